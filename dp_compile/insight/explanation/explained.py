"""What one step says of itself: what bounds it, what is exposed and why, what would help. Pure data, text, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from dp_compile.engine.record import OptimizerRecord
from dp_compile.errors import ConfigError
from dp_compile.insight.explanation.advice import Advice, advice_for, wire_that_does_not_pay
from dp_compile.insight.explanation.exposure import (
    SHORTEST_S,
    ExplainedBucket,
    SlowPart,
    explained_buckets,
    last_run,
    slowest_part,
    with_measured_backward,
)
from dp_compile.insight.explanation.facts import (
    COMMUNICATION,
    COMPUTE,
    NOT_KNOWN,
    ONE_RANK,
    Copies,
    MeasuredFigures,
    backward_from,
    bound_by,
    copies_of,
    ended_in_backward,
    forward_from,
    measured_figures,
    notes_of,
    ready_from,
)
from dp_compile.insight.explanation.text import (
    Times,
    bucket_table,
    digits_ms,
    exposed_s,
    figures_table,
    format_ms,
    lines_of_advice,
    members_of_buckets,
    percent,
    wrapped,
)
from dp_compile.insight.step import DECENTRALIZED, WAITED, MeasuredBucket, PlannedBucket, Step
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.words import count, format_bytes

EXPLANATION_VERSION: Final = 1
SHOWN_BUCKETS: Final = 20
SHOWN_EXPOSED: Final = 3
SHOWN_REASONS: Final = 3
SHOWN_CROSSING: Final = 24
FITTED: Final = 0.01
"""Of the measured end: so near to it is no prediction, if the network was fitted to the same backward."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a step takes as long as it takes. Times in seconds after the start of the backward; print it for a text.

    Args:
        bound_by: `communication`, `compute`, `not known` (nobody has timed the backward) or `one rank`.
        mode: what reduces.
        strategy: where buckets end.
        world_size: ranks.
        backend: of the process group.
        device: type of the parameters' device.
        nbytes: of all gradients.
        gradients: how many there are.
        backward_s: how long the backward computes.
        backward_from: where that is from; starts with `assumed` if nobody has timed the backward.
        ready_from: where ready times are from.
        cost: of one collective, for people.
        cost_source: where the cost is from.
        communication_s: all buckets one after the other on the network.
        bound_s: no plan is earlier; by `network.release_time_bound`.
        end_s: when the plan is predicted to be over; `None` if its timeline is not known.
        exposed_s: how much of the communication is predicted to lie behind the backward; `None` as `end_s`.
        buckets: all of them.
        measured: what was measured, if anything was.
        copies: what is copied, and why.
        placed_nbytes: of the gradients of which it is known where they are computed.
        memory: the simulated peak; `None` if it was not simulated.
        advice: what would help, the most helpful first.
        refusals: what passes left alone.
        backwards: how many backwards took which way.
        notes: what else has to be known to read the figures.
        slowest: where most of the compute is, if it is more in one place than elsewhere.
        optimizers: those that update in the backward.
        left: the buckets whose reductions may end under the next forward.
        ended_in_backward: those that do not then, and why.
        forward_s: how long the next forward computes, where something may end under it; else `None`. `end_s`,
            `bound_s` and `exposed_s` are then of the backward and that forward together.
        forward_from: where that is from.
        gather_s: how long parameters go round, where each rank updates a part: behind the backward, or under the next
            forward.
        gather_wait_s: how much of that compute stands still.
    """

    bound_by: str
    mode: str
    strategy: str
    world_size: int
    backend: str
    device: str
    nbytes: int
    gradients: int
    backward_s: float
    backward_from: str
    ready_from: str
    cost: str
    cost_source: str
    communication_s: float
    bound_s: float
    end_s: float | None
    exposed_s: float | None
    buckets: tuple[ExplainedBucket, ...]
    measured: MeasuredFigures | None
    copies: tuple[Copies, ...]
    placed_nbytes: int
    memory: PeakMemory | None
    advice: tuple[Advice, ...]
    refusals: tuple[Refusal, ...]
    backwards: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    slowest: SlowPart | None = None
    optimizers: tuple[OptimizerRecord, ...] = ()
    left: tuple[int, ...] = ()
    ended_in_backward: tuple[tuple[int, str], ...] = ()
    forward_s: float | None = None
    forward_from: str = ""
    gather_s: float = 0.0
    gather_wait_s: float = 0.0

    @property
    def has_two_halves(self) -> bool:
        """Whether something may end under the next forward."""
        return self.forward_s is not None

    @property
    def times(self) -> Times:
        """How times are said: where nobody has timed the backward, as shares of it, for they are no milliseconds."""
        return Times(self.backward_s if self.backward_from.startswith("assumed") else None)

    @property
    def computes_s(self) -> float:
        """How long what computes beside the network does: the backward, and where reductions may cross the forward."""
        return self.backward_s + (self.forward_s or 0.0)

    @property
    def ratio(self) -> float | None:
        """The predicted end over the bound: 1 is the best there can be."""
        return None if self.end_s is None or not self.bound_s else self.end_s / self.bound_s

    @property
    def copied_nbytes(self) -> int:
        return sum(each.nbytes for each in self.copies)

    def to_json(self) -> str:
        return json.dumps({"version": EXPLANATION_VERSION} | asdict(self))

    @staticmethod
    def from_json(text: str) -> Explanation:
        """What `to_json` wrote.

        Raises:
            ConfigError: not JSON, of another version, or a field is missing or unknown.
        """
        try:
            data = dict(json.loads(text))
            version = data.pop("version")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"not an explanation of dp_compile: {error!r}.") from error
        if version != EXPLANATION_VERSION:
            raise ConfigError(
                f"the explanation is of version {version!r}, readable is {EXPLANATION_VERSION}. Explain the step anew."
            )
        try:
            return Explanation(**data | _records(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not an explanation of dp_compile: {error!r}.") from error

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """One screen, then the buckets. `verbose`: all of them, with their members and why they end where they end."""
        word = "assumed" if self.backward_from.startswith("assumed") else "predicted"
        sections: list[Iterable[str]] = [_verdict(self), _figures(self, word)]
        sections += [[*_slowest(self), *_crossing(self), *_exposure(self, word), *_measured_exposure(self)]]
        sections += [[*_updates(self), *_memory_and_copies(self), *_left_alone(self)]]
        if self.end_s is not None:
            what = (
                "for backward and next forward" if self.has_two_halves else "until backward and communication are over"
            )
            sections += [lines_of_advice(self.advice, word, self.end_s, self.times, what)]
        shown = None if verbose else SHOWN_BUCKETS
        sections += [bucket_table(self.buckets, at_most=shown, word=word, times=self.times)]
        sections += [members_of_buckets(self.buckets)] if verbose else []
        texts = ["\n".join(section) for section in sections]
        return "\n\n".join(text for text in texts if text)


def explanation_of(step: Step) -> Explanation:
    """Explain a step. What is measured stays apart from what is predicted.

    If only a measured step tells how long the backward computes, predictions start from that.

    Raises:
        ConfigError: the measured buckets are not those of the plan, or no gradient is reduced.
    """
    if step.mode == DECENTRALIZED:
        raise ConfigError(
            "this step mixes parameters with neighbours: no gradient is reduced, nothing of that can be explained. Its "
            "timeline shows the exchanges, dp-compile whatif --topology predicts others."
        )
    given, step = step, with_measured_backward(step)
    buckets = explained_buckets(step)
    planned = [bucket.planned for bucket in buckets if bucket.planned is not None]
    forward_s = step.forward_s if step.has_two_halves else 0.0
    exposed_s, gather_wait_s = sum(bucket.exposed_s for bucket in planned), step.gather_wait_s
    ends = [step.backward_s, *(each.finish_s for each in planned)] if not step.left else [step.backward_s + exposed_s]
    return Explanation(
        bound_by=bound_by(step),
        mode=step.mode,
        strategy=step.strategy,
        world_size=step.world_size,
        backend=step.backend.name,
        device=step.device,
        nbytes=step.plan.nbytes,
        gradients=sum(each.name != UNUSED_FLAGS for each in step.plan.gradients),
        backward_s=step.backward_s,
        backward_from=backward_from(given),
        ready_from=ready_from(step),
        cost=str(step.cost),
        cost_source=step.cost_source,
        communication_s=step.communication_s,
        bound_s=step.bound_s() + forward_s,
        end_s=max(ends) + forward_s + gather_wait_s if planned else None,
        exposed_s=exposed_s + gather_wait_s if planned else None,
        buckets=buckets,
        measured=measured_figures(step),
        copies=copies_of(step.placements),
        placed_nbytes=sum(each.nbytes for each in step.placements if each.gradient != UNUSED_FLAGS),
        memory=step.memory,
        advice=advice_for(step) if planned else (),
        refusals=step.refusals,
        backwards=step.backwards,
        notes=(*notes_of(step), *(wire_that_does_not_pay(step) if planned else ())),
        slowest=slowest_part(step),
        optimizers=step.optimizers,
        left=tuple(sorted(step.left)),
        ended_in_backward=tuple(ended_in_backward(step)) if step.left else (),
        forward_s=forward_s if step.has_two_halves else None,
        forward_from=forward_from(step) if step.has_two_halves else "",
        gather_s=step.gather_s,
        gather_wait_s=gather_wait_s,
    )


def _records(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a file that are records, or lists of them."""
    measured, memory = data["measured"], data["memory"]
    return {
        "buckets": tuple(_bucket(each) for each in data["buckets"]),
        "measured": None if measured is None else MeasuredFigures(**measured),
        "copies": tuple(Copies(**each | {"gradients": tuple(each["gradients"])}) for each in data["copies"]),
        "memory": None if memory is None else PeakMemory(**memory),
        "advice": tuple(Advice(**each) for each in data["advice"]),
        "refusals": tuple(Refusal(**each) for each in data["refusals"]),
        "backwards": tuple((str(way), int(times)) for way, times in data["backwards"]),
        "notes": tuple(map(str, data["notes"])),
        "slowest": None if data.get("slowest") is None else SlowPart(**data["slowest"]),
        "optimizers": tuple(
            OptimizerRecord(**each | {"left": tuple(each["left"])}) for each in data.get("optimizers", ())
        ),
        "left": tuple(data.get("left", ())),
        "ended_in_backward": tuple((int(number), str(why)) for number, why in data.get("ended_in_backward", ())),
    }


def _bucket(data: dict[str, Any]) -> ExplainedBucket:
    planned, measured = data["planned"], data["measured"]
    return ExplainedBucket(
        **data
        | {
            "members": tuple(data["members"]),
            "planned": None if planned is None else PlannedBucket.from_dict(planned),
            "measured": None if measured is None else MeasuredBucket(**measured),
        }
    )


# --- the text -------------------------------------------------------------------------------------------------------


def _verdict(this: Explanation) -> Iterator[str]:
    halves = "backward and next forward take" if this.has_two_halves else "the backward takes"
    computes = f"{halves} {format_ms(this.computes_s)}"
    together = f"communication would take {format_ms(this.communication_s)} if nothing overlapped"
    yield from wrapped(
        {
            COMMUNICATION: f"Communication-bound: {together}, {computes}.",
            COMPUTE: f"Compute-bound: {computes}, {together}.",
            NOT_KNOWN: "Communication- or compute-bound: not known, nobody has timed the backward. It is "
            f"communication-bound if the backward takes less than that: {together}.",
            ONE_RANK: "One rank: there is nobody to communicate with.",
        }[this.bound_by]
    )
    size = f"{count(len(this.buckets), 'bucket')}, {count(this.gradients, 'gradient')}, {format_bytes(this.nbytes)}"
    ways = ", ".join(f"{times} {way}" for way, times in this.backwards)
    yield from wrapped(
        f"{count(this.world_size, 'rank')}, {this.backend} on {this.device}, {this.mode}, {this.strategy}: "
        f"{size}{'; backwards: ' if ways else ''}{ways}",
        2,
    )
    forward = f"; next forward: {this.forward_from}" if this.has_two_halves else ""
    yield from wrapped(f"backward: {this.backward_from}; ready times: {this.ready_from}{forward}", 2)
    yield from wrapped(f"link: an all-reduce takes {this.cost}, {this.cost_source}", 2)
    for note in this.notes:
        yield from wrapped(note, 2)


def _figures(this: Explanation, word: str) -> list[str]:
    seen = this.measured
    if this.bound_by == ONE_RANK:
        return []
    end, bound = "end of backward and communication", "best possible end, whatever the buckets"
    if this.has_two_halves:
        end, bound = (
            "backward and next forward",
            "best possible end: the longer of compute and communication",
        )
    rows: list[tuple[str, float | None, float | None]] = [
        ("backward, compute alone", this.backward_s, seen.compute_s if seen else None),
    ]
    if this.has_two_halves:
        rows.append(("next forward, compute alone", this.forward_s, seen.forward_s if seen else None))
    if seen is not None and seen.updates_s:
        rows.append(("updates in the backward", None, seen.updates_s))
    rows.append(("communication if nothing overlapped", this.communication_s, None))
    rows += _going_round(this, seen.gather_s if seen else None) if this.gather_s else []
    rows.append(("exposed: compute stands still for communication", this.exposed_s, seen.exposed_s if seen else None))
    if this.has_two_halves and seen is not None:
        rows.append(("  of it behind the backward", None, seen.later_s))
    rows += [(end, this.end_s, seen.end_s if seen else None), (bound, this.bound_s, None)]
    cells = [(name, this.times.cell(planned), digits_ms(measured)) for name, planned, measured in rows]
    if this.backward_from.startswith("measured on rank"):
        cells[0] = (cells[0][0], "(taken)", cells[0][2])  # the same figure twice would look like a good prediction
        if this.has_two_halves and this.forward_from.startswith("measured"):
            cells[1] = (cells[1][0], "(taken)", cells[1][2])
    if _is_fitted(this):
        cells = [(row[0], "(taken)", row[2]) if row[0].startswith(("exposed", end)) else row for row in cells]
    ratios = [None if end_s is None or not this.bound_s else end_s / this.bound_s for end_s in _ends(this)]
    first, second = ("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
    cells.append(("end over the best possible end", first, second))
    return figures_table(cells, word, "measured" if seen else None, this.times)


def _going_round(this: Explanation, seen_s: float | None) -> list[tuple[str, float | None, float | None]]:
    """Rows on parameters that go round. In a step of two halves they need not cross, as those of another optimizer."""
    if not this.has_two_halves:
        return [("  parameters that go round behind the backward", this.gather_s, seen_s)]
    return [
        ("  parameters that go round", this.gather_s, None),
        ("    for which compute stands still", this.gather_wait_s, seen_s),
    ]


def _is_fitted(this: Explanation) -> bool:
    """Whether the predicted end is the measured one because the network was taken to be as slow as that."""
    if not this.cost_source.startswith(WAITED) or this.end_s is None or this.measured is None:
        return False
    return this.measured.end_s is not None and abs(this.end_s - this.measured.end_s) < FITTED * this.measured.end_s


def _ends(this: Explanation) -> tuple[float | None, float | None]:
    return this.end_s, this.measured.end_s if this.measured else None


def _slowest(this: Explanation) -> Iterator[str]:
    part = this.slowest
    if part is None:
        return
    length = "" if this.times.whole_s else f"{format_ms(part.share * this.backward_s)}, "
    where = f"between {part.after} and {part.before}" if part.after else f"before {part.before} is ready"
    measured = f", measured on rank {this.measured.rank}" if part.measured and this.measured else ", estimated"
    yield from wrapped(f"Compute: {length}{percent(part.share)} of the backward, lie {where}{measured}.")


def _exposure(this: Explanation, word: str) -> Iterator[str]:
    if this.exposed_s is None or this.end_s is None:
        return
    if this.exposed_s < SHORTEST_S:
        before = "before the next forward needs it" if this.has_two_halves else "before the backward"
        yield f"Exposed: nothing. All communication is {word} to be over {before}."
        return
    share = percent(this.exposed_s / this.communication_s)
    where = "lie behind the end of the backward"
    if this.has_two_halves:
        where = "is what compute stands still for in both halves of the step"
    yield f"Exposed: {this.times.said(this.exposed_s)}, {share} of the communication, {where} ({word})."
    if this.gather_wait_s:
        when = "and the next forward needs them" if this.has_two_halves else "when all ranks have updated their parts"
        yield f"  {this.times.said(this.gather_wait_s)}: parameters go round {when}."
    exposed = sorted((bucket for bucket in this.buckets if exposed_s(bucket) >= SHORTEST_S), key=exposed_s)[::-1]
    for bucket in exposed[:SHOWN_EXPOSED]:
        yield from wrapped(_why_exposed(bucket, this.times), 2)
    if rest := exposed[SHOWN_EXPOSED:]:
        yield f"  {count(len(rest), 'more bucket')}: {this.times.said(sum(map(exposed_s, rest)))}"
    if not exposed:
        return
    if not this.left:
        yield from _last_run(this)
    cause = "due to where this plan's buckets end" if exposed[0].released_by else "due to the late start and the plan"
    hidden_by_none_s = max(0.0, this.bound_s - this.computes_s)
    yield from wrapped(
        f"No plan can hide {this.times.said(hidden_by_none_s)} of it; "
        f"{this.times.said(max(0.0, this.end_s - this.bound_s))} are {cause}.",
        2,
    )


def _why_exposed(bucket: ExplainedBucket, times: Times) -> str:
    planned = bucket.planned
    assert planned is not None
    starts = times.said(planned.start_s)
    if planned.start_s > planned.ready_s + SHORTEST_S:
        why = f"could start at {times.said(planned.ready_s)}, but the network carries earlier buckets until {starts}"
    elif not bucket.released_by:
        why = f"starts at {starts}, when the backward ends, as all reductions do"
    elif bucket.released_in != bucket.number:
        why = (
            f"starts at {starts} because bucket {bucket.released_in}, which is launched before it, has to wait for "
            f"{bucket.released_by}"
        )
    else:
        why = f"starts at {starts} because {bucket.released_by} is ready last"
    if planned.needed_s is not None:
        why += (
            f", ends at {times.said(planned.finish_s)}, and the next forward reads it at {times.said(planned.needed_s)}"
        )
    holds = f"{count(bucket.gradients, 'gradient')}, {format_bytes(bucket.nbytes)}"
    largest = f", the largest {bucket.largest}" if bucket.gradients > 1 else ""
    return f"bucket {bucket.number}, {times.said(planned.exposed_s)}: it {why} ({holds}{largest})."


def _last_run(this: Explanation) -> Iterator[str]:
    """Which buckets the end waits for, if they are several."""
    run = last_run(this.buckets)
    if len(run) > 1 and run[0].planned is not None:
        since = f", when {run[0].released_by} is ready" if run[0].released_by else ""
        yield from wrapped(
            f"The network does not rest from bucket {run[0].number} on: {count(len(run), 'bucket')}, "
            f"{format_bytes(sum(bucket.nbytes for bucket in run))}, from "
            f"{this.times.said(run[0].planned.start_s)}{since}.",
            2,
        )


def _crossing(this: Explanation) -> Iterator[str]:
    """Which reductions end under the next forward, in which order, and why."""
    if not this.left:
        return
    some = this.left[:SHOWN_CROSSING]
    more = f" and {len(this.left) - len(some)} more" if len(some) < len(this.left) else ""
    yield from wrapped(
        f"Under the next forward may end {count(len(this.left), 'bucket')} of {len(this.buckets)}, launched in this "
        f"order: {', '.join(map(str, some))}{more}. Of what is ready goes first what the next forward reads first."
    )
    for why in dict.fromkeys(why for _, why in this.ended_in_backward):
        numbers = [number for number, other in this.ended_in_backward if other == why]
        shown = ", ".join(map(str, numbers[:SHOWN_CROSSING]))
        word = "bucket" if len(numbers) == 1 else f"{len(numbers)} buckets,"
        yield from wrapped(f"in the backward ends {word} {shown}: {why}", 2)


def _updates(this: Explanation) -> Iterator[str]:
    for each in this.optimizers:
        yield from wrapped(f"{each}.")


def _measured_exposure(this: Explanation) -> Iterator[str]:
    seen = this.measured
    if seen is None:
        return
    waited = sorted((bucket for bucket in this.buckets if _waited(bucket) >= SHORTEST_S), key=_waited, reverse=True)
    most = [f"{format_ms(_waited(bucket))} for bucket {bucket.number}" for bucket in waited[:SHOWN_EXPOSED]]
    residual = ""
    if this.end_s is not None and seen.end_s and not _is_fitted(this):
        off = this.end_s / seen.end_s - 1
        residual = f"; the end is predicted {percent(abs(off))} {'later' if off > 0 else 'earlier'} than measured"
    yield from wrapped(
        f"Measured on rank {seen.rank} ({seen.source}): compute stood still for {format_ms(seen.exposed_s)}"
        f"{', most of it ' if most else ''}{', '.join(most)}{residual}."
    )


def _waited(bucket: ExplainedBucket) -> float:
    return bucket.measured.waited_s if bucket.measured else 0.0


def _memory_and_copies(this: Explanation) -> Iterator[str]:
    memory = this.memory
    if memory is None:
        yield "Peak memory: not known, no pass simulated it (no capture, or code from a compiler's cache)."
    else:
        change = memory.nbytes / memory.ddp_nbytes - 1 if memory.ddp_nbytes else 0.0
        yield (
            f"Peak memory of the backward, simulated: {format_bytes(memory.nbytes)}; as torch's DDP "
            f"{format_bytes(memory.ddp_nbytes)} ({change:+.1%})."
        )
    if not this.placed_nbytes:
        yield "Copies: not known, no code was generated here (backend aot_eager, or code from a compiler's cache)."
        return
    total = format_bytes(this.placed_nbytes)
    if not this.copies:
        yield f"Copies: none, all {total} of gradients are computed where they are reduced."
        return
    yield f"Copies: {format_bytes(this.copied_nbytes)} of {total} are copied to where they are reduced."
    for copies in this.copies[:SHOWN_REASONS]:
        names = " .. ".join(dict.fromkeys((copies.gradients[0], copies.gradients[-1])))
        yield from wrapped(
            f"{count(len(copies.gradients), 'gradient')}, {format_bytes(copies.nbytes)}, {names}: {copies.reason}", 2
        )
    if rest := this.copies[SHOWN_REASONS:]:
        yield f"  {count(len(rest), 'more reason')}: {format_bytes(sum(each.nbytes for each in rest))}"


def _left_alone(this: Explanation) -> Iterator[str]:
    if not this.refusals:
        return
    yield f"Left alone by the passes: {count(len(this.refusals), 'node')}"
    for refusal in this.refusals[:SHOWN_REASONS]:
        yield from wrapped(f"{refusal.node}: {refusal.reason}", 2)
    if rest := this.refusals[SHOWN_REASONS:]:
        yield f"  {len(rest)} more: .refusals, or --json"
