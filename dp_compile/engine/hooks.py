"""Gradient hooks, one per parameter, and the eager reduction that they drive in backwards that are not captured.

A hook marks the gradient of its parameter as complete, to be reduced once. In a captured backward `engine/graph.py`
puts that reduction into the graph, after all hooks of the parameter. Otherwise the hook reports to a `ReductionRound`,
which launches the plan's buckets in the plan's order. Graph and round launch the same collectives, so a rank whose
capture failed still works with ranks whose capture succeeded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from dp_compile._torch import autograd, compiler
from dp_compile._torch.distributed import collectives_launched, group_of_name
from dp_compile.engine.flags import flags_of_failure, flags_to_send, in_one_line, read_flags, refuse_failed, remember
from dp_compile.engine.plan_sync import finalize_plans, meet_before_launch
from dp_compile.engine.ranges import BACKWARD, LAUNCH, WAIT, during, during_bucket
from dp_compile.errors import ReductionError
from dp_compile.passes.reduction import EagerOps, finished, reduce_bucket
from dp_compile.passes.reduction_by_call import reduce_by_call
from dp_compile.plan.buckets import Bucket
from dp_compile.plan.reduction import CALLED, is_handed_back_at_the_end, launch_order
from dp_compile.replica.gradients import lay_out, local_view, sparse_gradient
from dp_compile.replica.replica import GradientReceiver, Replica
from dp_compile.replica.store_channel import is_of_other_ranks

ResultT = TypeVar("ResultT")


class GradHook:
    """The hook of parameter `index` of a replica; autograd calls the hook after accumulating the gradient.

    The garbage collector does not see a parameter's references to its hooks, so a hook must hold its replica weakly.
    """

    __slots__ = ("_replica", "index", "name")

    def __init__(self, replica: Replica, index: int) -> None:
        self._replica, self.index, self.name = weakref.ref(replica), index, replica.names[index]

    @property
    def replica(self) -> Replica | None:
        """The replica, `None` once its module is deleted and only the parameter remains."""
        return self._replica()

    def __call__(self, parameter: torch.Tensor) -> None:
        replica = self._replica()
        if replica is None:
            raise ReductionError(
                f"the gradient of {self.name} is not reduced: every replicated module that held the parameter was "
                "deleted. Keep a reference to the module that was given to replicate(), or to a part of it."
            )
        if torch.compiler.is_dynamo_compiling():
            raise ReductionError(
                f"the hook of {self.name} is being traced by a capture that is not dp_compile's. "
                "Switch torch's own compiled autograd off around this backward."
            )
        receiver = receiver_of(replica)
        if receiver is None:
            # C++ started this backward, so the guard cannot separate changes before it from changes inside it.
            receiver = _open_round(replica)
            replica.state.step_guard.at_start = ()
        receiver.mark_ready(self.index)


@dataclass(frozen=True, slots=True)
class UnsyncedGradients:
    """Receives calls of hooks in a backward without synchronisation, and records used parameters for the next flags."""

    replica: Replica
    existing: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The gradients before this backward, by index; recorded only with CUDA graphs."""

    def mark_ready(self, index: int) -> None:
        parameter = self.replica.parameters[index]
        grad = parameter.grad
        if grad is None:  # a nested backward computed no gradient for it
            return
        self.replica.state.step_guard.used.add(index)
        if self.existing.get(index) is not grad and compiler.replays_cuda_graphs(parameter.device):
            # Autograd keeps the output of compiled code as `.grad`; the next replay overwrites it (pytorch#169545).
            parameter.grad = grad.clone()


@dataclass(frozen=True, slots=True)
class NoGradients:
    """Receives calls of hooks in a captured backward and raises: the graph reduces, so no hook should be called."""

    replica: Replica

    def mark_ready(self, index: int) -> None:
        raise ReductionError(
            f"the gradient of {self.replica.names[index]} was completed inside an operator of a captured backward: the "
            "operator runs a nested backward, which the graph cannot represent. Run that backward in a "
            "torch.autograd.Function instead, or do not compile the forward that calls the operator."
        )


def receiver_of(replica: Replica) -> GradientReceiver | None:
    """Return what a module's hooks report to in its current backward, `None` if no backward is in progress."""
    receiver = replica.state.receiver
    is_left_over = isinstance(receiver, ReductionRound) and receiver.is_left_over()
    return None if is_left_over else receiver


@contextlib.contextmanager
def reporting(receivers: Mapping[Replica, GradientReceiver]) -> Iterator[None]:
    """Context manager inside which the hooks of each module report to the receiver given for this module."""
    before = [(replica, replica.state.receiver) for replica in receivers]
    for replica, now in receivers.items():
        replica.state.receiver = now
    try:
        yield
    finally:
        for replica, earlier in before:
            replica.state.receiver = earlier


def install_hooks(replica: Replica) -> None:
    """Register one hook on each parameter of a replica. The handles that remove them: `ModuleRefs.hook_handles`."""
    replica.module.hook_handles = tuple(
        parameter.register_post_accumulate_grad_hook(GradHook(replica, index))
        for index, parameter in enumerate(replica.parameters)
    )


@dataclass(eq=False, slots=True)
class ReductionRound:
    """The reductions of one backward that was not captured: the plan's buckets, launched in the plan's order."""

    replica: Replica
    graph_task: int | None = None  # the backward's id in the engine, if only an engine callback marks its end
    before: ReductionRound | None = None  # another module's round; it launches all buckets first, as captured code does
    absent: bool = False  # no inputs are left, or the backward failed: contributes zeros and keeps no result
    silent_launches: int = 0  # launches, in the plan's order, that a failed backward has made already
    is_held: bool = False  # launches nothing before the end, as a nested backward may add to a gradient again
    reached: Callable[[], Collection[int]] = tuple
    """Returns the parameters in the backward's graph; called if some gradients are missing. A user's function may have
    returned None for these, which counts as zeros, as in torch's DDP."""
    arrived: dict[int, None] = field(default_factory=dict)  # parameters in the order in which gradients were completed
    awaited: list[int] | None = field(init=False)
    """Members of the next bucket in reverse order; completed ones are popped. `None`: all buckets are launched."""
    flights: list[tuple[EagerOps, Generator[None, None, torch.Tensor]]] = field(default_factory=list)  # launched
    memory: Callable[..., torch.Tensor] | None = field(init=False)
    """Allocates buckets in memory that is reused after the round unless it became a gradient. `None`: no reuse."""
    new: frozenset[int] = frozenset()  # had no gradient before: `.grad` may alias the bucket; an old one is written to
    due: deque[tuple[int, int]] = field(init=False)  # (bucket, stage) pairs still to be launched
    averages: dict[int, torch.Tensor] = field(default_factory=dict)
    """The reduced gradients and flags by index once the round is finished, without scattered gradients."""

    def __post_init__(self) -> None:
        self._await_next()
        self.due = deque(launch_order([bucket.key.reduction.stages for bucket in self.replica.plan.buckets]))
        state, keeps_memory = self.replica.state, self.replica.plan.keeps_memory
        self.memory = state.bucket_memory.in_turn(self.replica.device) if keeps_memory else None

    def mark_ready(self, index: int) -> None:
        """Record that the gradient of parameter `index` is accumulated. Launch buckets that earlier calls completed."""
        if index in self.replica.module.dtensors:
            # Now, not when its bucket is filled: ranks that hold other shards of it may have another plan.
            lay_out(self.replica.parameters[index])
        launched = (member.gradient.index for ops, _ in self.flights for member in ops.bucket.members)
        if index in self.arrived and index in launched:
            raise ReductionError(
                f"the gradient of {self.replica.names[index]} was completed twice in one backward, the second time "
                "after its bucket was launched. Use non-reentrant checkpointing, or compile the forward."
            )
        # Do not count this gradient yet: a user's hooks on it may run after ours and change it.
        is_next = not self.is_held and (self.before is None or not self.before.due)
        while is_next and self.awaited is not None:
            while self.awaited and self.awaited[-1] in self.arrived:
                self.awaited.pop()
            if self.awaited:
                break
            self._launch(self.replica.plan.buckets[len(self.flights)], None)
        self.arrived[index] = None

    def is_left_over(self) -> bool:
        """Return whether the round belongs to an earlier backward that was interrupted before its end callback."""
        return self.graph_task is not None and self.graph_task != autograd.graph_task()

    def finish(self) -> None:
        """Contribute zeros for missing gradients, wait for buckets, set `.grad`. Raises the errors of `read_flags`."""
        replica, everything = self.replica, range(len(self.replica.parameters))
        try:
            if not self.absent and len(self.arrived) < len(everything):
                self.arrived |= dict.fromkeys(sorted(self.reached()))
            if not self.absent:
                replica.state.step_guard.note_steps()
                for index in sorted(replica.module.dtensors.difference(self.arrived)):
                    lay_out(replica.parameters[index])  # its gradient is of earlier, unsynchronised backwards
            unused = [index for index in everything if index not in self.arrived and not self.absent]
            used = sorted({*self.arrived, *replica.state.step_guard.used})
            self.launch_rest(None if self.absent else flags_to_send(replica, unused, used))
            self.averages = self._wait()
            flags = self.averages[len(replica.parameters)]
            refuse_failed(replica, flags)
            left_alone = replica.used_by_nobody(everything if self.absent else unused, flags)
            for ops, _ in self.flights:
                if ops.run is not None:
                    remember(replica, ops.bucket, ops.run, flags, left_alone)
            self._set_grads()
            replica.state.step_guard.used.clear()
            replica.hand_out(unused, list(map(self.averages.get, unused)), left_alone)
            self._reduce_sparse(left_alone)
            read_flags(replica, flags, unused)
        finally:
            if self.graph_task is not None:  # otherwise the caller does this at the end of the backward
                replica.count_synced()
                replica.state.receiver = None

    def launch_rest(self, flags: torch.Tensor | None) -> None:
        for bucket in self.replica.plan.buckets[len(self.flights) :]:
            self._launch(bucket, flags)
        while self.due:
            self._launch_stage()

    @property
    def launches(self) -> int:
        """The number of collectives launched."""
        return sum(ops.launches for ops, _ in self.flights)

    def drop(self) -> None:
        """Wait for all collectives in flight and discard their results."""
        for ops, _ in self.flights:
            if ops.work is not None:
                ops.work.wait()

    def _wait(self) -> dict[int, torch.Tensor]:
        """Wait for all buckets and return averages by parameter index. Scattered buckets go to `after.parts_to`."""
        reduced: dict[int, torch.Tensor] = {}
        for number, (ops, reducing) in enumerate(self.flights):
            tensor = finished(reducing)
            if ops.bucket.key.reduction.is_scattered:
                assert self.replica.after.parts_to is not None
                self.replica.after.parts_to.apply(number, (), (), [tensor])
                continue
            reduced.update(ops.averages(tensor))
        return reduced

    def _set_grads(self) -> None:
        """Set each completed `.grad` to its average, in place or as a view of the bucket, or to None if scattered."""
        replica, is_plain = self.replica, self.replica.module.is_plain
        scattered, parameters = replica.after.scattered, replica.parameters
        for index in self.arrived:
            if index in replica.module.sparse:
                continue
            parameter = parameters[index]
            if index in scattered:
                parameter.grad = None
            elif index in self.new and is_plain and (average := self.averages[index]).stride() == parameter.stride():
                parameter.grad = average
            else:
                replica.set_grad(index, self.averages[index])

    def _reduce_sparse(self, left_alone: Collection[int]) -> None:
        """Average sparse gradients as torch's DDP does: divide and all-reduce one by one, after all buckets.

        Ranks without a gradient contribute no rows. They get the average too, unless no rank used the parameter.
        """
        group = self.replica.group
        for index in sorted(self.replica.module.sparse):
            parameter = self.replica.parameters[index]
            with torch.no_grad():
                average = sparse_gradient(parameter, absent=self.absent)
                average /= group.averaging.divide_by or group.world_size
                dist.all_reduce(average, group=group.process_group)
                if not self.absent and index not in left_alone:
                    is_dense = parameter.grad is not None and not parameter.grad.is_sparse
                    parameter.grad = average.to_dense() if is_dense else average
                self.averages[index] = average.coalesce().values()

    def _await_next(self) -> None:
        rest = self.replica.plan.buckets[len(self.flights) :]
        self.awaited = [member.gradient.index for member in reversed(rest[0].members)] if rest else None

    def _launch(self, bucket: Bucket, flags: torch.Tensor | None) -> None:
        number, hook = len(self.flights), bucket.key.reduction.hook
        members = () if hook in (None, CALLED) else bucket.members  # only functional hooks have state
        ops = EagerOps(
            bucket,
            [self._source(member.gradient.index, flags) for member in bucket.members],
            self.replica.device,
            partial(during_bucket, LAUNCH, self.replica, number, bucket),
            partial(during_bucket, WAIT, self.replica, number, bucket),
            state=[self.replica.state_of_hook(member.gradient.index) for member in members],
            memory=self.memory,
        )
        reducing, called = reduce_bucket(bucket, ops), self.replica.called_hook
        if called is not None and hook == CALLED:
            reducing = reduce_by_call(called, bucket, ops, self.replica.parameters, self.replica.plan)
        self.flights.append((ops, reducing))
        self._await_next()
        # Only later stages of launched buckets are due before this bucket's first stage: `launch_order` puts each
        # bucket's first stage before its later ones, and buckets are launched in the plan's order.
        while self._launch_stage() != (number, 0):
            pass
        # Keep the last stages back: this rank would block until the slow link has finished the stages before them.
        while self.due and (stage := self.due[0][1]):
            stages = self.replica.plan.buckets[self.due[0][0]].key.reduction.stages
            if stage == len(stages) - 1 and is_handed_back_at_the_end(stages):
                break
            self._launch_stage()

    def _launch_stage(self) -> tuple[int, int]:
        """Launch the stage that is due next, after waiting for its bucket's previous stage."""
        number, stage = self.due.popleft()
        ops, reducing = self.flights[number]
        ops.is_silent, self.silent_launches = self.silent_launches > 0, self.silent_launches - 1
        with torch.no_grad():
            next(reducing)
        return number, stage

    def _source(self, index: int, flags: torch.Tensor | None) -> torch.Tensor | None:
        parameters = self.replica.parameters
        if index == len(parameters):
            return flags
        grad = None if self.absent else parameters[index].grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise ReductionError(
                f"the gradient of {self.replica.names[index]} is sparse, but no nn.Embedding or nn.EmbeddingBag of the "
                "module declares it. Use one of these with sparse=True, or compute the gradient with sparse=False."
            )
        return grad if self.replica.module.is_plain else local_view(grad)


def reduce_eagerly(
    replicas: Sequence[Replica],
    run: Callable[[], ResultT],
    *,
    create_graph: bool = False,
    reached: Callable[[Replica], Collection[int]] | None = None,
) -> ResultT:
    """Run a backward without capture; its hooks reduce the gradients of these modules, in this order.

    `create_graph`: gradients stay in autograd graphs, so none aliases a bucket. `reached`: as in `ReductionRound`.
    """
    synced = [replica for replica in replicas if replica.reduces]
    finalize_plans(synced)
    meet_before_launch(synced)
    rounds: list[ReductionRound] = []
    for replica in synced:
        this = ReductionRound(replica, before=rounds[-1] if rounds else None)
        this.reached = tuple if reached is None else partial(reached, replica)
        if not create_graph:
            this.new = frozenset(index for index, each in enumerate(replica.parameters) if each.grad is None)
        rounds.append(this)
    local: dict[Replica, GradientReceiver] = {}
    for replica in replicas:
        if not replica.reduces:
            of_graphs = replica.parameters if compiler.replays_cuda_graphs(replica.device) else ()
            existing = {index: each.grad for index, each in enumerate(of_graphs) if each.grad is not None}
            local[replica] = UnsyncedGradients(replica, existing)
    with reporting(local | {each.replica: each for each in rounds}), during(BACKWARD, *synced):
        try:
            result = run()
            for each in rounds:  # in launch order
                each.finish()
        except BaseException as error:
            for each in () if is_of_other_ranks(error) else rounds:
                each.drop()
            try:
                leave({each.replica: each.launches for each in rounds}, error)
            except Exception as another:  # a hook failed again: the caller completes the remaining launches
                if is_of_other_ranks(another):
                    raise
            raise
    return result


def leave(launches: Mapping[Replica, int], error: BaseException) -> None:
    """Complete the collectives of a backward that failed on this rank, so no rank waits and no receive is pending.

    `launches`: the number of launched collectives per module, in the order of reduction.
    """
    for replica, launched in launches.items():
        if not replica.group.has_others:
            continue
        local = replica.state.step_guard
        if local.reduced is None and not is_of_other_ranks(error):
            rest = ReductionRound(replica, absent=True, silent_launches=launched)
            rest.memory = None  # launched collectives may still use it
            # Once the flags are launched, every rank will accept the gradients. Plans for deferred updates have them in
            # their first bucket, others in the last.
            held = [{member.gradient.index for member in each.members} for each in replica.plan.buckets]
            of_flags = next(number for number, indices in enumerate(held) if len(replica.parameters) in indices)
            local.reduced = launched > rest.due.index((of_flags, 0))
            rest.launch_rest(flags_of_failure(replica, error))  # with zeros
            for _, reducing in rest.flights:
                finished(reducing)
        if local.reduced:
            number = replica.history.synced_backwards + 1
            local.missed = (
                f"rank {dist.get_rank()} left synchronised backward {number} of the module of {replica.names[0]} after "
                f"other ranks had its gradients: {in_one_line(error)}. Parameters differ between ranks. Restore a "
                "checkpoint on every rank."
            )


def launches_so_far(replica: Replica) -> int:
    """Return the number of collectives of any kind launched in a replica's groups. Only differences are meaningful."""
    return sum(collectives_launched(group_of_name(name), replica.device) for name in replica.planning.groups)


def await_inner(replica: Replica, late: dict[Replica, ReductionRound] | None) -> None:
    """Launch nothing before the outermost backward ends for a module that a nested backward reaches.

    `late` receives the round of a module that only nested backwards reach; the caller then finishes the round at the
    end. `None`: an engine callback finishes the round.
    """
    receiver = receiver_of(replica) or _open_round(replica, late)
    if isinstance(receiver, ReductionRound):
        receiver.is_held = True


def _open_round(replica: Replica, late: dict[Replica, ReductionRound] | None = None) -> GradientReceiver:
    """Return the receiver of a module's hooks in a backward that `engine/backward.py` did not start. Raises
    ReductionError inside `join`, or if an update must follow the backward: only `engine/backward.py` runs updates."""
    if replica.state.sync and (not replica.state.reduces_gradients or replica.after.parts_to is not None):
        what = "sharded optimizer" if replica.state.reduces_gradients else "step at the end of each backward"
        raise ReductionError(
            f"the module of {replica.names[0]}, with a {what}, is reached only by a nested backward (reentrant "
            "checkpointing) or by a backward launched from C++. Use checkpoint(..., use_reentrant=False)."
        )
    if not replica.reduces:
        return UnsyncedGradients(replica)
    if replica.state.uneven is not None:
        raise ReductionError(
            f"inside join(), the module of {replica.names[0]} is reached only by a nested backward (reentrant "
            "checkpointing) or by a backward launched from C++. Use checkpoint(..., use_reentrant=False)."
        )
    replica.state.step_guard.begin()
    finalize_plans([replica])
    meet_before_launch([replica])
    this = replica.state.receiver = ReductionRound(replica)
    if late is not None:
        late[replica] = this
    else:
        this.graph_task = autograd.graph_task()
        autograd.queue_after_backward(this.finish)
    return this
