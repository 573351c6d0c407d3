"""What a step would take if something were different: ranks, link, gradients' dtype, buckets, batch. Pure numbers.

The model is that of `plan/network.py`: a link carries one stage at a time, in the order of the launches. Nothing here
is measured; what is not known is said in `Prediction.basis`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from dp_compile.config import ReplicateConfig
from dp_compile.engine.observers import UPDATE
from dp_compile.engine.record import IN_BACKWARD, OVERLAP_FORWARD, SHARDED, OptimizerRecord
from dp_compile.errors import ConfigError
from dp_compile.insight.step import BYTES, MeasuredStep, PlannedBucket, Step, planned_buckets
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan, GradientSpec, Layout
from dp_compile.plan.certificate import ERROR_BAND, MEASURED_BAND
from dp_compile.plan.cost import EITHER, AllReduceCost, check_number
from dp_compile.plan.crossing import (
    FORWARD_SHARE,
    plan_crossing,
    why_not_left,
    without_flags,
)
from dp_compile.plan.links import LAUNCH_US, link, with_levels
from dp_compile.plan.ready_times import MEASURED, ReadyTimes
from dp_compile.plan.reduction import Levels, Stage, scattering, stages_of
from dp_compile.plan.strategies import Planned, plan_coalesced, plan_fixed, plan_optimal
from dp_compile.plan.words import count

AS_PLANNED: Final = "as planned"
STRATEGIES: Final = (AS_PLANNED, "optimal", "coalesced", "fixed")
"""Where buckets can end in a prediction."""

_NOT_FROM_A_STEP: Final = {
    "ddp": "torch's rule needs the parameters themselves; 'fixed' closes buckets at the same sizes",
    "per_module": "a policy needs the module",
    "explicit": "it needs a plan file; put that plan into the step and ask for 'as planned'",
}
PLAIN: Final = "plain"
OPTIMIZERS: Final = (PLAIN, IN_BACKWARD, SHARDED)
"""Where an optimizer can update in a prediction: in `step()`, in the backward, or there each rank a part."""

DTYPES: Final = {name: BYTES[name] for name in ("bfloat16", "float16", "float32")}
"""What gradients can be predicted in, with the bytes of an element."""

_FLOATING: Final = frozenset({*DTYPES, "float64"})
LINK_INSIDE: Final = "nvlink4"
LAUNCH_S: Final = LAUNCH_US * 1e-6
"""What of a collective's latency does not grow with the ranks: as in `Link.cost`."""

_ALGORITHMS: Final = "a ring or a double binary tree, whichever is sooner"

NO_COST: Final = AllReduceCost(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is different from the step. What is `None` is as in the step.

    Args:
        world_size: ranks.
        link: what every hop between ranks is: a name of `links.LINKS`.
        cost: what an all-reduce costs on the group of `world_size` ranks, and on its two levels, if there are some.
        latency_us: of one collective, whatever its size, in microseconds: `AllReduceCost.alpha_s`.
        busbw_gb_s: 1e9 bytes per second, in the meaning of nccl-tests.
        strategy: `optimal`, `coalesced` or `fixed` plan anew; `as planned`, as without it, keeps the buckets.
        bucket_cap_mb: MiB, for `fixed`, and asks for it.
        gradient_dtype: `bfloat16`, `float16` or `float32`: in which every floating gradient travels, in the place of a
            comm hook, if there is one. Compute stays as long.
        compute_scale: forward and backward take so many times as long: a larger batch, a slower device.
        ranks_inside: ranks of a node: reductions have two levels, `link`, or what the step has, joins each rank to
            other nodes. 1: one level.
        link_inside: what joins the ranks of a node then; `nvlink4` if not given.
        optimizer: where it updates, one of `OPTIMIZERS`; `sharded` is for one that goes element by element.
        overlap_forward: what does not have to be over with the backward may end under the next forward: reductions, or
            with `sharded` the all-gathers (which `in_backward` does not do yet).
        label: for people; without it the wishes.

    Raises:
        ConfigError: a value is not allowed, or two of them contradict each other.
    """

    world_size: int | None = None
    link: str | None = None
    cost: AllReduceCost | None = None
    latency_us: float | None = None
    busbw_gb_s: float | None = None
    strategy: str | None = None
    bucket_cap_mb: float | None = None
    gradient_dtype: str | None = None
    compute_scale: float = 1.0
    ranks_inside: int | None = None
    link_inside: str | None = None
    optimizer: str | None = None
    overlap_forward: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        size = self.world_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"Scenario.world_size must be an integer >= 1, got {size!r}.")
        if self.link is not None:
            link(self.link)
        for name, zero_allowed in (("latency_us", True), ("busbw_gb_s", False), ("compute_scale", False)):
            if getattr(self, name) is not None:
                check_number(f"Scenario.{name}", getattr(self, name), zero_allowed=zero_allowed)
        if self.gradient_dtype is not None and self.gradient_dtype not in DTYPES:
            raise ConfigError(
                f"Scenario.gradient_dtype must be one of {', '.join(DTYPES)}, got {self.gradient_dtype!r}."
            )
        self._check_levels()
        self._check_cost()
        self._check_strategy()
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"Scenario.optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}.")
        if not isinstance(self.overlap_forward, bool):
            raise ConfigError(f"Scenario.overlap_forward must be True or False, got {self.overlap_forward!r}.")
        if self.overlap_forward and self.optimizer == PLAIN:
            raise ConfigError(
                "Scenario.overlap_forward is for an optimizer that updates in the backward, but Scenario.optimizer is "
                f"'{PLAIN}'. Give '{IN_BACKWARD}' or '{SHARDED}'."
            )
        if self.optimizer == SHARDED and self.has_levels:
            raise ConfigError("a sharded optimizer reduces on one level of network. Leave Scenario.ranks_inside out.")

    def _check_levels(self) -> None:
        inside = self.ranks_inside
        if inside is not None and (isinstance(inside, bool) or not isinstance(inside, int) or inside < 1):
            raise ConfigError(f"Scenario.ranks_inside must be an integer >= 1, got {inside!r}.")
        if self.link_inside is not None:
            link(self.link_inside)
        if not self.has_levels:
            return
        for name in ("latency_us", "busbw_gb_s"):
            if getattr(self, name) is not None:
                raise ConfigError(f"Scenario.{name} is of one link, but with Scenario.ranks_inside there are two.")

    @property
    def has_levels(self) -> bool:
        return self.ranks_inside not in (None, 1)

    def _check_cost(self) -> None:
        if self.cost is None:
            return
        if not isinstance(self.cost, AllReduceCost):
            raise ConfigError(f"Scenario.cost must be an AllReduceCost, got {type(self.cost).__name__}.")
        others = [name for name in ("link", "latency_us", "busbw_gb_s") if getattr(self, name) is not None]
        if others:
            raise ConfigError(
                f"Scenario.cost says all of a collective's cost; give it or Scenario.{others[0]}, not both."
            )

    def _check_strategy(self) -> None:
        if self.strategy in _NOT_FROM_A_STEP:
            raise ConfigError(
                f"Scenario.strategy '{self.strategy}' cannot be planned from a step alone: "
                f"{_NOT_FROM_A_STEP[self.strategy]}. Possible are {', '.join(STRATEGIES)}."
            )
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ConfigError(f"Scenario.strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}.")
        if self.bucket_cap_mb is None:
            return
        if self.strategy not in (None, "fixed"):
            raise ConfigError(f"Scenario.bucket_cap_mb belongs to strategy 'fixed', but that is '{self.strategy}'.")
        ReplicateConfig(bucket_cap_mb=self.bucket_cap_mb)

    @property
    def chosen_strategy(self) -> str:
        return self.strategy or (AS_PLANNED if self.bucket_cap_mb is None else "fixed")

    def __str__(self) -> str:
        if self.label:
            return self.label
        defaults = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        return ", ".join(f"{name} {value}" for name, value in given.items()) or "as it is"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step would take. Times in seconds, of the backward if nothing else is said.

    Args:
        scenario: what was asked.
        world_size: ranks.
        cost: what one collective costs.
        cost_basis: where `cost` is from, for people.
        backward_basis: where the backward's length is from.
        strategy: where buckets end.
        plan: the buckets. Factors before the reduction are the step's: they follow from its ranks.
        buckets: the timeline of each.
        backward_s: how long it computes.
        communication_s: how long the network carries the buckets.
        makespan_s: when both are over; with parameters that go round. Where some of it may end under the next forward,
            how long the backward takes with all that this forward waits.
        bound_s: no plan can end earlier (`release_time_bound`). Where some may end under the next forward: what is left
            of the longer of all compute and all communication, without that forward.
        gradient_nbytes: of all gradients.
        padding_nbytes: gaps in the buckets and the unused-parameter flags: what buckets need on top of the gradients,
            that are parts of them.
        step_s: forward and optimizer too; `None` if the step does not know how long they take.
        forward_s: how long the next forward computes, if some of the communication may end under it; else 0.
        forward_basis: where that is from; empty if nothing may.
    """

    scenario: Scenario
    world_size: int
    cost: AllReduceCost
    cost_basis: str
    backward_basis: str
    strategy: str
    plan: BucketPlan
    buckets: tuple[PlannedBucket, ...]
    backward_s: float
    communication_s: float
    makespan_s: float
    bound_s: float
    gradient_nbytes: int
    padding_nbytes: int
    step_s: float | None
    forward_s: float = 0.0
    forward_basis: str = ""

    @property
    def basis(self) -> str:
        """What the prediction rests on, for people."""
        return "; ".join(filter(None, (self.cost_basis, self.backward_basis, self.forward_basis)))

    @property
    def exposed_s(self) -> float:
        """How long the step stands still for communication."""
        return self.makespan_s - self.backward_s

    @property
    def ratio(self) -> float:
        """Makespan over bound, both with the forward that something ends under; 1 is the best that any plan can do."""
        bound_s = self.bound_s + self.forward_s
        return (self.makespan_s + self.forward_s) / bound_s if bound_s else 1.0


def predict(step: Step, scenario: Scenario) -> Prediction:
    """What `step` would take if it were as `scenario` says.

    How long the backward computes is what it was for the step, times `compute_scale`. Also if nobody measured it and
    it was assumed to be as long as the communication: it does not become shorter because the network is faster.
    Copies of gradients that are in pieces are not counted. The bound is that for the plan's pieces.

    Raises:
        ConfigError: the ranks change, and nothing is known of the link, for the step ran on one rank.
    """
    cost, where_from = cost_for(step, scenario)
    backward_s = step.backward_s * scenario.compute_scale
    ready = replace(step.ready, backward_s=backward_s)
    plan = _plan(step, scenario, cost, ready)
    world_size = scenario.world_size or step.world_size
    optimizers = _optimizers(step, scenario, plan)
    other = replace(step, plan=plan, cost=cost, ready=ready, world_size=world_size, optimizers=optimizers)
    buckets = tuple(planned_buckets(other))
    reduced_s = max([backward_s, *(bucket.finish_s for bucket in buckets)])
    makespan_s = reduced_s + other.gather_wait_s
    if other.left:
        makespan_s = backward_s + sum(bucket.exposed_s for bucket in buckets)
    gradient_nbytes = sum(gradient.nbytes for gradient in plan.gradients if gradient.name != UNUSED_FLAGS)
    return Prediction(
        scenario=scenario,
        world_size=world_size,
        cost=cost,
        cost_basis=where_from,
        backward_basis=_backward_basis(step, scenario),
        strategy=step.strategy if scenario.chosen_strategy == AS_PLANNED else scenario.chosen_strategy,
        plan=plan,
        buckets=buckets,
        backward_s=backward_s,
        communication_s=other.communication_s,
        makespan_s=makespan_s,
        bound_s=other.bound_s(),
        gradient_nbytes=gradient_nbytes,
        padding_nbytes=sum(bucket.nbytes + bucket.padding_nbytes for bucket in plan.buckets) - gradient_nbytes,
        step_s=_step_s(step, scenario, other, makespan_s),
        forward_s=other.forward_s if other.has_two_halves else 0.0,
        forward_basis=_forward_basis(step) if other.has_two_halves else "",
    )


# --- what a collective costs ----------------------------------------------------------------------------------------


def cost_for(step: Step, scenario: Scenario) -> tuple[AllReduceCost, str]:
    """What a collective costs in a scenario, and where that is from.

    Raises:
        ConfigError: as in `predict`.
    """
    ranks = scenario.world_size or step.world_size
    if ranks == 1:
        return NO_COST, "one rank reduces nothing"
    if scenario.cost is not None:
        return scenario.cost, "the cost is given"
    inside = _ranks_inside(step, scenario)
    if inside > 1 and (scenario.latency_us is not None or scenario.busbw_gb_s is not None):
        raise ConfigError("Scenario.latency_us and Scenario.busbw_gb_s are of one link, but the step has two levels.")
    if inside > 1 and (scenario.link is not None or step.cost.inside is None):
        return _on_two_levels(step, scenario, inside, ranks)
    if scenario.link is not None:
        cost = link(scenario.link).cost(ranks, formula=EITHER)
        where_from = f"{scenario.link}, nominal, not measured, as {_ALGORITHMS}"
    elif ranks == step.world_size:
        cost, where_from = step.cost, f"the step's cost, {step.cost_source}"
    else:
        cost = _extrapolated_or_given(step, scenario, ranks)
        where_from = (
            f"the step's cost on {count(step.world_size, 'rank')}, {step.cost_source}, taken to other ranks as if it "
            f"were {_ALGORITHMS}, all hops alike"
        )
    return _changed(cost, where_from, scenario, ranks)


def _ranks_inside(step: Step, scenario: Scenario) -> int:
    return step.ranks_inside if scenario.ranks_inside is None else scenario.ranks_inside


def _check_nodes(ranks: int, inside: int) -> None:
    if ranks <= inside or ranks % inside:
        raise ConfigError(
            f"{ranks} ranks do not fill two nodes or more of Scenario.ranks_inside={inside}. Give a multiple of it, or "
            "1 for one level."
        )


def _on_two_levels(step: Step, scenario: Scenario, inside: int, ranks: int) -> tuple[AllReduceCost, str]:
    """Without a link that is named, what the step has joins nodes."""
    _check_nodes(ranks, inside)
    nodes, name = ranks // inside, scenario.link_inside or LINK_INSIDE
    if scenario.link is not None:
        whole = link(scenario.link).cost(ranks, formula=EITHER)
        cost = with_levels(whole, link(name), link(scenario.link), ranks_inside=inside, nodes=nodes)
        where_from = f"{name} inside, {scenario.link} between, nominal, not measured"
    else:
        whole, between = (_extrapolated_or_given(step, scenario, each) for each in (ranks, nodes))
        cost = replace(whole, inside=link(name).cost(inside, launch_us=2 * LAUNCH_US), between=between)
        where_from = f"{name} inside, nominal, not measured, the step's cost between, {step.cost_source}"
    return cost, (
        f"two levels, {count(nodes, 'node')} of {inside} ranks: {where_from}; rings on both; the two carry stages of "
        "different buckets beside each other"
    )


def _changed(cost: AllReduceCost, where_from: str, scenario: Scenario, ranks: int) -> tuple[AllReduceCost, str]:
    """With the latency and the bandwidth that are given."""
    given = []
    if scenario.latency_us is not None:
        cost = replace(cost, alpha_s=scenario.latency_us * 1e-6)
        given.append(f"latency {scenario.latency_us:g} us")
    if scenario.busbw_gb_s is not None:
        cost = replace(cost, beta_s_per_byte=_units(ranks).beta_s_per_byte / (scenario.busbw_gb_s * 1e9))
        given.append(f"bus bandwidth {scenario.busbw_gb_s:g} GB/s")
    if len(given) == 2:
        return cost, f"{' and '.join(given)}, given"
    return cost, f"{where_from}, but {given[0]}" if given else where_from


def _extrapolated_or_given(step: Step, scenario: Scenario, ranks: int) -> AllReduceCost:
    if None not in (scenario.latency_us, scenario.busbw_gb_s):
        return NO_COST
    if step.world_size == 1:
        raise ConfigError(
            f"Scenario.world_size is {ranks}, but the step ran on 1 rank, so nothing is known of its link. Give "
            "Scenario.link or Scenario.cost."
        )
    inside = _ranks_inside(step, scenario) if step.cost.inside is not None else 1
    if inside > 1:
        _check_nodes(ranks, inside)
    return extrapolated(step.cost, from_ranks=step.world_size, to_ranks=ranks, ranks_inside=inside)


def extrapolated(cost: AllReduceCost, *, from_ranks: int, to_ranks: int, ranks_inside: int = 1) -> AllReduceCost:
    """What a collective costs on more or fewer ranks of the same link.

    From a straight line for one group, latency of a hop and bus bandwidth follow by `EITHER`; `LAUNCH_S` of the
    latency, if it is as long, is not of hops. All hops are taken to be alike, those between nodes too. On two levels
    nodes stay as large as they are, `ranks_inside`, and there are more or fewer of them.

    Raises:
        ConfigError: `from_ranks` is less than 2: one rank has no link.
    """
    if from_ranks < 2:
        raise ConfigError(f"from_ranks must be >= 2, got {from_ranks!r}.")
    if to_ranks == 1:
        return NO_COST
    known, wanted = _units(from_ranks), _units(to_ranks)
    launch_s = min(LAUNCH_S, cost.alpha_s)
    between = cost.between
    if between is not None and from_ranks > ranks_inside:
        between = extrapolated(between, from_ranks=from_ranks // ranks_inside, to_ranks=to_ranks // ranks_inside)
    return AllReduceCost(
        launch_s + (cost.alpha_s - launch_s) * wanted.alpha_s / known.alpha_s,
        cost.beta_s_per_byte * wanted.beta_s_per_byte / known.beta_s_per_byte,
        cost.inside,
        between,
    )


def _units(ranks: int) -> AllReduceCost:
    """How many latencies of a hop a collective takes, and how often a byte passes the bus."""
    line = EITHER.cost(alpha_0=1.0, alpha_hop=1.0, busbw=1.0, n=ranks)
    return replace(line, alpha_s=line.alpha_s - 1.0)


# --- buckets --------------------------------------------------------------------------------------------------------


def _plan(step: Step, scenario: Scenario, cost: AllReduceCost, ready: ReadyTimes) -> BucketPlan:
    plan = _plan_of_one_half(step, scenario, cost, ready)
    if not _crosses(step, scenario) or (plan is step.plan and step.left):
        return plan
    strategy = scenario.chosen_strategy if scenario.chosen_strategy != AS_PLANNED else step.strategy
    layout = Layout(ReplicateConfig().alignment_bytes) if strategy in ("optimal", "coalesced") else None
    return plan_crossing(Planned(plan), ready, cost, layout, lanes=step.backend.lanes).plan


def _plan_of_one_half(step: Step, scenario: Scenario, cost: AllReduceCost, ready: ReadyTimes) -> BucketPlan:
    """For reductions that end with the backward."""
    change = _changes(step, scenario)
    members = [member for bucket in step.plan.buckets for member in bucket.members]
    apart = frozenset(member.gradient.name for member in members if member.offset is None)
    layout = Layout(ReplicateConfig().alignment_bytes if step.plan.folds_scale else 1, apart)
    strategy = scenario.chosen_strategy
    if strategy == AS_PLANNED:
        buckets: Sequence[Bucket] = step.plan.buckets
        flags = [change(each) for each in step.plan.gradients if each.name == UNUSED_FLAGS]
        keys = {change(each).key for each in step.plan.gradients if each.name != UNUSED_FLAGS}
        if scenario.optimizer is not None and flags and flags[0].key not in keys:
            buckets = [*without_flags(buckets), layout.bucket(flags[0].key, flags, "flags travel by themselves")]
        plan = replace(step.plan, buckets=tuple(_same_bucket(bucket, change, layout) for bucket in buckets))
        return step.plan if plan.gradients == step.plan.gradients else plan
    gradients = [change(gradient) for gradient in in_plan_order(step.plan.gradients)]
    if strategy == "fixed":
        return plan_fixed(gradients, ReplicateConfig(bucket_cap_mb=scenario.bucket_cap_mb).caps_mb(), layout).plan
    make = {"optimal": plan_optimal, "coalesced": plan_coalesced}[strategy]
    return make(gradients, cost, ready, _together(step, layout), band=band_for(step)).plan


def _together(step: Step, layout: Layout) -> Layout:
    """Members are apart in `coalesced` because of the strategy, elsewhere because of the gradient."""
    return replace(layout, apart=frozenset()) if step.strategy == "coalesced" else layout


def band_for(step: Step) -> tuple[float, ...]:
    """How far off the speeds of a step may be that `optimal` and `coalesced` plan for."""
    return MEASURED_BAND if step.ready.basis == MEASURED else ERROR_BAND


def in_plan_order(gradients: Sequence[GradientSpec]) -> list[GradientSpec]:
    """As plans are made: from the last parameter to the first, the flags at the end."""
    return sorted(gradients, key=lambda gradient: (gradient.name == UNUSED_FLAGS, -gradient.index))


def _changes(step: Step, scenario: Scenario) -> Callable[[GradientSpec], GradientSpec]:
    """What becomes of a gradient in a scenario: it travels in another dtype, on one level of network or two."""
    dtype, inside = scenario.gradient_dtype, scenario.ranks_inside
    ranks = tuple((0,) * inside for _ in range(2)) if inside is not None and scenario.has_levels else None
    levels = None if ranks is None else Levels("", "", ranks)
    sharded = _way(step, scenario) == SHARDED
    parts = scenario.world_size or step.world_size

    def change(gradient: GradientSpec) -> GradientSpec:
        reduction, itemsize = gradient.key.reduction, gradient.itemsize
        if dtype is not None and gradient.key.dtype in _FLOATING:
            reduction = replace(reduction, wire=None if dtype == gradient.key.dtype else dtype)
            itemsize = DTYPES[dtype]
        if inside is not None or (dtype is not None and reduction.hook is not None):
            reduce_op = reduction.stages[0].reduce_op or "sum"  # a hook may add up itself
            reduction = replace(reduction, stages=stages_of("", step.backend, levels, reduce_op), hook=None)
        if scenario.optimizer is not None and gradient.name != UNUSED_FLAGS and reduction.is_scattered != sharded:
            reduce_op = reduction.stages[0].reduce_op or "sum"
            whole = stages_of("", step.backend, None, reduce_op)
            stages = (Stage(scattering(step.backend), "", reduce_op, parts),) if sharded else whole
            reduction = replace(reduction, stages=stages, hook=None)
        if reduction == gradient.key.reduction:
            return gradient
        return replace(gradient, itemsize=itemsize, key=gradient.key._replace(reduction=reduction), sent=())

    return change


def _same_bucket(bucket: Bucket, change: Callable[[GradientSpec], GradientSpec], layout: Layout) -> Bucket:
    """A bucket with gradients that are reduced in another way."""
    gradients = [change(member.gradient) for member in bucket.members]
    rows = {place: member.rows for place, member in enumerate(bucket.members) if member.rows is not None}
    return layout.bucket(gradients[0].key, gradients, bucket.reason, rows)


# --- times ----------------------------------------------------------------------------------------------------------


def _backward_basis(step: Step, scenario: Scenario) -> str:
    text = f"backward: {step.ready.basis}"
    if step.ready.backward_s is None:
        text = "the backward as long as the step's communication, assumed"
    elif step.measured is not None and step.ready.basis != MEASURED:
        text = f"the backward as measured on rank {step.measured.rank}"
    return text if scenario.compute_scale == 1.0 else f"{text}, times {scenario.compute_scale:g}"


def _forward_basis(step: Step) -> str:
    if step.forward_share is None:
        return f"the next forward {FORWARD_SHARE:g} of the backward, assumed"
    return "the next forward as long beside its backward as it was"


def _step_s(step: Step, scenario: Scenario, other: Step, makespan_s: float) -> float | None:
    """With the updates behind all of it; those in a backward run while the last buckets travel."""
    measured = step.measured
    if measured is None or (updates_s := _updates_s(step, measured)) is None or step.forward_share is None:
        return None
    forward_s = step.forward_share * step.backward_s * scenario.compute_scale
    if step.measured is not None and measured.forward_s is not None and not step.optimizers:
        forward_s = measured.forward_s * scenario.compute_scale
    way = _way(step, scenario)
    if way == SHARDED:
        updates_s /= other.world_size
    elif way == IN_BACKWARD and not other.left:
        return forward_s + _updated_in_backward(other, updates_s)
    return forward_s + makespan_s + updates_s


def _updates_s(step: Step, measured: MeasuredStep) -> float | None:
    """How long all updates take one rank; `None` if nobody has seen them."""
    if not step.optimizers:
        return measured.optimizer_s
    seen_s = measured.updates_s + measured.lasted(UPDATE, behind=True)
    return seen_s * max((each.ranks for each in step.optimizers), default=1) or None


def _updated_in_backward(step: Step, updates_s: float) -> float:
    """When the last bucket is updated: one behind the other, when it has arrived and all is computed."""
    clock_s, nbytes = step.backward_s, sum(bucket.nbytes for bucket in step.plan.buckets) or 1
    for bucket, planned in zip(step.plan.buckets, planned_buckets(step), strict=True):
        clock_s = max(clock_s, planned.finish_s) + updates_s * bucket.nbytes / nbytes
    return clock_s


# --- what optimizers do ---------------------------------------------------------------------------------------------


def _way(step: Step, scenario: Scenario) -> str:
    """Where an optimizer updates in a scenario: one of `OPTIMIZERS`."""
    if scenario.optimizer is not None:
        return scenario.optimizer
    if any(each.way == SHARDED for each in step.optimizers):
        return SHARDED
    return IN_BACKWARD if step.optimizers or scenario.overlap_forward else PLAIN


def _crosses(step: Step, scenario: Scenario) -> bool:
    """Whether reductions may end under the next forward: as in the step, if nothing else is wished."""
    if scenario.optimizer is None and not scenario.overlap_forward:
        return bool(step.left)
    return scenario.overlap_forward and _way(step, scenario) == IN_BACKWARD


def _optimizers(step: Step, scenario: Scenario, plan: BucketPlan) -> tuple[OptimizerRecord, ...]:
    way, crosses = _way(step, scenario), _crosses(step, scenario)
    left = tuple(n for n, bucket in enumerate(plan.buckets) if not why_not_left(bucket)) if crosses else ()
    if scenario.optimizer is None and not scenario.overlap_forward:
        if plan is step.plan:
            return step.optimizers
        return tuple(each if each.way == SHARDED else replace(each, left=left) for each in step.optimizers)
    if way == PLAIN:
        return ()
    nbytes = sum(each.numel * BYTES.get(each.key.dtype, 4) for each in plan.gradients if each.name != UNUSED_FLAGS)
    ranks = scenario.world_size or step.world_size
    if way == SHARDED:
        late = tuple(range(len(plan.buckets))) if scenario.overlap_forward else ()
        return (OptimizerRecord("", SHARDED, nbytes, left=late, ranks=ranks, cuts=True),)
    return (OptimizerRecord("", OVERLAP_FORWARD if crosses else IN_BACKWARD, nbytes, left=left),)
