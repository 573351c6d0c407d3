"""An optimizer in the backward of which each rank does a part: reduced gradients, updates and state are cut over ranks.

    captured backward        ... compute ... reduce-scatter 0 ... reduce-scatter 1 ... wait, update own part of 0, of 1
    other backwards          the same reduce-scatters
    end of every backward    what is not updated yet; all-gather 0, all-gather 1, ...
    next forward             with `overlap_forward`: all-gathers have begun in the order in which it reads; each is
                             waited for in front of what reads it first (`crossing.py`)

A rank that falls back runs the same collectives in the same order: those behind the reductions all come at the end of
the backward. And it runs the same kernels on the same elements: each element is updated on one rank, and is what that
rank says on all.

Source: DeAR (arXiv 2302.12445), Megatron-LM's `overlap_param_gather`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from dp_compile._torch import optim
from dp_compile._torch.stand_in import ShardedGradient, sharded_gradient
from dp_compile.engine.events import GATHER, UPDATE, listeners_of
from dp_compile.engine.gradients import dense_strides
from dp_compile.engine.plan_sync import agree_in_call, is_of_other_ranks
from dp_compile.engine.record import SHARDED, OptimizerRecord
from dp_compile.engine.replica import Replica
from dp_compile.engine.supported import SHARD, check_supported
from dp_compile.engine.updates import Wanted
from dp_compile.errors import ConfigError, ReductionError, VoidBackwardError
from dp_compile.optim.deferred import Pending
from dp_compile.optim.in_backward import InBackward
from dp_compile.optim.partial_steps import check_in_place, said_of
from dp_compile.optim.shards import Piece, layout_of, numel_of_part, pieces_of, pieces_of_others
from dp_compile.optim.states import State, States, cut, gathered
from dp_compile.passes.bucketing import nan_check_is_on
from dp_compile.passes.reduction import launch_gather
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.reduction import ALL_GATHER, Stage
from dp_compile.replication.gradient_averaging import scatter

ELEMENT_WISE: Final = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD,
)  # fmt: skip
"""Each element is updated by itself, so parameters may be cut anywhere. Others look at shapes or norms."""

_GATHERS_AHEAD: Final = 4
"""How many all-gathers are on their way when the first of them is waited for: each has memory of its own."""


class ShardedStates(defaultdict[Any, Any]):
    """`optimizer.state` by pieces of parameters, which say nothing to a copy of the optimizer."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ReductionError(
            "an optimizer with sharded state was copied or pickled: the copy would have a part of the state, under "
            "names of this process. Copy what dp_compile.optim.full_state_dict(optimizer) gives, called on every rank."
        )


class _TakesParts:
    """Keeps the optimizer as long as its module is replicated: gradients in parts are of no use to anybody else."""

    def __init__(self, sharded: Sharded, optimizer: torch.optim.Optimizer) -> None:
        self._sharded, self._optimizer = sharded, optimizer

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        self._sharded.apply(bucket, indices, parameters, gradients)


@dataclass(frozen=True, slots=True)
class _Round:
    """Updated parameters of a bucket that are being all-gathered.

    `bucket`: its number. `indices`: of its parameters. `others`: the pieces that other ranks have updated. `values`:
    the whole bucket, once `work` has ended, each piece from its offset on.
    """

    bucket: int
    indices: tuple[int, ...]
    others: tuple[Piece, ...]
    values: torch.Tensor
    work: dist.Work

    def put_back(self, parameters: Sequence[nn.Parameter]) -> None:
        self.work.wait()
        for piece in self.others:
            part = self.values[piece.offset : piece.offset + piece.numel]
            flat(parameters[piece.index])[piece.start : piece.stop].copy_(part)


@dataclass(eq=False, slots=True, kw_only=True)
class PendingGather(Pending):
    """Parameters that other ranks have updated, and that are on their way to this one."""

    round: _Round
    what = "all-gather"

    @property
    def nbytes(self) -> int:
        return self.round.values.nbytes

    def written_to(self) -> object:
        return self._versions_now()

    def wait(self) -> None:
        self.round.work.wait()

    def finish(self) -> None:
        with self.told.during(GATHER):
            self.round.put_back(self.replica.parameters)


class Sharded(InBackward):
    """An optimizer whose updates run in the backward of one module, each rank doing a part."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        scaler: GradScaler | None,
        *,
        overlaps: bool = False,
    ) -> None:
        super().__init__(replica, optimizer, max_norm, scaler, overlaps=overlaps)
        self.group = replica.group.process_group
        self.rank, self.ranks = dist.get_rank(self.group), replica.group.world_size
        self.parameters, self.names = replica.parameters, replica.names
        self._place = {id(parameter): index for index, parameter in enumerate(replica.parameters)}
        self.covered: tuple[int, ...] = ()
        """The parameters of the optimizer, by their places in the module; with frozen ones."""
        self.pieces: dict[int, Piece] = {}
        """What this rank looks after, by parameter."""
        self._in_buckets: dict[int, tuple[tuple[Piece, ...], tuple[Piece, ...]]] = {}
        """What this rank looks after in each bucket and what the others do, each piece with its place in the bucket."""
        self._own: dict[int, nn.Parameter] = {}
        """What the optimizer updates on this rank, by parameter: elements of it."""
        self._group_of: dict[int, int] = {}
        self._plan: BucketPlan | None = None
        """The plan by which parameters are cut."""
        self._looked_at: tuple[BucketPlan | None, dict[int, int], bool] = (None, {}, False)
        """The plan of the backward, which bucket each parameter is in, and whether it cuts where `_plan` does."""
        self._parts: dict[int, torch.Tensor] = {}
        """This rank's parts of buckets that are not used yet in the backward."""
        self._squares: dict[int, torch.Tensor] = {}
        """Of the gradients in these parts, the square of the norm of each, where that is known already."""
        self._has_state = False
        """Whether any rank has state: known to all of them."""
        self._is_open = False
        """A backward has begun, and this rank has not come to the end of it."""

    # --- from the call to the end

    def install(self) -> None:
        replica, optimizer = self._replicated(), self._alive()
        if type(optimizer) not in ELEMENT_WISE:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be sharded: it looks at a parameter as a whole, and ranks have "
                f"parts. Use shard=False, or one of {', '.join(each.__name__ for each in ELEMENT_WISE)}."
            )
        self._check(replica, optimizer)
        self.indices()
        agree_in_call(replica, {
            "optimizer": type(optimizer).__name__,
            "parameters": [replica.names[index] for index in self._indices],
            "groups": [len(group["params"]) for group in optimizer.param_groups],
            "overlap_forward": self.deferred is not None,
        }, "in_backward(shard=True)")  # fmt: skip
        replica.after.parts_to = _TakesParts(self, optimizer)
        self._cover(replica)
        states = self._full_states(optimizer)
        self._lay_out()
        self._hold(states)
        super().install()
        self._handles.append(optimizer.register_state_dict_pre_hook(_refuse_state_dict))

    def _check(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        """What would not be exact, or cannot be cut, is refused by name."""
        check_supported(replica, (SHARD,))
        planned, at = strides_of(replica.plan), dict[int, str]()
        frozen = {id(parameter) for _, parameter in replica.frozen}  # they have no gradient, and never will
        every = (each for group in optimizer.param_groups for each in group["params"])
        for parameter in (each for each in every if id(each) not in frozen):
            index = self._place.get(id(parameter))
            if index is None:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} in this {type(optimizer).__name__} is not in the "
                    "module, so nobody reduces its gradient in parts. Give it to an optimizer of its own."
                )
            if parameter.is_complex() or index in replica.sparse:
                what = "is complex" if parameter.is_complex() else "has sparse gradients"
                raise ConfigError(f"{replica.names[index]} {what}: it is not cut. Use shard=False.")
            if parameter.stride() != dense_strides(parameter):
                raise ConfigError(
                    f"{replica.names[index]} has strides {parameter.stride()}, with gaps in its memory: it cannot be "
                    "cut. Make it contiguous before replicate()."
                )
            if not lies_as(parameter, planned[index]):
                raise ConfigError(_other_order(replica.names[index], parameter, planned[index]))
            other = at.setdefault(parameter.data_ptr(), replica.names[index]) if parameter.numel() else ""
            if other not in ("", replica.names[index]):
                raise ConfigError(
                    f"{replica.names[index]} shares its memory with {other}, and ranks would update the one without "
                    "the other. Let both be one nn.Parameter before replicate(), or use shard=False."
                )

    def _cover(self, replica: Replica) -> None:
        """The parameters that the optimizer has now."""
        self.indices()
        self.covered = self._indices
        self._find_groups()
        scatter(replica, frozenset(replica.names[index] for index in self.covered))

    def _find_groups(self) -> None:
        self._group_of = {
            self._place[id(each)]: number
            for number, group in enumerate(self._alive().param_groups)
            for each in group["params"]
            if id(each) in self._place
        }

    def remove(self) -> None:
        """Leave the optimizer alone, with all of its state on every rank. Every rank calls it."""
        optimizer = self._alive()
        super().remove()
        states = self.full_states()
        optimizer.state = defaultdict(dict)
        for index, state in states.items():
            device = self.parameters[index].device
            optimizer.state[self.parameters[index]] = {
                key: value.to(device) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in state.items()
            }
            self._place_numbers(index, optimizer.state[self.parameters[index]])
        self._own, self.pieces = {}, {}

    def record(self) -> OptimizerRecord:
        optimizer, sizes = self._alive(), self._sizes()
        state = (value for each in optimizer.state.values() for value in each.values())
        record = OptimizerRecord(
            type(optimizer).__name__,
            SHARDED,
            sum(sizes[index] for index in self.covered),
            ranks=self.ranks,
            elements=sum(self.parameters[index].numel() for index in self.covered),
            own_elements=sum(piece.numel for piece in self.pieces.values()),
            state_nbytes=sum(value.nbytes for value in state if isinstance(value, torch.Tensor)),
        )
        return self._with_what_is_left(record)

    # --- who has what

    def _lay_out(self) -> None:
        """Cut parameters as the plan of the module says. If that has changed, state goes where its elements go."""
        replica = self._replicated()
        if not self._is_laid_out(replica):
            states = self.full_states() if self._has_state else {}
            self._plan = replica.plan
            self.pieces = {each.index: each for each in pieces_of(replica.plan, self.rank)}
            self._own = {
                index: nn.Parameter(flat(self.parameters[index])[piece.start : piece.stop])
                for index, piece in self.pieces.items()
            }
            own = defaultdict[int, list[Piece]](list)
            for piece in self.pieces.values():
                first = self.rank * numel_of_part(replica.plan, piece.bucket)
                own[piece.bucket].append(replace(piece, offset=first + piece.offset))
            self._in_buckets = {
                number: (tuple(own[number]), pieces_of_others(replica.plan, number, self.rank))
                for number, bucket in enumerate(replica.plan.buckets)
                if bucket.key.reduction.is_scattered
            }
            self._alive().state = ShardedStates(dict)
            self._looked_at = (None, {}, False)
            self._hold(states)
        self._find_memory()

    def _find_memory(self) -> None:
        """The pieces lie where their parameters lie, which may have been given other memory."""
        for index, piece in self.pieces.items():
            parameter, own = self.parameters[index], self._own[index]
            if own.data_ptr() != parameter.data_ptr() + piece.start * parameter.element_size():
                own.data = flat(parameter)[piece.start : piece.stop]

    def _check_order(self, replica: Replica) -> None:
        """Gradients lie in buckets as parameters lay in memory when they were replicated; parts are cut out of both.

        Raises:
            ReductionError: a parameter's elements are in another order now.
        """
        planned = strides_of(replica.plan)
        for index in self.covered:
            if not lies_as(self.parameters[index], planned[index]):
                raise ReductionError(_other_order(self.names[index], self.parameters[index], planned[index]))

    def _is_laid_out(self, replica: Replica) -> bool:
        plan, _, same = self._looked_at
        if plan is not replica.plan:
            bucket_of = {
                member.gradient.index: number
                for number, bucket in enumerate(replica.plan.buckets)
                for member in bucket.members
            }
            same = self._plan is not None and layout_of(replica.plan) == layout_of(self._plan)
            self._looked_at = (replica.plan, bucket_of, same)
        return same

    # --- state

    def _full_states(self, optimizer: torch.optim.Optimizer) -> States:
        """Of an optimizer that has whole parameters, as after `load_state_dict()`, by place in the module."""
        return {
            index: dict(optimizer.state[self.parameters[index]])
            for index in self.covered
            if self.parameters[index] in optimizer.state
        }

    def _hold(self, states: States) -> None:
        """Keep this rank's part of whole states; they are the same on every rank."""
        pieces = {index: piece for index, piece in self.pieces.items() if index in states}
        self._hold_own({index: cut(states[index], self.parameters[index], piece) for index, piece in pieces.items()})
        self._has_state = bool(states)

    def _hold_own(self, states: States) -> None:
        held = ShardedStates(dict)
        for index, state in states.items():
            self._place_numbers(index, state)
            held[self._own[index]] = state
        self._alive().state = held

    def _place_numbers(self, index: int, state: State) -> None:
        """A step counter is on the host, unless kernels of the device read it."""
        group = self._alive().param_groups[self._group_of[index]]
        if group.get("capturable") or group.get("fused"):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not value.dim():
                    state[key] = value.to(self.parameters[index].device)

    def own_states(self) -> States:
        """Of this rank's pieces."""
        state = self._alive().state
        return {index: dict(state[own]) for index, own in self._own.items() if own in state}

    def full_states(self, to: int | None = None) -> States:
        """The whole state, by place in the module, on the CPU. Every rank calls it; `to`: the only one that gets it."""
        parameters = {index: self.parameters[index] for index in sorted(self.covered)}
        return gathered(self.own_states(), self.pieces, parameters, self.group, to)

    def hold_own(self, states: States) -> None:
        """Go on from states of this rank's pieces. Every rank calls it."""
        self._hold_own(states)
        self._has_state = True
        self._has_another_state()

    @contextlib.contextmanager
    def as_whole(self, states: States) -> Iterator[torch.optim.Optimizer]:
        """Inside, the optimizer has these whole states, as one that was never sharded."""
        optimizer = self._alive()
        before = optimizer.state
        optimizer.state = defaultdict(dict, {self.parameters[index]: state for index, state in states.items()})
        try:
            yield optimizer
        finally:
            optimizer.state = before

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        super()._loaded(optimizer)
        self._has_state = False
        replica = self.replica
        if replica is not None:
            self._take_in_added(replica)
        states = self._full_states(optimizer)
        if replica is not None:
            self._lay_out()
        self._hold(states)

    # --- for the engine

    def begin(self) -> None:
        super().begin()
        self._is_open = True
        replica = self._replicated()
        self._forget()
        self._take_in_added(replica)  # laid out at the end: the plan may change before
        self._find_groups()
        self._check_order(replica)
        self._find_memory()
        for index in self.covered:
            if isinstance(replica.parameters[index].grad, ShardedGradient):
                replica.parameters[index].grad = None

    def _take_in_added(self, replica: Replica) -> None:
        """Cover parameters of `add_param_group()`, too."""
        self.indices()
        if self._indices == self.covered:
            return
        taking, replica.after.parts_to = replica.after.parts_to, None
        try:
            self._check(replica, self._alive())
        finally:
            replica.after.parts_to = taking
        self._cover(replica)
        self._looked_at = (None, {}, False)

    def wanted(self, *, keep_graph: bool) -> Wanted:
        replica = self._replicated()
        self._options = said_of(self._alive())
        if keep_graph:
            raise ReductionError(
                "retain_graph=True, but a backward with a sharded optimizer changes parameters at its end: it cannot "
                "be gone through once more. Add the losses, or run all backwards but the last under no_sync()."
            )
        if replica.config.check_nan or replica.uneven is not None:
            raise ReductionError("a sharded optimizer has no whole gradients to look at or to divide anew.")
        return Wanted(self.covered, parts=True)

    @property
    def _whole_step(self) -> bool:
        """Whether something is known of all gradients before any is used."""
        return self._max_norm is not None or self._scaler is not None

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        replica = self._replicated()
        check_in_place(replica, indices[: len(parameters)], parameters)
        if replica.rehearses:
            return
        is_laid_out = self._is_laid_out(replica)
        if not parameters or self._whole_step or not is_laid_out:
            # On a GPU what replays a graph has other plans for its memory.
            self._keep(bucket, gradients[0] if gradients[0].device.type == "cpu" else gradients[0].clone())
            return
        self._updated.update(indices)
        with replica.local.updating(indices):
            self._step(self._gradients_in(bucket, gradients[0]))

    def _keep(self, bucket: int, part: torch.Tensor) -> None:
        """Until the end of the backward. The norm of it is found while others are on their way."""
        self._parts[bucket] = part
        if self._max_norm is not None and self._scaler is None and self._is_laid_out(self._replicated()):
            for index, gradient in self._gradients_in(bucket, part).items():
                self._squares[index] = _square(gradient)

    def _forget(self) -> None:
        self._parts.clear()
        self._squares.clear()

    def _gradients_in(self, bucket: int, part: torch.Tensor) -> dict[int, torch.Tensor]:
        """By parameter, what is reduced of this rank's pieces."""
        own, _ = self._in_buckets[bucket]
        offsets = [piece.offset - self.rank * part.numel() for piece in own]
        return {piece.index: part[offset : offset + piece.numel] for piece, offset in zip(own, offsets, strict=True)}

    @torch.no_grad()
    def ended(self) -> None:
        try:
            self._end(self._replicated())
        except BaseException as error:
            self.interrupted(error)
            raise
        super().ended()

    def left_out(self, error: BaseException) -> None:
        if self._is_open:
            with contextlib.suppress(type(error)), torch.no_grad():
                self._end(self._replicated(), error)
            self._forget()
            if self.deferred is not None:
                self.deferred.drop()

    def _end(self, replica: Replica, failed: BaseException | None = None) -> None:
        """Do what is left of the update, and let all ranks have all of it.

        An error, or `failed`, is raised once other ranks have all that they wait for from this one.
        """
        self._is_open, held = False, _Held(failed)
        self._lay_out()
        still = {
            *replica.untouched,
            *(index for index in self.covered if not self.parameters[index].requires_grad),
        }
        gradients: dict[int, torch.Tensor] = {}
        for bucket in sorted(self._parts):
            gradients |= self._gradients_in(bucket, self._parts.pop(bucket))
        gradients = {index: gradient for index, gradient in gradients.items() if index not in still}
        moves = True
        if self._whole_step:
            moves = self._may_step_with(gradients, held)
        self._forget()
        if moves:
            # A rank that takes part only has updated nothing: the next backward compares who has missed the step.
            self._updated.update(() if failed is not None else self.covered)
            with replica.local.updating(self.covered):
                self._gather(replica, gradients, held)
        for index in self.covered:
            if index not in still:
                self.parameters[index].grad = sharded_gradient(self.parameters[index])

    def interrupted(self, error: BaseException) -> None:
        self._forget()
        super().interrupted(error)

    def released(self) -> None:
        """The module is not replicated any more: there is nobody who would reduce parts, or whole gradients."""
        super().released()
        for index in self.covered:
            if isinstance(self.parameters[index].grad, ShardedGradient):
                self.parameters[index].grad = None

    # --- a step

    def _step(self, gradients: Mapping[int, torch.Tensor]) -> None:
        if gradients:
            with listeners_of(self._replicated()).during(UPDATE), self._narrowed(gradients) as optimizer:
                optim.step_without_hooks(optimizer)
        self._has_state = True

    @contextlib.contextmanager
    def _narrowed(self, gradients: Mapping[int, torch.Tensor]) -> Iterator[torch.optim.Optimizer]:
        """Inside, the optimizer has this rank's pieces with a gradient only, each in the group of its parameter."""
        optimizer = self._alive()
        groups = optimizer.param_groups
        before = [group["params"] for group in groups]
        chosen: list[list[nn.Parameter]] = [[] for _ in groups]
        for index in sorted(gradients):
            self._own[index].grad = gradients[index]
            chosen[self._group_of[index]].append(self._own[index])
        try:
            for group, some in zip(groups, chosen, strict=True):
                group["params"] = some
            optimizer.param_groups = [group for group in groups if group["params"]]
            yield optimizer
        finally:
            optimizer.param_groups = groups
            for group, every in zip(groups, before, strict=True):
                group["params"] = every
            for index in gradients:
                self._own[index].grad = None

    def _may_step_with(self, gradients: Mapping[int, torch.Tensor], held: _Held) -> bool:
        """Unscale and clip; the norm, and whether anything is not finite, come from all ranks in one all-reduce.

        Raises:
            VoidBackwardError: another rank failed before it; nothing is updated on any rank.
        """
        scaler, device = self._scaler, self.parameters[0].device
        found: list[torch.Tensor] = []
        both = torch.zeros(3, dtype=torch.float64, device=device)
        with held:
            if scaler is not None and held.error is None:
                with self._narrowed(gradients) as optimizer, _something_to_look_at(optimizer, device):
                    scaler.unscale_(optimizer)
                    found = optim.found_inf_tensors(scaler, optimizer)
            norms = [
                self._squares[index] if index in self._squares else _square(gradients[index])
                for index in sorted(gradients)
            ]
            both[0] = torch.stack(norms).sum() if norms else 0.0
            for each in found:
                both[1] += each.to(device=device, dtype=torch.float64).squeeze()
        both[2] = float(held.error is not None)
        dist.all_reduce(both, group=self.group)
        # Without a scaler a GPU is not waited for: the next backward says that parameters differ.
        if (device.type == "cpu" or scaler is not None) and bool(both[2] > 0):
            held.release()
            raise VoidBackwardError("another rank failed before the update, which no rank does: its log says why.")
        for each in found:
            each.copy_((both[1:2] > 0).view(each.shape))
        if self._max_norm is not None:
            # As torch's own: of gradients of two dtypes in the wider one, whichever the first parameter has.
            kinds = {self.parameters[index].dtype for index in self.covered}
            norm = both[0].sqrt().to(reduce(torch.promote_types, kinds))
            self._alive().total_norm = norm  # type: ignore[attr-defined]
            # Where one may look without waiting, gradients that are small enough are not multiplied by one.
            if device.type != "cpu" or not bool(norm + 1e-6 <= self._max_norm):
                with self._narrowed(gradients):
                    own = [self._own[index] for index in gradients]
                    torch.nn.utils.clip_grads_with_norm_(own, self._max_norm, norm)
        return scaler is None or not bool(both[1] > 0)

    # --- what all ranks get

    def _gather(self, replica: Replica, gradients: Mapping[int, torch.Tensor], held: _Held) -> None:
        """Update by these gradients, and let all ranks have all of the parameters, now or in the next forward."""
        if self.ranks == 1:
            self._step(gradients)
            return
        flights: deque[_Round] = deque()
        for each in self._rounds(replica, gradients, held):
            if self.deferred is not None:
                self.deferred.keep(
                    PendingGather(
                        deferred=self.deferred, replica=replica, indices=each.indices, buckets=(each.bucket,),
                        told=listeners_of(replica), round=each,
                    )
                )  # fmt: skip
                continue
            flights.append(each)
            if len(flights) > _GATHERS_AHEAD:
                with held, listeners_of(replica).during(GATHER):
                    flights.popleft().put_back(self.parameters)
        with listeners_of(replica).during(GATHER) if flights else contextlib.nullcontext():
            for each in flights:
                with held:
                    each.put_back(self.parameters)
        held.release()

    def _rounds(self, replica: Replica, gradients: Mapping[int, torch.Tensor], held: _Held) -> Iterator[_Round]:
        """Each rank's part of each bucket; updated and launched one by one, so that the first is on its way at once.

        What is ready last in a backward is taken to be read first in the next forward, as in `plan/crossing.py`.
        """
        stage = Stage(ALL_GATHER, replica.group.name, parts=self.ranks)
        for number in sorted(self._in_buckets, reverse=self.deferred is not None):
            bucket, (own, others) = replica.plan.buckets[number], self._in_buckets[number]
            with held:
                if held.error is None:
                    self._step({piece.index: gradients[piece.index] for piece in own if piece.index in gradients})
            (numel,), like = bucket.tensor_numels, self.parameters[bucket.members[0].gradient.index]
            with listeners_of(replica).during(GATHER):
                values = self._memory(number, numel, like)
                for piece in own:
                    values[piece.offset : piece.offset + piece.numel] = self._own[piece.index].detach()
                work = held.launched(partial(launch_gather, stage, values))
            indices = tuple(member.gradient.index for member in bucket.members)
            yield _Round(number, indices, others, values, work)

    def _memory(self, bucket: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """What a bucket of parameters is gathered in: where its gradients were. What is in gaps is not defined, unless
        NCCL looks for NaN there."""
        replica = self._replicated()
        if replica.plan.keeps_memory:
            values = replica.bucket_memory.take(bucket, numel, like.dtype, like.device)
        else:
            values = like.new_empty(numel)
        return values.zero_() if nan_check_is_on() else values

    # --- around step()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_step(optimizer, args, kwargs)
        for index in self.covered:
            parameter = self.parameters[index]
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
            elif parameter.grad is not None:
                raise ReductionError(
                    f"{self.names[index]} has a gradient that no synchronised backward of its module has brought, and "
                    "each rank has a part of the optimizer only. Run a backward outside of no_sync(), set no .grad by "
                    "hand; and once the module is not replicated any more, load "
                    "dp_compile.optim.full_state_dict(optimizer) into an optimizer of its own."
                )
        self._check_gradients(optimizer)


class _Held:
    """Holds the first error inside until other ranks have all that they wait for from this one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or is_of_other_ranks(error):
            return False
        self.error = self.error or error
        return True

    def launched(self, launch: Callable[[], dist.Work | None]) -> dist.Work:
        """What is launched, the second time if the first one raised."""
        work: dist.Work | None = None
        with self:
            work = launch()
        work = work or launch()
        assert work is not None
        return work

    def release(self) -> None:
        if self.error is not None:
            raise self.error


def _square(gradient: torch.Tensor) -> torch.Tensor:
    """Of the norm of a gradient."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


def flat(parameter: torch.Tensor) -> torch.Tensor:
    """All elements in the order of the memory, which has no gaps."""
    return parameter.detach().as_strided((parameter.numel(),), (1,))


def strides_of(plan: BucketPlan) -> dict[int, tuple[int, ...]]:
    """In what order the elements of each gradient lie in its bucket, by index."""
    return {gradient.index: gradient.stride for gradient in plan.gradients}


def lies_as(parameter: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether the elements of a parameter lie in that order; a dimension of size one may have any step."""
    return (
        parameter.stride() == stride
        or not parameter.numel()
        or all(
            size == 1 or own == planned
            for size, own, planned in zip(parameter.shape, parameter.stride(), stride, strict=True)
        )
    )


def _other_order(name: str, parameter: torch.Tensor, stride: Sequence[int]) -> str:
    return (
        f"{name} has strides {parameter.stride()}, it had {tuple(stride)} when replicate() was called: gradients come "
        "in that order, of which each rank updates a part. Call to(memory_format=...) before replicate()."
    )


@contextlib.contextmanager
def _something_to_look_at(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """A scaler refuses to step where it has seen no gradient, as on a rank without a piece."""
    if optimizer.param_groups:
        yield
        return
    nothing = nn.Parameter(torch.zeros(1, device=device))
    nothing.grad = torch.zeros(1, device=device)
    optimizer.param_groups.append({"params": [nothing]})
    try:
        yield
    finally:
        optimizer.param_groups.clear()


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer.state, ShardedStates):
        raise ReductionError(
            "optimizer.state_dict() of a sharded optimizer: each rank has a part of the state. Call "
            "dp_compile.optim.full_state_dict(optimizer) on every rank for all of it, or "
            "dp_compile.optim.sharded_state_dict(optimizer) for torch.distributed.checkpoint."
        )
