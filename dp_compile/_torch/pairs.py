"""All-to-all and all-gather over gloo, with the two directions of a link in use at once. Costs nothing to load.

gloo tells a peer that it can receive on the connection on which that peer's data goes too, behind what was posted
before. Its own collectives post what they send first (torch 2.13: gloo/alltoallv.cc, gloo/transport/tcp/pair.cc). So of
two ranks the one that comes later sends at once, for the other is ready, and says only behind all of its data that it
is ready as well: one direction follows on the other, as far as the data does not fit into the buffers of a socket. On
1 Gbit/s, where 16 MiB between two ranks are 67 ms on the wire, an all-to-all takes 140 ms or more and an all-gather 94.
Here every receive is posted before the first send: 85 and 74 ms.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile._torch.missing import named

with named():
    from torch._C._distributed_c10d import _register_work
    from torch.autograd import _enable_record_function  # type: ignore[attr-defined]

_TAG: Final = 0x6470
"""Of these messages; torch's default is 0."""

_more: Final[Counter[str]] = Counter()
"""By group, how many messages were counted as collectives beyond one for each exchange."""


class Pairs(dist.Work):
    """A message to each other rank of a group and one from each. Owns the memory of both until it is waited for.

    It stays in `_in_flight` until then, also if it is dropped: gloo reads nothing more from a connection once the
    buffer of a posted receive was freed (torch 2.13: gloo/transport/tcp/pair.cc): every later exchange would time out.
    """

    def __init__(self, messages: Sequence[dist.Work], memory: Sequence[torch.Tensor], group: str) -> None:
        super().__init__()
        self._messages, self._memory, self._group = deque(messages), list(memory), group
        _in_flight[group][id(self)] = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """`timeout`: none, or of no length, as waits in a graph have it, is the group's. Does nothing the second time:
        gloo would wait for a second message."""
        while self._messages:
            each = self._messages.popleft()
            each.wait(timeout) if timeout else each.wait()
        self._memory.clear()
        _in_flight[self._group].pop(id(self), None)
        return True


_in_flight: Final[defaultdict[str, dict[int, Pairs]]] = defaultdict(dict)
"""By group, what was launched and not waited for."""


def wait_for_all(group: str) -> None:
    """Wait for every exchange of a group that is in flight, as after a backward whose error has dropped some."""
    for each in list(_in_flight[group].values()):
        each.wait()


def take_turns(group: str, device: torch.device) -> bool:
    """Whether the group's own all-to-all uses one direction of a link after the other: whether it is gloo's."""
    if device.type != "cpu":
        return False
    try:
        return distributed.is_gloo(distributed.group_of_name(group), device.type)
    except (RuntimeError, ValueError):  # there is none: a plan is looked at without ranks
        return False


def all_to_all(sent: torch.Tensor, group: str, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Pairs]:
    """As `all_to_all_single` of equal parts, in one dimension. The result is there once the work is waited for.

    `into`: its memory.
    """
    parts = sent.view(distributed.group_of_name(group).size(), -1)
    received = torch.empty_like(parts) if into is None else into.view_as(parts)
    return received.flatten(), _exchange(parts.__getitem__, received, sent, group)


def all_gather(sent: torch.Tensor, group: str, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Pairs]:
    """As `all_gather_into_tensor`, of one dimension. The result is there once the work is waited for.

    `into`: its memory, in which `sent` may lie in its place already.
    """
    ranks = distributed.group_of_name(group).size()
    received = sent.new_empty(ranks, sent.numel()) if into is None else into.view(ranks, -1)
    return received.flatten(), _exchange(lambda _: sent, received, sent, group)


def _exchange(part_for: Callable[[int], torch.Tensor], received: torch.Tensor, sent: torch.Tensor, name: str) -> Pairs:
    group = distributed.group_of_name(name)
    ranks, rank = group.size(), group.rank()
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    # gloo's receive is a range of the profiler until it is waited for. If that is after the profiler's end, its time
    # is written into memory that the profiler has freed, and the process dies sooner or later (torch 2.13).
    _enable_record_function(False)
    try:
        messages = [group.recv([received[other]], other, _TAG) for other in reversed(others)]
        messages += [group.send([part_for(other)], other, _TAG) for other in others]
    finally:
        _enable_record_function(True)
    own = part_for(rank)
    if own.data_ptr() != received[rank].data_ptr():
        received[rank].copy_(own)
    _more[name] += len(messages) - 1
    return Pairs(messages, (sent, received), name)


def collectives_launched(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives on tensors of `device` this rank has launched. Only differences mean something.

    gloo and NCCL count them, gloo each message between two ranks too, of which an exchange has several; for a backend
    that does not count the answer is always the same.
    """
    try:
        counted = int(cast(Any, group)._get_backend(device)._get_sequence_number_for_group())
    except RuntimeError:
        return 0
    return counted - _more[distributed.group_name(group)]


# --- in a graph ---------------------------------------------------------------------------------------------------

_library = torch.library.Library("dp_compile", "FRAGMENT")
_library.define("all_to_all_in_pairs(Tensor sent, int ranks, str group) -> Tensor")
_library.define("all_gather_in_pairs(Tensor sent, int ranks, str group) -> Tensor")


def _registered(launched: tuple[torch.Tensor, Pairs]) -> torch.Tensor:
    """A result that is waited for as those of functional collectives are."""
    result, work = launched
    _register_work(result, work)
    return result


_library.impl(
    "all_to_all_in_pairs",
    lambda sent, _, group: _registered(all_to_all(sent, group)),
    "CompositeExplicitAutograd",
)
_library.impl(
    "all_gather_in_pairs", lambda sent, _, group: _registered(all_gather(sent, group)), "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "dp_compile::all_to_all_in_pairs", lambda sent, ranks, group: sent.new_empty(sent.numel()), lib=_library
)
torch.library.register_fake(
    "dp_compile::all_gather_in_pairs", lambda sent, ranks, group: sent.new_empty(ranks * sent.numel()), lib=_library
)

ALL_TO_ALL = torch.ops.dp_compile.all_to_all_in_pairs.default
ALL_GATHER = torch.ops.dp_compile.all_gather_in_pairs.default
