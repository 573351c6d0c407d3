"""Which gradients are reduced together, and in which order: pure data, the same on every rank.

A plan is a function of the parameters (order, shapes, dtypes, devices), the group and the configuration; never of
a rank's own timing, cache or activations. Every rank runs the plan's buckets in the plan's order, whether its
backward was compiled or not.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from dp_compile.plan.reduction import CALLED, Load, Reduction
from dp_compile.plan.words import BYTES_PER_MB, count, format_bytes

UNUSED_FLAGS: Final = "<unused-parameter flags>"
"""The one member of a plan that is not a gradient: status bits of each rank (`plan/flags.py`)."""

Partition = tuple[tuple[int, ...], ...]
"""Positions of gradients, ascending in each bucket; buckets in launch order, that of their last members."""


class BucketKey(NamedTuple):
    """Gradients may share a bucket only if all of these agree."""

    reduction: Reduction
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.device} {self.reduction}"


@dataclass(frozen=True)
class GradientSpec:
    """What a plan needs to know of one gradient.

    `index` is its position among the replicated parameters, `stride` that of the parameter (a bucket keeps its memory
    order), `itemsize` the bytes of an element in a bucket, on the wire. `sent`: how many bytes of it a comm hook sends
    in each of its rounds; empty: all of it, or unknown.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    key: BucketKey
    sent: tuple[int, ...] = ()

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def loads(self) -> tuple[Load, ...]:
        """What each stage of its reduction carries of it."""
        return self.key.reduction.loads(self.nbytes, self.sent)


@dataclass(frozen=True, slots=True)
class Member:
    """A gradient of a bucket. `offset`: where it starts in the bucket's memory, in elements."""

    gradient: GradientSpec
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Gradients of one key that are reduced together, in one flat tensor."""

    members: tuple[Member, ...]

    @cached_property
    def key(self) -> BucketKey:
        return self.members[0].gradient.key

    @cached_property
    def numel(self) -> int:
        """Its elements: with the gaps between members, and what makes it divide evenly into parts."""
        multiple_of = self.key.reduction.multiple_of
        return -(-max(member.offset + member.gradient.numel for member in self.members) // multiple_of) * multiple_of

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(member.gradient.nbytes for member in self.members)

    @property
    def padding_nbytes(self) -> int:
        """Bytes that are reduced although no gradient lies there."""
        return (self.numel - sum(member.gradient.numel for member in self.members)) * self.members[0].gradient.itemsize

    @property
    def span(self) -> tuple[int, str]:
        """How many gradients, and the first and the last: `2.bias .. 0.weight + flags`."""
        names = [member.gradient.name for member in self.members if member.gradient.name != UNUSED_FLAGS]
        ends = " .. ".join(dict.fromkeys((*names[:1], *names[-1:])))
        return len(names), ends + " + flags" * (len(names) < len(self.members))

    def __str__(self) -> str:
        number, span = self.span
        padding = f"  ({format_bytes(self.padding_nbytes)} padding)" if self.padding_nbytes else ""
        size = f"{format_bytes(self.nbytes):>10}  {count(number, 'gradient'):>14}"
        return f"{size}  {self.key}  {span if number else 'flags only'}{padding}"


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of one replicated module, in launch order.

    `keeps_memory`: whether the memory of buckets is used again in the next backward; `None`: where it pays, see
    `passes/memory.py`. Ranks need not agree on that: `to_dict` leaves it out.
    """

    buckets: tuple[Bucket, ...]
    keeps_memory: bool | None = None

    @property
    def gradients(self) -> tuple[GradientSpec, ...]:
        """Every gradient once, in launch order."""
        return tuple(member.gradient for bucket in self.buckets for member in bucket.members)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the names of groups."""
        buckets = [asdict(bucket) for bucket in self.buckets]
        for bucket, data in zip(self.buckets, buckets, strict=True):
            data["key"] = bucket.key._asdict() | {"reduction": bucket.key.reduction.to_dict()}
            for member in data["members"]:
                del member["gradient"]["key"]
        return {"buckets": buckets}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> BucketPlan:
        """What `to_dict` gave, with empty group names: for looking at, not for reducing by.

        Raises:
            KeyError, TypeError: a field is missing, unknown or of another kind.
        """
        buckets = []
        for bucket in data["buckets"]:
            key = BucketKey(**bucket["key"] | {"reduction": Reduction.from_dict(bucket["key"]["reduction"])})
            members = []
            for member in bucket["members"]:
                lists = {name: tuple(member["gradient"].get(name, ())) for name in ("shape", "stride", "sent")}
                members.append(Member(GradientSpec(**member["gradient"] | lists, key=key), member["offset"]))
            buckets.append(Bucket(tuple(members)))
        return BucketPlan(tuple(buckets))

    def with_keys_of(self, gradients: Iterable[GradientSpec]) -> BucketPlan:
        """The same buckets of the same gradients, which are reduced in another way."""
        now = {gradient.index: gradient for gradient in gradients}

        def changed(member: Member) -> Member:
            new = now[member.gradient.index]
            return replace(member, gradient=replace(member.gradient, key=new.key, sent=new.sent))

        return replace(self, buckets=tuple(Bucket(tuple(map(changed, each.members))) for each in self.buckets))

    def for_code(self) -> BucketPlan:
        """As compiled code knows it: the same for all factors that it asks for when it runs."""
        if not any(bucket.key.reduction.given for bucket in self.buckets):
            return self
        keys = ((each, each.key._replace(reduction=each.key.reduction.for_code())) for each in self.gradients)
        return self.with_keys_of(replace(gradient, key=key) for gradient, key in keys)

    def signature(self) -> str:
        """A short hash; two ranks with equal signatures run the same collectives."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        gradients = [gradient for gradient in self.gradients if gradient.name != UNUSED_FLAGS]
        head = f"plan: {count(len(self.buckets), 'bucket')}, {count(len(gradients), 'gradient')}"
        lines = [f"{head}, {format_bytes(self.nbytes)}"]
        lines += [f"  {position:>3}  {bucket}" for position, bucket in enumerate(self.buckets)]
        return "\n".join(lines)


ALIGNMENT_BYTES: Final = 64
"""Of members in the buckets of a module: a cache line, and more than the 16 that vectorised loads want."""

PACKED: Final = 1
"""The same of members that lie one after the other without gaps."""


def bucket_of(gradients: Sequence[GradientSpec], alignment_bytes: int = ALIGNMENT_BYTES) -> Bucket:
    """A bucket of gradients of one key, one after the other in the given order.

    Each starts at a multiple of `alignment_bytes`; one that is smaller than that, at a multiple of its size rounded up
    to a power of two, so that small gradients are not mostly padding. A Python hook finds no padding: hooks of torch's
    DDP cut the buffer by the sizes of its gradients.
    """
    members, end = list[Member](), 0
    for gradient in gradients:
        own_size = 1 << max(0, gradient.nbytes - 1).bit_length()
        step = max(1, min(alignment_bytes, own_size) // gradient.itemsize)  # in elements
        offset = end if gradient.key.reduction.hook == CALLED else -(-end // step) * step
        members.append(Member(gradient, offset))
        end = offset + gradient.numel
    return Bucket(tuple(members))


def partition_by_size(
    keys: Sequence[Hashable],
    sizes: Sequence[float],
    cap_nbytes: float,
    first_cap_nbytes: float,
    open_after: Collection[int] = (),
) -> Partition:
    """A bucket is closed when it holds its cap, the first of each key at another one; not `open_after` a position.

    Source: torch `compute_bucket_assignment_by_size` (reducer.cpp), with one open bucket per key.
    """
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, float] = defaultdict(float)
    caps: dict[Hashable, float] = defaultdict(lambda: first_cap_nbytes)
    closed: list[tuple[int, ...]] = []
    for position, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        filling.setdefault(key, []).append(position)
        filled[key] += size
        if filled[key] >= caps[key] and position not in open_after:
            closed.append(tuple(filling.pop(key)))
            filled[key], caps[key] = 0.0, cap_nbytes
    return tuple(sorted([*closed, *map(tuple, filling.values())], key=operator.itemgetter(-1)))


def plan_buckets(
    gradients: Sequence[GradientSpec],
    *,
    bucket_cap_mb: float,
    first_bucket_cap_mb: float | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> BucketPlan:
    """Fill buckets in the given order, in which gradients are expected to become ready, and close each when it has
    reached its cap, as torch's DDP does. Buckets are launched in the order of their last members.

    The flags go with the gradient before them: they never cost a collective. Padding does not count towards the caps,
    which are in MiB; the first one is for the first bucket of each key, by default like all others.
    """
    first_cap_mb = bucket_cap_mb if first_bucket_cap_mb is None else first_bucket_cap_mb
    flags = [each for each, gradient in enumerate(gradients) if gradient.name == UNUSED_FLAGS]
    partition = partition_by_size(
        [gradient.key for gradient in gradients],
        [gradient.nbytes for gradient in gradients],
        bucket_cap_mb * BYTES_PER_MB,
        first_cap_mb * BYTES_PER_MB,
        [each - 1 for each in flags if each and gradients[each - 1].key == gradients[each].key],
    )
    members = ([gradients[position] for position in each] for each in partition)
    return BucketPlan(tuple(bucket_of(each, alignment_bytes) for each in members))
