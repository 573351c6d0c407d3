"""How gradients are put into buckets: `fixed`, `per_module`, `optimal`, `coalesced`, `ddp`, `explicit`. Pure.

| strategy     | a bucket ends                                                              | wants           |
|--------------|----------------------------------------------------------------------------|-----------------|
| `fixed`      | at a size, as in torch's DDP                                               | `bucket_cap_mb` |
| `per_module` | where the module that a policy names ends                                  | `bucket_policy` |
| `optimal`    | where the predicted end of the step is earliest, also if speeds are off 2x | `cost`          |
| `coalesced`  | as `optimal`; a bucket has no flat memory, its gradients are reduced apart | `cost`          |
| `ddp`        | where it ends in torch's DDP, which gives the same bits                    | nothing         |
| `explicit`   | where a plan file says                                                     | `plan`          |

`Fixed`, `Optimal` and `Coalesced` are the values of those names. `ddp` needs torch's own rule, `per_module` the module
and `explicit` a file: `modules/planning.py` has these at hand.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Protocol, runtime_checkable

from dp_compile.errors import ConfigError
from dp_compile.plan.backends import Backend
from dp_compile.plan.buckets import (
    PACKED,
    PLAN_VERSION,
    UNUSED_FLAGS,
    Bucket,
    BucketPlan,
    GradientSpec,
    Layout,
    Member,
    Rows,
    covers,
    plan_buckets,
    row_blocks,
)
from dp_compile.plan.certificate import ERROR_BAND, MEASURED_BAND, Certificate, Cut, certify, robust_with_pieces
from dp_compile.plan.cost import EITHER, RING, AllReduceCost
from dp_compile.plan.links import link, with_levels
from dp_compile.plan.network import ReadyGradient, in_pieces, legs_of
from dp_compile.plan.ready_times import ReadyTimes, backward_seconds, in_ready_order, ready_gradients
from dp_compile.plan.reduction import ALL_REDUCE, Stage
from dp_compile.plan.words import BYTES_PER_MB, count

RANKS_OF_A_NODE: Final = 8
PIECE_COUNTS: Final = (2, 4, 8)
PIECE_NBYTES: Final = 16 * BYTES_PER_MB
"""No piece is smaller: a product of few rows runs at less than full speed, which the model does not know."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it promises if it was made from a cost."""

    plan: BucketPlan
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a strategy makes a plan of.

    Args:
        gradients: in the order in which they are expected to be ready; the flags of unused parameters come last.
        times: when they are ready, as far as that is known.
        cost: what one collective costs on the group, measured or nominal.
        layout: how gradients lie in their buckets; `layout.bucket(key, gradients, reason)` makes one.
    """

    gradients: Sequence[GradientSpec]
    times: ReadyTimes
    cost: AllReduceCost
    layout: Layout


@runtime_checkable
class Strategy(Protocol):
    """Where buckets end: `ReplicateConfig(strategy=...)` takes one of these, also one that is not of this package.

    A frozen value whose `repr` says all of it: ranks compare that. `plan` has to give the same plan on every rank for
    the same arguments. Each gradient is in the plan once, and the gradients of a bucket have one key.
    """

    @property
    def name(self) -> str:
        """For logs, reports and step files."""

    @property
    def plans_anew(self) -> bool:
        """Whether plans depend on ready times: one is then made anew once a captured backward says what they are."""

    def plan(self, wanted: Wanted) -> Planned:
        """The plan, and what it promises."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A bucket ends at a size, as in torch's DDP.

    Args:
        cap_mb: MiB at which a bucket is closed; `math.inf`: one bucket for each key.
        first_cap_mb: the same for the first bucket of each key.
    """

    cap_mb: float = 25.0
    first_cap_mb: float = 1.0
    name: ClassVar[str] = "fixed"
    plans_anew: ClassVar[bool] = False

    def plan(self, wanted: Wanted) -> Planned:
        return plan_fixed(wanted.gradients, (self.cap_mb, min(self.first_cap_mb, self.cap_mb)), wanted.layout)

    def options(self) -> dict[str, Any]:
        """As fields of `ReplicateConfig`."""
        return {"bucket_cap_mb": self.cap_mb, "first_bucket_cap_mb": self.first_cap_mb}


@dataclass(frozen=True, slots=True)
class Optimal:
    """Buckets end where the predicted end of the step is earliest; see `plan_optimal`.

    Args:
        cost: what an all-reduce costs; `None`: as measured, before that a nominal link.
        replan_after: plan once more from so many measured backwards; `None`: never.
    """

    cost: AllReduceCost | None = None
    replan_after: int | None = None
    name: ClassVar[str] = "optimal"
    plans_anew: ClassVar[bool] = True

    def plan(self, wanted: Wanted) -> Planned:
        return plan_optimal(wanted.gradients, self.cost or wanted.cost, wanted.times, wanted.layout)

    def options(self) -> dict[str, Any]:
        """As fields of `ReplicateConfig`."""
        return {"cost": self.cost, "replan_after": self.replan_after}


@dataclass(frozen=True, slots=True)
class Coalesced(Optimal):
    """As `Optimal`; each bucket is one grouped collective of its gradients, without flat memory."""

    name: ClassVar[str] = "coalesced"

    def plan(self, wanted: Wanted) -> Planned:
        return plan_coalesced(wanted.gradients, self.cost or wanted.cost, wanted.times, wanted.layout)


WITH_OPTIONS: Final = (Fixed, Optimal, Coalesced)


def check_complete(plan: BucketPlan, wanted: Wanted, strategy: str) -> None:
    """Whether a plan is one of the gradients that were given, each in a place of its own.

    Raises:
        ConfigError: it is not: a gradient is missing, there twice, another one or unknown, pieces of one do not make it
            up, or a bucket is empty, mixes keys, or has two members in one place.
    """
    said = list(_wrong_in(plan, wanted))
    if said:
        raise ConfigError(f"the plan of strategy '{strategy}' {' and '.join(said)}. Each gradient is in it once.")


def _wrong_in(plan: BucketPlan, wanted: Wanted) -> Iterator[str]:
    given = {gradient.name: gradient for gradient in wanted.gradients}
    planned: dict[str, list[Member]] = {}
    for member in (member for bucket in plan.buckets for member in bucket.members):
        planned.setdefault(member.gradient.name, []).append(member)
    if missing := [name for name in given if name not in planned]:
        yield f"misses {', '.join(missing[:5])}"
    whole = [name for name, members in planned.items() if any(member.rows is None for member in members)]
    if extra := [name for name in planned if name not in given or (name in whole and len(planned[name]) > 1)]:
        yield f"has {', '.join(extra[:5])} too often"
    if other := [name for name in planned if any(each.gradient != given.get(name) for each in planned[name])]:
        yield f"has another shape, dtype or key for {', '.join(other[:5])}"
    for name in planned.keys() & given.keys() - set(whole):
        if not covers([member.rows for member in planned[name] if member.rows], given[name].shape[0]):
            yield f"has pieces of {name} that overlap or miss rows"
    yield from _wrong_in_buckets(plan)


def _wrong_in_buckets(plan: BucketPlan) -> Iterator[str]:
    for number, bucket in enumerate(plan.buckets):
        if not bucket.members:
            yield f"has an empty bucket, {number}"
        elif any(member.gradient.key != bucket.key for member in bucket.members):
            yield f"mixes keys in a bucket of {bucket.members[0].gradient.name}"
        flat = sorted((each.offset, each.numel, each.label) for each in bucket.members if each.offset is not None)
        for (start, numel, first), (following, _, second) in pairwise(flat):
            if start + numel > following:
                yield f"has {first} and {second} in the same place of a bucket"


def plan_fixed(gradients: Sequence[GradientSpec], caps_mb: tuple[float, float], layout: Layout) -> Planned:
    """Buckets by size in MiB, of any bucket and of the first of its key, closed as torch's DDP closes them."""
    cap_mb, first_cap_mb = caps_mb
    return Planned(plan_buckets(gradients, bucket_cap_mb=cap_mb, first_bucket_cap_mb=first_cap_mb, layout=layout))


def plan_per_module(
    gradients: Sequence[GradientSpec],
    unit_of: Callable[[str], str],
    layout: Layout,
    caps_mb: Mapping[str, float] = MappingProxyType({}),
) -> Planned:
    """One bucket, for each key, for each stretch of gradients of one unit; more if the unit has a cap.

    Args:
        gradients: in launch order.
        unit_of: the unit (a module's fully qualified name) of a parameter's fully qualified name.
        layout: how gradients lie in their buckets.
        caps_mb: by unit, MiB at which a bucket of it is closed, as by size; none if it is not there.
    """
    last = [gradient for gradient in gradients if gradient.name != UNUSED_FLAGS][-1]
    units = {gradient.name: unit_of(gradient.name) for gradient in gradients if gradient.name != UNUSED_FLAGS}
    units[UNUSED_FLAGS] = units[last.name]
    buckets = []
    for unit, stretch in groupby(gradients, key=lambda gradient: units[gradient.name]):
        members = list(stretch)
        for key in dict.fromkeys(gradient.key for gradient in members):
            of_key = [gradient for gradient in members if gradient.key == key]
            cap_mb, name = caps_mb.get(unit, math.inf), unit or "the outermost module"
            *capped, last_of_it = plan_buckets(
                of_key, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, layout=layout
            ).buckets
            buckets += [replace(each, reason=f"reached the cap of {cap_mb:g} MiB of {name}") for each in capped]
            buckets.append(replace(last_of_it, reason=f"end of {name}"))
    return Planned(BucketPlan(tuple(buckets)))


def plan_optimal(
    gradients: Sequence[GradientSpec],
    cost: AllReduceCost,
    times: ReadyTimes,
    layout: Layout,
    *,
    band: tuple[float, ...] | None = None,
) -> Planned:
    """The partition that is best in the worst case: over speeds off by 0.5x to 2x, by 0.9x to 1.1x if measured.

    The plan must be the same on every rank, so all of them pass the same times. As long as nobody has measured the
    backward it is taken to be as long as the communication: the case in which the buckets matter most.

    The gradient whose matrix product takes longest is cut into pieces of rows if that pays (`PIECES_GAIN`).

    Args:
        gradients: in any order; equally ready ones are launched in it.
        cost: what one collective costs on the group.
        times: when the gradients are ready.
        layout: how gradients lie in their buckets.
        band: how far off speeds may be; `None`: as said above.
    """
    ordered = in_ready_order(gradients, times)
    whole = [Member(gradient, None) for gradient in ordered]
    backward_s = backward_seconds(whole, times, cost)
    ready = ready_gradients(whole, times, backward_s)
    band = band or (ERROR_BAND if times.backward_s is None else MEASURED_BAND)
    cuts = list(_cuts(ordered, ready, times, backward_s))
    choice = robust_with_pieces(ready, cuts, cost=cost, backward_s=backward_s, band=band)
    parts = list(_parts(ordered, choice.gradients))
    buckets = []
    for bucket, reason in zip(choice.buckets, choice.certificate.reasons, strict=True):
        members = [parts[position] for position in bucket]
        rows = {position: part.rows for position, part in enumerate(members) if part.rows is not None}
        buckets.append(layout.bucket(members[0].gradient.key, [part.gradient for part in members], reason, rows))
    return Planned(BucketPlan(tuple(buckets)), choice.certificate)


class _Part(NamedTuple):
    """A gradient, or the rows of a piece of it."""

    gradient: GradientSpec
    rows: Rows | None


def _cuts(
    ordered: Sequence[GradientSpec], ready: Sequence[ReadyGradient], times: ReadyTimes, backward_s: float
) -> Iterator[Cut]:
    """The largest product in 2, 4, and 8 pieces."""
    fit = [place for place, each in enumerate(ordered) if each.index in times.products and not each.why_in_one_piece()]
    if not fit:
        return
    place = max(fit, key=lambda each: times.products[ordered[each].index].produced)
    gradient, product = ordered[place], times.products[ordered[place].index]
    whole = replace(ready[place], produced_s=backward_s * product.produced)
    for pieces_count in PIECE_COUNTS:
        if gradient.shape[0] >= pieces_count and gradient.nbytes >= pieces_count * PIECE_NBYTES:
            row_nbytes = gradient.nbytes // gradient.shape[0]
            sizes = [(last - first) * row_nbytes for first, last in row_blocks(gradient.shape[0], pieces_count)]
            pieces = in_pieces(whole, sizes)
            yield Cut((*ready[:place], *pieces, *ready[place + 1 :]), backward_s * product.copied / gradient.nbytes)


def _parts(ordered: Sequence[GradientSpec], ready: Sequence[ReadyGradient]) -> Iterator[_Part]:
    """What the numbers stand for: each piece is followed by the others of its gradient."""
    gradients = iter(ordered)
    for each in ready:
        if each.piece == 0:
            gradient = next(gradients)
        yield _Part(gradient, row_blocks(gradient.shape[0], each.pieces)[each.piece] if each.pieces > 1 else None)


def plan_ddp(gradients: Sequence[GradientSpec], assignment: Sequence[Sequence[int]]) -> Planned:
    """The buckets of torch's DDP, bit for bit: its members at its offsets, each scaled before it is added up.

    The flags travel in a collective of their own, behind the others, for they would move what is added up together.

    Args:
        gradients: in any order, the flags among them.
        assignment: for each bucket the indices of its gradients, from torch's own rule (`distributed.ddp_buckets`).
    """
    by_index = {gradient.index: gradient for gradient in gradients}
    buckets = [[by_index[index] for index in indices] for indices in assignment]
    for bucket in buckets:
        odd = [gradient for gradient in bucket if gradient.key != bucket[0].key]
        if odd:
            raise ConfigError(
                f"strategy 'ddp' puts gradients into the buckets of torch's DDP, which are reduced in one way, but "
                f"{bucket[0].name} is {bucket[0].key} and {odd[0].name} is {odd[0].key}. Use another strategy."
            )
    buckets.append([gradient for gradient in gradients if gradient.name == UNUSED_FLAGS])
    laid_out = tuple(PACKED.bucket(members[0].key, members, "as torch's DDP") for members in buckets)
    return Planned(BucketPlan(laid_out, folds_scale=False))


def plan_coalesced(
    gradients: Sequence[GradientSpec],
    cost: AllReduceCost,
    times: ReadyTimes,
    layout: Layout,
    *,
    band: tuple[float, ...] | None = None,
) -> Planned:
    """The buckets of `optimal`, each one grouped collective of its gradients: no flat memory, no padding."""
    everything = frozenset(gradient.name for gradient in gradients)
    return plan_optimal(gradients, cost, times, replace(layout, apart=everything), band=band)


def check_grouped(plan: BucketPlan, backend: Backend) -> None:
    """Whether a backend can run the plan's grouped collectives.

    Raises:
        ConfigError: the plan has some, and the backend reduces one tensor at a time, or there are two levels.
    """
    # A hook sends tensors of its own.
    grouped = [each for each in plan.buckets if len(each.tensor_numels) > 1 and each.key.reduction.hook is None]
    if any(len(bucket.key.reduction.stages) > 1 for bucket in grouped):
        raise ConfigError(
            "the plan reduces several tensors in one collective, which is not supported on two levels of network. Use "
            "another strategy than 'coalesced', a plan without members apart, or a device_mesh with one dimension."
        )
    if grouped and not backend.coalesces:
        raise ConfigError(
            f"the plan reduces several tensors in one collective, which backend '{backend}' cannot. "
            "Use another strategy than 'coalesced', or a plan without members apart."
        )


def on_cheaper_levels(planned: Planned, group: str, cost: AllReduceCost, times: ReadyTimes) -> Planned:
    """The same buckets; those of two levels on one, over all ranks of `group`, if that takes less time than the stages.

    Each bucket is judged by itself, as if the links had nothing else to carry. Gradients in pieces stay as they are.
    """
    plan = planned.plan
    buckets = tuple(_on_cheaper_levels(bucket, group, cost) for bucket in plan.buckets)
    plan, certificate = replace(plan, buckets=buckets), planned.certificate
    flat = sum(before.key != after.key for before, after in zip(planned.plan.buckets, buckets, strict=True))
    if certificate is not None and flat:
        backward_s = certificate.backward_s
        members = [member for bucket in buckets for member in bucket.members]
        ends = list(accumulate(len(bucket.members) for bucket in buckets))
        promised = certify(
            ready_gradients(members, times, backward_s),
            tuple(tuple(range(start, end)) for start, end in pairwise([0, *ends])),
            cost=certificate.cost,
            backward_s=backward_s,
            strategy=f"{certificate.strategy}, {count(flat, 'bucket')} on one level",
            band=certificate.band,
        )
        certificate = replace(promised, exact=False, reasons=tuple(bucket.reason for bucket in buckets))
    return Planned(plan, certificate)


def _on_cheaper_levels(bucket: Bucket, group: str, cost: AllReduceCost) -> Bucket:
    reduction = bucket.key.reduction
    if reduction.ranks_inside == 1 or any(member.rows is not None for member in bucket.members):
        return bucket
    two_s = sum(leg.seconds for leg in legs_of([member.loads for member in bucket.members], cost))
    flat_s = cost.seconds(bucket.nbytes)
    times = f"{flat_s * 1e3:.3g} ms on one level, {two_s * 1e3:.3g} ms on two"
    if two_s <= flat_s:
        return replace(bucket, reason=f"{bucket.reason}; {times}")
    flat = replace(reduction, stages=(Stage(ALL_REDUCE, group, reduction.stages[0].reduce_op),))
    key = bucket.key._replace(reduction=flat)
    members = tuple(replace(each, gradient=replace(each.gradient, key=key)) for each in bucket.members)
    return Bucket(key, members, f"{bucket.reason}; {times}")


def nominal_cost(backend: Backend, world_size: int, ranks_inside: int | None = None) -> AllReduceCost:
    """What to plan with before anything was measured: the backend's nominal links.

    `ranks_inside`: of a node, where the network has two levels.
    """
    inside, between, formula = link(backend.inside), link(backend.between), EITHER if backend.has_nodes else RING
    if ranks_inside is not None:
        whole = between.cost(world_size, formula=formula)
        return with_levels(whole, inside, between, ranks_inside=ranks_inside, nodes=world_size // ranks_inside)
    return (inside if world_size <= RANKS_OF_A_NODE else between).cost(world_size, formula=formula)


def plan_to_json(plan: BucketPlan) -> str:
    """A plan file: for each bucket its members in order, the rest for the reader."""
    return json.dumps(plan.to_dict(), indent=1)


def plan_explicit(gradients: Sequence[GradientSpec], text: str, layout: Layout) -> Planned:
    """The plan of a file, for these gradients.

    Of the file count the names of the members, and which of them are apart (offset `null`). Other offsets follow from
    `layout`, so that a gradient can be moved to another bucket by hand. A member with `rows` is a piece.

    Raises:
        ConfigError: not a plan file, of another version, names unknown gradients, misses one or has one twice,
            puts gradients of different keys into one bucket, or has pieces that overlap, miss rows, or are of a
            gradient that cannot be cut.
    """
    by_name = {gradient.name: gradient for gradient in gradients}
    listed = _members(text)
    everything = [member for members in listed for member in members]
    _check_members(by_name, everything)
    layout = replace(layout, apart=frozenset(member.name for member in everything if member.apart))
    buckets = []
    for number, named in enumerate(listed):
        members = [by_name[member.name] for member in named]
        odd = [gradient for gradient in members if gradient.key != members[0].key]
        if odd:
            raise ConfigError(
                f"the plan file mixes keys in bucket {number}: {members[0].name} is {members[0].key}, {odd[0].name} "
                f"is {odd[0].key}. Put them into different buckets."
            )
        rows = {position: each.rows for position, each in enumerate(named) if each.rows and not each.has_all(by_name)}
        buckets.append(layout.bucket(members[0].key, members, "as the plan file says", rows))
    return Planned(BucketPlan(tuple(buckets)))


def _check_members(by_name: Mapping[str, GradientSpec], members: Sequence[_Listed]) -> None:
    """Whether each gradient is in a plan file once, whole or in pieces."""
    counts = Counter(member.name for member in members if member.rows is None)
    counts.update({member.name for member in members if member.rows is not None})
    complaints = {
        "names gradients that the module does not have": [name for name in counts if name not in by_name],
        "misses": [name for name in by_name if name not in counts],
        "names more than once": [name for name, times in counts.items() if times > 1],
    }
    for complaint, names in complaints.items():
        if names:
            raise ConfigError(f"the plan file {complaint}: {', '.join(names[:5])}. Save report(model).plan anew.")
    pieces: dict[str, list[Rows]] = {}
    for member in members:
        if member.rows is not None:
            pieces.setdefault(member.name, []).append(member.rows)
    for name, rows in pieces.items():
        _check_rows(by_name[name], rows)


def _check_rows(gradient: GradientSpec, pieces: Sequence[Rows]) -> None:
    """Whether the pieces of a gradient in a plan file are the whole gradient."""
    if (why := gradient.why_in_one_piece()) is not None:
        raise ConfigError(f"the plan file cuts {gradient.name} into pieces, but {why}. Take 'rows' out.")
    if not covers(pieces, gradient.shape[0]):
        raise ConfigError(
            f"the pieces of {gradient.name} in the plan file overlap or miss rows: {sorted(pieces)}. Each of its "
            f"{gradient.shape[0]} rows has to be in exactly one piece [first row, row behind the last]."
        )


class _Listed(NamedTuple):
    """A member of a plan file."""

    name: str
    apart: bool
    rows: Rows | None

    def has_all(self, by_name: Mapping[str, GradientSpec]) -> bool:
        """Whether this one piece is the whole gradient."""
        return self.rows == (0, by_name[self.name].shape[0])


def _listed(member: Mapping[str, Any]) -> _Listed:
    rows = member.get("rows")
    if rows is not None:
        first, last = rows
        rows = (int(first), int(last))
    return _Listed(str(member["gradient"]["name"]), member["offset"] is None, rows)


def _members(text: str) -> list[list[_Listed]]:
    """The members of each bucket of a plan file."""
    try:
        data: Mapping[str, Any] = json.loads(text)
        version, buckets = data["version"], data["buckets"]
        listed = [[_listed(member) for member in bucket["members"]] for bucket in buckets]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a plan file of dp_compile: {error!r}. Save one with plan_to_json.") from error
    if version != PLAN_VERSION:
        raise ConfigError(f"the plan file is of version {version!r}, readable is {PLAN_VERSION}. Save it anew.")
    empty = [number for number, members in enumerate(listed) if not members]
    if empty:
        raise ConfigError(f"bucket {empty[0]} of the plan file is empty. Take it out.")
    return listed
