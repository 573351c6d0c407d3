"""Reduction of a bucket: `reduce_bucket`, for eager and captured backwards, and its ops in a graph.

    grad -> dp_compile::reduce_grad(grad, index, replica) -> reduced grad

`index` is the gradient's position among the parameters of its module, `replica` the position of that module among the
modules in this backward. The op never runs: a pass replaces it with the nodes of its bucket.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import has_side_effect

from dp_compile._torch import autograd, distributed
from dp_compile.comm_hooks.functional import HookRun, State, bucket_of, fake_step
from dp_compile.errors import InvalidGraphError, ReductionError
from dp_compile.passes.memory import make_op, this_thread
from dp_compile.plan.buckets import Bucket, Member
from dp_compile.plan.reduction import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, Stage

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}

_SMALL_NUMEL: Final = 2**15  # such a tensor stays in the processor's cache: a second pass over it is almost free
_EXACT: Final = (torch.float32, torch.float64)

TensorT = TypeVar("TensorT")  # a tensor, or a graph node


class Ops(Protocol[TensorT]):
    """The operations that `reduce_bucket` calls, on graph nodes or (in an eager backward) on tensors."""

    def fill(self, scale: float, dtype: torch.dtype | None, given: Sequence[TensorT] | None = None) -> TensorT:
        """Return the flat bucket of `given` (`None`: gradients) times `scale`, in `dtype` (`None`: that of `given`)."""

    def step_of_hook(self, hook: str, received: Sequence[TensorT]) -> list[TensorT]:
        """Return what a functional hook sends after it received these results; at its end the reduced gradients."""

    def launch(self, stage: Stage, tensor: TensorT) -> Any:
        """Launch the collective of a stage."""

    def wait(self, launched: Any) -> TensorT:
        """Wait for a launched collective and return its result."""

    def add_up(self, tensor: TensorT, parts: int) -> TensorT:
        """Return the sum of the equal parts of a tensor, rounded once."""

    def restore(self, tensor: TensorT, scale: float, dtype: torch.dtype) -> TensorT:
        """Return a reduced tensor times `scale`, rounded once to `dtype`, the dtype of the gradients."""


def reduce_bucket(bucket: Bucket, ops: Ops[TensorT]) -> Generator[None, None, TensorT]:
    """Reduce a bucket and return it. Yields after each launch; when resumed, waits for it and launches the next stage.

    Callers with several buckets follow `plan.reduction.launch_order`.
    """
    reduction = bucket.key.reduction
    wire = None if reduction.wire is None else dtype_of(reduction.wire)
    if reduction.hook is not None:
        received: list[TensorT] = []
        for stage in reduction.stages:
            (sent,) = ops.step_of_hook(reduction.hook, received)
            launched = ops.launch(stage, sent)
            yield
            received.append(ops.wait(launched))
        return ops.fill(1.0, None, ops.step_of_hook(reduction.hook, received))
    tensor = ops.fill(reduction.scale, wire)
    for stage in reduction.stages:
        launched = ops.launch(stage, tensor)
        yield
        tensor = ops.wait(launched)
        if stage.op == EXCHANGE:
            tensor = ops.add_up(tensor, stage.parts)
    return restored(bucket, tensor, ops)


def restored(bucket: Bucket, tensor: TensorT, ops: Ops[TensorT]) -> TensorT:
    """Return the result `tensor` of the last stage with factor and dtype applied, also for a deferred update."""
    reduction = bucket.key.reduction
    if reduction.wire is None and reduction.post_scale == 1.0 and reduction.given < 2:
        return tensor
    return ops.restore(tensor, reduction.post_scale, dtype_of(bucket.key.dtype))


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def finished(reducing: Generator[None, None, TensorT]) -> TensorT:
    """Run a reduction to its end and return its result."""
    while True:
        try:
            next(reducing)
        except StopIteration as end:
            return end.value


# --- eager --------------------------------------------------------------------------------------------------------


def dtype_of_product(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's kernels multiply by a scalar if the result has the wider of both dtypes."""
    wide = torch.promote_types(one, other)
    return torch.float32 if wide in (torch.float16, torch.bfloat16) else wide


def multiply_into(parts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], scale: float) -> None:
    """Write each tensor times `scale` into its part of a bucket, computed in the wider of both dtypes and rounded once.

    All small tensors share two multi-tensor calls, because one call for each takes longer than the multiplication. Half
    precision is excluded: torch's multi-tensor CPU kernels round the factor to half (torch 2.13), unlike other kernels.
    """
    together: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part, tensor in zip(parts, tensors, strict=True):
        is_small = tensor.numel() <= _SMALL_NUMEL or not tensor.is_cpu
        if scale == 1.0 or (is_small and part.dtype == tensor.dtype and tensor.dtype in _EXACT):
            together.append((part, tensor))
        else:
            wide = torch.promote_types(tensor.dtype, part.dtype)
            torch.mul(tensor.to(wide), scale, out=part)
    if together:
        targets, values = zip(*together, strict=True)
        autograd.copy_all(targets, values)
        if scale != 1.0:
            autograd.multiply_all(targets, scale)


@dataclass(slots=True)
class EagerOps:
    """Implementation of `Ops` on tensors, with the same collectives as a captured backward for the same bucket.

    Args:
        sources: the local gradient of each member; `None`: zeros.
        launching: context of the first launch; `waiting`: context of each wait.
        work: the handle of the last launched collective.
        state: of a functional hook, for each member; `run`: the running call of that hook.
        memory: allocates a bucket from numel and dtype; by default each bucket is a new tensor.
        launches: the number of collectives launched.
        is_silent: launch nothing, because a failed backward of this rank has launched this bucket and lost the result.
        filled: the last filled tensor, and a view of each member in it.
    """

    bucket: Bucket
    sources: Sequence[torch.Tensor | None]
    device: torch.device
    launching: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    waiting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    work: dist.Work | torch.futures.Future[Any] | None = None
    state: Sequence[State] = ()
    memory: Callable[..., torch.Tensor] | None = None
    launches: int = 0
    is_silent: bool = False
    filled: tuple[torch.Tensor, list[torch.Tensor]] | None = None
    run: HookRun | None = None

    def fill(
        self, scale: float, dtype: torch.dtype | None, given: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        bucket = self.bucket
        given = list(map(self._given, range(len(bucket.members)))) if given is None else given
        filled = (self.memory or given[0].new_empty)(bucket.numel, dtype=dtype or given[0].dtype)
        with torch.no_grad():  # also in a backward that is differentiated
            if bucket.padding_nbytes:
                filled.zero_()
            parts = self._members_in(filled)
            multiply_into(parts, given, scale)
        self.filled = filled, parts
        return filled

    def _members_in(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        with autograd.aliasing():
            return [view_of(member, tensor) for member in self.bucket.members]

    def averages(self, reduced: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Return pairs of index and reduced member, each a view of `reduced`, shaped as its parameter."""
        filled, parts = self.filled or (None, [])
        parts = parts if filled is reduced else self._members_in(reduced)
        return zip((member.gradient.index for member in self.bucket.members), parts, strict=True)

    def step_of_hook(self, hook: str, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.run is None:
            gradients = list(map(self._given, range(len(self.bucket.members))))
            self.run = HookRun(hook, bucket_of(gradients, self.state, self.bucket.key.reduction.stages[0].group))
        return self.run.step(received)

    def _given(self, number: int) -> torch.Tensor:
        member, source = self.bucket.members[number], self.sources[number]
        if source is not None:
            return source
        zero = torch.zeros((), dtype=dtype_of(self.bucket.key.dtype), device=self.device)
        return zero.expand(member.gradient.shape)

    def launch(self, stage: Stage, tensor: torch.Tensor) -> Launched:
        if self.is_silent:
            return Launched(tensor.new_zeros(_numel_of_result(stage, tensor)), None)
        stages = self.bucket.key.reduction.stages
        with self.launching() if stage is stages[0] else contextlib.nullcontext():
            launched = launch_stage(stage, tensor)
        self.work, self.launches = launched.work, self.launches + 1
        return launched

    def wait(self, launched: Launched) -> torch.Tensor:
        if launched.work is not None:
            with self.waiting():
                launched.work.wait()
        return launched.tensor

    def add_up(self, tensor: torch.Tensor, parts: int) -> torch.Tensor:
        return tensor.view(parts, tensor.numel() // parts).sum(0)

    def restore(self, tensor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        if scale != 1.0:
            tensor = tensor.to(torch.promote_types(tensor.dtype, dtype)).mul_(scale)
        return tensor.to(dtype)


class Launched(NamedTuple):
    """A launched collective: `tensor` has the result once `work` has ended or if `work` is `None`."""

    tensor: torch.Tensor
    work: dist.Work | None


def launch_gather(stage: Stage, gathered: torch.Tensor) -> dist.Work:
    """Launch an in-place all-gather of each rank's part of the tensor."""
    group = distributed.group_of_name(stage.group)
    work = distributed.all_gather(gathered, gathered.view(stage.parts, -1)[group.rank()], group=group, async_op=True)
    assert work is not None
    return work


def _numel_of_result(stage: Stage, tensor: torch.Tensor) -> int:
    """Return the numel of a collective's result. For `EXCHANGE`, `Stage.numel_behind` is the numel after the sum."""
    return tensor.numel() if stage.op in (ALL_REDUCE, EXCHANGE) else stage.numel_behind(tensor.numel())


def launch_stage(stage: Stage, tensor: torch.Tensor) -> Launched:
    """Launch the collective of a stage on a tensor, which it may overwrite."""
    group = distributed.group_of_name(stage.group)
    result = tensor if stage.op == ALL_REDUCE else tensor.new_empty(_numel_of_result(stage, tensor))
    if stage.op == ALL_REDUCE:
        work = dist.all_reduce(tensor, op=REDUCE_OPS[stage.reduce_op], group=group, async_op=True)
    elif stage.op == ALL_GATHER:
        work = distributed.all_gather(result, tensor, group=group, async_op=True)
    elif stage.op in (EXCHANGE, ALL_TO_ALL):
        work = dist.all_to_all_single(result, tensor, group=group, async_op=True)
    else:
        op = REDUCE_OPS[stage.reduce_op]
        work = distributed.reduce_scatter(result, tensor, op=op, group=group, async_op=True)
    assert work is not None
    return Launched(result, work)


def view_of(member: Member, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a member in its bucket's tensor, with shape and strides of its parameter."""
    return tensor.as_strided(member.gradient.shape, member.gradient.stride, member.offset)


# --- in a graph ---------------------------------------------------------------------------------------------------


def _not_replaced(grad: torch.Tensor, index: int, replica: int) -> torch.Tensor:
    raise InvalidGraphError(f"gradient {index} of module {replica} is reduced outside a backward of dp_compile")


def _shape_of_reduced(grad: torch.Tensor, *_: object) -> torch.Tensor:
    if grad.layout is not torch.strided:
        raise TypeError(f"a gradient whose layout is {grad.layout} is not reduced")
    return torch.empty_like(grad)


REDUCE_GRAD = make_op("reduce_grad(Tensor grad, int index, int replica) -> Tensor", _not_replaced, _shape_of_reduced)


def emit(grad: torch.Tensor, index: int, replica: int) -> torch.Tensor:
    """Call the op `reduce_grad`. Its result is a new tensor with the shape, dtype and strides of `grad`."""
    return REDUCE_GRAD(grad, index, replica)


def reductions_in(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, int, int]]:
    """Return gradient, index and replica of each `reduce_grad`. Raise `InvalidGraphError` for other arguments."""
    found: dict[fx.Node, tuple[fx.Node, int, int]] = {}
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        match node.args:
            case fx.Node() as grad, int() as index, int() as replica if not node.kwargs:
                found[node] = grad, index, replica
            case _:
                raise InvalidGraphError(f"{node.name} reduces no gradient of a module: {node.args}, {node.kwargs}")
    return found


# --- a bucket in a graph ------------------------------------------------------------------------------------------
#
#     flat_bucket([a, b], scales, strides, offsets, numel)  ->  one flat tensor with a * scale and b * scale at their
#                                                               offsets, each in its memory order
#
# Gaps are zeros if `zero_gaps`, else undefined. `dtype`: of the result, which is rounded once. `factor`: a scalar
# tensor, by which all are multiplied instead of `scales`. `lowering.py` has Inductor's implementation.


def places_of(
    shapes: Sequence[Sequence[int]], strides: Sequence[int], offsets: Sequence[int]
) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield shape, stride and offset of each member. `strides` is the concatenation of all members' strides."""
    left = iter(strides)
    for shape, offset in zip(shapes, offsets, strict=True):
        yield list(map(int, shape)), list(itertools.islice(left, len(shape))), offset


def _fill(
    gradients: Sequence[torch.Tensor],
    scales: Sequence[float],
    strides: Sequence[int],
    offsets: Sequence[int],
    numel: int,
    zero_gaps: bool = False,
    dtype: torch.dtype | None = None,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    bucket = gradients[0].new_zeros(numel, dtype=dtype)
    places = places_of([gradient.shape for gradient in gradients], strides, offsets)
    for gradient, scale, place in zip(gradients, scales, places, strict=True):
        part = bucket.as_strided(*place)
        if factor is None:
            multiply_into([part], [gradient], scale)
        else:
            # Cast: torch.mul treats a factor of another dtype as a scalar only if the gradient has dimensions.
            inner = dtype_of_product(gradient.dtype, bucket.dtype)
            torch.mul(gradient.to(inner), factor.to(inner), out=part)
    return bucket


FLAT_BUCKET = make_op(
    "flat_bucket(Tensor[] gradients, float[] scales, int[] strides, int[] offsets, int numel, bool zero_gaps=False,"
    " ScalarType? dtype=None, Tensor? factor=None) -> Tensor",
    _fill,
    lambda gradients, _1, _2, _3, numel, _4=False, dtype=None, _5=None: gradients[0].new_empty(numel, dtype=dtype),
)


# --- a factor that may change in each step ------------------------------------------------------------------------


def _factor(replica: int, bucket: int, last: bool, device: torch.device) -> torch.Tensor:
    reduction = this_thread.running.plans[replica].buckets[bucket].key.reduction
    factor = reduction.post_scale if last else reduction.scale
    return torch.full((), factor, dtype=torch.float64, device=device)


FACTOR = make_op(
    "bucket_factor(int replica, int bucket, bool last, Device device) -> Tensor",
    _factor,
    lambda replica, bucket, last, device: torch.empty((), dtype=torch.float64, device=device),
    (torch.Tag.cudagraph_unsafe,),
)
"""The factor of a bucket's reduction before its stages, or, with `last`, after them: a scalar float64 tensor."""


# --- a functional hook in a graph ---------------------------------------------------------------------------------
#
#     hook_step(gradients, [])       -> what is sent     -> all_reduce -> wait
#     hook_step(gradients, [sum])    -> reduced gradients
#
# Each step takes all graph tensors that the hook has seen, so none of them is overwritten before the last step. The
# hook's state is not part of the graph: it belongs to the modules for which code runs (`passes/memory.py`), and the new
# state is stored once the backward has ended. A CUDA graph would replay kernels without calling the hook.


def _step_of_hook(
    gradients: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    hook: str,
    group: str,
    replica: int,
    bucket: int,
) -> list[torch.Tensor]:
    now = this_thread.running
    if not received:
        members = now.plans[replica].buckets[bucket].members
        state = [now.states[replica](member.gradient.index) for member in members]
        now.hook_runs[replica, bucket] = HookRun(hook, bucket_of(gradients, state, group))
    run = now.hook_runs[replica, bucket]
    if [each.data_ptr() for each in run.bucket.gradients] != [each.data_ptr() for each in gradients]:
        raise ReductionError(
            f"comm hook {hook} receives gradients at other addresses than in its last round. The "
            "memory that the hook still reads may have been overwritten. Use "
            'ReplicateConfig(backend="aot_eager") with this hook.'
        )
    return run.step(received)


HOOK_STEP = make_op(
    "hook_step(Tensor[] gradients, Tensor[] received, str hook, str group, int replica, int bucket) -> Tensor[]",
    _step_of_hook,
    lambda gradients, received, hook, group, *_: fake_step(gradients, received, hook, group),
    (torch.Tag.cudagraph_unsafe,),
)
has_side_effect(HOOK_STEP)  # empty gradients have no reader; the hook still updates its state
