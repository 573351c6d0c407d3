"""Tensors averaged over a process group where they lie, if all its ranks mean the same tensors at the same step.

    first call       ranks compare tensors, step and schedule in the key-value store
    each averaging   one small all-reduce (step and a hash of the tensors) that is read, then the buckets

The small all-reduce comes first, so that no rank sends a bucket to one that expects another: with gloo such a rank
hangs, or adds up what does not belong together.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile.comm_hooks.functional import FunctionalHook, State, register
from dp_compile.engine.gradients import dense_strides, real_view, tensor_spec
from dp_compile.engine.group import group_on
from dp_compile.engine.owners import owners
from dp_compile.engine.plan_sync import agree, table_of
from dp_compile.engine.replica import Replica
from dp_compile.errors import CommunicationError, ConfigError, DesyncError
from dp_compile.optim.deferred import Deferred, Pending
from dp_compile.passes.crossing import in_flight
from dp_compile.passes.reduction import EagerOps, finished, reduce_bucket, view_of
from dp_compile.plan.buckets import BucketPlan, plan_buckets
from dp_compile.plan.reduction import Averaging

BUCKET_MB: Final = 25.0
"""As large as those of torch's DDP; for each dtype and type of device its own."""
IN_FLIGHT: Final = 2
"""Buckets that are on their way at a time, but for those left to the next forward: one is filled while the other
travels, and memory stays small."""
ASK_S: Final = 5.0
"""How long ranks that could not reach each other look for those that are missing."""
CALL: Final = "average_parameters()"
AVERAGED: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)

_exchanges: Final[Counter[str]] = Counter()


def parameters_in(params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """All parameters of an iterable of them or of an optimizer's groups, each once, with a gradient or without.

    Raises:
        NotImplementedError: it holds something else, as with torch's averagers.
        ConfigError: it holds none, or one that has no average.
    """
    found: dict[int, torch.Tensor] = {}
    for each in params:
        if not isinstance(each, (torch.Tensor, dict)):
            raise NotImplementedError(
                f"params must hold parameters or parameter groups, got {type(each).__name__}. "
                "Pass model.parameters() or optimizer.param_groups."
            )
        for parameter in each["params"] if isinstance(each, dict) else (each,):
            found[id(parameter)] = parameter
    if not found:
        raise ConfigError(
            "params holds no parameters: a generator that was used up? Call model.parameters() anew each time."
        )
    for place, parameter in enumerate(found.values()):
        plain = type(parameter.detach()) is torch.Tensor and parameter.layout is torch.strided
        if not plain or parameter.dtype not in AVERAGED or parameter.is_meta:
            raise ConfigError(
                f"parameter {place} of params is a {parameter.dtype} {type(parameter.detach()).__name__} on "
                f"{parameter.device}, which has no average. Averaged are dense {', '.join(map(str, AVERAGED))}."
            )
    if in_flight:
        for replica in {owner[0] for owner in map(owners.find, found.values()) if owner is not None}:
            replica.arrive()  # updates that an optimizer has left for the next forward
    return list(found.values())


def tell_modules(parameters: Sequence[torch.Tensor], process_group: dist.ProcessGroup) -> None:
    """Parameters of replicated modules are equal again on the ranks of a group: steps of each rank's own are over."""
    indices: dict[Replica, list[int]] = {}
    for found in filter(None, map(owners.find, parameters)):
        indices.setdefault(found[0], []).append(found[1])
    for replica, averaged in indices.items():
        if _makes_equal(replica, process_group):
            replica.local.made_equal(averaged)


def _makes_equal(replica: Replica, process_group: dist.ProcessGroup) -> bool:
    """Whether an average over a group is one over all ranks of a module."""
    equal = set(dist.get_process_group_ranks(process_group)) if dist.get_rank(process_group) >= 0 else set()
    return equal.issuperset(dist.get_process_group_ranks(replica.group.process_group))


class _Look(NamedTuple):
    """What tensors are like, their buckets, and a number that other tensors do not have."""

    said: tuple[tuple[Any, ...], ...]
    plan: BucketPlan
    hash: int


@dataclass(eq=False, slots=True)
class Exchange:
    """The averagings of one averager.

    Args:
        process_group: of all ranks that take part. A rank that is not in it does nothing.
        schedule: what has to be the same on all ranks beside tensors and step.
        hook: how tensors travel; `None`: as they are.

    Raises:
        ConfigError: ranks cannot compare this hook.
    """

    process_group: dist.ProcessGroup
    schedule: Mapping[str, Any]
    hook: FunctionalHook | None = None
    _averaging: Averaging = field(default_factory=Averaging)
    _topic: str = ""
    _has_met: bool = False
    _looks: dict[str, _Look] = field(default_factory=dict)
    """The last one at what a group averages, by the group's name."""
    _meetings: int = 0

    def __post_init__(self) -> None:
        if self.hook is not None:
            key, self.hook = register(self.hook)
            self._averaging = Averaging(hook=key, rounds=self.hook.rounds)
            self.schedule = {**self.schedule, "comm_hook": key}
        if self.has_others:
            name = distributed.group_name(self.process_group)
            _exchanges[name] += 1
            self._topic = f"dp_compile.averaging/{name}/{_exchanges[name]}"

    @property
    def has_others(self) -> bool:
        """Whether there is anybody to average with."""
        return dist.get_rank(self.process_group) >= 0 and dist.get_world_size(self.process_group) > 1

    @property
    def has_met(self) -> bool:
        """Whether the ranks have compared what they were given."""
        return self._has_met or not self.has_others

    def meet(self, tensors: Sequence[torch.Tensor], step: int, **more: Any) -> None:
        """Compare once with all ranks of the group; `more` is compared too.

        Raises:
            DesyncError: on every rank, they were given different tensors, steps or schedules, or one did not come.
        """
        self._compare(self.process_group, tensors, step, **self.schedule, **more)
        self._has_met = True

    def average(
        self,
        tensors: Sequence[torch.Tensor],
        step: int,
        process_group: dist.ProcessGroup,
        states: Sequence[State] | None = None,
        *,
        may_cross: bool = False,
    ) -> None:
        """Set each tensor to its average over the ranks of a group, in place.

        Args:
            tensors: the same on all ranks but for their values.
            step: of the caller.
            process_group: over which to average.
            states: what the hook remembers of each tensor, updated in place.
            may_cross: leave buckets on their way for the next forward, where that waits for its parameters.

        Raises:
            DesyncError: on every rank of the group, other ranks have other tensors or are at another step.
            CommunicationError: a rank did not come within the group's time-out.
        """
        if dist.get_rank(process_group) < 0 or dist.get_world_size(process_group) == 1:
            return
        look = self._look_at(tensors, process_group)
        with self.naming_missing(process_group, step), torch.no_grad():
            if not _all_mean_the_same(tensors[0].device, step, look.hash, process_group):
                self._compare(process_group, tensors, step)
            leave = None
            if may_cross:
                lie = Counter(tensor.data_ptr() for tensor in tensors if tensor.numel())
                shared = frozenset(address for address, count in lie.items() if count > 1)
                leave = partial(self._leave, tensors, shared, step, process_group)
            _reduce(look.plan, tensors, states or [{}] * len(tensors), leave)

    def _leave(
        self,
        tensors: Sequence[torch.Tensor],
        shared: frozenset[int],
        step: int,
        process_group: dist.ProcessGroup,
        flight: _Flight,
    ) -> bool:
        """Leave a bucket that was launched to the next forward, if that waits for what lies in it.

        `shared`: addresses at which several of the tensors lie.
        """
        bucket = flight.ops.bucket
        members = [tensors[member.gradient.index] for member in bucket.members]
        found = [owners.find(member) for member in members]
        replicas = {place[0] for place in found if place is not None}
        if None in found or len(replicas) > 1 or len(bucket.key.reduction.stages) > 1:
            return False  # later stages would be launched when somebody reads: on each rank in another order
        if shared.intersection(member.data_ptr() for member in members):
            return False  # one that arrives would have written to another that is in flight
        (replica,) = replicas
        deferred = next((each.deferred for each in replica.after.updates if each.deferred is not None), None)
        if not isinstance(deferred, Deferred):
            return False
        indices = tuple(place[1] for place in found if place is not None)
        return deferred.leave_behind(
            PendingAverage(
                deferred=deferred,
                replica=replica,
                indices=indices,
                buckets=(),
                flight=flight,
                missing=partial(self.naming_missing, process_group, step),
                makes_equal=_makes_equal(replica, process_group),
            )
        )

    @contextlib.contextmanager
    def naming_missing(self, process_group: dist.ProcessGroup, step: int, what: str = "") -> Iterator[None]:
        """Inside, ranks wait for each other; `what`: for what, for errors.

        Raises:
            CommunicationError: in place of torch's error, one that says for whom.
        """
        try:
            yield
        except DesyncError:
            raise
        except RuntimeError as error:
            if not distributed.is_communication_error(error):
                raise
            said = self.who_is_missing(process_group, step)
            raise CommunicationError(f"{what or f'{CALL} at step {step}'}: {said} ({error})") from error

    def _look_at(self, tensors: Sequence[torch.Tensor], process_group: dist.ProcessGroup) -> _Look:
        name = distributed.group_name(process_group)
        said = tuple((*_described(tensor), tensor.device.type) for tensor in tensors)
        if name in self._looks and self._looks[name].said == said:
            return self._looks[name]
        kinds = dict.fromkeys(each.device.type for each in tensors)
        groups = {kind: replace(group_on(process_group, kind), averaging=self._averaging) for kind in kinds}
        specs = [tensor_spec(i, str(i), tensor, groups[tensor.device.type]) for i, tensor in enumerate(tensors)]
        plan = plan_buckets(specs, bucket_cap_mb=BUCKET_MB, first_bucket_cap_mb=BUCKET_MB)
        described = repr([_described(tensor) for tensor in tensors])
        self._looks[name] = _Look(said, plan, int.from_bytes(hashlib.sha256(described.encode()).digest()[:7]))
        return self._looks[name]

    def _compare(
        self, process_group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], step: int, **more: Any
    ) -> None:
        self._meetings += 1
        group = group_on(process_group, tensors[0].device.type)
        topic = f"{self._topic}/{group.name}/{self._meetings}"
        parameters = [" ".join(map(str, _described(tensor))) for tensor in tensors]
        if (table := table_of(group, tensors[0].device)) is not None:
            agree(table, topic, {**more, "step": step, "parameters": parameters}, call=CALL)

    def who_is_missing(self, process_group: dist.ProcessGroup, step: int) -> str:
        """Asked in the store by every rank that gave up: those that wait at another step are found there, too."""
        store, own = distributed.default_store(), dist.get_rank()
        others = [rank for rank in dist.get_process_group_ranks(process_group) if rank != own]
        missing: list[int] = []
        elsewhere: list[str] = []
        try:
            store.set(f"{self._topic}/lost/{own}", str(step))
            for rank in others:
                try:
                    store.wait([f"{self._topic}/lost/{rank}"], timedelta(seconds=0.1 if missing else ASK_S))
                except RuntimeError:
                    missing.append(rank)
                    continue
                there = int(store.get(f"{self._topic}/lost/{rank}"))
                elsewhere += [f"rank {rank} is at step {there}"] if there != step else []
        except RuntimeError:
            return "the key-value store does not answer, so it is not known who is missing"
        absent = ", ".join(map(str, missing))
        elsewhere += [f"rank(s) {absent} did not come, or have not noticed yet"] if missing else []
        return "; ".join(elsewhere) or "all ranks were there, and could not reach each other"


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What has to be the same on all ranks. Memory order too: buckets keep it."""
    order = () if tensor.is_contiguous() else ("strides", dense_strides(tensor))
    return (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), *order)


def _all_mean_the_same(device: torch.device, step: int, hashed: int, process_group: dist.ProcessGroup) -> bool:
    own = torch.tensor([step, hashed])
    both = torch.cat([own, -own]).to(device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=process_group)
    largest, smallest = both.cpu().view(2, 2)
    return torch.equal(largest, -smallest)


class _Flight(NamedTuple):
    """A bucket that was launched, and where its averages go."""

    ops: EagerOps
    reducing: Generator[None, None, list[torch.Tensor]]
    targets: Sequence[torch.Tensor]

    def land(self) -> None:
        """Wait for the bucket and put the averages where the tensors lie."""
        reduced, bucket = finished(self.reducing), self.ops.bucket
        for member, place in zip(bucket.members, bucket.places, strict=True):
            self.targets[member.gradient.index].copy_(view_of(member, reduced[place.tensor], place.offset))
        self.ops.remember()


@dataclass(eq=False, slots=True, kw_only=True)
class PendingAverage(Pending):
    """A bucket of parameters whose averages are on their way.

    `missing`: around a wait, names the ranks that did not come. `makes_equal`: all ranks of the module have the same
    then.
    """

    flight: _Flight
    missing: Callable[[], contextlib.AbstractContextManager[None]]
    makes_equal: bool
    what = "average"
    of_backward = False

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.flight.ops.bucket.members)

    def wait(self) -> None:
        finished(self.flight.reducing)

    def finish(self) -> None:
        with self.missing():
            self.flight.land()
        if self.makes_equal:
            self.replica.local.made_equal(self.indices)


def _reduce(
    plan: BucketPlan,
    tensors: Sequence[torch.Tensor],
    states: Sequence[State],
    leave: Callable[[_Flight], bool] | None = None,
) -> None:
    """Average the tensors of a plan; what `leave` takes is somebody else's to land."""
    sources = [real_view(tensor.detach()) for tensor in tensors]
    flights: deque[_Flight] = deque()
    for bucket in plan.buckets:
        indices = [member.gradient.index for member in bucket.members]
        members, remembered = [sources[index] for index in indices], [states[index] for index in indices]
        ops = EagerOps(bucket, members, members[0].device, state=remembered)
        reducing = reduce_bucket(bucket, ops)
        next(reducing)
        flight = _Flight(ops, reducing, sources)
        if leave is not None and leave(flight):
            continue
        flights.append(flight)
        if len(flights) == IN_FLIGHT:
            flights.popleft().land()
    while flights:
        flights.popleft().land()
