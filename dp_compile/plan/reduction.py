"""How gradients are averaged over all ranks: pure data, part of a bucket's key. `passes/reduction.py` executes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from dp_compile.errors import ConfigError
from dp_compile.plan.backends import Backend

MOST_IN_FLOAT16: Final = 1e6  # the least float16 is 6e-8
# The range of float32 and bfloat16 is 1e-38 to 3e38: an infinite factor would turn zeros into NaN.
LEAST_FACTOR, MOST_FACTOR = 1e-30, 1e30

ALL_REDUCE: Final = "all_reduce"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_GATHER: Final = "all_gather"
EXCHANGE: Final = "exchange"
ALL_TO_ALL: Final = "all_to_all"

CALLED: Final = "called"  # `hook` key of any Python hook, which is called with each bucket and never captured
ROUNDS: Final = (ALL_REDUCE, ALL_TO_ALL, ALL_GATHER)  # collectives that a functional comm hook may use

WHOLE: Final = "whole"
INSIDE: Final = "inside"
BETWEEN: Final = "between"


class Load(NamedTuple):
    """The traffic of a stage on a link: a tensor of `nbytes`, `phases` times.

    An all-reduce has two phases, a reduce-scatter and an all-gather. Every other collective has one.
    """

    link: str
    phases: int
    nbytes: float


class Stage(NamedTuple):
    """One collective: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all` or `exchange`. `exchange` is an
    all-to-all and a local sum, for backends whose reduce-scatter sends as much as their all-reduce.

    `reduce_op`: `sum` or `avg`; empty if nothing is summed. `parts`: the number of equal parts, one for each rank of
    the group, into which a tensor is split or from which it is gathered. `link`: the network of the group: `whole`,
    or on two levels `inside` a node or `between` nodes.
    """

    op: str
    group: str
    reduce_op: str = ""
    parts: int = 1
    link: str = WHOLE

    def numel_behind(self, numel: int) -> int:
        """Return the numel of a rank's tensor after this stage, from its `numel` before."""
        if self.op in (REDUCE_SCATTER, EXCHANGE):
            return numel // self.parts
        return numel * self.parts if self.op == ALL_GATHER else numel


@dataclass(frozen=True, slots=True)
class Levels:
    """Two network levels: names of this rank's groups `inside` its node and `between` nodes; `ranks` by node."""

    inside: str
    between: str
    ranks: tuple[tuple[int, ...], ...]

    @property
    def ranks_inside(self) -> int:
        return len(self.ranks[0])

    def stages(self, reduce_op: str, backend: Backend) -> tuple[Stage, ...]:
        """Return a reduce-scatter inside a node, an all-reduce of each part between nodes, an all-gather inside."""
        return (
            Stage(scattering(backend), self.inside, reduce_op, self.ranks_inside, INSIDE),
            Stage(ALL_REDUCE, self.between, reduce_op, link=BETWEEN),
            Stage(ALL_GATHER, self.inside, parts=self.ranks_inside, link=INSIDE),
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction: gradients times `scale` in dtype `wire`, all stages, the result times `post_scale` in the gradient's
    dtype. Factors are applied in the wider of the two dtypes, with one rounding each.

    `wire`: name of a floating dtype; `None`: the gradient's. `hook`: key of a functional comm hook, which computes the
    inputs of each stage and the reduced gradients; nothing is scaled or cast for it. With `CALLED`, a Python hook
    launches its own collectives, and the stage is an assumption for the cost. `given`: how many of the two factors
    compiled code reads at run time. The others are constants, which the kernel that computes a gradient may apply.
    """

    stages: tuple[Stage, ...]
    scale: float
    post_scale: float = 1.0
    wire: str | None = None
    hook: str | None = None
    given: int = 0

    def for_code(self) -> Reduction:
        """Return the reduction for compiled code: the same for any values of factors that code reads at run time."""
        scale, post_scale = (1.0,) * self.given + (self.scale, self.post_scale)[self.given :]
        return replace(self, scale=scale, post_scale=post_scale)

    @property
    def reduce_op(self) -> str:
        """How the stages reduce, for display; the names of their collectives if none reduces."""
        adding = [stage.reduce_op for stage in self.stages if stage.reduce_op]
        return " ".join(dict.fromkeys(adding or (stage.op for stage in self.stages)))

    @property
    def parts(self) -> int:
        """The least common multiple of `parts` of all stages."""
        return math.lcm(*(stage.parts for stage in self.stages))

    @property
    def is_scattered(self) -> bool:
        """Whether each rank keeps only its shard of the result."""
        return self.hook is None and self.stages[-1].op in (REDUCE_SCATTER, EXCHANGE)

    @property
    def ranks_inside(self) -> int:
        """Ranks of a node on two network levels; 1 on one level."""
        return next((stage.parts for stage in self.stages if stage.link == INSIDE), 1)

    @property
    def multiple_of(self) -> int:
        """The number of which a bucket's numel is a multiple. It aligns parts to 16 bytes in any dtype, because NCCL is
        slower otherwise (pytorch#195450). With a hook, which splits tensors itself, it is 1."""
        return 1 if self.parts == 1 or self.hook is not None else 16 * self.parts

    def numels(self, numel: int) -> Iterator[int]:
        """Yield the input numel of each stage for a tensor of `numel` elements; with a hook usually an upper limit."""
        for stage in self.stages:
            yield numel
            numel = stage.numel_behind(numel)

    def loads(self, nbytes: int, sent: Sequence[int] = ()) -> tuple[Load, ...]:
        """Return the traffic of each stage for `nbytes` on the wire. `sent`: bytes that a hook sends in each stage."""
        parts = 1 if sent else self.parts
        given = zip(self.stages, sent or self.numels(nbytes * parts), strict=True)
        return tuple(
            Load(stage.link, 2 if stage.op == ALL_REDUCE else 1, max(each, stage.numel_behind(each)) / parts)
            for stage, each in given
        )

    def __str__(self) -> str:
        if self.hook is not None:
            return f"{self.reduce_op} by {self.hook}"
        levels = f", two levels with {self.ranks_inside} ranks in a node" if self.ranks_inside > 1 else ""
        parts = f", sharded over {self.parts} ranks" if self.is_scattered else ""
        return self.reduce_op + (f" in {self.wire}" if self.wire else "") + levels + parts

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without the names of groups, which differ between ranks."""
        return asdict(self) | {"stages": [stage._replace(group="")._asdict() for stage in self.stages]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Reduction:
        return Reduction(**data | {"stages": tuple(Stage(**stage) for stage in data["stages"])})


@dataclass(frozen=True, slots=True)
class Averaging:
    """How a module's gradients are averaged, in any dtype: divided before the sum, or by a collective that averages.
    float16 is divided by a part of the divisor before the sum (`before_the_sum`), unless `all_before`."""

    wire: str | None = None  # dtype of the sum; `None`: the gradient's
    divide_by: float | None = None  # divisor of the sum; `None`: the number of ranks
    in_collective: bool = True  # let the collective average if the backend can
    all_before: bool = False  # divide by the whole divisor before the sum, also in float16
    given: bool = False  # the divisor changes often: compiled code reads the factors at run time
    hook: str | None = None  # key of the functional comm hook that reduces, or `CALLED`
    rounds: tuple[str, ...] = (ALL_REDUCE,)  # of `ROUNDS`, the hook's collectives
    scattered: bool = False  # each rank keeps only its shard of the result

    def reduction(
        self, group: str, backend: Backend, world_size: int, dtype: str, levels: Levels | None = None
    ) -> Reduction:
        """Return the reduction of gradients of one dtype over a group, on its `levels` if it has any.

        Factors are applied before and after all stages. With averaging collectives, each reducing stage divides by its
        ranks, as in FSDP2. Raises `ConfigError` if the divisor would turn a flag in the same bucket into zero or NaN.
        """
        if self.hook is not None:
            alike, cut = Stage(ALL_REDUCE, group, "sum"), Stage("", group, parts=world_size)
            rounds = (alike if op == ALL_REDUCE else cut._replace(op=op) for op in self.rounds)
            return Reduction(tuple(rounds), 1.0, hook=self.hook)

        def stages(reduce_op: str) -> tuple[Stage, ...]:
            if self.scattered:
                return (Stage(scattering(backend), group, reduce_op, world_size),)
            return (Stage(ALL_REDUCE, group, reduce_op),) if levels is None else levels.stages(reduce_op, backend)

        wire = None if self.wire == dtype else self.wire
        divisor = float(world_size) if self.divide_by is None else self.divide_by
        predivisor, given = divisor, 1
        if (wire or dtype) == "float16" and not self.all_before:
            predivisor, given = before_the_sum(divisor), 2
        # NCCL may return wrong results with AVG and one rank (FSDP2's `_get_gradient_divide_factors`).
        elif self.in_collective and self.divide_by is None and backend.averages and world_size > 1:
            if all(stage.op != EXCHANGE for stage in stages("avg")):  # an exchange only adds up
                return Reduction(stages("avg"), 1.0, wire=wire)
        for factor in (divisor, predivisor):
            if not LEAST_FACTOR <= factor <= MOST_FACTOR:
                raise ConfigError(
                    f"gradient_divide_factor must be {LEAST_FACTOR:g} to {MOST_FACTOR:g}, got {factor:g}: the result "
                    "would overflow or underflow float32."
                )
        if "float16" in (wire, dtype) and (largest := max(divisor, predivisor)) > MOST_IN_FLOAT16:
            raise ConfigError(
                f"gradients in float16 can be divided by {MOST_IN_FLOAT16:g} at most, got {largest:g}: the flags in "
                "their bucket would underflow to zero. Use bfloat16 or float32, for parameters and for communication."
            )
        return Reduction(stages("sum"), 1.0 / predivisor, predivisor / divisor, wire, given=given if self.given else 0)


def scattering(backend: Backend) -> str:
    """Return the op of a stage after which each rank has its shard of a sum."""
    return REDUCE_SCATTER if backend.scatters else EXCHANGE


def launch_order(buckets: Sequence[Sequence[Any]]) -> Iterator[tuple[int, int]]:
    """Yield bucket and stage, by number, in the order of their launches, which is equal on every rank.

    A stage waits for the previous one, and compute waits with it. So a second stage is launched one bucket later, when
    its first has ended. On two levels, the last stage, inside a node, follows all traffic of the slow link: only the
    end of the backward needs its result. On one link, as with a comm hook, this would gain nothing.

        bucket 0    first         second                        last
        bucket 1           first          second                      last
        bucket 2                  first            second                   last

    `buckets`: the stages of each, or their costs, in launch order.
    """
    for bucket in range(len(buckets)):
        yield bucket, 0
        for earlier in (bucket - 1, bucket) if bucket == len(buckets) - 1 else (bucket - 1,):
            if earlier >= 0:
                count = len(buckets[earlier]) - is_handed_back_at_the_end(buckets[earlier])
                yield from ((earlier, stage) for stage in range(1, count))
    for bucket, stages in enumerate(buckets):
        if is_handed_back_at_the_end(stages):
            yield bucket, len(stages) - 1


def is_handed_back_at_the_end(stages: Sequence[Any]) -> bool:
    """Return whether a bucket's last stage follows the other stages of all buckets, because another link carries it."""
    return len(stages) > 1 and stages[-1].link != stages[-2].link


def before_the_sum(divisor: float) -> float:
    """Return the power of two by which float16 gradients are divided before the sum. It is near the square root of the
    divisor, so neither one large contribution nor the sum of many leaves the range of float16.

    Source: FSDP, `_get_gradient_divide_factors` of torch's `fsdp/_fully_shard/_fsdp_collectives.py`.
    """
    power = 1.0
    while divisor % power == 0 and divisor / power > power:
        power *= 2
    return power
