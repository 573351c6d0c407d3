"""Uneven inputs: a rank that has no more batches takes part in the backwards of the others, with zeros.

Built on torch's `torch.distributed.algorithms.join`, so other joinables, torch's `ZeroRedundancyOptimizer` for one,
can be in the same context, after the module.

    a rank with inputs                                  a rank without
      Join.notify_join_context      <- all-reduce ->      Join's loop: is any rank left?
      announce: who has inputs      <- all-reduce ->      main_hook
      plans that are due, buckets, buffers     ==         the same, with zeros

The entry of the engine announces each synchronised backward before its first collective; accumulation inside
`no_sync()` concerns this rank alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from dp_compile._torch import distributed
from dp_compile.engine.backward import complete_backward
from dp_compile.engine.hooks import ReductionRound
from dp_compile.engine.monitor import Watched
from dp_compile.engine.plan_sync import finalize_plans, meet_before_launch
from dp_compile.errors import ConfigError
from dp_compile.replica.replica import Replica
from dp_compile.replica.supported import AVERAGING, JOIN, check_supported
from dp_compile.replication.module import inner_module, parts_of, replica_of


@contextlib.contextmanager
def join(
    module: nn.Module,
    *,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Train inside with a different number of batches on each rank, as in torch's `DistributedDataParallel.join`.

    A rank that leaves the block takes part in the others' backwards with zeros until all have left; then parameters and
    buffers of the last rank that had inputs (the highest of them) are copied to all. Each step costs two small
    all-reduces more, for which the host waits.

    Args:
        module: a replicated module. Each step has one synchronised backward, which reaches no other replicated module.
        divide_by_initial_world_size: `True`: gradients are divided by the size of the group. `False`: by the number
            of ranks that still have inputs. Without effect with a `gradient_divide_factor` or a comm hook.
        enable: `False`: do nothing; for inputs that are known to be even.
        throw_on_early_termination: `True`: all ranks raise in the step in which the first one has no inputs left.

    Raises:
        UnsupportedModuleError: the module is not replicated.
        ConfigError: parts of the module were replicated by themselves, or a backward reaches another module.
        RuntimeError: with `throw_on_early_termination`, on every rank.
    """
    member, replica = joinable(module), replica_of(module)
    if not enable:
        yield
        return
    try:
        with Join(
            [member],
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        ):
            yield
    finally:
        replica.state.uneven = None


def joinable(module: nn.Module) -> ReplicaJoinable:
    """A replicated module as the first member of torch's `Join`: `with Join([joinable(model), optimizer]):`."""
    return ReplicaJoinable(module)


class ReplicaJoinable(Joinable):
    """One replicated module in a join context."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        check_supported(replica_of(module), (AVERAGING,))
        self.module = module

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join`: what this rank does once it has no inputs. Its backwards are announced from now on.

        See `join` for `divide_by_initial_world_size`.

        Raises:
            ConfigError: parts of the module were replicated by themselves, or it cannot be combined with `join`.
        """
        replica = replica_of(self.module)
        check_supported(replica, (JOIN,))
        if parts_of(inner_module(self.module)):
            raise ConfigError("join() does not support a module with separately replicated parts.")
        hook = _Membership(self, replica, bool(kwargs.get("divide_by_initial_world_size", True)))
        replica.state.uneven = hook
        return hook

    @property
    def join_device(self) -> torch.device:
        return replica_of(self.module).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return replica_of(self.module).group.process_group


@dataclass(eq=False)
class _Membership(JoinHook):
    """A replica in a join context: announces its backwards; without inputs, takes part in those of the others."""

    member: Joinable
    replica: Replica
    divides_initially: bool
    active: tuple[int, ...] = ()  # the ranks of the group that had inputs in the latest backward

    def announce(self, replicas: Sequence[Replica]) -> None:
        """Announce to ranks without inputs that this rank is about to reduce these modules: this one alone. torch's
        `Join` meets ranks without inputs for its first member only, which would wait for another collective."""
        context = distributed.join_config(self.member)
        if not context.enable:
            return
        if len(replicas) > 1 or not context.is_first_joinable:
            names = ", ".join(replica.names[0] for replica in replicas)
            raise ConfigError(
                f"a backward inside join() reaches the replicated modules of {names}. join() supports one module, "
                "which is the first member of its context: replicate a module around them."
            )
        work = Join.notify_join_context(self.member)
        if work is not None:
            work.wait()
        self._find_active(has_inputs=True)

    def _find_active(self, *, has_inputs: bool) -> None:
        process_group = self.replica.group.process_group
        present = torch.zeros(self.replica.group.world_size, dtype=torch.int32)
        present[dist.get_rank(process_group)] = has_inputs
        present = present.to(self.replica.device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=process_group)
        self.active = tuple(present.nonzero().flatten().tolist())

    def rescale(self) -> None:
        """From the average over the group to the average over the ranks with inputs, if that is wanted. Not if a factor
        is given, or a comm hook, which in torch divides by itself."""
        world_size = self.replica.group.world_size
        if self.replica.group.averaging.divide_by is not None or self.replica.planning.comm_hook is not None:
            return
        if self.divides_initially or not self.active or len(self.active) == world_size:
            return
        with torch.no_grad():
            for index, parameter in enumerate(self.replica.parameters):
                if parameter.grad is not None and index not in self.replica.state.untouched:
                    parameter.grad.mul_(world_size / len(self.active))

    @property
    def source(self) -> int:
        """The rank whose buffers count: the highest with inputs, as in torch's DDP inside `join()`."""
        return max(self.active, default=0)

    # --- torch's `Join` calls these on a rank without inputs

    def main_hook(self) -> None:
        """Take part in one backward of the ranks with inputs: the same plan, the same collectives, with zeros."""
        self._find_active(has_inputs=False)
        replica = self.replica
        with Watched([replica]) as watched:
            finalize_plans([replica])
            meet_before_launch([replica])
            watched.count_from_here()
            this = ReductionRound(replica, absent=True)
            this.finish()
            complete_backward(replica, {name: this.averages[index] for index, name in enumerate(replica.names)})

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the state of the last rank that had inputs."""
        replica = self.replica
        replica.wait_for_updates()  # left before ranks ran out of inputs; one that had none has read nothing since
        process_group = replica.group.process_group
        own = dist.get_rank(process_group) if is_last_joiner else -1
        source = torch.tensor([own], device=replica.device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=process_group)
        buffers = replica.buffers if replica.config.broadcast_buffers else ()
        tensors = [*replica.parameters, *(parameter for _, parameter in replica.module.frozen), *buffers]
        distributed.broadcast(tensors, process_group, int(source.item()))
        replica.state.uneven = None
