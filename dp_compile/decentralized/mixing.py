"""Exchange of parameters between the few ranks of an edge while they compute gradients, and the step that mixes them.

step t     wait for what was sent in step t - 1        x_i(t): own parameters of rank i
           mix                                         sum of W_ij(t) x_j(t) over the ranks j of the edge of i in step t
           update with the gradient at x_i(t)          x_i(t + 1)
           send for step t + 1                         in flight during the next forward and backward
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from dp_compile._torch import autograd, distributed
from dp_compile.averaging.exchange import Exchange
from dp_compile.decentralized.topologies import Edge, Topology
from dp_compile.errors import ReductionError, require
from dp_compile.passes.reduction import view_of
from dp_compile.plan.buckets import Bucket, BucketPlan, plan_buckets
from dp_compile.plan.words import count
from dp_compile.replica.gradients import tensor_spec
from dp_compile.replica.group import group_on
from dp_compile.replica.replica import Replica
from dp_compile.replica.sinks import Updates

ALIGNMENT_BYTES: Final = 128
"""Alignment of parameters in a bucket. Inductor copies an input that is less aligned than the one it compiled for."""


def plan_of(replica: Replica, bucket_mb: float) -> BucketPlan:
    """Return buckets of a module's parameters, the last parameter first, as in decent-dp; equal on every rank."""
    group, specs = group_on(replica.group.process_group, replica.device.type), []
    for index, (name, parameter) in enumerate(zip(replica.names, replica.parameters, strict=True)):
        require(not parameter.is_complex(), name, "real", parameter.dtype, " Use two real parameters.")
        specs.append(tensor_spec(index, name, parameter, group))
    return plan_buckets(specs[::-1], bucket_cap_mb=bucket_mb)


class MixedBucket:
    """Parameters that are sent together: the tensors in `own`, or views of the only tensor in `own`.

    `received`: received values of each tensor in `own`. `views`: those of each parameter. All are views of `buffer`.
    """

    def __init__(self, bucket: Bucket, parameters: list[nn.Parameter], as_views: bool) -> None:
        self.parameters = parameters
        self.buffer = torch.zeros(bucket.numel, dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = self.received = [view_of(member, self.buffer) for member in bucket.members]
        self.own = [each.detach() for each in parameters]
        if as_views:
            memory = torch.zeros_like(self.buffer)
            self.own, self.received = [memory], [self.buffer]
            for parameter, member in zip(parameters, bucket.members, strict=True):
                parameter.data = view_of(member, memory).copy_(parameter)


class Mixer:
    """A module's parameters in buckets (`plan_of`), and the ranks with which they are mixed.

    `as_views`: move the parameters of a bucket into one buffer, which one kernel mixes. Otherwise parameters keep
    their memory, and each step copies each parameter to its bucket.
    """

    def __init__(self, replica: Replica, topology: Topology, *, as_views: bool) -> None:
        self.topology, self.group = topology, replica.group.process_group
        self.rank = dist.get_rank(self.group)
        self.edges = topology.edges_of(self.rank)
        self.step = 0  # number of the next step
        self.factor = 1.0  # step size towards the mixture
        self.all_equal = True  # no update since the start or a global average: parameters are equal on all ranks
        self.has_warned = False  # that a state dict has one rank's parameters
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors and own values, until `revert()`
        self._replica = weakref.ref(replica)
        with torch.no_grad():
            self.buckets = [
                MixedBucket(bucket, [replica.parameters[each.gradient.index] for each in bucket.members], as_views)
                for bucket in replica.plan.buckets
            ]
        self._parameters = replica.parameters
        self._addresses = [each.data_ptr() for each in replica.parameters]
        self._versions: list[int] = []  # version counter of each parameter when it was sent or reverted
        self._in_flight: list[tuple[dist.Work, Edge]] = []
        self._everyone = Exchange(self.group, {})
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        timeout = timedelta(seconds=distributed.timeout_of(self.group, replica.device))
        for ranks in topology.groups():  # every rank creates all groups in one order: torch names them by a counter
            group = dist.new_group(list(ranks), timeout)
            if self.rank in ranks:
                self._groups[ranks] = group

    def edge_of(self, step: int) -> Edge:
        return self.edges[step % len(self.edges)]

    def mix(self, before: Callable[[Edge, float], None] | None = None) -> None:
        """Replace parameters by their average over the ranks that mix in this step, if an exchange is in flight.

        `before(edge, weight)` is called between exchange and mixing. Raises a `ReductionError` and mixes nothing
        if a parameter of this rank was moved to other memory or written to.
        """
        if not self._in_flight:
            return
        replica = self._replica()
        assert replica is not None  # its backward is running
        for name, parameter, address in zip(replica.names, replica.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise ReductionError(
                    f"the storage of parameter {name} was replaced after decentralize(), so it is no longer mixed. "
                    "Copy values into the parameter (parameter.data.copy_()) instead of assigning a new tensor."
                )
        versions = zip(self._versions, map(autograd.version_of, self._parameters), strict=True)
        changed = {index for index, (then, now) in enumerate(versions) if then != now} - replica.state.step_guard.exempt
        if changed:
            raise ReductionError(
                f"{replica.name_list(sorted(changed))} changed between two steps while their exchange was in flight. "
                "Mixing would overwrite the change. Change parameters in the optimizer's step(), after "
                "global_avg(will_revert=False), or with load_state_dict() of the whole module."
            )
        _, edge = self._in_flight[0]
        own_factor = (1 - self.factor) + self.factor * edge.own_factor
        self.forget()
        if before is not None:
            before(edge, edge.weight)
        for bucket in self.buckets:
            for own, received in zip(bucket.own, bucket.received, strict=True):
                if own_factor == 0:
                    own.copy_(received)
                else:
                    own.mul_(own_factor).add_(received, alpha=self.factor)
        torch.autograd.graph.increment_version(self._parameters)

    def send(self) -> None:
        """Launch the exchange for the next step. The ranks of an edge send their buckets in the same order."""
        edge = self.edge_of(self.step + 1)
        if len(edge.ranks) == 1:
            return
        works = []
        for bucket in self.buckets:
            for own, sent in zip(bucket.own, bucket.received, strict=True):
                torch.mul(own, edge.share, out=sent)
            works.append((self.start(bucket.buffer, edge), edge))
        self._in_flight, self._versions = works, list(map(autograd.version_of, self._parameters))

    def start(self, tensor: torch.Tensor, edge: Edge, op: Any = dist.ReduceOp.SUM) -> dist.Work:
        """Launch an all-reduce over the ranks of an edge; pass the returned work to `wait`."""
        with self._naming_missing(edge):
            return dist.all_reduce(tensor, op=op, group=self._groups[edge.ranks], async_op=True)

    def wait(self, work: dist.Work, edge: Edge) -> None:
        with self._naming_missing(edge):
            work.wait()

    def _naming_missing(self, edge: Edge) -> contextlib.AbstractContextManager[None]:
        others = ", ".join(str(each) for each in edge.ranks if each != self.rank)
        what = (
            f"rank {self.rank}: the parameters of rank(s) {others}, of edge {edge.ranks} of topology "
            f"{self.topology.name!r}, did not arrive in step {self.step}"
        )
        return self._everyone.naming_missing(self._groups[edge.ranks], self.step, what)

    def arrive(self) -> None:
        """Wait for the exchange in flight. The next step still mixes with the received values."""
        for work, edge in self._in_flight:
            self.wait(work, edge)

    def forget(self) -> None:
        """Wait for the exchange in flight and drop it: the next step does not mix with the received values."""
        self.arrive()
        self._in_flight = []

    def average(self, *, keep: bool, buffers: bool) -> None:
        """Replace parameters by their average over all ranks; with `buffers`, floating-point buffers too.

        `keep`: keep the previous values for `revert()`. Otherwise the next step starts from the average.
        """
        if self.kept:
            raise ReductionError("parameters already hold the global average. Call revert_global_avg() first.")
        tensors = [each for bucket in self.buckets for each in bucket.own]
        if buffers and (replica := self._replica()) is not None:
            tensors += [each for each in replica.buffers if each.is_floating_point()]
        self.arrive()  # one communicator at a time
        before = [(each, each.detach().clone()) for each in tensors] if keep else []
        self._everyone.average([each.detach() for each in tensors], self.step)
        torch.autograd.graph.increment_version(self._parameters)  # writes to a bucket do not increment them
        self.kept = before
        if not keep:
            self.accept()

    def accept(self) -> None:
        """Keep the average of all ranks: the next step starts from it."""
        self.kept, self.all_equal = [], True
        self.forget()

    def revert(self) -> None:
        """Restore the values from before `average`."""
        if not self.kept:
            raise ReductionError("there is no global average to revert. Call global_avg() first.")
        with torch.no_grad():
            for tensor, value in self.kept:
                tensor.copy_(value)
        torch.autograd.graph.increment_version(self._parameters)
        self._versions = list(map(autograd.version_of, self._parameters))
        self.kept = []

    def distance_to_average(self) -> float:
        """Return the Euclidean distance between this rank's parameters before `average` and the average."""
        own = {id(tensor): value for tensor, value in self.kept}
        parts = ((each - own[id(each)]).double().square().sum() for bucket in self.buckets for each in bucket.own)
        return math.sqrt(float(sum(parts)))

    def close(self) -> None:
        """Destroy the process groups of the edges. Parameters stay where they are in memory."""
        for group in self._groups.values():
            if distributed.is_alive(group):
                dist.destroy_process_group(group)
        self._groups = {}


@dataclass(eq=False)
class MixingUpdates(Updates):
    """A sink (`replica/sinks.py`) that mixes, updates and sends parameters at the end of each synchronised backward.

    `optimizer`: over all or some parameters of the module. `max_norm`: norm to which each bucket's gradients are
    clipped; 0: none. `scaler`: if enabled, unscales gradients, skips steps and updates its scale at that time.
    `averages_buffers`: global averages include buffers.
    """

    optimizer: torch.optim.Optimizer
    mixer: Mixer
    max_norm: float
    scaler: GradScaler
    scheduler: LRScheduler | None
    averages_buffers: bool
    handles: list[RemovableHandle] = field(default_factory=list)
    _scale: tuple[torch.Tensor, dist.Work, Edge] | None = None  # the edge's smallest scale, its all-reduce, the edge
    _broken: str = ""

    def __post_init__(self) -> None:
        self._before_mixing = getattr(self.optimizer, "pre_average_hook", None)
        if self._before_mixing is not None:
            for bucket in self.mixer.buckets:
                for parameter, received in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.comm_buffer = received  # type: ignore[attr-defined]

    def begin(self) -> None:
        if self._broken:
            raise ReductionError(self._broken)
        if self.mixer.kept:
            raise ReductionError(
                "a backward started while parameters hold the global average. Reverting it would discard the "
                "backward's update. Train outside of global_average(), or call revert_global_avg() first."
            )

    def apply(self, *_: object) -> None:
        raise AssertionError("no backward of a decentralized module is captured")

    @torch.no_grad()
    def ended(self) -> None:
        self.mixer.mix(self._before_mixing)
        try:
            self._update()
            self.mixer.send()
            if self.scaler.is_enabled():
                self._agree_on_scale(self.scaler)
        except BaseException as error:
            self._broken = (
                f"step {self.mixer.step} of a decentralized module failed ({type(error).__name__}) after parameters "
                "had been mixed: they are partially updated, and other ranks wait for them. Restore a checkpoint on "
                "all ranks and call decentralize() on a new module."
            )
            raise
        self.mixer.step += 1
        self.mixer.all_equal = False
        if self.scheduler is not None:
            self.scheduler.step()

    def released(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.mixer.close()

    def describe(self) -> str:
        topology = self.mixer.topology
        return (
            f"topology {topology.name}, period {count(topology.period, 'step')}: buckets hold parameters, which are "
            "mixed in each step; no gradient is reduced"
        )

    def _update(self) -> None:
        """Clip gradients, and update all parameters, or none if the scaler found a gradient that is not finite."""
        self.scaler.unscale_(self.optimizer)
        for bucket in self.mixer.buckets if self.max_norm > 0 else ():
            torch.nn.utils.clip_grad_norm_(bucket.parameters, self.max_norm)
        self.scaler.step(self.optimizer)
        for bucket in self.mixer.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _agree_on_scale(self, scaler: GradScaler) -> None:
        """Take the smallest loss scale of the ranks that mix. Scales of others arrive a step later, like parameters."""
        scaler.update()
        if self._scale is not None:
            least, work, edge = self._scale
            self.mixer.wait(work, edge)
            scaler.update(min(float(least), scaler.get_scale()))
            self._scale = None
        edge = self.mixer.edge_of(self.mixer.step + 1)
        if len(edge.ranks) > 1:
            least = torch.tensor([scaler.get_scale()], device=self.mixer.buckets[0].buffer.device)
            self._scale = least, self.mixer.start(least, edge, dist.ReduceOp.MIN), edge
