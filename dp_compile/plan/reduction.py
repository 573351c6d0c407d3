"""How a gradient becomes the average over all ranks: pure data, part of the key of its bucket.

`passes/reduction.py` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from dp_compile.errors import ConfigError
from dp_compile.plan.backends import Backend

MOST_IN_FLOAT16: Final = 1e6  # float16 ends at 6e-8
# float32 and bfloat16 end at 1e-38 and 3e38: a factor that is infinite there makes NaN of zeros.
LEAST_FACTOR, MOST_FACTOR = 1e-30, 1e30

ALL_REDUCE: Final = "all_reduce"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_GATHER: Final = "all_gather"
EXCHANGE: Final = "exchange"
ALL_TO_ALL: Final = "all_to_all"

CALLED: Final = "called"
"""The key, in place of a functional hook's, of a Python hook: it is called with each bucket, and never captured."""

ROUNDS: Final = (ALL_REDUCE, ALL_TO_ALL, ALL_GATHER)
"""What a functional comm hook may ask for."""

WHOLE: Final = "whole"
INSIDE: Final = "inside"
BETWEEN: Final = "between"


class Load(NamedTuple):
    """What a stage puts on a link: a tensor of so many bytes, `phases` times.

    An all-reduce is two phases, a reduce-scatter and an all-gather; every other collective is one of them.
    """

    link: str
    phases: int
    nbytes: float


class Stage(NamedTuple):
    """One collective: `all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`; or `exchange`: an all-to-all after
    which each rank adds up what it got, which is a reduce-scatter for backends whose reduce-scatter saves no bytes.

    `reduce_op`: `sum` or `avg`, empty where nothing is added up. `parts`: into how many equal parts a tensor is cut,
    each for one rank of the group, or of how many it is put together. `link`: which network its group is on: the
    `whole` one, or of two levels that `inside` a node or `between` nodes.
    """

    op: str
    group: str
    reduce_op: str = ""
    parts: int = 1
    link: str = WHOLE

    def numel_behind(self, numel: int) -> int:
        """How many elements a rank has of a tensor that had so many before this stage."""
        if self.op in (REDUCE_SCATTER, EXCHANGE):
            return numel // self.parts
        return numel * self.parts if self.op == ALL_GATHER else numel


@dataclass(frozen=True, slots=True)
class Levels:
    """Two levels of network: names of this rank's groups `inside` its node and `between` nodes, and all ranks by
    node."""

    inside: str
    between: str
    ranks: tuple[tuple[int, ...], ...]

    @property
    def ranks_inside(self) -> int:
        return len(self.ranks[0])

    def stages(self, reduce_op: str, backend: Backend) -> tuple[Stage, ...]:
        """Reduce-scatter inside a node, all-reduce of each part between nodes, all-gather inside."""
        return (
            Stage(scattering(backend), self.inside, reduce_op, self.ranks_inside, INSIDE),
            Stage(ALL_REDUCE, self.between, reduce_op, link=BETWEEN),
            Stage(ALL_GATHER, self.inside, parts=self.ranks_inside, link=INSIDE),
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """Each contribution times `scale` in the dtype `wire`, the stages one after the other, the result times
    `post_scale` in the gradient's dtype again. Factors are applied in the wider of the two dtypes: one rounding each.

    `wire`: name of a floating dtype; `None`: the gradient's. `hook`: key of a functional comm hook, which computes the
    inputs of each stage and the reduced gradients; nothing is scaled or cast for it. `CALLED`: a Python hook, which
    launches its collectives itself: the stage is what a cost assumes. `given`: how many of the two factors compiled
    code asks for when it runs; the others are constants, which the kernel that computes a gradient may apply.
    """

    stages: tuple[Stage, ...]
    scale: float
    post_scale: float = 1.0
    wire: str | None = None
    hook: str | None = None
    given: int = 0

    def for_code(self) -> Reduction:
        """As compiled code knows it: the same for all factors that it asks for when it runs."""
        scale, post_scale = (1.0,) * self.given + (self.scale, self.post_scale)[self.given :]
        return replace(self, scale=scale, post_scale=post_scale)

    @property
    def reduce_op(self) -> str:
        """For people: how stages add up; their names, if none does."""
        adding = [stage.reduce_op for stage in self.stages if stage.reduce_op]
        return " ".join(dict.fromkeys(adding or (stage.op for stage in self.stages)))

    @property
    def parts(self) -> int:
        """Into how many equal parts a tensor is cut at most."""
        return math.lcm(*(stage.parts for stage in self.stages))

    @property
    def is_scattered(self) -> bool:
        """Whether each rank keeps its part of the result only."""
        return self.hook is None and self.stages[-1].op in (REDUCE_SCATTER, EXCHANGE)

    @property
    def ranks_inside(self) -> int:
        """Ranks of a node on two levels of network; 1 on one."""
        return next((stage.parts for stage in self.stages if stage.link == INSIDE), 1)

    @property
    def multiple_of(self) -> int:
        """Of elements, for a tensor whose parts start at 16 bytes in any dtype: with others NCCL takes longer
        (pytorch#195450). A hook cuts what it sends itself.
        """
        return 1 if self.parts == 1 or self.hook is not None else 16 * self.parts

    def numels(self, numel: int) -> Iterator[int]:
        """How many elements of a tensor with `numel` each stage takes; with a hook at most, as a rule."""
        for stage in self.stages:
            yield numel
            numel = stage.numel_behind(numel)

    def loads(self, nbytes: int, sent: Sequence[int] = ()) -> tuple[Load, ...]:
        """What each stage carries of so many bytes on the wire. `sent`: what a hook sends in each stage."""
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
        parts = f", cut over {self.parts} ranks" if self.is_scattered else ""
        return self.reduce_op + (f" in {self.wire}" if self.wire else "") + levels + parts

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Names of groups are left out: they differ between ranks."""
        return asdict(self) | {"stages": [stage._replace(group="")._asdict() for stage in self.stages]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Reduction:
        return Reduction(**data | {"stages": tuple(Stage(**stage) for stage in data["stages"])})


@dataclass(frozen=True, slots=True)
class Averaging:
    """How the gradients of a module are averaged, in any dtype: divided by all of the divisor before they are added, or
    in a collective that averages; in float16 by a part of it, see `before_the_sum`.
    """

    wire: str | None = None  # dtype in which they are added up; `None`: their own
    divide_by: float | None = None  # what the sum is divided by; `None`: the number of ranks
    in_collective: bool = True  # let the collective average where the backend can
    all_before: bool = False  # divide by all of it before the sum, float16 too
    given: bool = False  # it changes often: compiled code asks for the factors that follow from it when it runs
    hook: str | None = None  # key of the functional comm hook that reduces, or `CALLED`
    rounds: tuple[str, ...] = (ALL_REDUCE,)  # of `ROUNDS`, the hook's collectives
    scattered: bool = False  # each rank keeps its part of the result only

    def reduction(
        self, group: str, backend: Backend, world_size: int, dtype: str, levels: Levels | None = None
    ) -> Reduction:
        """The reduction of gradients of one dtype over a group, by its `levels` if it has some.

        Factors are applied before and after all stages; in collectives that average, each stage divides by its ranks,
        as FSDP2 does. An error if a flag in the same bucket would be divided down to zero, or become NaN.
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
            return Reduction(stages("avg"), 1.0, wire=wire)
        for factor in (divisor, predivisor):
            if not LEAST_FACTOR <= factor <= MOST_FACTOR:
                raise ConfigError(
                    f"gradient_divide_factor must be {LEAST_FACTOR:g} to {MOST_FACTOR:g}, got {factor:g}: the result "
                    "would overflow or underflow float32."
                )
        if "float16" in (wire, dtype) and (largest := max(divisor, predivisor)) > MOST_IN_FLOAT16:
            raise ConfigError(
                f"gradients in float16 can be divided by {MOST_IN_FLOAT16:g} at most, got {largest:g}: the status bits "
                "in their bucket would become zero. Send them in bfloat16 or float32."
            )
        return Reduction(stages("sum"), 1.0 / predivisor, predivisor / divisor, wire, given=given if self.given else 0)


def scattering(backend: Backend) -> str:
    """The stage after which each rank has its part of a sum."""
    return REDUCE_SCATTER if backend.scatters else EXCHANGE


def launch_order(buckets: Sequence[Sequence[Any]]) -> Iterator[tuple[int, int]]:
    """In which order buckets launch their stages: a bucket and one of its stages, by number. The same on every rank.

    A stage waits for the one before it, and compute waits with it. So a second stage is launched one bucket later, when
    its first is over. The last stage on two levels, inside a node, comes after all that the slow link has to carry:
    only the end of the backward needs it. Over one link, as by a comm hook, that would gain nothing.

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
    """Whether the last stage of a bucket comes after the first ones of all: another link carries it."""
    return len(stages) > 1 and stages[-1].link != stages[-2].link


def before_the_sum(divisor: float) -> float:
    """The power of two by which float16 is divided before it is added up: near the square root of the whole, so that
    neither one large contribution nor the sum of many leaves its range.

    Source: FSDP, `_get_gradient_divide_factors` of torch's `fsdp/_fully_shard/_fsdp_collectives.py`.
    """
    power = 1.0
    while divisor % power == 0 and divisor / power > power:
        power *= 2
    return power
