"""The op that fills a bucket, and how Inductor turns it into memory that producers write into.

    flat_bucket([a, b], scales, strides, offsets, numel)  ->  one flat tensor with a * scale and b * scale at their
                                                              offsets, each in its memory order

In eager mode the op copies. Compiled, the bucket is allocated before its members are computed: a matrix product gets
its part of the bucket as `out=`, generated code stores there, the factor included. Nothing is left to be copied, but
for gradients whose kernel insists on memory of its own. Those take one pass, and the record says why. If such a
gradient has the whole bucket for itself, its own memory becomes the bucket. Memory of large buckets is that of the
backward before (`memory.py`).

What lies in the gaps between members is not defined unless the op says zeros: the collective adds it up, but nobody
looks at it, except for NCCL's own check for NaN.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from dp_compile._torch import inductor
from dp_compile.fx import edit
from dp_compile.fx.collectives import PAIRED_ALL_GATHER, PAIRED_ALL_TO_ALL
from dp_compile.passes.bucket_ops import FLAT_BUCKET, MemberPlace, dtype_of_product, gaps_of, places_of
from dp_compile.passes.crossing import LEAVE
from dp_compile.passes.memory import BUCKET_MEMORY, place_of
from dp_compile.passes.updates import UPDATE

ir = inductor.ir


@dataclass(frozen=True, slots=True)
class Written:
    """How compiled code fills the place of one member of a bucket.

    `unit` names the bucket, `position` is the member's place among the bucket's members. `copied` says why it costs a
    pass of its own, else `None`.
    """

    unit: str
    position: int
    copied: str | None


Observer = Callable[[Written], None]
_observer: ContextVar[Observer | None] = ContextVar("dp_compile_observer", default=None)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell `observer` of every member of every bucket that is lowered inside, in this thread."""
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
    node = inductor.graph_being_lowered().current_node
    device, dtype = gradients[0].get_device(), dtype or gradients[0].get_dtype()
    is_scaled = [factor is not None or scale != 1.0 for scale in scales]
    if len(gradients) == 1 and not is_scaled[0] and places[0].numel == numel and gradients[0].get_dtype() == dtype:
        whole = _own_memory(node, gradients[0], places[0])
        if whole is not None:
            _tell(node, 0, None)
            return whole
    bucket, kept = _flat_memory(node, numel, dtype, device)
    storage = ir.StorageBox(bucket)
    for position, (gradient, scale, place) in enumerate(zip(gradients, scales, places, strict=True)):
        if place.numel:
            layout = ir.FixedLayout(device, dtype, list(place.shape), list(place.stride), place.offset)
            part = ir.ReinterpretView(data=storage, layout=layout)
            own = _is_own(node, position, _storage_of(gradient))
            cast = gradient.get_dtype() != dtype
            if not is_scaled[position] and own and not cast and _can_be_moved(gradient, part):
                bucket.inputs.append(_move(gradient, part))
                _tell(node, position, _why_carried_over(gradient))
            else:
                bucket.inputs.append(ir.ConcatKernel.realize_into(_scaled(gradient, scale, dtype, factor), part))
                _tell(node, position, _why_copied(gradient, own=own, alone=len(gradients) == 1, cast=cast))
    for offset, gap in gaps_of(places, numel) if zero_gaps else ():
        layout = ir.FixedLayout(device, dtype, [gap], [1], offset)
        zeros = inductor.lower_zeros([gap], device, dtype)
        bucket.inputs.append(ir.ConcatKernel.realize_into(zeros, ir.ReinterpretView(data=storage, layout=layout)))
    _register(bucket, kept)
    return ir.TensorBox(storage)


def _flat_memory(node: fx.Node, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """What members are written into, and its memory if that is used again; for `_register`."""
    kept = _kept_memory(node, numel, dtype, device)
    layout = ir.FixedLayout(device, dtype, [numel], [1]) if kept is None else ir.NonOwningLayout(kept)
    return ir.ConcatKernel(name=None, layout=layout, inputs=[]), kept


def _register(bucket: Any, kept: Any) -> None:
    """All members of a bucket have their places."""
    graph = inductor.graph_being_lowered()
    bucket.name = graph.register_buffer(bucket)
    bucket.inputs = ir.ConcatKernel.unwrap_storage(bucket.inputs)
    graph.register_operation(bucket)
    if kept is not None:
        inductor.run_first(kept.data.data, list(_writers(bucket)))


def _writers(bucket: Any) -> Iterator[Any]:
    """What writes into a bucket, also through one that lies in it; and these themselves."""
    yield bucket
    for each in bucket.inputs if isinstance(bucket, ir.ConcatKernel) else ():
        yield from _writers(each)


def _kept_memory(node: fx.Node, numel: int, dtype: torch.dtype, device: torch.device) -> Any:
    """The memory of a bucket that later backwards use again; `None`: it is allocated where it is first filled."""
    place = place_of(node)
    if place is None:
        return None
    memory = inductor.lower_as_call(BUCKET_MEMORY, place.replica, place.number, numel, dtype, device)
    memory.realize()
    return ir.ReinterpretView(data=memory.data, layout=ir.FixedLayout(device, dtype, [numel], [1]))


inductor.register_lowering(FLAT_BUCKET, type_promotion_kind=None)(_lower)


for _op in (PAIRED_ALL_TO_ALL, PAIRED_ALL_GATHER):
    inductor.register_lowering(_op, type_promotion_kind=None)(partial(inductor.lower_collective, _op))


def _lower_leaving(launched: Sequence[Any], *who: Any) -> None:
    """The network has this memory until long after the code has ended."""
    for each in launched:
        each.realize()
        inductor.graph_being_lowered().never_reuse_buffers.add(_storage_of(each).get_name())
    inductor.lower_as_call(LEAVE, launched, *who)


inductor.register_lowering(LEAVE, type_promotion_kind=None)(_lower_leaving)


def _lower_update(written: Sequence[Any], gradients: Sequence[Any], *who: Any) -> None:
    """An optimizer may keep what it is given until all gradients are there."""
    for each in gradients:
        each.realize()
        inductor.graph_being_lowered().never_reuse_buffers.add(_storage_of(each).get_name())
    inductor.lower_as_call(UPDATE, written, gradients, *who)


inductor.register_lowering(UPDATE, type_promotion_kind=None)(_lower_update)


def _own_memory(bucket: fx.Node, gradient: Any, place: MemberPlace) -> Any:
    """The memory of a gradient that has a bucket for itself and a kernel that allocates; `None` if it is not fit."""
    storage = _storage_of(gradient)
    if isinstance(gradient.data, ir.BaseView) or not isinstance(storage.data, (ir.ExternKernelAlloc, ir.MultiOutput)):
        return None
    if not _is_own(bucket, 0, storage) or _may_be_older(storage.data) or not _lies_as(storage.data, place.stride):
        return None
    layout = ir.FixedLayout(gradient.get_device(), gradient.get_dtype(), [place.numel], [1])
    return ir.TensorBox(ir.ReinterpretView(data=storage, layout=layout))


def _may_be_older(buffer: Any) -> bool:
    """Whether a kernel's result may be memory that it was given."""
    return bool(buffer.get_inputs_that_alias_output() or buffer.get_mutation_names())


def _can_be_moved(gradient: Any, part: Any) -> bool:
    """Whether what computes a gradient can be told to write it into its part of the bucket."""
    if not isinstance(gradient.data, ir.StorageBox):
        return False
    gradient.realize()
    if gradient.data.data.get_name() in inductor.graph_being_lowered().mutated_buffers:
        return _is_scattered_into(gradient, part)
    return ir.ConcatKernel.can_realize_into_without_copy(gradient.data, part) or _writes_as_given(gradient, part)


def _is_scattered_into(gradient: Any, part: Any) -> bool:
    """Whether generated code writes a gradient first, and rows are then added to it, as to an embedding's.

    Both do so in the bucket: what adds the rows knows the memory by the gradient's name.
    """
    written = gradient.data.data
    if not isinstance(written, ir.ComputedBuffer) or not (
        isinstance(written.layout, ir.FlexibleLayout) or _lies_as(written, part.get_stride())
    ):
        return False
    name = written.get_name()
    writers = [each for each in inductor.graph_being_lowered().operations if name in each.get_mutation_names()]
    # None is seen of a collective in place, which is somebody else's: where that runs is not ours to say.
    return bool(writers) and all(
        isinstance(each, ir.IndexPutFallback)
        or (isinstance(each, ir.ComputedBuffer) and isinstance(each.data, ir.Scatter))
        for each in writers
    )


def _writes_as_given(gradient: Any, part: Any) -> bool:
    """Whether a library's kernel has fixed strides that happen to be those of the part."""
    return isinstance(gradient.data.data, ir.ExternKernelOut) and _lies_as(gradient.data.data, part.get_stride())


def _lies_as(buffer: Any, stride: Sequence[Any]) -> bool:
    """Whether a buffer has these strides for good; a dimension of size one may have any."""
    if type(buffer.layout) is not ir.FixedLayout or buffer.layout.offset:
        return False
    strides = zip(buffer.get_size(), buffer.get_stride(), stride, strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


def _move(gradient: Any, part: Any) -> Any:
    gradient.data.data.layout = ir.NonOwningLayout(part)
    return gradient.data.data


def _scaled(gradient: Any, scale: float, dtype: Any, factor: Any = None) -> Any:
    """A gradient times `scale`, or `factor` if there is one, rounded to `dtype`, computed by whoever reads it."""
    if factor is not None:
        inner = dtype_of_product(gradient.get_dtype(), dtype)
        return inductor.lower_cast(
            inductor.lower_multiplication(inductor.lower_cast(gradient, inner), inductor.lower_cast(factor, inner)),
            dtype,
        )
    if scale != 1.0:
        wide = torch.promote_types(gradient.get_dtype(), dtype)
        if gradient.get_dtype() != wide:
            gradient = inductor.lower_cast(gradient, wide)
        gradient = inductor.lower_multiplication(gradient, scale)
    if gradient.get_dtype() != dtype:
        return inductor.lower_cast(gradient, dtype)
    if scale != 1.0:
        return gradient
    return ir.Pointwise.create(
        device=gradient.get_device(),
        dtype=gradient.get_dtype(),
        inner_fn=gradient.make_loader(),
        ranges=gradient.get_size(),
    )


def _why_copied(gradient: Any, *, own: bool, alone: bool, cast: bool) -> str | None:
    """Why reading a gradient is not a part of the kernel that computes it; `None` if it is.

    Args:
        own: whether the gradient serves nobody but the bucket.
        alone: whether the bucket has this member only.
        cast: whether the bucket has another dtype.
    """
    buffer = _storage_of(gradient).data
    if not isinstance(buffer, ir.Buffer):
        return _why_carried_over(gradient)  # Not in memory yet: whoever reads it computes it.
    if isinstance(buffer, ir.InputBuffer):
        return "an input of the backward"
    if isinstance(buffer, (ir.ExternKernelAlloc, ir.MultiOutput)) and not (alone and own):
        return f"{_operator(buffer)} allocates its result itself"
    if buffer.get_name() in inductor.graph_being_lowered().mutated_buffers:
        return "filled in several steps"
    if isinstance(buffer, ir.ComputedBuffer):
        return _why_carried_over(gradient)  # Generated code, which the reading is fused with.
    if not own:
        return f"the result of {_operator(buffer)} is used in another place too"
    if cast:
        return f"{_operator(buffer)} does not round to another dtype"
    return f"{_operator(buffer)} writes with other strides, or does not take a factor"


def _why_carried_over(gradient: Any) -> str | None:
    """Why generated code only carries a gradient over from where it was computed; `None` if it computes something.

    A product that Inductor padded, as it may on a GPU, is larger than the gradient; rows of an embedding in half
    precision are added up in float32.
    """
    computed = _storage_of(gradient).data
    computed = computed.data if isinstance(computed, ir.ComputedBuffer) else computed
    count = computed.inner_fn_opcount() if isinstance(computed, ir.Pointwise) else None
    if count is None or len(count.read_buffers) != 1 or not set(count.used_ops) <= {"load", "to_dtype"}:
        return None
    graph, (name,) = inductor.graph_being_lowered(), count.read_buffers
    if name in graph.graph_inputs:
        return "an input of the backward"
    if name in graph.mutated_buffers:
        return "filled in several steps"
    source = graph.try_get_buffer(name)
    if isinstance(source, (ir.ExternKernel, ir.MultiOutput)):
        return f"cut out of, cast or cloned from the result of {_operator(source)}"
    return None  # Generated code, which is fused with this.


def _operator(buffer: Any) -> str:
    while isinstance(buffer, ir.MultiOutput):
        buffer = buffer.inputs[0]
    return str(getattr(buffer, "op_overload", None) or getattr(buffer, "python_kernel_name", None) or "a kernel")


def _storage_of(value: Any) -> Any:
    """The storage behind a tensor of Inductor's, and behind its views."""
    inner = value.data
    return inner.unwrap_view() if isinstance(inner, ir.BaseView) else inner


def _is_own(bucket: fx.Node, position: int, storage: Any) -> bool:
    """Whether the storage of a member serves nobody but the bucket, and only once.

    The collective overwrites the bucket, so nobody else may look for a gradient there. Operations may return what
    they were given (an update in place, a change of nothing): those are followed back to who made the storage.
    """
    members = bucket.args[0]
    assert isinstance(members, Sequence)
    node = members[position]
    assert isinstance(node, fx.Node)
    if members.count(node) > 1 or set(node.users) != {bucket}:
        return False
    while node not in storage.data.origins:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return False
        if node.target is operator.getitem and source in storage.data.origins:
            return [user.args[1:] for user in source.users].count(
                node.args[1:]
            ) == 1  # one result of a kernel's several
        if set(source.users) != {node}:
            return False
        node = source
    return True


def _tell(node: fx.Node, position: int, copied: str | None) -> None:
    observer, provenance = _observer.get(), edit.provenance_of(node)
    if observer is not None and provenance is not None:
        observer(Written(provenance.unit, int(provenance.members[position]), copied))
