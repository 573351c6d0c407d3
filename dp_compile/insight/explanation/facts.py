"""What else a step says of itself: what bounds it, what is copied, what was measured, what to know beforehand. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dp_compile.engine.observers import UPDATE
from dp_compile.engine.record import OVERLAP_FORWARD, SHARDED, Placement
from dp_compile.insight.explanation.exposure import why_no_timeline
from dp_compile.insight.step import Step
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.crossing import FORWARD_SHARE, why_not_left
from dp_compile.plan.ready_times import ASSUMED, ESTIMATED, MEASURED, ModelCollective
from dp_compile.plan.words import count, format_bytes

COMMUNICATION: Final = "communication"
COMPUTE: Final = "compute"
NOT_KNOWN: Final = "not known"
ONE_RANK: Final = "one rank"


@dataclass(frozen=True, slots=True)
class Copies:
    """Gradients that are copied into their place, for one reason. `gradients`: their names."""

    reason: str
    nbytes: int
    gradients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """What was measured of one rank's backward, in seconds: `compute_s` is its length without waiting and updates.

    `end_s`: with the parameters that go round behind it, or with the next forward, if something ends under that;
    `None`: that was not seen. `forward_s`: how long that computed. `exposed_s`: with those parameters; `later_s`: how
    much of it was behind the backward.
    """

    compute_s: float
    exposed_s: float
    end_s: float | None
    source: str
    rank: int
    forward_s: float | None = None
    later_s: float = 0.0
    updates_s: float = 0.0
    gather_s: float = 0.0


def bound_by(step: Step) -> str:
    """What bounds a step: the longer of what computes beside the network and all buckets one after the other.

    That is the backward, and where something may end under the next forward that too.
    """
    if step.world_size == 1:
        return ONE_RANK
    if step.ready.backward_s is None:
        return NOT_KNOWN
    computes_s = step.ready.backward_s + (step.forward_s if step.has_two_halves else 0.0)
    return COMMUNICATION if step.communication_s > computes_s else COMPUTE


def ready_from(step: Step) -> str:
    """Where the ready times are from, apart from the length of the backward."""
    shares = {
        ESTIMATED: "estimated from the captured graph",
        ASSUMED: "assumed, work as the parameters' elements",
        MEASURED: "measured, the slowest rank's",
    }
    return shares.get(step.ready.basis, step.ready.basis)


def backward_from(step: Step) -> str:
    """Where the length of the backward is from; starts with `assumed` if nobody has timed it."""
    if step.ready.backward_s is not None:
        return "measured, the slowest rank's" if step.ready.basis == MEASURED else "given with the ready times"
    if step.measured is not None:
        return f"measured on rank {step.measured.rank}"
    return "assumed, as long as the bytes of the gradients take on the network"


def measured_figures(step: Step) -> MeasuredFigures | None:
    measured = step.measured
    if measured is None:
        return None
    end_s: float | None = measured.backward_s + measured.lasted(UPDATE, behind=True) + measured.gather_s
    if step.has_two_halves:
        forward = measured.next_forward
        end_s = None if forward is None else measured.backward_s + forward.seconds
    return MeasuredFigures(
        measured.compute_s,
        measured.exposed_s + measured.gather_s,
        end_s,
        measured.source,
        measured.rank,
        measured.next_forward_s,
        measured.exposed_later_s + measured.gather_s,
        measured.updates_s,
        measured.gather_s,
    )


def ended_in_backward(step: Step) -> Iterator[tuple[int, str]]:
    """Of a step whose reductions may end under the next forward, the buckets that do not, and why."""
    for number, bucket in enumerate(step.plan.buckets):
        if number not in step.left:
            yield number, why_not_left(bucket) or "somebody else reads what is reduced, or updates some of it"


def forward_from(step: Step) -> str:
    """Where the length of the next forward is from."""
    if step.forward_share is None:
        return f"assumed, {FORWARD_SHARE:g} of the backward"
    return f"measured on rank {step.measured.rank}" if step.measured is not None else ""


def copies_of(placements: Sequence[Placement]) -> tuple[Copies, ...]:
    """What is copied, by reason, the most bytes first; not the flags, a few bytes of bookkeeping."""
    by_reason: dict[str, list[Placement]] = {}
    for placement in placements:
        if placement.copied is not None and placement.gradient != UNUSED_FLAGS:
            by_reason.setdefault(placement.copied, []).append(placement)
    found = [
        Copies(reason, sum(each.nbytes for each in group), tuple(each.gradient for each in group))
        for reason, group in by_reason.items()
    ]
    return tuple(sorted(found, key=lambda copies: -copies.nbytes))


def _sent_by_the_model(step: Step) -> Iterator[str]:
    """Kind by kind what the backward waits for by itself, as with tensor parallel: that is part of its time."""
    kinds: dict[tuple[str, int], list[ModelCollective]] = {}
    for each in step.ready.collectives:
        kinds.setdefault((each.collective, each.ranks), []).append(each)
    for (kind, ranks), sent in kinds.items():
        share = sum(each.end - each.start for each in sent)
        yield (
            f"Beside reductions of gradients the backward sends {count(len(sent), kind)} over "
            f"{count(ranks, 'rank')}, {format_bytes(sum(each.nbytes for each in sent))}: {share:.0%} of it, estimated."
        )


def notes_of(step: Step) -> Iterator[str]:
    """What has to be known to read the figures."""
    if (why := why_no_timeline(step)) is not None:
        yield f"No timeline: {why}."
    if step.deferred:
        why = step.why_deferred or "no pass makes buckets"
        yield f"All reductions stand at the end of the backward: {why}."
    for each in step.optimizers:
        if each.stayed is False and each.left:
            what, all_of = (
                ("all-gather", "parameters go round") if each.way == SHARDED else ("update", "reductions end")
            )
            yield (
                f"step() waits for the {count(each.updates, what)} that the backward of {each.name} leaves: the "
                'forward is not one graph of torch.compile(model, backend="dp_compile"). Predicted is a step in which '
                f"all {all_of} with the backward."
            )
        elif each.way == OVERLAP_FORWARD and not each.left:
            yield f"The last backward of {each.name} left no update for the next forward: report(model) says why."
    yield from _sent_by_the_model(step)
    if step.left or any(each.way == SHARDED for each in step.optimizers):
        yield "How long updates take is in no prediction."
    ways = dict(step.backwards)
    if eager := ways.get("eager hooks", 0):
        all_of_them = sum(times for way, times in ways.items() if "without sync" not in way)
        yield (
            f"{eager} of {count(all_of_them, 'synchronised backward')} ran outside of a capture, with the same "
            "collectives in the same order; the figures are for captured ones."
        )
