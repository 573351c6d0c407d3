"""Parameters that travel between few ranks while each of them computes its next gradients.

    step t     wait for what was sent in step t - 1        x_i(t)   own
               mix                                         sum over the edge of step t:  W_ij(t) x_j(t)
               update with the gradient at x_i(t)          x_i(t + 1)
               send for step t + 1                         travels behind the next forward and backward

Which ranks a step is with is data: an index into process groups that were made at the start.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import autograd, distributed
from dp_compile.averaging.exchange import Exchange
from dp_compile.decentralized.topologies import Edge, Topology
from dp_compile.engine.gradients import dense_strides
from dp_compile.engine.logs import warn_once
from dp_compile.engine.replica import Replica
from dp_compile.errors import CommunicationError, ConfigError, ReductionError
from dp_compile.plan.buckets import Bucket, BucketKey, BucketPlan, GradientSpec, plan_buckets
from dp_compile.plan.reduction import ALL_REDUCE, Reduction, Stage

logger = logging.getLogger("dp_compile.decentralized")

ALIGNMENT_BYTES: Final = 128
"""Where parameters start in the memory of their bucket: what a kernel was compiled for stays so."""


def plan_of(replica: Replica, bucket_mb: float) -> BucketPlan:
    """Buckets of parameters, the last ones first, as their gradients are expected; the same on every rank.

    Raises:
        ConfigError: a parameter is complex.
    """
    reduction = Reduction((Stage(ALL_REDUCE, "", "sum"),), 1.0)
    specs: list[GradientSpec] = []
    for index, (name, parameter) in enumerate(zip(replica.names, replica.parameters, strict=True)):
        if parameter.is_complex():
            raise ConfigError(f"{name} is complex, which is not mixed. Hold real and imaginary parts as real numbers.")
        key = BucketKey(reduction, str(parameter.dtype).removeprefix("torch."), parameter.device.type)
        shape, strides = tuple(parameter.shape), dense_strides(parameter)
        specs.append(GradientSpec(index, name, shape, strides, parameter.dtype.itemsize, key))
    plan = plan_buckets(specs[::-1], bucket_cap_mb=bucket_mb, first_bucket_cap_mb=bucket_mb)
    return replace(plan, buckets=tuple(map(_aligned, plan.buckets)))


def _aligned(bucket: Bucket) -> Bucket:
    """Each parameter at `ALIGNMENT_BYTES`, small ones too: compilers copy what lies elsewhere than before."""
    multiple, end, members = ALIGNMENT_BYTES // bucket.members[0].gradient.itemsize, 0, []
    for member in bucket.members:
        members.append(replace(member, offset=end))
        end += -(-member.numel // multiple) * multiple
    return replace(bucket, members=tuple(members))


@dataclass(eq=False, slots=True)
class MixedBucket:
    """Parameters that travel together. `mine` is where they lie, `arriving` what comes, part for part."""

    number: int
    plan: Bucket
    parameters: tuple[nn.Parameter, ...]
    mine: list[torch.Tensor]
    arriving: list[torch.Tensor]
    buffer: torch.Tensor
    addresses: list[int] = field(init=False)
    under_way: tuple[Edge, dist.Work | None] | None = None
    """With whom it is mixed next; nobody has to be waited for if the rank is alone in that step."""
    versions: list[int] = field(default_factory=list)
    """How often each parameter had been changed when it was sent."""

    def __post_init__(self) -> None:
        self.addresses = [each.data_ptr() for each in self.parameters]

    @property
    def indices(self) -> tuple[int, ...]:
        """Places of the parameters in their module."""
        return tuple(member.gradient.index for member in self.plan.members)

    def versions_now(self) -> list[int]:
        return [autograd.version_of(each) for each in self.parameters]

    def arriving_parameters(self) -> Iterator[torch.Tensor]:
        """`arriving`, as it is of each parameter."""
        return _views(self.plan, self.buffer)


class Mixer:
    """The parameters of a module and the ranks that it mixes them with.

    Args:
        replica: the module; its plan is `plan_of` it.
        topology: of as many ranks as its group has.
        as_views: let parameters lie in the memory of their bucket, which is mixed as one. Else they stay where they
            are, and each is copied to its bucket in each step.
    """

    def __init__(self, replica: Replica, topology: Topology, *, as_views: bool) -> None:
        self.topology, self.group = topology, replica.group.process_group
        self.edges = topology.edges_of(dist.get_rank(self.group))
        self.step = 0
        """Which step comes next."""
        self.factor = 1.0
        """How much of the way to the mixture parameters go."""
        self._replica = weakref.ref(replica)
        with torch.no_grad():
            self.buckets = tuple(
                _bucket(number, bucket, replica.parameters, as_views=as_views)
                for number, bucket in enumerate(replica.plan.buckets)
            )
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._everybody = Exchange(self.group, {})
        self._make_groups(replica)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """While parameters are averages over all ranks that will be taken back: tensors, and what they were."""
        self.all_equal = True
        """Parameters are the same on all ranks: nothing has been updated since the start or an average."""

    def _make_groups(self, replica: Replica) -> None:
        """Every rank makes all groups, those without it too, in one order: torch counts them to name them."""
        timeout = timedelta(seconds=distributed.timeout_of(self.group, replica.device))
        own = dist.get_rank(self.group)
        for ranks in self.topology.groups():
            group = dist.new_group(list(ranks), timeout)
            if own in ranks:
                self._exchanges[ranks] = Exchange(group, {})

    def edge_of(self, step: int) -> Edge:
        return self.edges[step % len(self.edges)]

    # --- one step, bucket by bucket

    def mix(self, bucket: MixedBucket, before: Callable[[Edge, float], None] | None = None) -> None:
        """Take the average of the edge with what has arrived, if anything was sent since the start.

        Args:
            before: called with the edge and its weight when all has arrived.
        """
        if bucket.under_way is None:
            return
        if [each.data_ptr() for each in bucket.parameters] != bucket.addresses:
            moved = [i for i, each in enumerate(bucket.parameters) if each.data_ptr() != bucket.addresses[i]]
            raise ReductionError(
                f"parameter {bucket.plan.members[moved[0]].label} lies in other memory than when decentralize() was "
                "called, which nobody mixes. Copy values into it (parameter.data.copy_()) in place of a new tensor."
            )
        edge, work = bucket.under_way
        if work is not None:
            self._tell_of_changes(bucket, edge)
            self.wait(work, edge)
        bucket.under_way = None
        if work is None:
            return
        if before is not None:
            before(edge, edge.weight)
        own = self._own_part(edge)
        for mine, arrived in zip(bucket.mine, bucket.arriving, strict=True):
            if own == 0:
                mine.copy_(arrived)
            else:
                mine.mul_(own).add_(arrived, alpha=self.factor)
        autograd.note_writes(bucket.parameters)

    def _own_part(self, edge: Edge) -> float:
        """What stays of a rank's own parameters, beside what comes back of them as they were sent."""
        return (1 - self.factor) + self.factor * edge.own_factor

    def _tell_of_changes(self, bucket: MixedBucket, edge: Edge) -> None:
        replica = self._replica()
        if replica is None or not replica.config.check_reductions or bucket.versions_now() == bucket.versions:
            return
        versions = zip(bucket.indices, bucket.versions, bucket.versions_now(), strict=True)
        changed = [index for index, then, now in versions if then != now and index not in replica.local.exempt]
        if changed:
            warn_once(
                logger,
                [replica],
                "%s changed between two steps, after being sent to be mixed: %.0f %% of the change stays. Change "
                "parameters with load_state_dict() of the whole module, after global_avg(will_revert=False), or in "
                "the optimizer's step().",
                replica.name_list(changed),
                100 * self._own_part(edge),
                key="parameters changed between two steps",
            )

    def send(self, bucket: MixedBucket) -> None:
        """Start what the next step mixes with. The ranks of an edge send their buckets in the same order."""
        edge = self.edge_of(self.step + 1)
        bucket.under_way = edge, None
        if len(edge.ranks) > 1:
            for mine, sent in zip(bucket.mine, bucket.arriving, strict=True):
                torch.mul(mine, edge.share, out=sent)
            bucket.under_way, bucket.versions = (edge, self.start(bucket.buffer, edge)), bucket.versions_now()

    def start(self, tensor: torch.Tensor, edge: Edge, op: Any = dist.ReduceOp.SUM) -> dist.Work:
        """Start an all-reduce over the ranks of an edge.

        Raises:
            CommunicationError: a rank of the edge cannot be reached.
        """
        with self._naming_who_is_missing(edge):
            group = self._exchanges[edge.ranks].process_group
            work: dist.Work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        return work

    def wait(self, work: dist.Work, edge: Edge) -> None:
        """Wait for such an all-reduce.

        Raises:
            CommunicationError: a rank of the edge has not come within the group's time-out.
        """
        with self._naming_who_is_missing(edge):
            work.wait()

    def _wait(self, bucket: MixedBucket) -> None:
        if bucket.under_way is not None and bucket.under_way[1] is not None:
            self.wait(bucket.under_way[1], bucket.under_way[0])

    @contextlib.contextmanager
    def _naming_who_is_missing(self, edge: Edge) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not distributed.is_communication_error(error):
                raise
            exchange = self._exchanges[edge.ranks]
            said = exchange.who_is_missing(exchange.process_group, self.step)
            others = ", ".join(str(each) for each in edge.ranks if each != dist.get_rank(self.group))
            raise CommunicationError(
                f"rank {dist.get_rank(self.group)}: the parameters of rank(s) {others}, of edge {edge.ranks} of "
                f"topology {self.topology.name!r}, did not arrive in step {self.step}: {said} ({error})"
            ) from error

    def forget(self) -> None:
        """Mix nothing in the next step: parameters are not those that were sent. A rank's own affair."""
        self.arrive()
        for bucket in self.buckets:
            bucket.under_way = None

    def arrive(self) -> None:
        """Wait for all that is on its way to this rank; the next step mixes with it as ever."""
        for bucket in self.buckets:
            self._wait(bucket)

    # --- all ranks at once

    def average(self, *, keep: bool, buffers: bool) -> None:
        """Let parameters be the average over all ranks, with buffers of floating point if these are asked for.

        Args:
            keep: what they were comes back with `revert`; else this is where the next step starts.

        Raises:
            ReductionError: they are the average already, and will be taken back.
            CommunicationError, DesyncError: ranks did not come, or are at another step.
        """
        if self.kept:
            raise ReductionError("parameters are the average of all ranks already. Call revert_global_avg() before.")
        tensors = [each for bucket in self.buckets for each in bucket.mine]
        if buffers and (replica := self._replica()) is not None:
            tensors += [each for each in replica.buffers if each.is_floating_point()]
        self.arrive()  # one communicator at a time
        before = [(each, each.detach().clone()) for each in tensors] if keep else []
        with self._writing():
            self._everybody.average([each.detach() for each in tensors], self.step, self.group)
        self.kept = before
        if not keep:
            self.accept()

    def accept(self) -> None:
        """Let an average stay."""
        self.kept, self.all_equal = [], True
        self.forget()

    def revert(self) -> None:
        """Take an average back.

        Raises:
            ReductionError: there is none.
        """
        if not self.kept:
            raise ReductionError("parameters are not an average that could be taken back. Call global_avg() before.")
        with torch.no_grad(), self._writing():
            for tensor, value in self.kept:
                tensor.copy_(value)
        self.kept = []

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, parameters are written to that will be what they were: that is no change between two steps.

        autograd is told, which does not know that parameters lie there.
        """
        before = [bucket.versions_now() for bucket in self.buckets]
        yield
        for bucket, versions in zip(self.buckets, before, strict=True):
            autograd.note_writes(bucket.parameters)
            written = map(operator.sub, bucket.versions_now(), versions)
            bucket.versions = list(map(operator.add, bucket.versions, written))

    def distance_to_average(self) -> float:
        """The Euclidean norm of the difference between this rank's own parameters and their average, which is set."""
        own = {id(tensor): value for tensor, value in self.kept}
        parts = ((each - own[id(each)]).double().square().sum() for bucket in self.buckets for each in bucket.mine)
        return math.sqrt(float(sum(parts)))

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """The root mean square over ranks of that norm. Costs an all-reduce of the parameters, bucket by bucket."""
        squared = torch.zeros((), dtype=torch.float64, device=self.buckets[0].buffer.device)
        for bucket in self.buckets:
            self._wait(bucket)
            average = [each.detach().clone() for each in bucket.mine]
            self._everybody.average(average, self.step, self.group)
            for mine, mean in zip(bucket.mine, average, strict=True):
                squared += (mine - mean).double().square().sum()
        self._everybody.average([squared], self.step, self.group)
        return math.sqrt(float(squared))

    def close(self) -> None:
        """Free the groups. Parameters stay where they are."""
        for exchange in self._exchanges.values():
            if distributed.is_alive(exchange.process_group):
                dist.destroy_process_group(exchange.process_group)
        self._exchanges = {}


def _bucket(number: int, bucket: Bucket, parameters: Sequence[nn.Parameter], *, as_views: bool) -> MixedBucket:
    mine = tuple(parameters[member.gradient.index] for member in bucket.members)
    buffer = torch.zeros(bucket.numel, dtype=mine[0].dtype, device=mine[0].device)
    if not as_views:
        views = list(_views(bucket, buffer))
        return MixedBucket(number, bucket, mine, [each.detach() for each in mine], views, buffer)
    memory = torch.zeros_like(buffer)
    for parameter, view in zip(mine, _views(bucket, memory), strict=True):
        view.copy_(parameter)
        parameter.data = view
    return MixedBucket(number, bucket, mine, [memory], [buffer], buffer)


def _views(bucket: Bucket, memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """What memory of a bucket holds of each parameter, in the parameter's own order."""
    for member in bucket.members:
        assert member.offset is not None
        yield memory.as_strided(member.gradient.shape, member.gradient.stride, member.offset)
