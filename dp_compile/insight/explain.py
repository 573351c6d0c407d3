"""Why a step takes as long as it takes: a verdict, one table of buckets, at most three pieces of advice. 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from dp_compile.errors import ConfigError
from dp_compile.insight.predict import DTYPES, replanned, sent_in
from dp_compile.insight.step import BYTES, NOMINAL, MeasuredBucket, PlannedBucket, Step, format_ms, planned_buckets
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.crossing import FORWARD_SHARE, why_not_left
from dp_compile.plan.words import WIDTH, count, format_bytes, in_columns

MOST_ROWS: Final = 16
MOST_ADVICE: Final = 3
SHORTEST_S: Final = 1e-9  # what is shorter is rounding
SMALLEST_GAIN: Final = 0.005  # of the predicted end; the model is not more exact
CAPS_MB: Final = {"1": 1.0, "5": 5.0, "25": 25.0, "math.inf": math.inf}
COMMUNICATION, COMPUTE, NOT_KNOWN, ONE_RANK = "communication", "compute", "not known", "one rank"


class ExplainedBucket(NamedTuple):
    """One bucket. `why`: why it is exposed, or that it is not. `planned`: `None` if there is one rank."""

    number: int
    nbytes: int
    gradients: int
    members: tuple[str, ...]
    why: str
    planned: PlannedBucket | None
    measured: MeasuredBucket | None


class Advice(NamedTuple):
    """Something to change, and how much earlier backward and communication would be over.

    `share`: of the predicted end. `at_most`: the gain if what the plan believes is off by 2x.
    """

    change: str
    gain_s: float
    share: float
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a step takes as long as it takes. Print it; times in seconds after the start of the backward.

    `bound_by`: `communication`, `compute`, `not known` (the backward was not timed) or `one rank`. `end_s`,
    `exposed_s`: predicted, with a next forward if something ends under it; `None` for one rank. `bound_s`: no
    plan ends earlier (`release_time_bound`).
    """

    step: Step
    bound_by: str
    end_s: float | None
    exposed_s: float | None
    bound_s: float
    buckets: tuple[ExplainedBucket, ...]
    advice: tuple[Advice, ...]

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """`verbose`: all buckets, with their members."""
        lines = [_verdict(self), *(f"  {text}" for text in _facts(self)), ""]
        lines += [*_table(self, None if verbose else MOST_ROWS), ""]
        if verbose:
            lines += [*(f"  bucket {each.number}: {', '.join(each.members)}" for each in self.buckets), ""]
        return in_columns("\n".join([*lines, *_advice(self)]))


def explanation_of(step: Step) -> Explanation:
    """Explain a step; a `ConfigError` if the measured buckets are not those of the plan."""
    if step.measured is not None and len(step.measured.buckets) not in (0, len(step.plan.buckets)):
        raise ConfigError(
            f"the plan has {len(step.plan.buckets)} buckets, but the measurement has {len(step.measured.buckets)}. "
            "Measure a run with this plan."
        )
    forward_s, alone = step.forward_s if step.has_two_halves else 0.0, step.world_size == 1
    bound_by = COMMUNICATION if step.communication_s > step.backward_s + forward_s else COMPUTE
    return Explanation(
        step,
        ONE_RANK if alone else bound_by if step.is_timed else NOT_KNOWN,
        None if alone else step.end_s + forward_s,
        None if alone else step.exposed_s,
        step.bound_s() + forward_s,
        tuple(_explained(step)),
        () if alone else advice_for(step),
    )


def _explained(step: Step) -> Iterator[ExplainedBucket]:
    """The buckets in launch order, each with the gradient that releases it, maybe of an earlier one: the largest."""
    alone = [None] * len(step.plan.buckets)
    planned: Sequence[PlannedBucket | None] = alone if step.world_size == 1 else planned_buckets(step)
    seen: Sequence[MeasuredBucket | None] = (step.measured.buckets if step.measured is not None else ()) or alone
    latest_s, last, place = -1.0, "", 0
    for number, (bucket, times) in enumerate(zip(step.plan.buckets, step.ready_members(), strict=True)):
        own = [each for each in bucket.members if each.gradient.name != UNUSED_FLAGS]
        if (own_s := max(each.ready_s for each in times)) >= latest_s:
            ready = [each for each, time in zip(bucket.members, times, strict=True) if time.ready_s == own_s]
            released_by = [each for each in ready if each.gradient.name != UNUSED_FLAGS] or ready
            latest_s, last, place = own_s, max(released_by, key=lambda each: each.gradient.nbytes).gradient.name, number
        each = planned[number]
        why = "" if each is None else _why(step, each, last if place == number else f"{last} (bucket {place})")
        labels = tuple(member.gradient.name for member in bucket.members)
        yield ExplainedBucket(number, bucket.nbytes, len(own), labels, why, each, seen[number])


def _why(step: Step, planned: PlannedBucket, released_by: str) -> str:
    """Why a bucket is exposed."""
    if planned.exposed_s < SHORTEST_S:
        return "hidden"
    if planned.needed_s is not None:
        return f"next forward reads it at {_time(step, planned.needed_s)}"
    if planned.start_s > planned.ready_s + SHORTEST_S:
        return "network busy"
    return f"waits for {released_by}"


def advice_for(step: Step) -> tuple[Advice, ...]:
    """Options that are predicted to gain more than `SMALLEST_GAIN`, the best first, at most `MOST_ADVICE`."""
    ranked = sorted(_options(step), key=lambda each: -each.share)
    return tuple(each for each in ranked if each.share > SMALLEST_GAIN)[:MOST_ADVICE]


def _gain(change: str, before: Step, after_s: float, *, at_most: bool = False) -> Advice:
    before_s = _end_s(before)
    return Advice(change, before_s - after_s, 1 - after_s / before_s if before_s else 0.0, at_most)


def _options(step: Step) -> Iterator[Advice]:
    plans = step.strategy == "optimal"
    if step.is_timed or not plans:  # a plan for assumed speeds is not judged by the same assumption
        other = {f"bucket_cap_mb={name}": replanned(step, cap_mb) for name, cap_mb in CAPS_MB.items()}
        if not plans:
            other["neither bucket_cap_mb nor bucket_policy"] = replanned(step)
        option, best = min(other.items(), key=lambda item: _end_s(item[1]))
        yield _gain(f"{option}: {count(len(best.plan.buckets), 'bucket')}", step, _end_s(best))
    if step.cost_source.startswith(NOMINAL):
        change = "cost=dp_compile.calibrate().cost (measures the link)"
        speeds = [replace(step, ready=replace(step.ready, backward_s=scale * step.backward_s)) for scale in (0.5, 2.0)]
        found = [_gain(change, each, _end_s(replanned(each)), at_most=True) for each in speeds]
        yield max(found, key=lambda each: each.share)
    hooks = any(each.key.reduction.hook is not None for each in step.plan.gradients)
    if not hooks and any(each.itemsize > BYTES["bfloat16"] for each in step.plan.gradients if each.key.dtype in DTYPES):
        change = "mp_policy, reduce_dtype=bfloat16: fewer bytes, other rounding"
        yield _gain(change, step, _end_s(sent_in(step, "bfloat16")))


def _end_s(step: Step) -> float:
    return step.end_s + (step.forward_s if step.has_two_halves else 0.0)


def _time(step: Step, seconds: float) -> str:
    """In milliseconds; in percent of the backward if its length is assumed, for such times are no milliseconds."""
    if step.is_timed:
        return format_ms(seconds)
    return f"{100 * seconds / step.backward_s:.1f}%" if step.backward_s else "0%"


def _verdict(this: Explanation) -> str:
    """The first line: what bounds the step and how much is exposed, and whether any of it was measured."""
    seen = this.step.measured
    estimate = "" if seen is not None else "Estimated, not measured: "
    if this.exposed_s is None:
        return f"{estimate}one rank, nothing to communicate."
    share = this.exposed_s / this.end_s if this.end_s else 0.0
    if this.bound_by == NOT_KNOWN:
        return f"{estimate}{share:.0%} exposed if compute lasts as long as its bytes."
    if seen is None:
        return f"{estimate}{this.bound_by}-bound, {format_ms(this.exposed_s)} ({share:.0%}) exposed."
    forward = seen.next_forward if this.step.has_two_halves else None
    exposed_s, end_s = seen.exposed_s + seen.gather_s, seen.end_s if forward is None else forward.end_s
    exposed = f"{format_ms(exposed_s)} exposed of {format_ms(end_s)}"
    return f"{this.bound_by.capitalize()}-bound: {exposed}, measured on rank {seen.rank}."


def _facts(this: Explanation) -> Iterator[str]:
    step, seen = this.step, this.step.measured
    ways = "".join(f", {times} {way}" for way, times in step.backwards)
    gradients = sum(each.name != UNUSED_FLAGS for each in step.plan.gradients)
    yield (
        f"{count(step.world_size, 'rank')}, {step.backend} on {step.device}, {step.mode}, {step.strategy}: "
        f"{count(len(this.buckets), 'bucket')}, {count(gradients, 'gradient')}, {format_bytes(step.plan.nbytes)}{ways}"
    )
    if this.end_s is not None:
        until, ratio = "next forward" if step.has_two_halves else "communication", this.end_s / (this.bound_s or 1.0)
        end = f"{_time(step, this.end_s)}, at best {_time(step, this.bound_s)} ({ratio:.3f})"
        yield f"predicted end of backward and {until} {end}; exposed {_time(step, this.exposed_s or 0.0)}"
        share = "measured" if step.forward_share is not None else f"assumed, {FORWARD_SHARE:g} of the backward"
        also = f"; next forward {_time(step, step.forward_s)} ({share})" if step.has_two_halves else ""
        also += f"; all-gathers of parameters {_time(step, step.gather_s)}" if step.gather_s else ""
        yield f"compute {_time(step, step.backward_s)}, communication {_time(step, step.communication_s)}{also}"
    if seen is not None:
        off = None if this.end_s is None or not seen.end_s or step.has_two_halves else this.end_s / seen.end_s - 1
        residual = "" if off is None else f"; predicted end {off:+.1%}"
        updates = f", updates {format_ms(seen.updates_s)}" if seen.updates_s else ""
        later_s = seen.exposed_later_s + seen.gather_s
        exposed = format_ms(seen.exposed_s + seen.gather_s)
        exposed += f", {format_ms(later_s)} of it after the backward" if later_s else ""
        yield f"measured: compute {format_ms(seen.compute_s)}{updates}, exposed {exposed} ({seen.source}){residual}"
    if seen and step.ready.backward_s is None:
        yield f"length of the backward: measured on rank {seen.rank}; planned before that: {step.ready.basis}"
    else:
        yield f"backward: {step.ready.basis}"
    yield f"link: an all-reduce takes {step.cost}, {step.cost_source}"
    yield from (f"{each}." for each in step.optimizers)
    if step.memory is not None:
        ddp = format_bytes(step.memory.ddp_nbytes)
        yield f"peak memory of the backward, simulated: {format_bytes(step.memory.nbytes)}; as torch's DDP {ddp}"
    if placed := [each for each in step.placements if each.gradient != UNUSED_FLAGS]:
        copied = format_bytes(sum(each.nbytes for each in placed if each.is_copied))
        yield f"copied into buckets: {copied} of {format_bytes(sum(each.nbytes for each in placed))}"
    yield from _notes(step)


def _notes(step: Step) -> Iterator[str]:
    if step.world_size == 1:
        yield "no timeline: there is one rank, and nothing to communicate"
    if step.left:
        others = [bucket for number, bucket in enumerate(step.plan.buckets) if number not in step.left]
        why = ", ".join(sorted({why_not_left(bucket) or "another reader" for bucket in others}))
        left, number = len(step.left), len(step.plan.buckets)
        yield f"{left} of {number} buckets may end under the next forward{'; not: ' if why else ''}{why}"
    for each in (each for each in step.optimizers if each.stayed is False and each.left):
        yield (
            f"step() waits for what {each.name} defers: the forward is not one graph of "
            'torch.compile(model, backend="dp_compile"). Predicted is a step without that overlap'
        )
    if eager := dict(step.backwards).get("eager hooks", 0):
        yield f"{eager} of its backwards were reduced by eager hooks; predicted is a captured one"
    if step.refusals:
        first = step.refusals[0]
        yield f"passes left {count(len(step.refusals), 'node')} alone; {first.node}: {first.reason}"


def _table(this: Explanation, most: int | None) -> Iterator[str]:
    """One line for each bucket; of very many those that say most, the outermost and the most exposed ones."""
    step, buckets = this.step, this.buckets
    shown = buckets
    if most is not None and len(buckets) > most:
        inner = sorted(buckets[2:-2], key=lambda each: -(each.planned.exposed_s if each.planned else 0.0))
        shown = tuple(sorted((*buckets[:2], *inner[: most - 4], *buckets[-2:]), key=lambda each: each.number))
    timed, seen = any(each.planned for each in buckets), any(each.measured for each in buckets)
    times = ["ready", "start", "end", "exposed"] if timed else []
    rows = [["#", "size", "n", *times, *(["waited"] if seen else []), "why"]]
    for each in shown:
        cells = [str(each.number), format_bytes(each.nbytes), str(each.gradients)]
        cells += [_time(step, time).removesuffix(" ms").removesuffix("%") for time in (each.planned or ())[:4]]
        cells += [format_ms(each.measured.waited_s).removesuffix(" ms")] if each.measured else []
        rows.append([*cells, each.why or each.members[0]])
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    room = WIDTH - sum(widths) - 2 * len(widths)
    about = [f"in {'ms' if step.is_timed else '% of the backward'}"] * timed + ["waited is measured"] * seen
    yield "Buckets in launch order, n gradients each" + (f" ({'; '.join(about)})" if about else "")
    for row in rows:
        why = row[-1] if len(row[-1]) <= room else f"{row[-1][: room // 2 - 1]}..{row[-1][-(room - room // 2 - 1) :]}"
        yield "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True)), why])
    if len(shown) < len(buckets):
        yield f"... and {len(buckets) - len(shown)} more: --buckets, text(verbose=True)"


def _advice(this: Explanation) -> Iterator[str]:
    if this.end_s is None:
        return
    if not this.advice:
        yield "Advice: none; nothing that was tried gains more than 0.5 % of the predicted end."
        return
    yield "Advice, each alone, with its predicted gain:"
    for each in this.advice:
        most = "up to " if each.at_most else ""
        gain = f"{most}{each.share:.1%}" + (f", {format_ms(each.gain_s)}" if this.step.is_timed else "")
        yield f"  {gain}: {each.change}"
