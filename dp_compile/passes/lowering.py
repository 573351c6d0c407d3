"""Inductor lowering of the op that fills a bucket: kernels that compute gradients write into the bucket's memory.

The bucket is allocated before its members are computed. A matrix product gets its part of the bucket as `out=`.
Generated code stores into its part, with the factor applied. A gradient is copied if its kernel allocates the result
itself, or if other nodes read it. Large buckets on CPUs reuse the memory of the last backward (`memory.py`).

Gaps between members are undefined unless the op requests zeros. Only collectives and NCCL's NaN check read them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from dp_compile._torch import inductor
from dp_compile.fx import edit
from dp_compile.passes.crossing import LEAVE
from dp_compile.passes.memory import BUCKET_MEMORY, is_kept
from dp_compile.passes.reduction import FLAT_BUCKET, dtype_of_product, places_of
from dp_compile.passes.updates import UPDATE

ir = inductor.ir
_CAST, _MULTIPLY = torch.ops.prims.convert_element_type.default, torch.ops.aten.mul.Tensor


class Written(NamedTuple):
    """Whether compiled code copies a member into its bucket. `unit`: replica and bucket. `position`: of the member."""

    unit: tuple[int, int]
    position: int
    is_copied: bool


_observer: ContextVar[Callable[[Written], None] | None] = ContextVar("dp_compile_observer", default=None)


@contextlib.contextmanager
def observing(observer: Callable[[Written], None]) -> Iterator[None]:
    """Call `observer` for every member of every bucket that this thread lowers in this context."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def _lower(
    gradients: Sequence[Any],
    scales: Sequence[float],
    strides: Sequence[int],
    offsets: Sequence[int],
    numel: int,
    zero_gaps: bool = False,
    dtype: Any = None,
    factor: Any = None,
) -> Any:
    places = places_of([gradient.get_size() for gradient in gradients], strides, offsets)
    graph = inductor.graph_being_lowered()
    node = graph.current_node
    device, dtype = gradients[0].get_device(), dtype or gradients[0].get_dtype()
    provenance, memory = edit.provenance_of(node), None
    layout = ir.FixedLayout(device, dtype, [numel], [1])
    if provenance is not None and is_kept(node):
        memory = inductor.lower_as_call(BUCKET_MEMORY, *provenance.unit, numel, dtype, device)
    elif zero_gaps:
        memory = inductor.lower_as_call(torch.ops.aten.zeros.default, [numel], dtype=dtype, device=device)
    if memory is not None:
        memory.realize()
        layout = ir.NonOwningLayout(ir.ReinterpretView(data=memory.data, layout=layout))
    bucket = ir.ConcatKernel(name=None, layout=layout, inputs=[])
    storage = ir.StorageBox(bucket)
    observer = _observer.get()
    for position, (gradient, scale, place) in enumerate(zip(gradients, scales, places, strict=True)):
        if 0 in place[0]:
            continue
        layout = ir.FixedLayout(device, dtype, *place)
        part = ir.ReinterpretView(data=storage, layout=layout)
        is_same = factor is None and scale == 1.0 and gradient.get_dtype() == dtype
        if is_same and _is_own(node, position, _storage_of(gradient)) and _can_be_moved(gradient, part):
            gradient.data.data.layout = ir.NonOwningLayout(part)
            bucket.inputs.append(gradient.data.data)
            is_copied = isinstance(gradient.data.data, ir.ComputedBuffer) and _only_moves(gradient.data.data.data)
        else:
            bucket.inputs.append(ir.ConcatKernel.realize_into(_scaled(gradient, scale, dtype, factor), part))
            is_copied = _is_copied(_storage_of(gradient).data)
        if observer is not None and provenance is not None:
            observer(Written(provenance.unit, provenance.members[position], is_copied))
    bucket.name = graph.register_buffer(bucket)
    bucket.inputs = ir.ConcatKernel.unwrap_storage(bucket.inputs)
    graph.register_operation(bucket)
    if memory is not None:
        inductor.run_first(memory.data.data, list(_writers(bucket)))
    return ir.TensorBox(storage)


def _writers(bucket: Any) -> Iterator[Any]:
    """Return a bucket and all buffers that write into it, recursively for nested buckets."""
    yield bucket
    for each in bucket.inputs if isinstance(bucket, ir.ConcatKernel) else ():
        yield from _writers(each)


inductor.register_lowering(FLAT_BUCKET, type_promotion_kind=None)(_lower)


def _lower_handing_over(op: Any, number: int, *args: Any) -> None:
    """Lower an op whose argument `number` is tensors that a network or an optimizer reads later, outside the graph."""
    for each in args[number]:
        each.realize()
        inductor.graph_being_lowered().never_reuse_buffers.add(_storage_of(each).get_name())
    inductor.lower_as_call(op, *args)


inductor.register_lowering(LEAVE, type_promotion_kind=None)(partial(_lower_handing_over, LEAVE, 0))
inductor.register_lowering(UPDATE, type_promotion_kind=None)(partial(_lower_handing_over, UPDATE, 1))


def _can_be_moved(gradient: Any, part: Any) -> bool:
    """Return whether the kernel that computes a gradient can write into its part of the bucket."""
    if not isinstance(gradient.data, ir.StorageBox):
        return False
    gradient.realize()
    if gradient.data.data.get_name() in inductor.graph_being_lowered().mutated_buffers:
        return _is_scattered_into(gradient, part)
    if ir.ConcatKernel.can_realize_into_without_copy(gradient.data, part):
        return True
    # A library kernel has fixed strides, which may equal those of the part.
    return isinstance(gradient.data.data, ir.ExternKernelOut) and _lies_as(gradient.data.data, part.get_stride())


def _is_scattered_into(gradient: Any, part: Any) -> bool:
    """Return whether generated code fills a gradient and scatters into it, as for an embedding: both can be moved."""
    written = gradient.data.data
    if not isinstance(written, ir.ComputedBuffer) or not (
        isinstance(written.layout, ir.FlexibleLayout) or _lies_as(written, part.get_stride())
    ):
        return False
    name = written.get_name()
    writers = [each for each in inductor.graph_being_lowered().operations if name in each.get_mutation_names()]
    # An in-place collective of the model is not among the writers: such a gradient is not moved.
    return bool(writers) and all(
        isinstance(each, ir.IndexPutFallback)
        or (isinstance(each, ir.ComputedBuffer) and isinstance(each.data, ir.Scatter))
        for each in writers
    )


def _lies_as(buffer: Any, stride: Sequence[Any]) -> bool:
    """Return whether a buffer has these strides and a fixed layout. A dimension of size one may have any stride."""
    if type(buffer.layout) is not ir.FixedLayout or buffer.layout.offset:
        return False
    strides = zip(buffer.get_size(), buffer.get_stride(), stride, strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


def _scaled(gradient: Any, scale: float, dtype: Any, factor: Any) -> Any:
    """Return a gradient times `factor` (if `None`: `scale`), rounded to `dtype`, as code to inline into its reader."""
    if factor is not None or scale != 1.0:
        widened = torch.promote_types if factor is None else dtype_of_product
        inner = widened(gradient.get_dtype(), dtype)
        by = scale if factor is None else inductor.lower(_CAST, factor, inner)
        gradient = inductor.lower(_MULTIPLY, inductor.lower(_CAST, gradient, inner), by)
    return inductor.lower(_CAST, gradient, dtype)  # also to the same dtype: a copy that is fused


def _is_copied(source: Any) -> bool:
    """Return whether one kernel computes a gradient and another one stores it in the bucket."""
    if not isinstance(source, ir.ComputedBuffer):  # inlined, or a library kernel or an input
        return isinstance(source, ir.Buffer) or _only_moves(source)
    return source.get_name() in inductor.graph_being_lowered().mutated_buffers or _only_moves(source.data)


def _only_moves(computed: Any) -> bool:
    """Return whether generated code only copies or casts the result of another kernel: a slice of a product that
    Inductor padded on a GPU, or embedding rows in half precision, which are summed in float32."""
    count = computed.inner_fn_opcount() if isinstance(computed, ir.Pointwise) else None
    if count is None or len(count.read_buffers) != 1 or not set(count.used_ops) <= {"load", "to_dtype"}:
        return False
    graph, (name,) = inductor.graph_being_lowered(), count.read_buffers
    if name in graph.graph_inputs or name in graph.mutated_buffers:
        return True
    return isinstance(graph.try_get_buffer(name), (ir.ExternKernel, ir.MultiOutput))  # others are fused with this


def _storage_of(value: Any) -> Any:
    """Return the storage of an Inductor tensor, also if the tensor is a view."""
    inner = value.data
    return inner.unwrap_view() if isinstance(inner, ir.BaseView) else inner


def _is_own(bucket: Any, position: int, storage: Any) -> bool:
    """Return whether only the bucket reads a member's storage, and reads it once: the collective overwrites it.

    Ops may return their input (in-place updates, no-ops). Such ops are followed back to the op that made the storage.
    """
    node: fx.Node = bucket.args[0][position]
    if bucket.args[0].count(node) > 1 or set(node.users) != {bucket}:
        return False
    while node not in storage.data.origins:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return False
        if node.target is operator.getitem and source in storage.data.origins:
            same_result = [user.args[1:] == node.args[1:] for user in source.users]  # of a multi-output kernel
            return sum(same_result) == 1
        if set(source.users) != {node}:
            return False
        node = source
    return True
