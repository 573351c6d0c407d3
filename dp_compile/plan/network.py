"""What the network does with given buckets: launches, finish, buckets of a fixed size, pieces. Pure numbers.

The model: one network that carries one bucket at a time. A bucket starts when its last member is ready and the
bucket before it has finished, and lasts alpha + beta * bytes (`AllReduceCost`). Buckets of different keys (group,
reduce op, dtype, device) share the network, never a bucket. A bucket is launched where its last member stands.

Source: the model of MG-WFBP (arXiv 1912.09268).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from dp_compile.errors import ConfigError
from dp_compile.plan.cost import AllReduceCost, check_number

Buckets = tuple[tuple[int, ...], ...]
"""Positions of gradients, bucket by bucket in launch order, ascending in each."""


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """A gradient, or a piece of one, at its place in launch order.

    `ready_s` is when it is ready on the compute stream without communication. `produced_s` is how long its producer
    takes, if that could hand out pieces one after the other; zero: it appears as a whole. Piece `piece` of `pieces`.

    Raises:
        ConfigError: a time or a size is negative or not finite.
    """

    nbytes: int
    ready_s: float
    key: Hashable = None
    produced_s: float = 0.0
    piece: int = 0
    pieces: int = 1

    def __post_init__(self) -> None:
        for name in ("nbytes", "ready_s", "produced_s"):
            check_number(name, getattr(self, name), zero_allowed=True)


class Launch(NamedTuple):
    """One bucket on the network; times in seconds after the start of the backward."""

    ready_s: float
    start_s: float
    finish_s: float


class Job(NamedTuple):
    """A bucket as the network sees it: the position of its last member, when it may start, how long it lasts."""

    position: int
    ready_s: float
    seconds: float


def release_times(gradients: Sequence[ReadyGradient]) -> list[float]:
    """When each gradient can be launched: launches keep their order, so never before an earlier one is ready."""
    return list(accumulate((gradient.ready_s for gradient in gradients), max))


def jobs_of(gradients: Sequence[ReadyGradient], buckets: Buckets, cost: AllReduceCost) -> list[Job]:
    """The buckets as the network sees them."""
    released = release_times(gradients)
    return [
        Job(bucket[-1], released[bucket[-1]], cost.seconds(sum(gradients[position].nbytes for position in bucket)))
        for bucket in buckets
    ]


def launches(jobs: Sequence[Job], *, slower: float = 1.0) -> Iterator[Launch]:
    """What the network does, if it is `slower` times as slow as the jobs say."""
    free = 0.0
    for job in jobs:
        start = max(job.ready_s, free)
        free = start + job.seconds * slower
        yield Launch(job.ready_s, start, free)


def finish_time(jobs: Sequence[Job], *, slower: float = 1.0) -> float:
    """When the last bucket has arrived, in seconds after the start of the backward."""
    free = 0.0
    for job in jobs:
        free = max(job.ready_s, free) + job.seconds * slower
    return free


def fixed_partition(gradients: Sequence[ReadyGradient], *, cap_nbytes: float, first_cap_nbytes: float) -> Buckets:
    """A bucket is closed when it holds its cap: the rule of torch's DDP, as in `plan.plan_buckets`."""
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = defaultdict(int)
    past_first: set[Hashable] = set()
    closed: list[tuple[int, ...]] = []
    for position, gradient in enumerate(gradients):
        key = gradient.key
        filling.setdefault(key, []).append(position)
        filled[key] += gradient.nbytes
        if filled[key] >= (cap_nbytes if key in past_first else first_cap_nbytes):
            closed.append(tuple(filling.pop(key)))
            past_first.add(key)
            del filled[key]
    return in_launch_order([*closed, *map(tuple, filling.values())])


def in_launch_order(buckets: Sequence[tuple[int, ...]]) -> Buckets:
    """By the position of the last member."""
    return tuple(sorted(buckets, key=lambda bucket: bucket[-1]))


def in_pieces(gradient: ReadyGradient, sizes: Sequence[int]) -> tuple[ReadyGradient, ...]:
    """A gradient cut into pieces of these bytes, made one after the other by its producer.

    A piece is ready when its share of `produced_s` is over. With `produced_s == 0` all pieces are ready together, and
    then pieces never finish earlier than the whole: moving them all into the bucket of the first one delays nothing
    and saves latencies. So this helps only where the producer itself can be cut.

    Raises:
        ConfigError: the sizes do not add up to the gradient's.
    """
    if sum(sizes) != gradient.nbytes:
        raise ConfigError(f"pieces of {sum(sizes)} bytes do not make up a gradient of {gradient.nbytes} bytes.")
    later = [gradient.nbytes - made for made in accumulate(sizes)]
    return tuple(
        replace(
            gradient,
            nbytes=nbytes,
            ready_s=max(0.0, gradient.ready_s - gradient.produced_s * after / max(1, gradient.nbytes)),
            piece=piece,
            pieces=len(sizes),
        )
        for piece, (nbytes, after) in enumerate(zip(sizes, later, strict=True))
    )
