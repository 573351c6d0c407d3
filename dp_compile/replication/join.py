"""Uneven inputs: a rank that has no more batches takes part in the backwards of the others, with zeros.

Built on torch's `torch.distributed.algorithms.join`, so other joinables, torch's `ZeroRedundancyOptimizer` for one,
can be in the same context.

    a rank with inputs                                  a rank without
      Join.notify_join_context      <- all-reduce ->      Join's loop: is anybody left?
      announce: who, which modules  <- all-reduce ->      main_hook: the same modules
      plans that are due, buckets, buffers     ==         the same, with zeros

The entry of the engine announces each synchronised backward before its first collective; accumulation inside
`no_sync()` concerns this rank alone.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from dp_compile._torch import distributed
from dp_compile.engine.backward import BROADCAST_BYTES, complete_backward
from dp_compile.engine.hooks import ReductionRound
from dp_compile.engine.monitor import Watched
from dp_compile.engine.owners import owners
from dp_compile.engine.plan_sync import settle
from dp_compile.engine.replica import Replica
from dp_compile.engine.supported import AVERAGING, JOIN, check_supported
from dp_compile.errors import ConfigError, DesyncError
from dp_compile.replication.module import behind, parts_of, replica_of

MOST_MODULES: Final = 16
"""How many modules one backward may reach in a join context."""

_SILENT: Final = -(2**62)
"""Less than any word of a rank that has one."""


@contextlib.contextmanager
def join(
    *modules: nn.Module,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Train inside with a different number of batches on each rank, as in torch's `DistributedDataParallel.join`.

    Parts of a module that were replicated before are members, too. A rank that leaves the block takes part in the
    others' backwards with zeros until all have left; then parameters and buffers of the last rank that had inputs (the
    highest of them) are copied to all. Each step costs two small all-reduces more, for which the host waits.

    Args:
        modules: replicated modules of one process group. With several, each has one synchronised backward per step,
            in this order, or they share one.
        divide_by_initial_world_size: `True`: gradients are divided by the size of the group. `False`: by the number
            of ranks that still have inputs. Without effect with a `gradient_divide_factor` or a comm hook.
        enable: `False`: do nothing; for inputs that are known to be even.
        throw_on_early_termination: `True`: all ranks raise in the step in which the first one has no inputs left.

    Raises:
        ModuleError: a module is not replicated.
        ConfigError: a backward reaches a module outside `modules`.
        RuntimeError: with `throw_on_early_termination`, on every rank.
    """
    found = [replica_of(each) for module in modules for each in (module, *parts_of(behind(module)))]
    members = [ReplicaJoinable(replica) for replica in dict.fromkeys(found)]
    if not enable:
        yield
        return
    try:
        with Join(
            list(members),
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        ):
            yield
    finally:
        for member in members:
            member.replica.state.uneven = None


def joinable(module: nn.Module) -> ReplicaJoinable:
    """A replicated module as a member of torch's `Join`: `with Join([joinable(model), optimizer]):`.

    Parts of it that were replicated before are members by calls on each.
    """
    return ReplicaJoinable(replica_of(module))


class ReplicaJoinable(Joinable):
    """One replicated module in a join context."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        check_supported(replica, (AVERAGING,))
        self.replica = replica

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `join` for `divide_by_initial_world_size`."""
        return join_hook(self, self.replica, **kwargs)

    @property
    def join_device(self) -> torch.device:
        return self.replica.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.replica.group.process_group


def join_hook(member: Joinable, replica: Replica, **kwargs: Any) -> JoinHook:
    """The hook of a replica that torch's `Join` knows as `member`. Its backwards are announced from now on."""
    check_supported(replica, (JOIN,))
    replica.state.uneven = hook = _Membership(member, replica, bool(kwargs.get("divide_by_initial_world_size", True)))
    return hook


class _Membership(JoinHook):
    """A replica in a join context: announces its backwards; without inputs, takes part in those of the others."""

    def __init__(self, member: Joinable, replica: Replica, divides_initially: bool) -> None:
        self.replica = replica
        self.is_shadowed = False
        """The backward of another module has covered this one in the present step."""
        self.active: tuple[int, ...] = ()
        """The ranks of the group that had inputs in the latest backward."""
        self.steps = 0
        """Synchronised backwards of this module in the context."""
        self._member, self._divides_initially = member, divides_initially

    def announce(self, replicas: Sequence[Replica]) -> None:
        """Announce to ranks without inputs that this rank is about to reduce `replicas`, in this order."""
        if not distributed.join_is_on(self._member):
            return
        members = [replica.state.uneven for replica in replicas if isinstance(replica.state.uneven, _Membership)]
        if len(members) < len(replicas) or len(replicas) > MOST_MODULES:
            outside = [replica.names[0] for replica in replicas if replica.state.uneven is None]
            raise ConfigError(
                f"a backward inside join() reaches {len(replicas)} replicated modules (at most {MOST_MODULES}); not in "
                f"the context: {', '.join(outside) or 'none'}. Give all modules to the same join()."
            )
        self._check_turn(members)
        for member in members:
            work = Join.notify_join_context(member._member)
            if work is not None:
                work.wait()
        active, _ = _meet(self.replica, [_word(replica) for replica in replicas])
        for member in members:
            member.active = active

    def _check_turn(self, members: Sequence[_Membership]) -> None:
        """Each module once in a step, the first one first: torch's `Join` meets ranks without inputs for it only."""
        everybody = [each for each in (replica.state.uneven for replica in owners) if isinstance(each, _Membership)]
        first = next((each for each in everybody if distributed.is_first_in_join(each._member)), None)
        for member in members:
            member.steps += 1
        for member in members:
            if first is not None and member.steps > first.steps:
                raise DesyncError(
                    f"a backward inside join() reaches {member.replica.names[0]}, out of turn: each step has one "
                    f"backward for each module, beginning with that of {first.replica.names[0]}, or one for all."
                )

    def rescale(self) -> None:
        """From the average over the group to the average over the ranks with inputs, if that is wanted.

        Not if a factor is given, or a comm hook, which in torch divides by itself.
        """
        world_size = self.replica.group.world_size
        if self.replica.group.averaging.divide_by is not None or self.replica.planning.comm_hook is not None:
            return
        if self._divides_initially or not self.active or len(self.active) == world_size:
            return
        with torch.no_grad():
            for index, parameter in enumerate(self.replica.parameters):
                if parameter.grad is not None and index not in self.replica.state.untouched:
                    parameter.grad.mul_(world_size / len(self.active))

    @property
    def source(self) -> int:
        """The rank whose buffers count: the highest with inputs, as in torch's DDP inside `join()`."""
        return max(self.active, default=0)

    # --- torch's `Join` calls these on a rank without inputs

    def main_hook(self) -> None:
        """Shadow one backward of the ranks with inputs."""
        if self.is_shadowed:
            self.is_shadowed = False
            return
        active, words = _meet(self.replica, [])
        replicas = [replica for word in words for replica in owners if _word(replica) == word]
        for replica in replicas:
            if isinstance(replica.state.uneven, _Membership):
                replica.state.uneven.active = active
                replica.state.uneven.is_shadowed = replica is not self.replica
        _shadow(replicas)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the state of the last rank that had inputs."""
        replica = self.replica
        replica.arrive()  # left before ranks ran out of inputs; one that had none has read nothing since
        process_group = replica.group.process_group
        own = dist.get_rank(process_group) if is_last_joiner else -1
        source = torch.tensor([own], device=replica.device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=process_group)
        state = (*replica.parameters, *(parameter for _, parameter in replica.module.frozen))
        buffers = replica.buffers if replica.config.broadcast_buffers else ()
        tensors = [tensor.detach() for tensor in (*state, *buffers)]
        distributed.broadcast_state(tensors, process_group, BROADCAST_BYTES, int(source.item()))
        replica.state.uneven = None


def _shadow(replicas: Sequence[Replica]) -> None:
    """Take part in one backward of the other ranks: the same plans, the same collectives, nothing of our own."""
    with Watched(replicas) as watched:
        settle(replicas)
        watched.count_from_here()
        rounds = [ReductionRound(replica, absent=True) for replica in replicas]
        for reduction_round in rounds:
            reduction_round.finish()
        for replica, reduction_round in zip(replicas, rounds, strict=True):
            averages = {name: reduction_round.averages[index] for index, name in enumerate(replica.names)}
            complete_backward(replica, averages)


def _meet(replica: Replica, words: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """Who has inputs, and what they are about to reduce. A rank without inputs has nothing to say.

    One all-reduce finds the largest of each entry: a one for each rank with inputs, then what they say, then the same
    negated. What all of them say is the largest and the smallest.

    Raises:
        DesyncError: on every rank, if two do not say the same.
    """
    world_size, process_group = replica.group.world_size, replica.group.process_group
    table = torch.zeros(world_size + 2 * MOST_MODULES, dtype=torch.int64)
    if words:
        table[dist.get_rank(process_group)] = 1
        padded = torch.tensor([*words, *[0] * (MOST_MODULES - len(words))])
        table[world_size:] = torch.cat([padded, -padded])
    else:
        table[world_size:] = _SILENT
    table = table.to(replica.device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=process_group)
    present, words = table[:world_size].tolist(), table[world_size:].tolist()
    largest, smallest = words[:MOST_MODULES], [-negated for negated in words[MOST_MODULES:]]
    active = tuple(rank for rank, is_active in enumerate(present) if is_active)
    if active and largest != smallest:
        raise DesyncError("in join(): the backwards of two ranks reach different modules. All have to reach the same.")
    return active, [word for word in largest if word > 0]


def _word(replica: Replica) -> int:
    """A number for a replica that all ranks know."""
    return zlib.crc32(replica.module.topic.encode()) or 1
