"""`Shard`: each rank updates a part of each bucket, and holds the optimizer state of that part only (ZeRO-1).

    captured backward        ... compute ... reduce-scatter 0 ... reduce-scatter 1 ... wait, update own part of 0, of 1
    other backwards          the same reduce-scatters
    end of every backward    the remaining updates; all-gather 0, all-gather 1, ...
    next forward             with `overlap_forward`: waits for each all-gather before the first read (`deferred.py`);
                             all-gathers are launched in the assumed order of its reads

A rank whose backward is not captured runs the same collectives in the same order: every all-gather is at the end of the
backward. It runs the same kernels on the same elements. One rank updates each element, and all ranks copy its value.

Source: DeAR (arXiv 2302.12445), Megatron-LM's `overlap_param_gather`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import optim
from dp_compile._torch.optim import ShardedGradient
from dp_compile.engine.ranges import GATHER, UPDATE, during
from dp_compile.errors import ConfigError, ReductionError, VoidBackwardError
from dp_compile.optim.deferred import Deferred, Pending
from dp_compile.optim.setup import Setup, check_in_place
from dp_compile.optim.shards import Piece, Pieces, State, States, cut, is_cut, pieces_of
from dp_compile.optim.update import Update
from dp_compile.passes.bucketing import nan_check_is_on
from dp_compile.passes.reduction import launch_gather
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.reduction import ALL_GATHER, Stage
from dp_compile.replica.gradients import dense_strides
from dp_compile.replica.record import SHARDED, OptimizerRecord
from dp_compile.replica.replica import Replica
from dp_compile.replica.sinks import UpdateRequest
from dp_compile.replica.store_channel import check_consistent_in_call, is_of_other_ranks
from dp_compile.replica.supported import SHARD, check_supported
from dp_compile.replication.gradient_averaging import scatter

ELEMENT_WISE: Final = (  # each element is updated independently, so parameters may be cut anywhere
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD,
)  # fmt: skip
_MAX_GATHERS: Final = 4  # still in flight while `_gather` waits for the oldest: each has its own memory


class ShardedStates(defaultdict[Any, Any]):
    """`optimizer.state` by piece of a parameter. Pieces exist in this process only, so pickle and deepcopy raise."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ReductionError(
            "an optimizer with sharded state was copied or pickled: the copy would have only this rank's part of "
            "it. Call dp_compile.optim.full_state_dict(optimizer) on every rank and copy the result."
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Gather(Pending):
    """All-gather of a bucket's updated parameters. `others`: the pieces that other ranks have updated. `values`: the
    whole bucket once `work` has ended, with each piece at its offset."""

    others: Sequence[Piece]
    values: torch.Tensor
    work: dist.Work

    def wait(self) -> None:
        self.work.wait()

    def finish(self) -> None:
        with during(GATHER, self.replica):
            self.work.wait()
            for piece in self.others:
                part = self.values[piece.offset : piece.offset + piece.numel]
                flat(self.replica.parameters[piece.index])[piece.start : piece.stop].copy_(part)


class Shard(Update):
    """An optimizer that updates this rank's elements of parameters, and holds the state of these elements only."""

    def __init__(self, setup: Setup, deferred: Deferred | None) -> None:
        super().__init__(setup, deferred)
        replica = setup.replica
        self.group = replica.group.process_group
        self.rank, self.ranks = dist.get_rank(self.group), replica.group.world_size
        self.parameters, self.names = replica.parameters, replica.names
        self.covered: tuple[int, ...] = ()  # indices in the module of the sharded parameters, frozen ones included
        self.pieces: dict[int, Piece] = {}  # this rank's piece of each parameter
        self._in_buckets: Pieces = {}
        self._own: dict[int, nn.Parameter] = {}  # the elements of each piece (a view), which the optimizer updates
        self._plan: BucketPlan | None = None  # the plan by which parameters are cut
        self._parts: dict[int, torch.Tensor] = {}  # by bucket: this rank's reduced part, if not applied yet
        self._has_state = False  # whether any rank has state; equal on all ranks
        self._is_open = False  # a backward has begun, and has not ended on this rank

    # --- installation and removal

    def install(self) -> None:
        replica, optimizer = self.setup.replica, self.setup.optimizer
        if type(optimizer) not in ELEMENT_WISE:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be sharded: its update needs whole parameters, and ranks hold "
                f"shards. Use shard=False, or one of {', '.join(each.__name__ for each in ELEMENT_WISE)}."
            )
        check_supported(replica, (SHARD,))
        self._check(replica, optimizer)
        check_consistent_in_call(replica, {
            "optimizer": type(optimizer).__name__,
            "parameters": [replica.names[index] for index in self.setup.covered],
            "groups": [len(group["params"]) for group in optimizer.param_groups],
            "overlap_forward": self.deferred is not None,
        }, "in_backward(shard=True)")  # fmt: skip
        # Keeps the optimizer alive while the module is replicated: other optimizers cannot use sharded gradients.
        replica.after.parts_to = SimpleNamespace(apply=self.apply, kept=optimizer)
        self._shard_state()
        super().install()
        self._handles.append(optimizer.register_state_dict_pre_hook(self._refuse_state_dict))

    def _check(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        """Raise if a parameter cannot be cut, or sharding would change the result."""
        frozen = {id(parameter) for _, parameter in replica.module.frozen}
        every = [each for group in optimizer.param_groups for each in group["params"]]
        for parameter in (each for each in every if id(each) not in frozen):
            index = self.setup.place.get(id(parameter))
            if index is None:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} in this {type(optimizer).__name__} is not in the "
                    "module, so its gradient is not reduce-scattered. Give it to another optimizer."
                )
            name = replica.names[index]
            if parameter.is_complex() or index in replica.module.sparse:
                what = "is complex" if parameter.is_complex() else "has sparse gradients"
                raise ConfigError(f"{name} {what} and cannot be sharded. Use shard=False.")
            if parameter.stride() != dense_strides(parameter):
                raise ConfigError(
                    f"{name} has strides {parameter.stride()}, is not dense in memory, and cannot be sharded. Make it "
                    "contiguous before replicate()."
                )
        self.setup.indices()
        self._check_order(replica, self.setup.covered, ConfigError)

    def _check_order(self, replica: Replica, indices: Sequence[int], kind: type[Exception]) -> None:
        """Raise if strides changed after `replicate()`: shards need parameters and buckets in the same memory order."""
        planned = {gradient.index: gradient.stride for gradient in replica.plan.gradients}
        for index in indices:
            parameter, stride = self.parameters[index], planned[index]
            if parameter.stride() == stride or not parameter.numel():
                continue
            # A dimension of size one may have any stride.
            sides = zip(parameter.shape, parameter.stride(), stride, strict=True)
            if any(size != 1 and now != then for size, now, then in sides):
                raise kind(
                    f"the strides of {self.names[index]} are {parameter.stride()}, but were {tuple(stride)} when "
                    "replicate() was called. Gradients keep that memory order, and each rank updates a shard in it. "
                    "Call to(memory_format=...) before replicate()."
                )

    def _cover(self, replica: Replica) -> None:
        """Shard the parameters that the optimizer has now, including those of `add_param_group()`."""
        self.setup.indices()
        if self.setup.covered != self.covered:
            self._check(replica, self.setup.optimizer)
            self.covered = self.setup.covered
            scatter(replica, frozenset(replica.names[index] for index in self.covered))

    def remove(self) -> None:
        super().remove()
        optimizer, states = self.setup.optimizer, self.full_states()
        optimizer.state = defaultdict(dict)
        for index, state in states.items():
            parameter = self.parameters[index]
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in state.items()
            }
            self._place_numbers(index, optimizer.state[parameter])
        self._own, self.pieces = {}, {}
        replica = self.setup.find_replica()
        if replica is not None and replica.module.hook_handles:
            scatter(replica, frozenset())
            replica.after.parts_to = None

    def released(self) -> None:
        super().released()
        self._drop_sharded_gradients()

    def _drop_sharded_gradients(self) -> None:
        for index in self.covered:
            if isinstance(self.parameters[index].grad, ShardedGradient):
                self.parameters[index].grad = None

    def record(self) -> OptimizerRecord:
        optimizer, covered = self.setup.optimizer, [self.parameters[index] for index in self.covered]
        state = (value for each in optimizer.state.values() for value in each.values())
        return OptimizerRecord(
            type(optimizer).__name__,
            SHARDED,
            sum(parameter.nbytes for parameter in covered),
            ranks=self.ranks,
            elements=sum(parameter.numel() for parameter in covered),
            own_elements=sum(piece.numel for piece in self.pieces.values()),
            state_nbytes=sum(value.nbytes for value in state if isinstance(value, torch.Tensor)),
            **({} if self.deferred is None else self.deferred.last),
        )

    # --- layout of shards

    def _lay_out(self) -> None:
        """Cut parameters by the module's plan. If the plan changed, move state along with its elements."""
        replica = self.setup.replica
        if not self._is_laid_out(replica.plan):
            states = self.full_states() if self._has_state else {}
            self._plan, self._in_buckets = replica.plan, pieces_of(replica.plan, self.rank)
            self.pieces = {each.index: each for own, _ in self._in_buckets.values() for each in own}
            self._own = {
                index: nn.Parameter(flat(self.parameters[index])[piece.start : piece.stop])
                for index, piece in self.pieces.items()
            }
            self._hold_whole(states)
        self._find_memory()

    def _is_laid_out(self, plan: BucketPlan) -> bool:
        if self._plan is not None and self._plan is not plan and pieces_of(plan, self.rank) == self._in_buckets:
            self._plan = plan
        return self._plan is plan

    def _find_memory(self) -> None:
        """Point each piece to the memory of its parameter, which may have been replaced."""
        for index, piece in self.pieces.items():
            parameter, own = self.parameters[index], self._own[index]
            if own.data_ptr() != parameter.data_ptr() + piece.start * parameter.element_size():
                own.data = flat(parameter)[piece.start : piece.stop]

    # --- state

    def _shard_state(self) -> None:
        """Shard the state of whole parameters, as after `load_state_dict()`."""
        state, replica = self.setup.optimizer.state, self.setup.find_replica()
        self._has_state = False
        if replica is not None:
            self._cover(replica)
        whole = {
            index: dict(state[self.parameters[index]]) for index in self.covered if self.parameters[index] in state
        }
        if replica is not None:
            self._lay_out()
        self._hold_whole(whole)

    def _hold_whole(self, states: States) -> None:
        """Keep this rank's part of whole states, which are equal on every rank."""
        held = ShardedStates(dict)
        for index, piece in self.pieces.items():
            if index in states:
                held[self._own[index]] = state = cut(states[index], self.parameters[index], piece)
                self._place_numbers(index, state)
        self.setup.optimizer.state = held
        self._has_state = bool(states)

    def _place_numbers(self, index: int, state: State) -> None:
        """Move step counters to the device if capturable or fused kernels read them there."""
        parameter = self.parameters[index]
        (group,) = (
            group for group in self.setup.optimizer.param_groups if any(each is parameter for each in group["params"])
        )
        if group.get("capturable") or group.get("fused"):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not value.dim():
                    state[key] = value.to(parameter.device)

    def full_states(self, to: int | None = None) -> States:
        """Gather the whole state by parameter index, on the CPU. Collective. `to`: the only rank that gets it."""
        held, states = self.setup.optimizer.state, dict[int, State]()
        # One parameter at a time: NCCL sends from the GPU, which has no room for the whole state.
        for index in sorted(self.covered):
            parameter, own = self.parameters[index], self._own.get(index)
            mine: State = held[own] if own is not None and own in held else {}
            start = self.pieces[index].start if mine else 0
            sent = start, {key: v.detach().cpu() if isinstance(v, torch.Tensor) else v for key, v in mine.items()}
            received = [sent] * self.ranks
            if to is None:
                dist.all_gather_object(received, sent, group=self.group)
            else:
                dist.gather_object(sent, received if self.rank == to else None, group=self.group, group_dst=to)
            for first, part in received if to in (None, self.rank) else ():
                state = states.setdefault(index, {}) if part else {}
                for key, value in part.items():
                    if is_cut(key, value):
                        zeros = torch.zeros(parameter.numel(), dtype=value.dtype)
                        whole = state.setdefault(key, zeros.as_strided(parameter.shape, dense_strides(parameter)))
                        whole.as_strided((parameter.numel(),), (1,))[first : first + value.numel()] = value
                    else:
                        state[key] = value
        return states

    def full_state_dict(self, to: int | None) -> dict[str, Any]:
        optimizer, states = self.setup.optimizer, self.full_states(to)
        if to not in (None, self.rank):
            return {}
        before = optimizer.state
        optimizer.state = defaultdict(dict, {self.parameters[index]: state for index, state in states.items()})
        try:
            return optimizer.state_dict()
        finally:
            optimizer.state = before

    def _refuse_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer.state, ShardedStates):
            raise ReductionError(
                "optimizer.state_dict() of a sharded optimizer: each rank has a part of the state. Call "
                "dp_compile.optim.full_state_dict(optimizer) on every rank for all of it."
            )

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        super()._loaded(optimizer)
        self._shard_state()

    # --- in a backward

    def begin(self) -> None:
        super().begin()
        replica = self.setup.replica
        self._is_open = True
        self._parts.clear()
        self._cover(replica)  # `finish()` calls `_lay_out()`: the plan may change until then
        self._check_order(replica, self.covered, ReductionError)
        self._find_memory()
        self._drop_sharded_gradients()

    def update_request(self, *, keep_graph: bool) -> UpdateRequest:
        super().update_request(keep_graph=keep_graph)  # raises if set
        return UpdateRequest(self.covered, parts=True)

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        replica, part = self.setup.replica, gradients[0]
        check_in_place(replica, indices[: len(parameters)], parameters)
        if replica.state.is_dry_run:
            return
        if parameters and self._is_laid_out(replica.plan) and not self.setup.looks_at_all:
            self.setup.updated.update(indices)
            with replica.state.step_guard.updating(indices):
                self._step(self._gradients_in(bucket, part))
            return
        # On a GPU, the next replay of a CUDA graph overwrites this memory.
        self._parts[bucket] = part.clone() if indices and part.device.type != "cpu" else part

    def _gradients_in(self, bucket: int, part: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the reduced gradients of this rank's pieces, by parameter index."""
        own, first = self._in_buckets[bucket][0], self.rank * part.numel()
        return {each.index: part[each.offset - first : each.offset - first + each.numel] for each in own}

    def left_out(self, error: BaseException) -> None:
        if not self._is_open:
            return
        with contextlib.suppress(type(error)), torch.no_grad():
            self.finish(error)
        self._parts.clear()
        if self.deferred is not None:
            self.deferred.drop()

    def interrupted(self, error: BaseException) -> None:
        self._parts.clear()
        super().interrupted(error)

    def finish(self, failed: BaseException | None = None) -> None:
        """Run the remaining updates and all-gather the parameters. Raise an error, or `failed`, only after the
        collectives that other ranks wait for."""
        replica, held = self.setup.replica, _Held(failed)
        self._is_open = False
        self._lay_out()
        frozen = (index for index in self.covered if not self.parameters[index].requires_grad)
        still = {*replica.state.untouched, *frozen}
        gradients: dict[int, torch.Tensor] = {}
        for bucket in sorted(self._parts):
            gradients |= self._gradients_in(bucket, self._parts.pop(bucket))
        gradients = {index: gradient for index, gradient in gradients.items() if index not in still}
        moves = not self.setup.looks_at_all or self._may_step_with(gradients, held)
        if moves:
            # A failed rank joins the collectives without updating. The next backward reports ranks without the step.
            self.setup.updated.update(() if failed is not None else self.covered)
            with replica.state.step_guard.updating(self.covered):
                self._gather(replica, gradients, held)
        for index in self.covered:
            if index not in still:
                self.parameters[index].grad = ShardedGradient(self.parameters[index])

    def _other_gradients(self) -> str:
        for index in self.covered:
            parameter = self.parameters[index]
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
            elif parameter.grad is not None:
                return (
                    f"the gradient of {self.names[index]} is not the result of a synchronised backward of its module, "
                    "and each rank holds a shard of the optimizer state only. Run the backward outside of no_sync(), "
                    "and do not set .grad by hand. If the module is no longer replicated, load "
                    "dp_compile.optim.full_state_dict(optimizer) into another optimizer."
                )
        return ""

    # --- a step

    def _step(self, gradients: Mapping[int, torch.Tensor]) -> None:
        if gradients:
            with during(UPDATE, self.setup.replica), self._narrowed(gradients) as optimizer:
                optim.step_without_hooks(optimizer)
        self._has_state = True

    def _narrowed(
        self, gradients: Mapping[int, torch.Tensor]
    ) -> contextlib.AbstractContextManager[torch.optim.Optimizer]:
        """Restrict the optimizer to this rank's pieces with a gradient, each in the group of its parameter."""
        indices = sorted(gradients)
        parameters, own = [self.parameters[index] for index in indices], [self._own[index] for index in indices]
        return self.setup.only(parameters, [gradients[index] for index in indices], own)

    def _may_step_with(self, gradients: Mapping[int, torch.Tensor], held: _Held) -> bool:
        """Unscale, clip by the norm over all ranks (one all-reduce). Return `False` if the scaler found inf or NaN."""
        setup, scaler, device = self.setup, self.setup.scaler, self.parameters[0].device
        found: list[torch.Tensor] = []
        both = torch.zeros(3, dtype=torch.float64, device=device)
        with held:
            if scaler is not None and held.error is None:
                with self._narrowed(gradients) as optimizer:
                    if not optimizer.param_groups:  # A scaler raises in its step() if it has seen no gradient.
                        nothing = nn.Parameter(torch.zeros(1, device=device))
                        nothing.grad = torch.zeros(1, device=device)
                        optimizer.param_groups.append({"params": [nothing]})
                    scaler.unscale_(optimizer)
                    found = optim.found_inf_tensors(scaler, optimizer)
            norms = [torch.linalg.vector_norm(gradients[index], dtype=torch.float64) for index in sorted(gradients)]
            both[0] = torch.stack(norms).square().sum() if norms else 0.0
            for each in found:
                both[1] += each.to(device=device, dtype=torch.float64).squeeze()
        both[2] = float(held.error is not None)
        dist.all_reduce(both, group=self.group)
        # Without a scaler, do not wait for a GPU: the next backward reports that parameters differ.
        if (device.type == "cpu" or scaler is not None) and bool(both[2] > 0):
            held.release()
            raise VoidBackwardError(
                "another rank failed before the update, so no rank applies it. See the log of the failed rank."
            )
        for each in found:
            each.copy_((both[1:2] > 0).view(each.shape))
        if setup.max_norm is not None:
            # As in torch, the norm of gradients of two dtypes has the wider one, in any order of parameters.
            kinds = {self.parameters[index].dtype for index in self.covered}
            norm = both[0].sqrt().to(reduce(torch.promote_types, kinds))
            setup.optimizer.total_norm = norm  # type: ignore[attr-defined]
            # On a CPU, which reads the norm without waiting, do not multiply small gradients by one.
            if device.type != "cpu" or not bool(norm + 1e-6 <= setup.max_norm):
                mine = [self._own[index] for index in gradients]
                with self._narrowed(gradients):
                    torch.nn.utils.clip_grads_with_norm_(mine, setup.max_norm, norm)
        return scaler is None or not bool(both[1] > 0)

    # --- all-gather

    def _gather(self, replica: Replica, gradients: Mapping[int, torch.Tensor], held: _Held) -> None:
        """Update and all-gather bucket by bucket: the first all-gather is launched after the first update. Wait for the
        all-gathers here or, if deferred, in the next forward."""
        if self.ranks == 1:
            self._step(gradients)
            return
        stage = Stage(ALL_GATHER, replica.group.name, parts=self.ranks)
        flights: deque[Gather] = deque()
        # The next forward is assumed to read the last bucket of a backward first, as in `plan/crossing.py`.
        for number in sorted(self._in_buckets, reverse=self.deferred is not None):
            bucket, (own, others) = replica.plan.buckets[number], self._in_buckets[number]
            with held:
                if held.error is None:
                    self._step({piece.index: gradients[piece.index] for piece in own if piece.index in gradients})
            like = self.parameters[bucket.members[0].gradient.index]
            with during(GATHER, replica):
                if replica.plan.keeps_memory:  # reuse the memory of the bucket's gradients
                    values = replica.state.bucket_memory.take(number, bucket.numel, like.dtype, like.device)
                else:
                    values = like.new_empty(bucket.numel)
                if nan_check_is_on():  # NCCL checks padding, too
                    values.zero_()
                work = None
                for piece in own:
                    values[piece.offset : piece.offset + piece.numel] = self._own[piece.index].detach()
                with held:
                    work = launch_gather(stage, values)
                work = work or launch_gather(stage, values)  # other ranks wait for it
            gather = Gather(
                setup=self.setup, replica=replica, buckets=(number,), nbytes=values.nbytes,
                indices=tuple(each.gradient.index for each in bucket.members), others=others, values=values, work=work,
            )  # fmt: skip
            if self.deferred is not None:
                self.deferred.pending.append(gather)
                continue
            flights.append(gather)
            if len(flights) > _MAX_GATHERS:
                with held:
                    flights.popleft().finish()
        for gather in flights:
            with held:
                gather.finish()
        held.release()


class _Held(contextlib.AbstractContextManager["_Held"]):
    """Context that holds the first error until the collectives that other ranks wait for are done."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or is_of_other_ranks(error):
            return False
        self.error = self.error or error
        return True

    def release(self) -> None:
        if self.error is not None:
            raise self.error


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter's elements in memory order. The memory must have no gaps."""
    return parameter.detach().as_strided((parameter.numel(),), (1,))
