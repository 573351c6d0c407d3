"""In-place averages of tensors over a process group, after a check that all ranks pass equal shapes at the same step.

    first call       ranks compare tensors, step and schedule in the key-value store
    each averaging   one small all-reduce (step, hash of shapes and dtypes), read by the host, then one per bucket

The small all-reduce keeps a rank from sending a bucket to a rank that expects another: gloo would hang, or add
unrelated tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile.errors import CommunicationError, require
from dp_compile.passes.crossing import in_flight
from dp_compile.passes.reduction import EagerOps, finished, reduce_bucket, view_of
from dp_compile.plan.buckets import PACKED, Bucket, BucketPlan, plan_buckets
from dp_compile.replica.gradients import dense_strides, real_view, tensor_spec
from dp_compile.replica.group import group_on
from dp_compile.replica.replica import Replica, owners
from dp_compile.replica.store_channel import check_consistent_in_call, unique_topic

BUCKET_MB: Final = 25.0  # as in torch's DDP; buckets are per dtype and device type
IN_FLIGHT: Final = 2  # buckets at a time: one is filled during the reduction of the other, and memory stays small
ASK_S: Final = 5.0  # how long a rank whose collective failed waits for each status, until one is missing
CALL: Final = "average_parameters()"
AVERAGED: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def parameters_in(params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """Return all parameters of an iterable of parameters or groups, each once, with or without a gradient.

    Raises a `ConfigError` for other types, no parameters, or a parameter that cannot be averaged.
    """
    found: dict[int, torch.Tensor] = {}
    for each in params:
        require(isinstance(each, (torch.Tensor, dict)), "items of params", "parameters or param groups", type(each))
        for parameter in each["params"] if isinstance(each, dict) else (each,):
            found[id(parameter)] = parameter
    hint = " A generator that was used up? Call model.parameters() for each averaging."
    require(bool(found), "params", "at least one parameter", [], hint)
    for place, parameter in enumerate(found.values()):
        plain = type(parameter.detach()) is torch.Tensor and parameter.layout is torch.strided
        has_average = plain and parameter.dtype in AVERAGED and not parameter.is_meta
        shown = f"a {parameter.dtype} {type(parameter.detach()).__name__} on {parameter.device}"
        require(
            has_average,
            f"parameter {place} of params",
            f"dense, with values, of {', '.join(map(str, AVERAGED))}",
            shown,
        )
    if in_flight:
        for replica in {owner[0] for owner in map(owners.find, found.values()) if owner is not None}:
            replica.wait_for_updates()  # updates that an optimizer has deferred to the next forward
    return list(found.values())


def note_equal(parameters: Sequence[torch.Tensor], process_group: dist.ProcessGroup) -> None:
    """Record that averaged parameters are equal on all ranks again, for modules whose ranks are all in the group."""
    indices: dict[Replica, list[int]] = {}
    for replica, index in filter(None, map(owners.find, parameters)):
        indices.setdefault(replica, []).append(index)
    ranks = set(dist.get_process_group_ranks(process_group)) if dist.get_rank(process_group) >= 0 else set()
    for replica, averaged in indices.items():
        if ranks.issuperset(dist.get_process_group_ranks(replica.group.process_group)):
            replica.state.step_guard.made_equal(averaged)


class Exchange:
    """Averages tensors over a group, for one averager. Ranks outside the group do nothing.

    `schedule`: values that must be equal on all ranks, in addition to tensors and step.
    """

    def __init__(self, process_group: dist.ProcessGroup, schedule: Mapping[str, Any]) -> None:
        self._group, self._schedule = process_group, dict(schedule)
        self.has_met = dist.get_rank(process_group) < 0 or dist.get_world_size(process_group) == 1
        """Whether the ranks have compared their inputs; true if this rank has none to compare with."""
        self._topic = "" if self.has_met else unique_topic(group_on(process_group, "cpu"), "averaging")
        self._known: tuple[list[tuple[Any, ...]], BucketPlan, int] = [], BucketPlan(()), 0
        """Kinds, buckets and hash of the tensors that were averaged last."""

    def meet(self, tensors: Sequence[torch.Tensor], step: int, **more: Any) -> None:
        """Compare tensors, step and `more` with all ranks of the group. Raise a `DesyncError` on all if one differs."""
        self._compare(tensors, step, **self._schedule, **more)
        self.has_met = True

    def average(self, tensors: Sequence[torch.Tensor], step: int) -> None:
        """Average each tensor over the group, in place. Raise before any is averaged if tensors or steps differ."""
        if dist.get_rank(self._group) < 0 or dist.get_world_size(self._group) == 1:
            return
        plan, hashed = self._plan(tensors)
        with self.naming_missing(self._group, step, f"{CALL} at step {step}"), torch.no_grad():
            own = torch.tensor([step, hashed])
            both = torch.cat([own, -own]).to(tensors[0].device)
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
            largest, smallest = both.cpu().view(2, 2)
            if not torch.equal(largest, -smallest):
                self._compare(tensors, step)
            _reduce(plan, [real_view(tensor.detach()) for tensor in tensors])

    def _plan(self, tensors: Sequence[torch.Tensor]) -> tuple[BucketPlan, int]:
        """Return the buckets of the tensors, and a hash of their dtypes, shapes and memory order."""
        described = list(map(_described, tensors))
        kinds = [(*kind, tensor.device.type) for kind, tensor in zip(described, tensors, strict=True)]
        if self._known[0] != kinds:
            groups = {kind: group_on(self._group, kind) for kind in {tensor.device.type for tensor in tensors}}
            specs = [tensor_spec(i, str(i), tensor, groups[tensor.device.type]) for i, tensor in enumerate(tensors)]
            plan = plan_buckets(specs, bucket_cap_mb=BUCKET_MB, alignment_bytes=PACKED)
            hashed = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:7])
            self._known = kinds, plan, hashed
        return self._known[1:]

    def _compare(self, tensors: Sequence[torch.Tensor], step: int, **more: Any) -> None:
        group = group_on(self._group, tensors[0].device.type)
        statement = {**more, "step": step, "parameters": [" ".join(map(str, _described(tensor))) for tensor in tensors]}
        check_consistent_in_call(group, statement, CALL)

    @contextlib.contextmanager
    def naming_missing(self, process_group: dist.ProcessGroup, step: int, what: str) -> Iterator[None]:
        """Turn a communication error in the block into a `CommunicationError` with `what` and the missing ranks."""
        try:
            yield
        except RuntimeError as error:
            if not distributed.is_communication_error(error):
                raise
            raise CommunicationError(f"{what}: {self._who_is_missing(process_group, step)} ({error})") from error

    def _who_is_missing(self, process_group: dist.ProcessGroup, step: int) -> str:
        """Publish this rank's step in the store, and name the ranks that are missing or failed at another step."""
        store, own = distributed.default_store(), dist.get_rank()
        missing: list[int] = []
        elsewhere: list[str] = []
        try:
            store.set(f"{self._topic}/lost/{own}", str(step))
            for rank in dist.get_process_group_ranks(process_group):
                try:
                    store.wait([f"{self._topic}/lost/{rank}"], timedelta(seconds=0.1 if missing else ASK_S))
                except RuntimeError:
                    missing.append(rank)
                    continue
                there = int(store.get(f"{self._topic}/lost/{rank}"))
                elsewhere += [f"rank {rank} is at step {there}"] if there != step else []
        except RuntimeError:
            return "the key-value store does not answer, so the missing rank is unknown"
        absent = ", ".join(map(str, missing))
        elsewhere += [f"rank(s) {absent} did not reach this step, or have not timed out yet"] if missing else []
        return "; ".join(elsewhere) or "all ranks reached this step, but could not communicate"


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what must be equal on all ranks: a tensor's dtype, shape, and memory order, which its bucket keeps."""
    order = () if tensor.is_contiguous() else ("strides", dense_strides(tensor))
    return (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), *order)


def _reduce(plan: BucketPlan, tensors: Sequence[torch.Tensor]) -> None:
    """Average the tensors of a plan, in place."""
    flights = deque[tuple[Bucket, Any]]()

    def land(bucket: Bucket, reducing: Any) -> None:
        reduced = finished(reducing)
        for member in bucket.members:
            tensors[member.gradient.index].copy_(view_of(member, reduced))

    for bucket in plan.buckets:
        members = [tensors[member.gradient.index] for member in bucket.members]
        reducing = reduce_bucket(bucket, EagerOps(bucket, members, members[0].device))
        next(reducing)  # launches it
        flights.append((bucket, reducing))
        if len(flights) == IN_FLIGHT:
            land(*flights.popleft())
    for flight in flights:
        land(*flight)
