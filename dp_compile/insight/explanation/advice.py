"""What would make a step end earlier, each with the predicted gain. Pure numbers, from `prediction`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from dp_compile.insight.explanation.exposure import slowest_part, times_as_seen
from dp_compile.insight.explanation.facts import COMPUTE, bound_by
from dp_compile.insight.prediction import LINK_INSIDE, Prediction, Scenario, predict
from dp_compile.insight.step import NOMINAL, WAITED, Step
from dp_compile.plan.ready_times import MEASURED
from dp_compile.plan.strategies import RANKS_OF_A_NODE, Planned, on_cheaper_levels
from dp_compile.plan.words import count

SMALLEST_GAIN: Final = 0.005
"""Of the predicted end. The model is not more exact."""

CAPS_MB: Final = (1.0, 5.0, 25.0, math.inf)
BELIEFS_OFF: Final = (0.5, 2.0)
"""How many times as long the backward may take as was believed, if nobody has measured it."""

PLANNERS: Final = ("optimal", "coalesced")
"""Strategies that plan from a cost and from ready times."""

NO_BUCKETS: Final = "single"
"""The strategy of a module without passes."""

BYTES_OF_HALF: Final = 2
LATENCY: Final = "latency, not bytes"


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to do or to have.

    Args:
        change: what, for people.
        gain_s: how much earlier the backward and its communication would be over, in seconds.
        share: the same as a share of the predicted end.
        at_most: the gain is the largest that is possible if what the plan believes is wrong; else what it predicts.
    """

    change: str
    gain_s: float
    share: float
    at_most: bool = False


def advice_for(step: Step) -> tuple[Advice, ...]:
    """What gains more than `SMALLEST_GAIN`, the most first; empty if nothing does."""
    now = predict(step, Scenario())
    found = [
        *_not_deferred(step, now),
        *_other_buckets(step, now),
        *_measurements(step),
        *_fewer_bytes(step, now),
        *_levels(step, now),
        *_other_links(step, now),
        *_more_compute(step, now),
        *_slow_part(step),
    ]
    return tuple(sorted((each for each in found if each.share > SMALLEST_GAIN), key=lambda each: -each.share))


def _advice(change: str, before_s: float, after_s: float, *, at_most: bool = False) -> Advice:
    gain_s = before_s - after_s
    return Advice(change, gain_s, gain_s / before_s if before_s else 0.0, at_most)


def _not_deferred(step: Step, now: Prediction) -> Iterator[Advice]:
    """What it costs that all reductions stand at the end of the backward."""
    if step.deferred:
        strategy = "optimal" if step.strategy == NO_BUCKETS else None
        after = predict(replace(step, deferred=False), Scenario(strategy=strategy))
        change = "passes that make buckets (the default ones)" if strategy else "a backward without graph breaks"
        change += ": then reductions start before its end"
        yield _advice(change, _end(now), _end(after))


def _other_buckets(step: Step, now: Prediction) -> Iterator[Advice]:
    """The best of the other plans: they exclude each other.

    A plan that was made for speeds that nobody has measured is not judged by the same guess.
    """
    if step.strategy == NO_BUCKETS or (step.strategy in PLANNERS and step.ready.backward_s is None):
        return
    scenarios = [Scenario(bucket_cap_mb=cap_mb) for cap_mb in CAPS_MB]
    scenarios += [Scenario(strategy="optimal")]
    best = min((predict(step, scenario) for scenario in scenarios), key=_end)
    before, after = len(now.plan.buckets), len(best.plan.buckets)
    buckets = f"{count(after, 'bucket')} instead of {before}" if before != after else "as many, with other boundaries"
    price = "; no longer the bits of torch's DDP" if step.strategy == "ddp" else ""
    yield _advice(f"{_option(step, best.scenario)}: {buckets}{price}", _end(now), _end(best))


def _option(step: Step, scenario: Scenario) -> str:
    if scenario.bucket_cap_mb is not None:
        return "bucket_cap_mb=" + ("math.inf" if scenario.bucket_cap_mb == math.inf else f"{scenario.bucket_cap_mb:g}")
    if step.strategy not in PLANNERS:
        return 'strategy="optimal"'
    return "a new plan from these times (replan_after=20)" if step.ready.basis != MEASURED else "a new plan"


def _end(prediction: Prediction) -> float:
    return prediction.makespan_s + prediction.forward_s


def _measurements(step: Step) -> Iterator[Advice]:
    """What planning from measured speeds can gain, if those that are believed are off by 0.5x to 2x."""
    nominal, unknown = step.cost_source.startswith((NOMINAL, WAITED)), step.ready.backward_s is None
    if not (nominal or unknown):
        return
    known = replace(step, ready=replace(step.ready, backward_s=step.backward_s))
    ends = [
        [_end(predict(known, Scenario(compute_scale=scale, strategy=strategy))) for strategy in (None, "optimal")]
        for scale in BELIEFS_OFF
    ]
    before_s, after_s = max(ends, key=lambda pair: 1 - pair[1] / pair[0] if pair[0] else 0.0)
    ways = [f"replan_after=20 (measures the backward{' and the link' if nominal else ''})"] if unknown else []
    ways += ["cost=dp_compile.calibrate().cost (measures the link)"] if nominal else []
    planner = "" if step.strategy in PLANNERS else ', with strategy="optimal"'
    yield _advice(f"{' or '.join(ways)}{planner}: the gain if speeds are off by 2x", before_s, after_s, at_most=True)


def wire_that_does_not_pay(step: Step) -> Iterator[str]:
    """Why a cheaper wire is not worth its rounding, if it is not: communication that is hidden costs nothing."""
    now = predict(step, Scenario())
    for each in _fewer_bytes(step, now):
        if each.share <= SMALLEST_GAIN:
            hidden = "all communication is hidden" if now.exposed_s <= 0 else f"what is exposed is {LATENCY}"
            yield f"A cheaper wire (reduce_dtype=torch.bfloat16) is predicted to gain nothing: {hidden}."


def _fewer_bytes(step: Step, now: Prediction) -> Iterator[Advice]:
    gradients = [gradient for gradient in step.plan.gradients if gradient.key.reduction.hook is None]
    if any(gradient.itemsize > BYTES_OF_HALF for gradient in gradients) and len(gradients) >= len(step.plan.gradients):
        after = predict(step, Scenario(gradient_dtype="bfloat16"))
        yield _advice("reduce_dtype=torch.bfloat16, same buckets: fewer bytes, other rounding", _end(now), _end(after))


def _levels(step: Step, now: Prediction) -> Iterator[Advice]:
    """Two levels of network where there is one; one for small buckets where there are two."""
    if step.ranks_inside > 1:
        known = replace(step, ready=replace(step.ready, backward_s=step.backward_s))
        plan = on_cheaper_levels(Planned(step.plan), "", step.cost, step.ready).plan
        flat = sum(bucket.key.reduction.ranks_inside == 1 for bucket in plan.buckets)
        after = predict(replace(known, plan=plan), Scenario())
        yield _advice(f'two_levels="auto": {count(flat, "bucket")} on one level', _end(now), _end(after))
    elif step.cost.inside is None and step.backend.has_nodes and not step.world_size % RANKS_OF_A_NODE:
        nodes = step.world_size // RANKS_OF_A_NODE
        if nodes > 1:
            after = predict(step, Scenario(ranks_inside=RANKS_OF_A_NODE))
            change = (
                f"a device_mesh of two dimensions, {nodes} nodes x {RANKS_OF_A_NODE} ranks, if nodes are that large"
            )
            yield _advice(f"{change} and have {LINK_INSIDE} inside (nominal, not measured)", _end(now), _end(after))


def _other_links(step: Step, now: Prediction) -> Iterator[Advice]:
    """What limits: the latency, or the bandwidth."""
    alpha_s = step.cost.on(step.links[-1]).alpha_s
    where = " between nodes" * (len(step.links) > 1)
    soon = predict(step, Scenario(cost=step.cost.scaled(1.0, latency=0.5)))
    latencies = f"{_us(alpha_s / 2)} us instead of {_us(alpha_s)}{where}"
    yield _advice(f"half the latency of a collective, {latencies}: a limit of the link", _end(now), _end(soon))
    fast = predict(step, Scenario(cost=step.cost.scaled(0.5, latency=2.0)))
    yield _advice("twice the bandwidth between ranks: a limit of the link", _end(now), _end(fast))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def _more_compute(step: Step, now: Prediction) -> Iterator[Advice]:
    after = predict(step, Scenario(compute_scale=2.0))
    yield _advice("double the batch on each rank: so much less time per sample", _end(now), _end(after) / 2)


def _slow_part(step: Step) -> Iterator[Advice]:
    """Where compute is what bounds the step, and much of it is in one place."""
    part = slowest_part(step) if bound_by(step) == COMPUTE and not step.has_two_halves else None
    if part is None:
        return
    seen, saved = replace(times_as_seen(step), backward_s=step.backward_s), part.share / 2
    until = max(seen.of(each) for each in step.plan.gradients if each.name == part.before)
    earlier = {each.index: min(saved, max(0.0, seen.of(each) - until + part.share) / 2) for each in step.plan.gradients}
    shares = {each.index: (seen.of(each) - earlier[each.index]) / (1 - saved) for each in step.plan.gradients}
    shorter = replace(seen, shares=shares, backward_s=step.backward_s * (1 - saved))
    before, after = (predict(replace(step, ready=times), Scenario()) for times in (seen, shorter))
    where = f"between {part.after} and {part.before}" if part.after else f"before {part.before} is ready"
    yield _advice(f"half the compute {where}", _end(before), _end(after))
