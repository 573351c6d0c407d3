"""Explanation of a step's duration: a verdict, a table of buckets, at most three pieces of advice; 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, NamedTuple

from dp_compile.errors import ConfigError
from dp_compile.insight.predict import DTYPES, replanned, sent_in
from dp_compile.insight.step import BYTES, NOMINAL, MeasuredBucket, Step, format_ms, planned_buckets
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket
from dp_compile.plan.crossing import FORWARD_SHARE, why_not_left
from dp_compile.plan.network import Launch
from dp_compile.plan.words import count, format_bytes, in_columns, table

MOST_ROWS: Final = 16
MOST_ADVICE: Final = 3
SHORTEST_S: Final = 1e-9  # shorter times are rounding errors
SMALLEST_GAIN: Final = 0.005  # as a share of the predicted end: the accuracy of the model
CAPS_MB: Final = {"1": 1.0, "5": 5.0, "25": 25.0, "math.inf": math.inf}
COMMUNICATION, COMPUTE, NOT_KNOWN, ONE_RANK = "communication", "compute", "not known", "one rank"


class ExplainedBucket(NamedTuple):
    """One bucket. `why`: the cause of its exposed time, or "hidden". On one rank `why` is "" and `planned` `None`."""

    number: int
    bucket: Bucket
    why: str
    planned: Launch | None
    measured: MeasuredBucket | None

    @property
    def members(self) -> list[str]:
        """The names of the bucket's gradients."""
        return [member.gradient.name for member in self.bucket.members]


class Advice(NamedTuple):
    """A change of options with its gain: how much earlier backward and communication would end."""

    change: str
    gain_s: float
    share: float  # the gain as a share of the predicted end
    at_most: bool = False  # whether the gain is the larger of two: for half and for twice the backward's length


class Explanation:
    """An explanation of a step's duration, to print. Times are predictions in seconds.

    `bound_by`: `communication`, `compute`, `not known` (the backward was not timed) or `one rank`. `end_s`: end of the
    backward, of communication, and of the next forward if communication may overlap it. `exposed_s`: how long compute
    waits for communication. Both are `None` for one rank. `bound_s`: lower bound of `end_s` for any plan.

    Raises:
        ConfigError: the measurement has another number of buckets than the plan.
    """

    def __init__(self, step: Step) -> None:
        if step.measured is not None and len(step.measured.buckets) not in (0, len(step.plan.buckets)):
            raise ConfigError(
                f"the plan has {len(step.plan.buckets)} buckets, but the measurement has "
                f"{len(step.measured.buckets)}. Measure a run with this plan."
            )
        self.step = step
        forward_s, alone = step.forward_s if step.has_two_halves else 0.0, step.world_size == 1
        bound_by = COMMUNICATION if step.communication_s > step.backward_s + forward_s else COMPUTE
        self.bound_by = ONE_RANK if alone else bound_by if step.is_timed else NOT_KNOWN
        self.end_s = None if alone else _end_s(step)
        self.exposed_s = None if alone else step.exposed_s
        self.bound_s = step.bound_s + forward_s

    def text(self, *, verbose: bool = False) -> str:
        """Return the explanation as text. `verbose`: all buckets, with their members."""
        verdict, *facts = self.summary()
        lines = [verdict, *(f"  {text}" for text in (*facts, *_notes(self.step))), ""]
        lines += [*_table(self, len(self.buckets) if verbose else MOST_ROWS), ""]
        if verbose:
            lines += [*(f"  bucket {each.number}: {', '.join(each.members)}" for each in self.buckets), ""]
        if self.advice:
            lines.append("Advice, each alone, with its predicted gain:")
        elif self.end_s is not None:
            lines.append("Advice: none; nothing that was tried gains more than 0.5 % of the predicted end.")
        for each in self.advice:
            gain = f"{'up to ' * each.at_most}{each.share:.1%}"
            lines.append(f"  {gain}{f', {format_ms(each.gain_s)}' * self.step.is_timed}: {each.change}")
        return in_columns("\n".join(lines))

    __str__ = text

    def summary(self) -> Iterator[str]:
        """Yield the verdict, then lines about the plan, the prediction, the measurement, the backward and the link."""
        step, seen = self.step, self.step.measured
        yield _verdict(self)
        ways = ", ".join(f"{times} {way}" for way, times in step.backwards)
        gradients = sum(each.name != UNUSED_FLAGS for each in step.plan.gradients)
        planned = f"{count(len(step.plan.buckets), 'bucket')}, {count(gradients, 'gradient')}"
        yield (
            f"{count(step.world_size, 'rank')}, {step.backend} on {step.device}, {step.mode}, {step.strategy}: "
            f"{planned}, {format_bytes(step.plan.nbytes)}{ways and '; backwards: '}{ways}"
        )
        if self.end_s is not None:
            time, until = step.time_text, "next forward" if step.has_two_halves else "communication"
            end = f"{time(self.end_s)}, at best {time(self.bound_s)} ({self.end_s / (self.bound_s or 1.0):.3f})"
            yield f"predicted end of backward and {until} {end}; exposed {time(self.exposed_s or 0.0)}"
            share = "measured" if step.forward_share is not None else f"assumed, {FORWARD_SHARE:g} of the backward"
            also = f"; next forward {time(step.forward_s)} ({share})" if step.has_two_halves else ""
            also += f"; all-gathers of parameters {time(step.gather_s)}" if step.gather_s else ""
            yield f"compute {time(step.backward_s)}, communication {time(step.communication_s)}{also}"
        if seen is not None:
            off = None if self.end_s is None or not seen.end_s or step.has_two_halves else self.end_s / seen.end_s - 1
            yield f"measured: {seen}" + ("" if off is None else f"; predicted end {off:+.1%}")
        found = f"measured on rank {seen.rank}; when planned, " if seen and step.ready.backward_s is None else ""
        yield f"backward: {found}{step.ready.basis}"
        yield f"link: an all-reduce takes {step.cost}, {step.cost_source}"

    @cached_property
    def buckets(self) -> tuple[ExplainedBucket, ...]:
        """In launch order. "waits for" names the gradient up to this bucket that is ready last, the largest if tied."""
        step, seen = self.step, self.step.measured
        alone = [None] * len(step.plan.buckets)
        planned: Sequence[Launch | None] = alone if step.world_size == 1 else planned_buckets(step)
        measured: Sequence[MeasuredBucket | None] = (() if seen is None else seen.buckets) or alone
        latest_s, last, place, found = -1.0, "", 0, []
        for number, (bucket, times) in enumerate(zip(step.plan.buckets, step.ready_gradients(), strict=True)):
            if (own_s := max(each.ready_s for each in times)) >= latest_s:
                gradients = [each.gradient for each in bucket.members]
                ready = [each for each, time in zip(gradients, times, strict=True) if time.ready_s == own_s]
                released_by = [each for each in ready if each.name != UNUSED_FLAGS] or ready
                latest_s, last, place = own_s, max(released_by, key=lambda each: each.nbytes).name, number
            each = planned[number]
            why = "" if each is None else _why(step, each, last if place == number else f"{last} (bucket {place})")
            found.append(ExplainedBucket(number, bucket, why, each, measured[number]))
        return tuple(found)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """At most `MOST_ADVICE` changes of options with a predicted gain above `SMALLEST_GAIN`, best first."""
        ranked = [] if self.end_s is None else sorted(_options(self.step), key=lambda each: -each.share)
        return tuple(each for each in ranked if each.share > SMALLEST_GAIN)[:MOST_ADVICE]


def _end_s(step: Step) -> float:
    """Return the predicted end, including the next forward if communication may overlap it."""
    return step.end_s + (step.forward_s if step.has_two_halves else 0.0)


def _why(step: Step, planned: Launch, released_by: str) -> str:
    if planned.waited_s < SHORTEST_S:
        return "hidden"
    if planned.needed_s is not None:
        return f"next forward reads it at {step.time_text(planned.needed_s)}"
    if planned.start_s > planned.ready_s + SHORTEST_S:
        return "network busy"
    return f"waits for {released_by}"


def _gain(change: str, before: Step, after: Step, *, at_most: bool = False) -> Advice:
    before_s, after_s = _end_s(before), _end_s(after)
    return Advice(change, before_s - after_s, 1 - after_s / before_s if before_s else 0.0, at_most)


def _options(step: Step) -> Iterator[Advice]:
    plans = step.strategy == "optimal"
    if step.is_timed or not plans:  # an assumption cannot judge a plan that was made from it
        other = {f"bucket_cap_mb={name}": replanned(step, cap_mb) for name, cap_mb in CAPS_MB.items()}
        if not plans:
            other["no bucket_cap_mb, no bucket_policy"] = replanned(step)
        option, best = min(other.items(), key=lambda item: _end_s(item[1]))
        yield _gain(f"{option}: {count(len(best.plan.buckets), 'bucket')}", step, best)
    if step.cost_source.startswith(NOMINAL):
        change = "cost=dp_compile.calibrate().cost (measures the link)"
        speeds = [replace(step, ready=replace(step.ready, backward_s=scale * step.backward_s)) for scale in (0.5, 2.0)]
        found = [_gain(change, each, replanned(each), at_most=True) for each in speeds]
        yield max(found, key=lambda each: each.share)
    hooks = any(each.key.reduction.hook is not None for each in step.plan.gradients)
    if not hooks and any(each.itemsize > BYTES["bfloat16"] for each in step.plan.gradients if each.key.dtype in DTYPES):
        yield _gain("mp_policy, reduce_dtype=bfloat16: fewer bytes, other rounding", step, sent_in(step, "bfloat16"))


def _verdict(this: Explanation) -> str:
    """Return the first line: what bounds the step, the exposed time, and whether it was measured."""
    seen = this.step.measured
    estimate = "" if seen is not None else "Estimated, not measured: "
    if this.exposed_s is None:
        return f"{estimate}one rank, nothing to communicate."
    share = this.exposed_s / this.end_s if this.end_s else 0.0
    if this.bound_by == NOT_KNOWN:
        return f"{estimate}{share:.0%} exposed if compute takes as long as communication."
    if seen is None:
        return f"{estimate}{this.bound_by}-bound, {format_ms(this.exposed_s)} ({share:.0%}) exposed."
    forward = seen.next_forward if this.step.has_two_halves else None
    exposed_s, end_s = seen.exposed_s + seen.gather_s, seen.end_s if forward is None else forward.end_s
    exposed = f"{format_ms(exposed_s)} exposed of {format_ms(end_s)}"
    return f"{this.bound_by.capitalize()}-bound: {exposed}, measured on rank {seen.rank}."


def _notes(step: Step) -> Iterator[str]:
    yield from (f"{each}." for each in step.optimizers)
    if step.capture is not None:
        yield from f"captured backward: {step.capture}".splitlines()
    if step.world_size == 1:
        yield "no prediction: there is one rank, and nothing to communicate"
    if step.left:
        others = [bucket for number, bucket in enumerate(step.plan.buckets) if number not in step.left]
        why = ", ".join(sorted({why_not_left(bucket) or "other code reads the gradients" for bucket in others}))
        left, number = len(step.left), len(step.plan.buckets)
        yield f"{left} of {number} buckets may end during the next forward{'; why not all: ' if why else ''}{why}"
    for each in (each for each in step.optimizers if each.stayed is False and each.left):
        yield (
            f"step() waits for what {each.name} defers: the forward is not one graph of "
            'torch.compile(model, backend="dp_compile"). The prediction is without that overlap'
        )
    if eager := dict(step.backwards).get("eager hooks", 0):
        yield f"{count(eager, 'backward')} reduced by eager hooks; the prediction is for a captured backward"


def _table(this: Explanation, most: int) -> Iterator[str]:
    """Yield one line per bucket, at most `most` of them: the first and last two, and the most exposed of the others."""
    step, shown = this.step, this.buckets
    if len(shown) > most:
        inner = sorted(shown[2:-2], key=lambda each: -(each.planned.waited_s if each.planned else 0.0))
        shown = (*shown[:2], *sorted(inner[: most - 4]), *shown[-2:])
    timed, seen = any(each.planned for each in shown), any(each.measured for each in shown)
    times = ["ready", "start", "end", "exposed"] if timed else []
    rows = [["#", "size", "n", *times, *(["waited"] if seen else []), "why"]]
    for each in shown:
        gradients = [name for name in each.members if name != UNUSED_FLAGS]
        cells = [str(each.number), format_bytes(each.bucket.nbytes), str(len(gradients))]
        cells += [step.time_text(time).removesuffix(" ms").removesuffix("%") for time in (each.planned or ())[:4]]
        cells += [format_ms(each.measured.waited_s).removesuffix(" ms")] if each.measured else []
        rows.append([*cells, each.why or each.members[0]])
    about = [f"in {'ms' if step.is_timed else '% of the backward'}"] * timed + ["only 'waited' is measured"] * seen
    yield "Buckets in launch order, n gradients each" + (f" ({'; '.join(about)})" if about else "")
    yield from table(rows, left=[len(rows[0]) - 1])
    if len(shown) < len(this.buckets):
        yield f"... and {len(this.buckets) - len(shown)} more: --buckets, text(verbose=True)"
