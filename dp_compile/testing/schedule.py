"""When a backward's collectives run if its graph is executed node by node: predicted, in the order that passes made.

    mm  mm  >> launch 0  mm  >> launch 1  mm  << wait 0 (stands still)  copy_  << wait 1

The model of `plan/network.py`: a link carries one collective at a time. What is taken from the plan there is taken from
the graph here, so that a launch that comes late or a wait that comes early costs what it would cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import fx

from dp_compile._torch import distributed
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.fx.printer import is_op
from dp_compile.insight.rehearsal import op_seconds
from dp_compile.insight.step import format_ms
from dp_compile.passes.bucket_ops import ASSEMBLE, FLAT_BUCKET
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.devices import Device
from dp_compile.plan.links import Link
from dp_compile.plan.network import is_on, legs_of
from dp_compile.plan.reduction import ALL_REDUCE, BETWEEN, INSIDE, WHOLE, Load

aten = torch.ops.aten

MODEL: Final = "model"
"""The link of what the model itself sends, as tensor parallel does, in groups that reduce nothing."""

_COSTS_NOTHING: Final = (FLAT_BUCKET, ASSEMBLE, aten.copy.default, aten.new_empty_strided.default)
"""Memory that gradients are computed in; and how a new gradient is handed out, which generated code does in place."""


@dataclass(frozen=True, slots=True)
class Compute:
    """So many seconds of compute between collectives."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective starts. `name` is what it is called in the graph's text.

    `collective`: torch's name of it, as `all_reduce`; `link` as in a plan's stages, or `MODEL`; `group`: its ranks, of
    which nothing is known if no pass made a bucket of it. `nbytes`: of what it is given; `whole_nbytes`: or of what it
    makes, if that is more.
    """

    name: str
    nbytes: int
    collective: str = ALL_REDUCE
    link: str = WHOLE
    dtype: str = ""
    group: tuple[int, ...] = ()
    whole_nbytes: int = 0

    @property
    def load(self) -> Load:
        phases = 2 if self.collective.startswith(ALL_REDUCE) else 1
        return Load(self.link, phases, max(self.nbytes, self.whole_nbytes))

    @property
    def sent_nbytes(self) -> int:
        """What this rank sends: in each phase the shares of all others, as rings do."""
        ranks = len(self.group) or 1
        return self.load.phases * int(self.load.nbytes) * (ranks - 1) // ranks


@dataclass(frozen=True, slots=True)
class Sent:
    """What this rank sends in one backward by one kind of collective, on one link, in one dtype, in one group.

    `link`: `whole`, or of two levels of network `inside` a node or `between` nodes; `model`: what the model itself
    sends, in groups that reduce nothing. `launches`: how many collectives. `nbytes`: sent, as rings send: of n ranks
    (n - 1)/n of the bytes, an all-reduce twice that. `group`: its ranks.
    """

    collective: str
    link: str
    dtype: str
    launches: int
    nbytes: int
    group: tuple[int, ...] = ()


def sent_by(events: Sequence[Event]) -> tuple[Sent, ...]:
    """What this rank sends, kind by kind, in the order of their first launches."""
    found: dict[tuple[str, str, str, tuple[int, ...]], list[int]] = {}
    for each in events:
        if isinstance(each, Launch):
            found.setdefault((each.collective, each.link, each.dtype, each.group), []).append(each.sent_nbytes)
    return tuple(
        Sent(collective, link, dtype, len(sent), sum(sent), group)
        for (collective, link, dtype, group), sent in found.items()
    )


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute goes on when the collective of this name is over."""

    name: str


Event = Compute | Launch | Wait


def events_of(
    graph: fx.Graph,
    names: Mapping[fx.Node, str],
    device: Device,
    efficiency: float,
    links: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Event, ...]:
    """What a graph does, node by node, in the order in which it stands there.

    Args:
        graph: with values in `meta["val"]`.
        names: what nodes are called, as in `graph_names.node_names`.
        links: by name of a group that reduces gradients, on which link it is.
        device: what computes.
        efficiency: which share of its peak matrix products reach.
    """
    return tuple(_events(graph, names, device, efficiency, links))


def _events(
    graph: fx.Graph, names: Mapping[fx.Node, str], device: Device, efficiency: float, links: Mapping[str, str]
) -> Iterator[Event]:
    launched: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if is_collective(node):
            launched[node] = names.get(node, f"{node.name} (of the model)")
            yield _launch(node, launched[node], links)
        elif node.target is REDUCE_GRAD:  # no pass made a bucket of it: it runs where it stands
            name = names.get(node, node.name)
            yield Launch(name, sum(each.nbytes for each in _tensors(_values(node.args[0]))))
            yield Wait(name)
        elif is_wait(node):
            yield Wait(launched[_launch_behind(node)])
        elif is_op(node.target) and node.target not in _COSTS_NOTHING:
            args, kwargs = _values((node.args, node.kwargs))
            yield Compute(op_seconds(node.target, args, kwargs, node.meta.get("val"), device, efficiency))


def _launch(node: fx.Node, name: str, links: Mapping[str, str]) -> Launch:
    given, made = _tensors(_values(node.args[0])), _tensors(node.meta.get("val"))
    group = str(node.args[-1])
    target: Any = node.target
    return Launch(
        name,
        sum(each.nbytes for each in given),
        target.overloadpacket.__name__.removesuffix("_"),
        links.get(group, MODEL),
        str(given[0].dtype).removeprefix("torch.") if given else "",
        tuple(dist.get_process_group_ranks(distributed.group_of_name(group))),
        sum(each.nbytes for each in made),
    )


def _launch_behind(wait: fx.Node) -> fx.Node:
    """The collective; between the two there may be the item of a grouped one."""
    node = wait
    while not is_collective(node):
        node = node.all_input_nodes[0]
    return node


def _values(given: Any) -> Any:
    return fx.node.map_arg(given, lambda each: each.meta.get("val"))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class ScheduledCollective:
    """One collective, in seconds after the start of the backward.

    `wait_s`: when compute comes to its first wait; `stalled_s`: how long compute stands still there.
    """

    name: str
    nbytes: int
    launch_s: float
    start_s: float
    finish_s: float
    wait_s: float
    stalled_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """A backward with its collectives, predicted. Times in seconds.

    `backward_s`: compute alone; `end_s`: when compute and communication are over; `end_if_waited_last_s`: the same if
    every wait stood at the end. `basis`: the link, ranks and device that were stated.
    """

    collectives: tuple[ScheduledCollective, ...]
    backward_s: float
    end_s: float
    end_if_waited_last_s: float
    basis: str

    @property
    def exposed_s(self) -> float:
        """How long compute stands still for communication."""
        return self.end_s - self.backward_s

    def __str__(self) -> str:
        return (
            f"compute alone {format_ms(self.backward_s)}, with communication {format_ms(self.end_s)}, "
            f"{format_ms(self.exposed_s)} exposed\n"
            f"  predicted: {self.basis}"
        )


def schedule(events: Sequence[Event], cost: AllReduceCost, basis: str, model_link: Link | None = None) -> Schedule:
    """What events take if an all-reduce costs `cost` and a link carries one collective at a time.

    What the model itself sends is carried by `model_link`, beside the rest, and waited for where it is.

    Source: the model of MG-WFBP (arXiv 1912.09268), applied to the order of a graph.
    """
    own = {each.name: each.group for each in events if isinstance(each, Launch) and each.link == MODEL}
    costs = {name: cost if model_link is None else model_link.cost(len(group)) for name, group in own.items()}
    collectives, end_s = _run(events, cost, costs)
    last = sorted(events, key=lambda each: isinstance(each, Wait) and each.name not in own)
    backward_s = sum(each.seconds for each in events if isinstance(each, Compute))
    return Schedule(collectives, backward_s, end_s, _run(last, cost, costs)[1], basis)


def _run(
    events: Sequence[Event], cost: AllReduceCost, of_model: Mapping[str, AllReduceCost]
) -> tuple[tuple[ScheduledCollective, ...], float]:
    clock_s, free_s = 0.0, dict.fromkeys((INSIDE, BETWEEN, MODEL), 0.0)
    seen: dict[str, ScheduledCollective] = {}
    waited: set[str] = set()
    for event in events:
        if isinstance(event, Compute):
            clock_s += event.seconds
        elif isinstance(event, Launch):
            (leg,) = legs_of([[event.load]], of_model.get(event.name, cost))
            busy = [MODEL] if leg.link == MODEL else [link for link in (INSIDE, BETWEEN) if is_on(leg, link)]
            start_s = max(clock_s, *(free_s[link] for link in busy))
            finish_s = start_s + leg.seconds
            free_s |= dict.fromkeys(busy, finish_s)
            seen[event.name] = ScheduledCollective(event.name, event.nbytes, clock_s, start_s, finish_s, finish_s, 0.0)
        elif event.name not in waited:
            waited.add(event.name)
            stalled_s = max(0.0, seen[event.name].finish_s - clock_s)
            seen[event.name] = replace(seen[event.name], wait_s=clock_s, stalled_s=stalled_s)
            clock_s += stalled_s
    return tuple(seen.values()), max(clock_s, *free_s.values())
