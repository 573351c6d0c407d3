"""Prediction of a step with another number of ranks, another link, or another dtype of sent gradients.

The model is that of `plan/network.py`: a link carries one stage at a time, in launch order. The duration of compute
does not change. Nothing is measured here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dp_compile.errors import ConfigError, require, require_integer
from dp_compile.insight.step import BYTES, Step
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan, GradientSpec, bucket_of
from dp_compile.plan.cost import LAUNCH_US, AllReduceCost, link, ring_or_tree, with_levels
from dp_compile.plan.crossing import plan_crossing, why_not_left
from dp_compile.plan.planner import plan_fixed, plan_optimal
from dp_compile.plan.reduction import ALL_REDUCE, Stage
from dp_compile.replica.record import SHARDED

DTYPES: Final = ("bfloat16", "float16", "float32")
LINK_INSIDE: Final = "nvlink4"  # joins the ranks of a node in a prediction for two levels of network


def predict(step: Step, *, ranks: int | None = None, link: str | None = None, dtype: str | None = None) -> Step:
    """Return the predicted step; see its `end_s`, `exposed_s` and `bound_s`. Options not given keep their values.

    Buckets are replanned for the new speeds if the step's strategy is a planner, otherwise kept. A backward that was
    not timed keeps its assumed length: a faster network does not shorten it. `cost_source` and `ready.basis` have the
    sources of the figures. `measured` is that of the given step.

    Args:
        step: the result of `dp_compile.step_of(model)` or of `Step.from_json`.
        ranks: size of the group. On two levels of network the size of nodes does not change.
        link: link between ranks, or between nodes: a name of `dp_compile.plan.cost.LINKS`.
        dtype: dtype of sent floating gradients: `bfloat16`, `float16` or `float32`.

    Raises:
        ConfigError: a value is not allowed, or a step of one rank is predicted for more without a link.
    """
    ranks = step.world_size if ranks is None else ranks
    require_integer("ranks", ranks, 1)
    require(dtype is None or dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", dtype)
    cost, source = _cost_on(step, ranks, link)
    timed = "measured" if step.measured is not None else step.ready.basis
    basis = timed if step.is_timed else "assumed to take as long as the communication of the step"
    ready = replace(step.ready, backward_s=step.backward_s, basis=basis)
    other = replace(step, ready=ready, world_size=ranks, cost=cost)
    other = other if dtype is None else sent_in(other, dtype)
    if step.strategy == "optimal" and ranks > 1 and (cost != step.cost or other.plan is not step.plan):
        other = replanned(other)
    return replace(other, cost_source=source)


def _cost_on(step: Step, ranks: int, name: str | None) -> tuple[AllReduceCost, str]:
    """Return the cost of a collective on this number of ranks and this link, and the source of the cost."""
    inside = max((bucket.key.reduction.ranks_inside for bucket in step.plan.buckets), default=1)
    if ranks == 1:
        return AllReduceCost(0.0, 0.0), "one rank reduces nothing"
    if inside > 1 and (ranks <= inside or ranks % inside):
        raise ConfigError(f"ranks must be a multiple of {inside} (ranks per node), {2 * inside} or more, got {ranks}.")
    if name is not None:
        cost = link(name).cost(ranks, hops=ring_or_tree)
        if inside == 1:
            return cost, f"{name}, nominal, not measured"
        cost = with_levels(cost, link(LINK_INSIDE), link(name), ranks_inside=inside, nodes=ranks // inside)
        return cost, f"{LINK_INSIDE} inside nodes of {inside}, {name} between them, nominal, not measured"
    if ranks == step.world_size:
        return step.cost, step.cost_source
    if step.world_size == 1:
        raise ConfigError(f"the step ran on 1 rank, so the cost on {ranks} ranks is not known. Give a link.")
    cost = extrapolated(step.cost, from_ranks=step.world_size, to_ranks=ranks, ranks_inside=inside)
    return cost, f"{step.cost_source}; computed for {ranks} ranks from the cost on {step.world_size}"


def extrapolated(cost: AllReduceCost, *, from_ranks: int, to_ranks: int, ranks_inside: int = 1) -> AllReduceCost:
    """Return the cost of a collective for another number of ranks, at least 2 (or two nodes), on the same link.

    Latency per hop (hops: `ring_or_tree`) and bus bandwidth stay as in the given cost. `LAUNCH_US` of the latency is
    independent of the ranks, as in `Link.cost`. On two levels nodes keep their size, `ranks_inside`.
    """
    launch_s, between = min(LAUNCH_US * 1e-6, cost.alpha_s), cost.between
    if between is not None:
        between = extrapolated(between, from_ranks=from_ranks // ranks_inside, to_ranks=to_ranks // ranks_inside)
    alpha_s = launch_s + (cost.alpha_s - launch_s) * ring_or_tree(to_ranks) / ring_or_tree(from_ranks)
    sent = [2 * (ranks - 1) / ranks for ranks in (from_ranks, to_ranks)]  # as a share of the bytes
    beta_s_per_byte = cost.beta_s_per_byte * sent[1] / sent[0]
    return AllReduceCost(alpha_s, beta_s_per_byte, cost.inside, between)


def sent_in(step: Step, dtype: str) -> Step:
    """Return the step with the same buckets and all floating gradients sent in this dtype, without a comm hook."""

    def change(gradient: GradientSpec) -> GradientSpec:
        if gradient.key.dtype not in (*DTYPES, "float64"):
            return gradient
        reduction = replace(gradient.key.reduction, wire=None if dtype == gradient.key.dtype else dtype)
        if reduction.hook is not None:
            reduce_op = reduction.stages[0].reduce_op or "sum"  # empty if the hook adds by itself
            reduction = replace(reduction, stages=(Stage(ALL_REDUCE, "", reduce_op),), hook=None)
        if reduction == gradient.key.reduction:
            return gradient
        return replace(gradient, itemsize=BYTES[dtype], key=gradient.key._replace(reduction=reduction), sent=())

    buckets = (bucket_of([change(member.gradient) for member in bucket.members]) for bucket in step.plan.buckets)
    plan = replace(step.plan, buckets=tuple(buckets))
    return step if plan.gradients == step.plan.gradients else _with_plan(step, plan)


def replanned(step: Step, cap_mb: float | None = None) -> Step:
    """Return the step with new buckets: of `cap_mb` MiB, if `None` planned for the step's cost and ready times."""
    gradients = sorted(step.plan.gradients, key=lambda each: (each.name == UNUSED_FLAGS, -each.index))
    ready = replace(step.ready, backward_s=step.backward_s)
    planned = plan_optimal(gradients, step.cost, ready) if cap_mb is None else plan_fixed(gradients, cap_mb)
    if step.left:
        planned = plan_crossing(planned, ready, step.cost, cuts=cap_mb is None, lanes=step.backend.lanes)
    return _with_plan(step, planned.plan)


def _with_plan(step: Step, plan: BucketPlan) -> Step:
    left = tuple(number for number, bucket in enumerate(plan.buckets) if not why_not_left(bucket)) if step.left else ()
    optimizers = tuple(each if each.way == SHARDED else replace(each, left=left) for each in step.optimizers)
    return replace(step, plan=plan, optimizers=optimizers)
