"""What else a step says of itself: what bounds it, what is copied, what was measured, what to know beforehand. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dp_compile.engine.record import Placement
from dp_compile.insight.explanation.exposure import why_no_timeline
from dp_compile.insight.step import Step
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.ready_times import ASSUMED, ESTIMATED, MEASURED
from dp_compile.plan.words import count

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
    """What was measured of one rank's backward, in seconds: `compute_s` is its length without waiting."""

    compute_s: float
    exposed_s: float
    end_s: float
    source: str
    rank: int


def bound_by(step: Step) -> str:
    """What bounds a step: the longer of the backward and all buckets one after the other."""
    if step.world_size == 1:
        return ONE_RANK
    if step.ready.backward_s is None:
        return NOT_KNOWN
    return COMMUNICATION if step.communication_s > step.ready.backward_s else COMPUTE


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
    compute_s = max(0.0, measured.backward_s - measured.exposed_s)
    return MeasuredFigures(compute_s, measured.exposed_s, measured.backward_s, measured.source, measured.rank)


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


def notes_of(step: Step) -> Iterator[str]:
    """What has to be known to read the figures."""
    if (why := why_no_timeline(step)) is not None:
        yield f"No timeline: {why}."
    if step.deferred:
        why = step.why_deferred or "it broke into several graphs, or no pass makes buckets"
        yield f"All reductions stand at the end of the backward: {why}."
    ways = dict(step.backwards)
    if eager := ways.get("eager hooks", 0):
        all_of_them = sum(times for way, times in ways.items() if "without sync" not in way)
        yield (
            f"{eager} of {count(all_of_them, 'synchronised backward')} ran outside of a capture, with the same "
            "collectives in the same order; the figures are for captured ones."
        )
