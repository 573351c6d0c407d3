"""Uneven inputs: a rank without further batches takes part in the other ranks' reductions with zeros.

Built on `torch.distributed.algorithms.join`. Other joinables, for example torch's `ZeroRedundancyOptimizer`, can follow
the module in the same context.

    a rank with inputs                                  a rank without inputs
      Join.notify_join_context      <- all-reduce ->      Join's loop: is any rank left?
      announce: who has inputs      <- all-reduce ->      main_hook
      pending plans, buckets, buffers          ==         the same, with zeros

`engine/backward.py` announces each synchronised backward before its first collective. Accumulation inside `no_sync()`
is local and is not announced.
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
    """Context manager to train with a different number of batches per rank, as `DistributedDataParallel.join`.

    A rank that exits the block contributes zeros to the other ranks' reductions until all have exited. Then parameters
    (and buffers, with `broadcast_buffers`) are broadcast from the last rank with inputs, the highest one of several.
    Each step costs two more small all-reduces, for which the host waits.

    Args:
        module: a replicated module. Each step has one synchronised backward, which reaches no other replicated module.
        divide_by_initial_world_size: `True`: gradients are divided by the size of the group. `False`: by the number
            of ranks that still have inputs. Without effect with a `gradient_divide_factor` or a comm hook.
        enable: `False`: do nothing; for inputs that are known to be even.
        throw_on_early_termination: `True`: all ranks raise in the first step in which a rank has no inputs left.

    Raises:
        UnsupportedModuleError: the module is not replicated, reduces no gradients, or has an optimizer in the backward.
        ConfigError: the module has separately replicated parts, or a backward reaches another replicated module.
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
    """Return a replicated module as a torch `Joinable`. List it first: `with Join([joinable(model), optimizer]):`."""
    return ReplicaJoinable(module)


class ReplicaJoinable(Joinable):
    """One replicated module in a join context."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        check_supported(replica_of(module), (AVERAGING,))
        self.module = module

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that torch's `Join` runs on a rank without inputs. Backwards notify `Join` from now on.

        See `join` for `divide_by_initial_world_size`.

        Raises:
            ConfigError, UnsupportedModuleError: the module has replicated parts, or an optimizer in the backward.
        """
        replica = replica_of(self.module)
        check_supported(replica, (JOIN,))
        if parts_of(inner_module(self.module)):
            raise ConfigError("join() does not support separately replicated parts. Replicate the module as a whole.")
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
    """A replica in a join context: announces this rank's backwards or, without inputs, joins those of other ranks."""

    member: Joinable
    replica: Replica
    divides_initially: bool
    active: tuple[int, ...] = ()  # the ranks of the group that had inputs in the latest backward

    def announce(self, replicas: Sequence[Replica]) -> None:
        """Notify ranks without inputs before this rank reduces `replicas`. Raises `ConfigError` if they are several.

        torch's `Join` notifies for its first member only: ranks without inputs would not join those of others."""
        context = distributed.join_config(self.member)
        if not context.enable:
            return
        if len(replicas) > 1 or not context.is_first_joinable:
            names = ", ".join(replica.names[0] for replica in replicas)
            raise ConfigError(
                f"a backward inside join() reaches the replicated modules of {names}. join() supports one module, "
                "and Join must list it first: reorder its list, or replicate a module that contains them."
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
        """Rescale gradients to the average over the ranks with inputs if `divide_by_initial_world_size` is `False`.

        Does nothing with a given divide factor, or with a comm hook: as in torch, the hook has to divide."""
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
        """The source of buffer broadcasts: the highest rank that has inputs, as in torch's DDP inside `join()`."""
        return max(self.active, default=0)

    # --- torch's `Join` calls these on a rank without inputs

    def main_hook(self) -> None:
        """Join one backward of the ranks with inputs: same plan and collectives, with zeros as gradients."""
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
        """Broadcast parameters and buffers from the last rank that had inputs."""
        replica = self.replica
        replica.wait_for_updates()  # of the last step with inputs: no forward on this rank has waited for them
        process_group = replica.group.process_group
        own = dist.get_rank(process_group) if is_last_joiner else -1
        source = torch.tensor([own], device=replica.device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=process_group)
        buffers = replica.buffers if replica.config.broadcast_buffers else ()
        tensors = [*replica.parameters, *(parameter for _, parameter in replica.module.frozen), *buffers]
        distributed.broadcast(tensors, process_group, int(source.item()))
        replica.state.uneven = None
