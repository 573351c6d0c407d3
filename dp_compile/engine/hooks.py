"""One hook per parameter, and what the hooks do when nothing is captured.

A hook means: the gradient of this parameter is complete, reduce it once. In a captured backward `capture` puts that
reduction into the graph at the hook's place. Everywhere else the hook reports to a `ReductionRound`, which runs the
plan's buckets in the plan's order: the collectives are the same ones, so a rank that could not capture one backward
still works together with ranks that could.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from dp_compile._torch import autograd
from dp_compile.engine.bucket_events import Observers, launching, ranges_if_profiled, waiting
from dp_compile.engine.intact import refuse_unreduced
from dp_compile.engine.replica import Replica
from dp_compile.engine.settling import revise_if_due, settle
from dp_compile.errors import ReductionError
from dp_compile.insight.launch_clock import SEVERAL_MODULES, LaunchClock
from dp_compile.passes.reduction import REDUCE_OPS
from dp_compile.plan.buckets import Bucket, Member, Rows


class GradHook:
    """Called by autograd when the gradient of parameter `index` of a replica has been accumulated.

    Parameters hold their hooks where Python's garbage collector does not look, so a hook must not hold its replica.
    """

    __slots__ = ("_replica", "index")

    def __init__(self, replica: Replica, index: int) -> None:
        self._replica, self.index = weakref.ref(replica), index

    @property
    def replica(self) -> Replica | None:
        """`None` once the module is gone and only the parameter is left."""
        return self._replica()

    def __call__(self, parameter: torch.Tensor) -> None:
        replica = self.replica
        if replica is None:
            return
        if torch.compiler.is_dynamo_compiling():
            raise ReductionError(
                f"the hook of {replica.names[self.index]} is being traced by a capture that is not dp_compile's. "
                "Switch torch's own compiled autograd off around this backward."
            )
        if not replica.sync:
            replica.used_without_sync.add(self.index)
            return
        _round_of_this_backward(replica).arrive(self.index)


@dataclass(slots=True)
class HookHandle:
    """Takes the hooks of a replica off again."""

    handles: list[RemovableHandle] = field(default_factory=list)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def install_hooks(replica: Replica) -> HookHandle:
    """Put one hook on each parameter of a replica."""
    return HookHandle(
        [
            parameter.register_post_accumulate_grad_hook(GradHook(replica, index))
            for index, parameter in enumerate(replica.parameters)
        ]
    )


@dataclass(eq=False, slots=True)
class _Flight:
    """A bucket on its way, and the tensors that its collective works on."""

    bucket: Bucket
    tensors: list[torch.Tensor]
    work: dist.Work


@dataclass(eq=False, slots=True)
class ReductionRound:
    """The reductions of one backward that was not captured: the plan's buckets, launched in the plan's order."""

    replica: Replica
    graph_task: int | None = None
    """The engine's number of the backward, if its end is seen by the engine only."""
    before: ReductionRound | None = None
    """The round of another module in the same backward. It launches everything first, as captured code does."""
    absent: bool = False
    """This rank has no inputs left: it takes part with zeros and keeps nothing of the result."""
    arrived: dict[int, None] = field(default_factory=dict)
    """Parameters in the order in which their gradients were completed."""
    flights: list[_Flight] = field(default_factory=list)
    averages: dict[int, torch.Tensor] = field(default_factory=dict)
    """The reduced gradients and flags by index, once the round is finished."""
    clock: LaunchClock | None = None
    observers: Observers = ()
    """Who is told of launches and waits."""

    def arrive(self, index: int) -> None:
        """The gradient of parameter `index` is accumulated. Launches every bucket that is complete and next.

        Raises:
            ReductionError: the parameter arrived twice in one backward, or its gradient is sparse.
        """
        grad = self.replica.parameters[index].grad
        if grad is not None and grad.layout is not torch.strided:
            raise ReductionError(
                f"the gradient of {self.replica.names[index]} is sparse, which is not supported. "
                "Compute it with sparse=False."
            )
        if index in self.arrived:
            raise ReductionError(
                f"the gradient of {self.replica.names[index]} was completed twice in one backward, after it may have "
                "been reduced. Use non-reentrant checkpointing, or compile the forward."
            )
        # Without this gradient: the user's own hooks on it, which may change it, can come after ours.
        self._launch_complete()
        self.arrived[index] = None

    def _launch_complete(self) -> None:
        if self.before is not None and not self.before.is_launched():
            return
        buckets = self.replica.plan.buckets
        while len(self.flights) < len(buckets) and self._is_complete(buckets[len(self.flights)]):
            self._launch(buckets[len(self.flights)], None)

    def finish(self) -> None:
        """Complete the set with zeros, wait for all buckets and hand the averages out.

        Raises:
            ReductionError: a parameter was unused on some rank and that is an error, or a parameter that has a
                gradient has no hook any more.
        """
        replica, everything = self.replica, range(len(self.replica.parameters))
        try:
            unused = [index for index in everything if index not in self.arrived and not self.absent]
            used = sorted({*self.arrived, *replica.used_without_sync})
            flags = replica.unused_flags(unused, used)
            for bucket in replica.plan.buckets[len(self.flights) :]:
                self._launch(bucket, flags)
            reduced: list[tuple[Member, torch.Tensor]] = []
            for number, flight in enumerate(self.flights):
                with waiting(self.observers, number) if self.observers else contextlib.nullcontext():
                    flight.work.wait()
                reduced += _views(flight.bucket, flight.tensors)
            self.averages = _whole(reduced)
            with torch.no_grad():
                for index in self.arrived:
                    grad = replica.parameters[index].grad
                    assert grad is not None
                    grad.copy_(self.averages[index])
            replica.used_without_sync.clear()
            replica.arrivals = replica.arrivals or tuple(self.arrived)
            flags = self.averages[len(replica.parameters)]
            replica.settle_unused(flags, unused, [self.averages[index] for index in unused])
            self._keep_time()
        finally:
            replica.synced_backwards += self.graph_task is not None  # else whoever saw the end counts
            close_round(replica)

    def _keep_time(self) -> None:
        if self.clock is not None and self.replica.recording is not None:
            self.clock.stop()
            self.replica.recording.clocks.append((self.replica.plan, self.clock))

    def is_launched(self) -> bool:
        return len(self.flights) == len(self.replica.plan.buckets)

    def _is_complete(self, bucket: Bucket) -> bool:
        return all(member.gradient.index in self.arrived for member in bucket.members)

    def _launch(self, bucket: Bucket, flags: torch.Tensor | None) -> None:
        parameters = self.replica.parameters
        with torch.no_grad():
            tensors = [
                torch.zeros(numel, dtype=_dtype(bucket), device=self.replica.device) for numel in bucket.tensor_numels
            ]
            for member, view in _views(bucket, tensors):
                index = member.gradient.index
                source = parameters[index].grad if index < len(parameters) else flags
                if source is not None and not self.absent:
                    source = source if member.rows is None else source[slice(*member.rows)]
                    torch.mul(source, member.gradient.scale, out=view)
        with launching(self.observers, len(self.flights)) if self.observers else contextlib.nullcontext():
            work = _all_reduce(tensors, bucket.key.reduce_op, self.replica.group.process_group)
        self.flights.append(_Flight(bucket, tensors, work))


def _all_reduce(tensors: list[torch.Tensor], reduce_op: str, group: dist.ProcessGroup) -> dist.Work:
    """The collective that a captured backward runs for the same bucket."""
    work: dist.Work | None
    if len(tensors) == 1:
        work = dist.all_reduce(tensors[0], op=REDUCE_OPS[reduce_op], group=group, async_op=True)
    else:
        # torch deprecates its function for this, but neither the group's method nor the op in graphs that calls it.
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(REDUCE_OPS[reduce_op]), True
        work = group.allreduce_coalesced(tensors, options)
    assert work is not None
    return work


_open_rounds: dict[Replica, ReductionRound] = {}


def open_rounds(replicas: Sequence[Replica]) -> list[ReductionRound]:
    """Start the rounds of a backward whose end the caller sees. To be finished in the same order."""
    rounds: list[ReductionRound] = []
    plans = [replica.plan for replica in replicas]
    for number, replica in enumerate(replicas):
        clock = _clock_for(replica, alone=len(replicas) == 1)
        observers = ranges_if_profiled(plans, number) + (() if clock is None else (clock,))
        before = rounds[-1] if rounds else None
        _open_rounds[replica] = ReductionRound(replica, before=before, clock=clock, observers=observers)
        rounds.append(_open_rounds[replica])
    return rounds


def _clock_for(replica: Replica, *, alone: bool) -> LaunchClock | None:
    if replica.recording is not None and not alone:
        replica.recording.skipped[SEVERAL_MODULES] += 1
    return LaunchClock(replica.device) if replica.recording is not None and alone else None


def close_round(replica: Replica) -> None:
    _open_rounds.pop(replica, None)


def _round_of_this_backward(replica: Replica) -> ReductionRound:
    """The open round; a new one that ends with this backward if somebody entered the engine past `torch.autograd`."""
    current = _open_rounds.get(replica)
    if current is not None and current.graph_task in (None, autograd.graph_task()):
        return current
    if replica.uneven is not None:
        raise ReductionError("a backward inside join() has to start with backward() or torch.autograd.backward().")
    # None is open, or an earlier backward was interrupted and left its round behind.
    revise_if_due(replica)
    settle([replica])
    current = _open_rounds[replica] = ReductionRound(replica, graph_task=autograd.graph_task())
    autograd.queue_after_backward(current.finish)
    return current


def check_gradients_have_hooks(replica: Replica, hooked: Sequence[int], accumulated: Sequence[torch.Tensor]) -> None:
    """The guard: every parameter that got a gradient has to be reduced.

    Args:
        hooked: indices of the parameters whose hook is called in this backward.
        accumulated: every tensor that gets a gradient in this backward.

    Raises:
        ReductionError: a parameter of the module gets a gradient but has no hook, was frozen when the module was
            replicated, or replaced another one since.
    """
    present = set(hooked)
    index_of = {id(parameter): index for index, parameter in enumerate(replica.parameters)}
    unhooked = [
        index_of[id(tensor)] for tensor in accumulated if id(tensor) in index_of and index_of[id(tensor)] not in present
    ]
    if unhooked:
        raise ReductionError(
            f"not reduced: {replica.name_list(unhooked)}. The gradient arrived but its hook did not run: it was "
            "probably removed, or the parameter's hooks were replaced. Call replicate() again on a fresh module."
        )
    foreign = [tensor for tensor in accumulated if id(tensor) not in index_of]
    if foreign:
        refuse_unreduced(replica, foreign)


def _dtype(bucket: Bucket) -> torch.dtype:
    dtype = getattr(torch, bucket.key.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _views(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Member, torch.Tensor]]:
    """Each member of a bucket with its place in the tensors that are reduced, shaped as its parameter, or its rows."""
    for member, place in zip(bucket.members, bucket.places(), strict=True):
        yield member, tensors[place.tensor].as_strided(member.shape, member.gradient.stride, place.offset)


def _whole(reduced: Sequence[tuple[Member, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Each reduced gradient by its index; those in pieces are put together, which copies them."""
    whole: dict[int, torch.Tensor] = {}
    pieces: dict[int, dict[Rows, torch.Tensor]] = {}
    for member, view in reduced:
        if member.rows is None:
            whole[member.gradient.index] = view
        else:
            pieces.setdefault(member.gradient.index, {})[member.rows] = view
    return whole | {index: torch.cat([views[rows] for rows in sorted(views)]) for index, views in pieces.items()}
