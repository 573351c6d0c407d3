"""A step as lanes and events: pure data that the page, the trace and the picture draw.

Two views of one step, both on the same axis, in seconds after the start of the backward: `planned` is the prediction
of `step.planned_buckets`, on two levels of network with a lane for each; `measured` what one rank saw. A measured
bucket's launch and end are known, when it got the network is not: it is drawn from the end of the bucket before it in
its lane. Compute is taken to stand still up to the end of the bucket that it waits for.

Where reductions may end under the next forward, a step has two halves: that forward is drawn behind the backward, with
the waits in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import groupby, zip_longest
from typing import Final, NamedTuple

from dp_compile.engine.observers import GATHER
from dp_compile.errors import ConfigError
from dp_compile.insight.explanation.exposure import with_measured_backward
from dp_compile.insight.explanation.facts import forward_from
from dp_compile.insight.step import (
    DECENTRALIZED,
    MeasuredBucket,
    MeasuredStep,
    Step,
    gathers_under_the_forward,
    planned_buckets,
)
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket
from dp_compile.plan.network import Carried
from dp_compile.plan.ready_times import MEASURED as MEASURED_TIMES
from dp_compile.plan.reduction import BETWEEN, INSIDE, WHOLE
from dp_compile.plan.words import count, format_bytes

LINK_NAMES: Final = {INSIDE: "network inside", BETWEEN: "network between"}
MOST_LAYERS: Final = 16
PLANNED: Final = "planned"
MEASURED: Final = "measured"


class Interval(NamedTuple):
    """From when to when, in seconds after the start of the backward."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One bucket in one view; times in seconds after the start of the backward.

    Args:
        bucket: its number in the plan.
        lane: which of the timeline's network lanes it is in.
        launch_s: when its last member was ready and it was launched.
        start_s: when it got the network.
        finish_s: when it was over, `None` if the source cannot tell.
        exposed_s: how long compute stood still for it.
        row: where it waits for the network: two that wait at the same time are in different rows.
        critical: it is on the critical path.
        stages: what is on the network in its place, where links carry its stages: each as if it were a bucket.
    """

    bucket: int
    lane: int
    launch_s: float
    start_s: float
    finish_s: float | None
    exposed_s: float
    row: int = 0
    critical: bool = False
    stages: tuple[Transfer, ...] = ()

    @property
    def exposed(self) -> Interval | None:
        """When compute stood still for it; `None` if it did not, or nobody knows when."""
        if self.finish_s is None or not self.exposed_s:
            return None
        return Interval(self.finish_s - self.exposed_s, self.finish_s)


class Phase(NamedTuple):
    """What compute does behind the backward: `next forward`, or it stands still because `parameters go round`."""

    name: str
    start_s: float
    end_s: float
    stands_still: bool = False


NEXT_FORWARD: Final = "next forward"
GOING_ROUND: Final = "parameters go round"


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of the model in the compute of a planned view: from when to when its gradients become ready.

    Or a collective of the model's own, which compute waits for.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class View:
    """The step as planned, or as measured.

    Args:
        name: `PLANNED` or `MEASURED`.
        source: where the times are from, for people.
        backward_s: when compute of the backward ends; in a measured view waiting is part of it.
        transfers: the buckets in the plan's order.
        critical: what of compute is on the critical path.
        critical_member: the gradient with which compute ends and the network takes over; `None`: compute alone
            decides, or the times do not tell.
        forward_s: how long the forward before it took, `None` if not known.
        optimizer_s: the same of the optimizer after it.
        layers: what the backward computes, in order, as far as ready times tell.
        sends: what the model itself sends in it, as tensor parallel does.
        assumed_s: how long the backward was taken to be, if nobody has timed it: times are then said in percent of it.
        behind: what of the step is behind the backward, if reductions may end there or parameters go round.
    """

    name: str
    source: str
    backward_s: float
    transfers: tuple[Transfer, ...]
    critical: Interval | None = None
    critical_member: str | None = None
    forward_s: float | None = None
    optimizer_s: float | None = None
    layers: tuple[Layer, ...] = ()
    sends: tuple[Layer, ...] = ()
    assumed_s: float | None = None
    behind: tuple[Phase, ...] = ()

    def said(self, seconds: float) -> str:
        """A time for people."""
        if self.assumed_s is None:
            return format_time(seconds)
        return f"{100 * seconds / self.assumed_s if self.assumed_s else 0.0:.3g}%"

    @property
    def strips(self) -> list[tuple[str, tuple[Layer, ...]]]:
        """What is drawn below compute, with its name."""
        return [(name, parts) for name, parts in (("layers", self.layers), ("model sends", self.sends)) if parts]

    @property
    def has_two_halves(self) -> bool:
        """Whether the next forward is part of it."""
        return any(not each.stands_still for each in self.behind)

    @property
    def computing(self) -> list[Phase]:
        """Backward and next forward, waits included."""
        backward = Phase(self.backward_name, 0.0, self.backward_s)
        return [backward, *(each for each in self.behind if not each.stands_still)]

    @property
    def optimizer(self) -> Interval | None:
        """When the optimizer runs behind the backward; `None` if nobody knows."""
        if not self.optimizer_s:
            return None
        start_s = self.backward_s if self.has_two_halves else self.end_s
        return Interval(start_s, start_s + self.optimizer_s)

    @property
    def boxes(self) -> list[Transfer]:
        """What is on the network, in the order in which it starts there."""
        return sorted((box for each in self.transfers for box in each.stages or (each,)), key=lambda box: box.start_s)

    @property
    def end_s(self) -> float:
        """When the backward and all its buckets are over, and what is drawn behind them."""
        finish_s = (each.finish_s for each in self.transfers if each.finish_s is not None)
        return max([self.backward_s, *finish_s, *(each.end_s for each in self.behind)])

    @property
    def exposed_s(self) -> float:
        """How long compute stands still."""
        still_s = sum(each.end_s - each.start_s for each in self.behind if each.stands_still)
        return sum(transfer.exposed_s for transfer in self.transfers) + still_s

    @property
    def exposed(self) -> list[Interval]:
        """When compute stands still, in order; intervals that touch are one."""
        joined: list[Interval] = []
        still = [Interval(each.start_s, each.end_s) for each in self.behind if each.stands_still]
        for each in sorted([*still, *(box.exposed for box in self.boxes if box.exposed is not None)]):
            if joined and each.start_s <= joined[-1].end_s + 1e-12:
                joined[-1] = Interval(joined[-1].start_s, max(joined[-1].end_s, each.end_s))
            else:
                joined.append(each)
        return joined

    @property
    def backward_name(self) -> str:
        """What to call compute of the backward; waits that nobody saw the place of cannot be taken out of it."""
        return "backward, waits included" if self.exposed_s and not self.exposed else "backward"

    @property
    def rows(self) -> int:
        """How many buckets wait for the network at the same time, at most."""
        return max((each.row + 1 for each in self.transfers if each.start_s > each.launch_s), default=0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """All views of a step. `lanes`: a name for each network lane: one for each key of the plan's buckets, on two levels
    of network one for each link, and one for measured buckets, of whose stages nobody knows when they were there.
    """

    step: Step
    lanes: tuple[str, ...]
    views: tuple[View, ...]

    @property
    def assumed_s(self) -> float | None:
        """As in the planned view. There is no other one then."""
        return self.views[0].assumed_s

    @property
    def start_s(self) -> float:
        sent_s = (each.launch_s for view in self.views for each in view.transfers)
        return min(*(-(view.forward_s or 0.0) for view in self.views), 0.0, *sent_s)

    @property
    def end_s(self) -> float:
        return max(max(view.end_s, *(view.optimizer or (0.0,))) for view in self.views)


class Fact(NamedTuple):
    """A line of the header."""

    label: str
    value: str


def timeline_of(step: Step) -> Timeline:
    """The planned view, and the measured one if the step was measured."""
    if step.mode == DECENTRALIZED:
        return _of_exchanges(step)
    step = with_measured_backward(step)
    keys = [bucket.key for bucket in step.plan.buckets]
    if len(step.links) > 1:
        lanes: tuple[str, ...] = (*LINK_NAMES.values(), *(["network, all stages"] if step.measured else []))
        lane_of = [len(LINK_NAMES)] * len(keys)
    else:
        lanes = _lane_names([tuple(str(key).split()) for key in keys])
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        lane_of = [numbers[key] for key in keys]
    views = [_planned(step, lane_of)]
    if step.measured is not None:
        views.append(_measured(step, step.measured, lane_of))
    return Timeline(step, lanes, tuple(views))


def _lane_names(keys: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """`network` alone, else with what a lane's key has that others have not."""
    distinct = list(dict.fromkeys(keys))
    if len(distinct) <= 1:
        return ("network",) * len(distinct)
    differing = [place for place, values in enumerate(zip_longest(*distinct)) if len(set(values)) > 1]
    return tuple("network " + " ".join(key[place] for place in differing if place < len(key)) for key in distinct)


# --- planned ----------------------------------------------------------------------------------------------------


def _planned(step: Step, lane_of: Sequence[int]) -> View:
    several = len(step.links) > 1
    transfers = []
    for number, (lane, each) in enumerate(zip(lane_of, planned_buckets(step), strict=True)):
        times = each.ready_s, each.start_s, each.finish_s, each.exposed_s
        on_lanes = [(stage, lanes) for stage in each.stages for lanes in _lanes_of(stage, lane, several)]
        stages = [Transfer(number, at, each.ready_s, *one[1:]) for one, at in on_lanes]
        transfers.append(Transfer(number, lane, *times, stages=tuple(stages) if len(stages) > 1 else ()))
    assumed_s = step.backward_s if step.ready.backward_s is None else None
    source = _basis(step) if assumed_s is not None else f"predicted; {_basis(step)}"
    view = View(PLANNED, source, step.backward_s, tuple(_in_rows(transfers)), assumed_s=assumed_s)
    for stall in view.exposed:  # compute ends later by what it stood still for before
        if stall.start_s < view.backward_s:
            view = replace(view, backward_s=view.backward_s + stall.end_s - stall.start_s)
    view = replace(view, layers=tuple(_layers(step, view)), sends=tuple(_sends(step, view)))
    if step.left:
        early_s = sum(each.exposed_s for each in transfers if each.bucket not in step.left)
        start_s, late_s = step.backward_s + early_s, view.exposed_s - early_s
        view = replace(view, behind=(Phase(NEXT_FORWARD, start_s, start_s + step.forward_s + late_s),))
    if step.gathers_late:
        waits = gathers_under_the_forward(step)
        forward = Phase(NEXT_FORWARD, view.end_s, view.end_s + step.forward_s + sum(each.waited_s for each in waits))
        stalls = (Phase(GOING_ROUND, each.finish_s - each.waited_s, each.finish_s, stands_still=True)
                  for each in waits if each.waited_s)  # fmt: skip
        view = replace(view, behind=(forward, *stalls))
    elif step.gather_s:
        view = replace(view, behind=(Phase(GOING_ROUND, view.end_s, view.end_s + step.gather_s, stands_still=True),))
    if any(each.stages for each in transfers):
        return _with_critical_stages(view, step)
    return _with_critical_path(view, step, [None, *range(len(transfers) - 1)])


def _layers(step: Step, view: View) -> Iterator[Layer]:
    """Modules in the order in which their gradients become ready, as deep as `MOST_LAYERS` allow; neighbours as one."""
    gradients = [each for each in step.plan.gradients if each.name != UNUSED_FLAGS]
    ready = sorted(((step.ready.of(each), each.name.split(".")[:-1]) for each in gradients), key=lambda each: each[0])
    runs: list[tuple[str, float]] = []
    for depth in range(max((len(path) for _, path in ready), default=0), 0, -1):
        found = [(name, [*run][-1][0]) for name, run in groupby(ready, key=lambda each: ".".join(each[1][:depth]))]
        if len(found) == 1 and runs:
            break
        runs = found
        if len(runs) <= MOST_LAYERS:
            break
    start_s, together = 0.0, -(-len(runs) // MOST_LAYERS)
    for first in range(0, len(runs), together or 1):
        names = [name or "the module itself" for name, _ in runs[first : first + together]]
        end_s = _with_stalls(runs[min(first + together, len(runs)) - 1][1] * step.backward_s, view)
        if end_s > start_s:
            yield Layer(" .. ".join(dict.fromkeys((names[0], names[-1]))), start_s, end_s)
        start_s = end_s


def _sends(step: Step, view: View) -> Iterator[Layer]:
    for each in step.ready.collectives:
        start_s, end_s = (_with_stalls(share * step.backward_s, view) for share in (each.start, each.end))
        yield Layer(f"{each.collective} {format_bytes(each.nbytes)}, {count(each.ranks, 'rank')}", start_s, end_s)


def _with_stalls(compute_s: float, view: View) -> float:
    """When so much is computed: compute stands still in between."""
    at_s = compute_s
    for stall in view.exposed:
        if stall.start_s < min(at_s, view.backward_s):
            at_s += stall.end_s - stall.start_s
    return at_s


def _lanes_of(stage: Carried, lane: int, several: bool) -> Sequence[int]:
    """Where a stage is drawn: one over the whole group keeps both links busy."""
    if not several:
        return [lane]
    return [number for number, link in enumerate(LINK_NAMES) if stage.link in (link, WHOLE)]


def _basis(step: Step) -> str:
    """Where the length of the backward is from."""
    if step.measured is None or step.ready.basis == MEASURED_TIMES:
        return step.ready.basis
    return f"the backward as measured on rank {step.measured.rank}"


# --- measured ---------------------------------------------------------------------------------------------------


def _measured(step: Step, measured: MeasuredStep, lane_of: Sequence[int]) -> View:
    holders: list[int | None] = []
    transfers: list[Transfer] = []
    latest: dict[int, Transfer] = {}
    for number, (lane, seen) in enumerate(zip(lane_of, measured.buckets, strict=False)):
        holder = latest.get(lane)
        holders.append(None if holder is None else holder.bucket)
        transfers.append(_transfer(number, lane, seen, -math.inf if holder is None else _end_s(holder)))
        if holder is None or _end_s(transfers[-1]) >= _end_s(holder):
            latest[lane] = transfers[-1]
    view = View(
        MEASURED,
        f"rank {measured.rank}; {measured.source}",
        measured.backward_s,
        tuple(_in_rows(transfers)),
        forward_s=measured.forward_s,
        optimizer_s=measured.optimizer_s,
        behind=tuple(_behind(step, measured)),
    )
    return _with_critical_path(view, step, holders)


def _behind(step: Step, measured: MeasuredStep) -> Iterator[Phase]:
    forward = measured.next_forward
    if step.has_two_halves and forward is not None:
        yield Phase(NEXT_FORWARD, forward.start_s, forward.end_s)
    for what, start_s, end_s in measured.follows:
        if what == GATHER and measured.is_behind(start_s):
            yield Phase(GOING_ROUND, start_s, end_s, stands_still=True)


def _of_exchanges(step: Step) -> Timeline:
    """What arrived in a backward, since it was sent in the step before, and what was sent in it: a lane for each edge.

    A bucket that is still on its way when the backward ends is drawn up to there.

    Raises:
        ConfigError: the step was not measured.
    """
    measured = step.measured
    if measured is None:
        raise ConfigError(
            "this step mixes parameters with neighbours, and was not measured: nothing plans when they travel. Train "
            "some steps in `with dp_compile.measure(model):`; dp-compile whatif --topology predicts."
        )
    edges = list(dict.fromkeys(edge for each in measured.buckets for edge in (each.edge, each.next_edge)))
    transfers = []
    for number, seen in enumerate(measured.buckets):
        lane, next_lane = edges.index(seen.edge), edges.index(seen.next_edge)
        whole = Transfer(number, lane, seen.launch_s, seen.launch_s, seen.finish_s, seen.waited_s)
        sent = [] if seen.sent_s is None else [Interval(seen.sent_s, max(seen.sent_s, measured.backward_s))]
        boxes = [whole, *(Transfer(number, next_lane, each.start_s, each.start_s, each.end_s, 0.0) for each in sent)]
        travelling = [each for each in boxes if len(edges[each.lane]) > 1]
        transfers.append(replace(whole, stages=tuple(travelling)))
    view = View(
        MEASURED,
        f"rank {measured.rank}; {measured.source}",
        measured.backward_s,
        tuple(transfers),
        critical=None if measured.exposed_s else Interval(0.0, measured.backward_s),
        forward_s=measured.forward_s,
        optimizer_s=measured.optimizer_s,
    )
    return Timeline(step, tuple(map(_edge_name, edges)), (view,))


def _edge_name(ranks: Sequence[int]) -> str:
    """Of many ranks the first and the last."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} alone"
    return "edge " + (", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}")


def _end_s(transfer: Transfer) -> float:
    return transfer.launch_s if transfer.finish_s is None else transfer.finish_s


def _transfer(number: int, lane: int, seen: MeasuredBucket, free_s: float) -> Transfer:
    if seen.finish_s is None:
        return Transfer(number, lane, seen.launch_s, seen.launch_s, None, seen.waited_s)
    start_s = min(max(seen.launch_s, free_s), max(seen.launch_s, seen.finish_s))
    return Transfer(number, lane, seen.launch_s, start_s, max(start_s, seen.finish_s), seen.waited_s)


# --- both -------------------------------------------------------------------------------------------------------


def _in_rows(transfers: Iterable[Transfer]) -> list[Transfer]:
    """With rows for those that wait: each in the lowest row that is free."""
    placed: list[Transfer] = []
    ending: list[tuple[float, int]] = []
    free: list[int] = []
    rows = 0
    for each in sorted(transfers, key=lambda transfer: (transfer.launch_s, transfer.bucket)):
        if each.start_s <= each.launch_s:
            placed.append(each)
            continue
        while ending and ending[0][0] <= each.launch_s:
            heappush(free, heappop(ending)[1])
        row = heappop(free) if free else rows
        rows = max(rows, row + 1)
        heappush(ending, (each.start_s, row))
        placed.append(replace(each, row=row))
    return sorted(placed, key=lambda transfer: transfer.bucket)


def _with_critical_path(view: View, step: Step, holders: Sequence[int | None]) -> View:
    """Walk back from the end: a bucket that had to wait for the network hands on to the one that held it.

    Args:
        view: without a critical path.
        step: whose members are named.
        holders: for each bucket, which one had the network before it, if any.
    """
    waited_for = [each for each in view.transfers if each.exposed is not None]
    if not waited_for:
        unseen = any(each.exposed_s for each in view.transfers)
        return replace(view, critical=None if unseen else Interval(0.0, view.computing[-1].end_s))
    current = max(waited_for, key=_end_s)
    path = {current.bucket}
    while current.start_s > current.launch_s and (holder := holders[current.bucket]) is not None:
        current = view.transfers[holder]
        path.add(current.bucket)
    return replace(
        view,
        transfers=tuple(replace(each, critical=each.bucket in path) for each in view.transfers),
        critical=Interval(0.0, current.launch_s),
        critical_member=_last_ready(step, current.bucket),
    )


def _with_critical_stages(view: View, step: Step) -> View:
    """The same where buckets have several stages: a stage that starts where another one ends is handed on by that."""
    waited_for = [box for box in view.boxes if box.exposed is not None]
    if not waited_for:
        return replace(view, critical=Interval(0.0, view.backward_s))
    path = [max(waited_for, key=_end_s)]
    while path[-1].start_s > path[-1].launch_s:
        before = [box for box in view.boxes if box.finish_s == path[-1].start_s and box.start_s < path[-1].start_s]
        if not before:
            break
        path.append(max(before, key=lambda box: box.bucket == path[-1].bucket))

    first = path[-1]

    def marked(each: Transfer) -> Transfer:
        # Compute hands over where the first of them is launched, which may be a later stage than the bucket's first.
        stages = tuple(
            replace(box, critical=box in path, launch_s=box.start_s if box is first else box.launch_s)
            for box in each.stages
        )
        return replace(each, critical=each in path or any(box.critical for box in stages), stages=stages)

    computed = max((each for each in view.transfers if each.launch_s <= first.start_s), key=lambda each: each.launch_s)
    return replace(
        view,
        transfers=tuple(map(marked, view.transfers)),
        critical=Interval(0.0, min(first.start_s, view.backward_s)),
        critical_member=_last_ready(step, computed.bucket),
    )


def _last_ready(step: Step, number: int) -> str:
    """The gradient of a bucket that is ready last; the flags count only where they are alone."""
    members = step.plan.buckets[number].members
    gradients = [member for member in members if member.gradient.name != UNUSED_FLAGS] or list(members)
    times = [step.ready.of(member.gradient) for member in gradients]
    latest = max(range(len(times)), key=lambda position: (times[position], position))
    return gradients[latest].label


# --- words ------------------------------------------------------------------------------------------------------


def format_time(seconds: float) -> str:
    """Seconds for people, in ms with three significant digits: `12.0 ms`."""
    milliseconds = seconds * 1e3
    if not milliseconds:
        return "0 ms"
    digits = max(0, 2 - math.floor(math.log10(abs(milliseconds))))
    return f"{milliseconds:,.{digits}f} ms"


def span_of_members(bucket: Bucket) -> str:
    """The first and the last member by name."""
    labels = [member.label for member in bucket.members]
    return " .. ".join(dict.fromkeys((labels[0], labels[-1])))


def critical_path_text(view: View) -> str:
    """The critical path in words."""
    buckets = [each.bucket for each in view.transfers if each.critical]
    if not buckets and view.exposed and view.critical is None:
        return "what was sent in the step before, and compute"
    if not buckets:
        return "compute alone" if view.critical else "not known: the ends of the buckets were not seen"
    numbers = str(buckets[0]) if len(buckets) == 1 else f"{buckets[0]} to {buckets[-1]}"
    if len(buckets) > 2 and buckets[-1] - buckets[0] + 1 != len(buckets):
        numbers = f"{buckets[0]} to {buckets[-1]}, {len(buckets)} of them"
    noun = "bucket" if len(buckets) == 1 else "buckets"
    assert view.critical is not None
    until = f"compute until {view.critical_member} ({view.said(view.critical.end_s)})"
    return f"{until}, then {noun} {numbers}{', then the rest of the forward' if view.has_two_halves else ''}"


def facts(timeline: Timeline) -> tuple[Fact, ...]:
    """What stands above every form of the timeline."""
    step = timeline.step
    plan = step.plan
    gradients = count(sum(gradient.name != UNUSED_FLAGS for gradient in plan.gradients), "gradient")
    group = f"{count(step.world_size, 'rank')} ({step.backend}, {step.device}), strategy {step.strategy}"
    size = f"{count(len(plan.buckets), 'bucket')}, {gradients}, {format_bytes(plan.nbytes)}"
    found = [Fact("step", f"{group}; {size}")]
    if step.mode == DECENTRALIZED:
        found.append(Fact("exchanges", "buckets are of parameters; each is sent in the step before it is mixed"))
    else:
        found.append(Fact("an all-reduce", f"{step.cost} ({step.cost_source})"))
    if step.left:
        text = f"{count(len(step.left), 'bucket')} of {len(plan.buckets)} may end under it; {forward_from(step)}"
        found.append(Fact(NEXT_FORWARD, text))
    if step.gathers_late:
        found.append(Fact(NEXT_FORWARD, f"parameters go round under it; {forward_from(step)}"))
    return (*found, *(_view_fact(timeline, view) for view in timeline.views))


def _view_fact(timeline: Timeline, view: View) -> Fact:
    text = summary(view)
    bound_s = timeline.step.bound_s() + (timeline.step.forward_s if view.has_two_halves else 0.0)
    if view.name == PLANNED and bound_s:
        text += f"; {view.end_s / bound_s:.3f} times the best possible end, {view.said(bound_s)}"
    return Fact(view.name, f"{text} ({view.source})")


def summary(view: View) -> str:
    """How long it takes, and how much of that is exposed."""
    share = view.exposed_s / view.end_s if view.end_s else 0.0
    if view.assumed_s is not None:
        return f"{share:.1%} of backward and communication exposed, if the backward lasts as long as was assumed"
    exposed = f"{view.said(view.exposed_s)} of it exposed ({share:.1%})"
    what = "backward with communication"
    if view.has_two_halves:
        what = "backward and next forward" if view.name == PLANNED else "to the end of the next forward"
    return f"{what} {view.said(view.end_s)}, {exposed}"
