"""Bucket plans: which gradients are reduced together, and in which order. Pure data, equal on every rank.

A plan is a function of the parameters (order, shapes, dtypes, devices), the group, the configuration, and ready times
and a network cost that are equal on all ranks. Compiled and eager backwards run its buckets in the same order.
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

UNUSED_FLAGS: Final = "<unused-parameter flags>"  # the only member that is no gradient: status bits (`plan/flags.py`)

Partition = tuple[tuple[int, ...], ...]
"""Positions of gradients, ascending in each bucket; buckets in launch order, which is that of their last members."""


class BucketKey(NamedTuple):
    """Gradients may share a bucket only if their keys are equal."""

    reduction: Reduction
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.device} {self.reduction}"


@dataclass(frozen=True)
class GradientSpec:
    """The properties of a gradient on which a plan depends.

    `index`: position among the replicated parameters. `stride`: of the parameter, whose memory order the bucket keeps.
    `itemsize`: bytes per element in a bucket, on the wire. `sent`: bytes that a comm hook sends of this gradient in
    each round; empty: all bytes, or unknown.
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
        """Traffic of this gradient in each stage of its reduction."""
        return self.key.reduction.loads(self.nbytes, self.sent)


@dataclass(frozen=True, slots=True)
class Member:
    """A gradient of a bucket. `offset`: its start in the bucket, in elements."""

    gradient: GradientSpec
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Gradients with equal keys that are reduced together, in one flat tensor."""

    members: tuple[Member, ...]

    @cached_property
    def key(self) -> BucketKey:
        return self.members[0].gradient.key

    @cached_property
    def numel(self) -> int:
        """Number of elements, including gaps between members and padding to equal parts for the ranks."""
        multiple_of = self.key.reduction.multiple_of
        return -(-max(member.offset + member.gradient.numel for member in self.members) // multiple_of) * multiple_of

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients in this bucket, without padding."""
        return sum(member.gradient.nbytes for member in self.members)

    @property
    def padding_nbytes(self) -> int:
        """Bytes that are reduced but belong to no gradient."""
        return (self.numel - sum(member.gradient.numel for member in self.members)) * self.members[0].gradient.itemsize

    @property
    def span(self) -> tuple[int, str]:
        """The number of gradients, and the names of the first and the last: `2.bias .. 0.weight + flags`."""
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

    `keeps_memory`: whether the next backward reuses the memory of buckets; `None`: only a captured backward, if reuse
    is faster (`passes/memory.py`). This may differ between ranks, so `to_dict` omits it.
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
        """Return plain data for JSON, without the names of process groups."""
        buckets = [asdict(bucket) for bucket in self.buckets]
        for bucket, data in zip(self.buckets, buckets, strict=True):
            data["key"] = bucket.key._asdict() | {"reduction": bucket.key.reduction.to_dict()}
            for member in data["members"]:
                del member["gradient"]["key"]
        return {"buckets": buckets}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> BucketPlan:
        """Return a plan from the result of `to_dict`, for display only: its group names are empty.

        Raises:
            KeyError, TypeError, AttributeError: a field is missing, unknown or of another kind.
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
        """Return the same buckets with `key` and `sent` from `gradients`, where each member's index must occur."""
        now = {gradient.index: gradient for gradient in gradients}

        def changed(member: Member) -> Member:
            new = now[member.gradient.index]
            return replace(member, gradient=replace(member.gradient, key=new.key, sent=new.sent))

        return replace(self, buckets=tuple(Bucket(tuple(map(changed, each.members))) for each in self.buckets))

    def for_code(self) -> BucketPlan:
        """Return the plan for compiled code: the same for any values of factors that the code reads at run time."""
        if not any(bucket.key.reduction.given for bucket in self.buckets):
            return self
        keys = ((each, each.key._replace(reduction=each.key.reduction.for_code())) for each in self.gradients)
        return self.with_keys_of(replace(gradient, key=key) for gradient, key in keys)

    def signature(self) -> str:
        """Return a short hash. Ranks with equal signatures run the same collectives."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        gradients = [gradient for gradient in self.gradients if gradient.name != UNUSED_FLAGS]
        head = f"plan: {count(len(self.buckets), 'bucket')}, {count(len(gradients), 'gradient')}"
        lines = [f"{head}, {format_bytes(self.nbytes)}"]
        lines += [f"  {position:>3}  {bucket}" for position, bucket in enumerate(self.buckets)]
        return "\n".join(lines)


ALIGNMENT_BYTES: Final = 64  # of members in a bucket: a cache line, and more than the 16 for vectorised loads
PACKED: Final = 1  # alignment of members without gaps


def bucket_of(gradients: Sequence[GradientSpec], alignment_bytes: int = ALIGNMENT_BYTES) -> Bucket:
    """Return a bucket of gradients with equal keys, in the given order.

    Each gradient starts at a multiple of `alignment_bytes`, a smaller one at a multiple of its size, rounded up to a
    power of two, which limits padding. A bucket for a Python hook has no padding, because hooks of torch's DDP split
    the buffer by the sizes of the gradients.
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
    """Partition positions into buckets of one key. A bucket is closed at its cap, but not after one of `open_after`.

    `first_cap_nbytes`: of a key's first bucket. Source: torch `compute_bucket_assignment_by_size` (reducer.cpp).
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
    """Fill buckets in the given order, the expected ready order, and close each at its cap, as torch's DDP does.

    Buckets are launched in the order of their last members. The flags share the bucket of the gradient before them if
    both keys are equal, which saves a collective. Caps are in MiB and exclude padding. `first_bucket_cap_mb`: cap of
    the first bucket of each key; `None`: `bucket_cap_mb`.
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
