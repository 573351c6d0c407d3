"""Which gradients are reduced together, and in which order: pure data, the same on every rank.

A plan is a function of the parameters (order, shapes, dtypes, devices), the group and the configuration; never of
a rank's own timing, cache or activations. Every rank runs the plan's buckets in the plan's order, whether its
backward was compiled or not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from dp_compile.errors import ConfigError
from dp_compile.plan.reduction import CALLED, Load, Reduction
from dp_compile.plan.words import BYTES_PER_MB, count, format_bytes

PLAN_VERSION = 3
UNUSED_FLAGS: Final = "<unused-parameter flags>"
"""The one member of a plan that is not a gradient: which parameters each rank did not use."""


class BucketKey(NamedTuple):
    """Gradients may share a bucket only if all of these agree."""

    reduction: Reduction
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.device} {self.reduction}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without names of groups."""
        return self._asdict() | {"reduction": self.reduction.without_groups().to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> BucketKey:
        return BucketKey(Reduction.from_dict(data["reduction"]), data["dtype"], data["device"])


@dataclass(frozen=True)
class GradientSpec:
    """What a plan needs to know of one gradient.

    `index` is its position among the replicated parameters, `stride` the strides of the parameter in elements (a
    bucket keeps the parameter's memory order), `itemsize` the bytes of an element in a bucket, on the wire. `sent`: how
    many bytes of it a comm hook hands out in each of its rounds; empty: all of it, or nobody knows.
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


@dataclass(frozen=True, slots=True)
class Member:
    """A gradient of a bucket.

    `offset`: where it starts in the bucket's flat memory, in elements. `None`: uncoalesced, it is reduced in the memory
    that it was computed in.
    """

    gradient: GradientSpec
    offset: int | None

    @property
    def numel(self) -> int:
        return self.gradient.numel

    @property
    def nbytes(self) -> int:
        return self.gradient.nbytes

    @property
    def label(self) -> str:
        return self.gradient.name

    @property
    def loads(self) -> tuple[Load, ...]:
        """What each stage of its reduction carries of it."""
        return self.gradient.key.reduction.loads(self.nbytes, self.gradient.sent)


class Place(NamedTuple):
    """Where a member lies: in which of the bucket's tensors, and how many elements from its start."""

    tensor: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced by one collective: a flat memory with some of them, and the others apart."""

    key: BucketKey
    members: tuple[Member, ...]
    reason: str

    @cached_property
    def numel(self) -> int:
        """Elements of the flat memory: with the gaps between members, and what makes it divide evenly into parts."""
        return self._evenly(max((m.offset + m.numel for m in self.members if m.offset is not None), default=0))

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(member.nbytes for member in self.members)

    @property
    def padding_nbytes(self) -> int:
        """Bytes that are reduced although no gradient lies there."""
        together = sum(member.numel for member in self.members if member.offset is not None)
        return (self.numel - together) * self.members[0].gradient.itemsize

    @cached_property
    def tensor_numels(self) -> tuple[int, ...]:
        """Elements of each tensor that the collective carries: the flat memory, if any, then what is apart."""
        apart = tuple(self._evenly(member.numel) for member in self.members if member.offset is None)
        return apart if len(apart) == len(self.members) else (self.numel, *apart)

    def _evenly(self, numel: int) -> int:
        multiple_of = self.key.reduction.multiple_of
        return -(-numel // multiple_of) * multiple_of

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Where each member lies among `tensor_numels`, in the order of the members."""
        apart = itertools.count(len(self.tensor_numels) - sum(member.offset is None for member in self.members))
        return tuple(
            Place(next(apart), 0) if member.offset is None else Place(0, member.offset) for member in self.members
        )

    @cached_property
    def members_of_tensors(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the members that lie in each of `tensor_numels`."""
        members: list[list[int]] = [[] for _ in self.tensor_numels]
        for number, place in enumerate(self.places):
            members[place.tensor].append(number)
        return tuple(map(tuple, members))


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of one replicated module, in launch order.

    `keeps_memory`: whether the memory of buckets is used again in the next backward; `None`: where it pays, see
    `passes/memory.py`. No two ranks have to agree on that, and `to_dict` does not say it.
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
        """Plain data for JSON. Group names are left out: they are a rank's own affair."""
        buckets = [asdict(bucket) | {"key": bucket.key.to_dict()} for bucket in self.buckets]
        for bucket in buckets:
            for member in bucket["members"]:
                del member["gradient"]["key"]
                if not member["gradient"]["sent"]:
                    del member["gradient"]["sent"]
        return {"version": PLAN_VERSION, "buckets": buckets}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> BucketPlan:
        """What `to_dict` gave, with empty group names: for looking at, not for reducing by.

        Raises:
            ConfigError: of another version.
            KeyError, TypeError: a field is missing, unknown or of another kind.
        """
        if data["version"] != PLAN_VERSION:
            raise ConfigError(f"the plan is of version {data['version']!r}, readable is {PLAN_VERSION}. Save it anew.")
        return BucketPlan(tuple(_bucket(each) for each in data["buckets"]))

    @property
    def flags(self) -> GradientSpec:
        """The one that is no gradient. It lies in one of the last buckets, if not in the last."""
        members = (member for bucket in reversed(self.buckets) for member in reversed(bucket.members))
        return next(member.gradient for member in members if member.gradient.name == UNUSED_FLAGS)

    def with_keys_of(self, gradients: Sequence[GradientSpec]) -> BucketPlan:
        """The same buckets of the same gradients, which are reduced in another way."""
        now = {gradient.index: gradient for gradient in gradients}

        def changed(member: Member) -> Member:
            gradient = now[member.gradient.index]
            return replace(member, gradient=replace(member.gradient, key=gradient.key, sent=gradient.sent))

        buckets = [(bucket, tuple(map(changed, bucket.members))) for bucket in self.buckets]
        return replace(
            self,
            buckets=tuple(replace(each, key=members[0].gradient.key, members=members) for each, members in buckets),
        )

    def given_reductions(self) -> tuple[Reduction, ...]:
        """The reductions with factors that compiled code is given when it runs."""
        found = dict.fromkeys(bucket.key.reduction for bucket in self.buckets)
        return tuple(reduction for reduction in found if reduction.given)

    def for_code(self) -> BucketPlan:
        """As compiled code knows it: the same for all factors that it is given when it runs."""
        if not self.given_reductions():
            return self
        keys = ((each, each.key._replace(reduction=each.key.reduction.for_code())) for each in self.gradients)
        return self.with_keys_of([replace(gradient, key=key) for gradient, key in keys])

    def signature(self) -> str:
        """A short hash; two ranks with equal signatures run the same collectives."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        gradients = [gradient for gradient in self.gradients if gradient.name != UNUSED_FLAGS]
        head = f"plan: {count(len(self.buckets), 'bucket')}, {count(len(gradients), 'gradient')}"
        lines = [f"{head}, {format_bytes(self.nbytes)}"]
        lines += [f"  {position:>3}  {_describe(bucket)}" for position, bucket in enumerate(self.buckets)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Layout:
    """How members lie in their buckets.

    A member starts at a multiple of `alignment_bytes`; one that is smaller than that, at a multiple of its own size
    rounded up to a power of two, so that small gradients are not mostly padding. Gradients named in `apart` keep
    memory of their own, unless ranks keep parts of their bucket or a Python hook is given the whole of it. Such a
    hook finds no padding: hooks of torch's DDP cut the buffer by the sizes of its gradients.
    """

    alignment_bytes: int
    apart: frozenset[str] = frozenset()

    def bucket(
        self,
        key: BucketKey,
        gradients: Sequence[GradientSpec],
        reason: str,
    ) -> Bucket:
        """A bucket with its members one after the other, in the given order.

        Args:
            key: what all members have in common.
            gradients: one for each member.
            reason: why the bucket ends here.
        """
        members: list[Member] = []
        end = 0
        for gradient in gradients:
            member = Member(gradient, None)
            is_called = key.reduction.hook == CALLED
            if gradient.name not in self.apart or key.reduction.is_scattered or is_called:
                step = 1 if is_called else self._step(member)
                member = replace(member, offset=-(-end // step) * step)
                end = -(-end // step) * step + member.numel
            members.append(member)
        return Bucket(key, tuple(members), reason)

    def _step(self, member: Member) -> int:
        """What an offset has to be a multiple of, in elements."""
        own_size = 1 << max(0, member.nbytes - 1).bit_length()
        return max(1, min(self.alignment_bytes, own_size) // member.gradient.itemsize)


ALIGNMENT_BYTES: Final = 64
"""Of members in the buckets of a module: a cache line, and more than the 16 that vectorised loads want."""

PACKED: Final = Layout(alignment_bytes=1)
"""One after the other without gaps."""


def plan_buckets(
    gradients: Sequence[GradientSpec], *, bucket_cap_mb: float, first_bucket_cap_mb: float, layout: Layout = PACKED
) -> BucketPlan:
    """Fill buckets in the given order and close each when it has reached its cap, as torch's DDP does.

    Args:
        gradients: in the order in which they are expected to become ready.
        bucket_cap_mb: MiB at which a bucket is closed.
        first_bucket_cap_mb: the same for the first bucket of each key.
        layout: where members start in a bucket; padding does not count towards the caps.

    Source: torch `compute_bucket_assignment_by_size` (reducer.cpp), with one open bucket per key. Buckets are
    launched in the order in which their last member becomes ready. The flags go with the gradient before them: they
    never cost a collective of their own.
    """
    filling: dict[BucketKey, list[GradientSpec]] = {}
    filled: Counter[BucketKey] = Counter()
    closed: list[tuple[int, Bucket]] = []
    past_first: set[BucketKey] = set()
    last_position: dict[BucketKey, int] = {}

    def close(key: BucketKey, reason: str) -> None:
        closed.append((last_position[key], layout.bucket(key, filling.pop(key), reason)))
        past_first.add(key)
        del filled[key]

    for position, gradient in enumerate(gradients):
        key = gradient.key
        members = filling.setdefault(key, [])
        members.append(gradient)
        filled[key] += gradient.nbytes
        last_position[key] = position
        cap_mb = bucket_cap_mb if key in past_first else first_bucket_cap_mb
        if filled[key] >= cap_mb * BYTES_PER_MB and not _flags_follow(gradients, position):
            close(key, f"reached the {'' if key in past_first else 'first '}cap of {cap_mb:g} MiB")
    for key in list(filling):
        close(key, "last of its key")
    return BucketPlan(tuple(bucket for _, bucket in sorted(closed, key=lambda item: item[0])))


def _flags_follow(gradients: Sequence[GradientSpec], position: int) -> bool:
    following = gradients[position + 1 : position + 2]
    return bool(following) and following[0].name == UNUSED_FLAGS and following[0].key == gradients[position].key


def plan_single(gradients: Sequence[GradientSpec]) -> BucketPlan:
    """Each gradient for itself, in the given order: what runs when no pass makes buckets.

    Row by row whatever the parameter's memory order, as the op does that is left in the graph then.
    """
    rows = [replace(gradient, stride=_row_by_row(gradient.shape)) for gradient in gradients]
    return BucketPlan(tuple(PACKED.bucket(gradient.key, [gradient], "no bucketing") for gradient in rows))


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = list(itertools.accumulate(shape[:0:-1], lambda step, size: step * max(size, 1), initial=1))
    return tuple(reversed(strides)) if shape else ()


def _bucket(data: Mapping[str, Any]) -> Bucket:
    key = BucketKey.from_dict(data["key"])
    members = []
    for each in data["members"]:
        given = dict(each["gradient"])
        shape, stride = tuple(given.pop("shape")), tuple(given.pop("stride"))
        sent = tuple(map(int, given.pop("sent", ())))
        members.append(Member(GradientSpec(shape=shape, stride=stride, key=key, sent=sent, **given), each["offset"]))
    return Bucket(key, tuple(members), data["reason"])


def _describe(bucket: Bucket) -> str:
    names = [member.label for member in bucket.members]
    gradients = [name for name in names if name != UNUSED_FLAGS]
    span = " .. ".join(dict.fromkeys((gradients[0], gradients[-1]))) if gradients else "flags only"
    flags = " + flags" if gradients and len(gradients) < len(names) else ""
    apart = sum(member.offset is None for member in bucket.members)
    notes = [bucket.reason]
    notes += [f"{apart} of {len(names)} in memory of their own"] if apart else []
    notes += [f"{format_bytes(bucket.padding_nbytes)} padding"] if bucket.padding_nbytes else []
    return (
        f"{format_bytes(bucket.nbytes):>10}  {count(len(gradients), 'gradient'):>14}  "
        f"{bucket.key}  {span}{flags}  ({'; '.join(notes)})"
    )
