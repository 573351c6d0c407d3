"""The gradients of a module in the form in which they are reduced: shapes, dtypes and the memory of `.grad`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import torch
from torch import nn

from dp_compile._torch.dtensors import is_dtensor, local_tensor, redistributed_as
from dp_compile.comm_hooks.functional import sent_nbytes
from dp_compile.passes.reduction import dtype_of
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, GradientSpec
from dp_compile.plan.flags import MORE
from dp_compile.plan.reduction import CALLED, Reduction
from dp_compile.replica.group import Group


def gradient_specs(
    parameters: Sequence[nn.Parameter], names: Sequence[str], group: Group, sparse: Container[int] = ()
) -> tuple[GradientSpec, ...]:
    """Describe a module's gradients in the order expected in a backward: last parameter first, flags at the end.

    Parameters with an index in `sparse` are left out, because no bucket has their gradients.
    """
    named = zip(names, parameters, strict=True)
    specs = [tensor_spec(index, name, parameter, group) for index, (name, parameter) in enumerate(named)]
    # Flags are reduced like the first parameter's gradient, but never scattered, and never by a hook: it may be lossy.
    whole = replace(group, averaging=replace(group.averaging, hook=None), scattered=frozenset())
    key = specs[0].key._replace(reduction=whole.reduction(parameters[0].dtype, names[0]))
    itemsize = _on_the_wire(parameters[0].dtype.to_real(), key.reduction).itemsize
    flags = GradientSpec(len(specs), UNUSED_FLAGS, (len(specs) + MORE,), (1,), itemsize, key)
    return (*(each for each in reversed(specs) if each.index not in sparse), flags)


def tensor_spec(index: int, name: str, tensor: torch.Tensor, group: Group) -> GradientSpec:
    """Return the plan's description of a tensor to average: a parameter's gradient, or a parameter.

    A DTensor is described by its local tensor.
    """
    tensor = local_tensor(tensor)
    dtype, shape, stride = tensor.dtype, tuple(tensor.shape), dense_strides(tensor)
    if tensor.is_complex():  # a real view, as in torch's DDP: NCCL has no complex dtypes
        dtype, shape, stride = dtype.to_real(), (*shape, 2), (*(2 * step for step in stride), 1)
    reduction = group.reduction(tensor.dtype, name)
    key = BucketKey(reduction, str(dtype).removeprefix("torch."), tensor.device.type)
    sent = () if reduction.hook in (None, CALLED) else sent_nbytes(reduction, shape, dtype, group.world_size)
    return GradientSpec(index, name, shape, stride, _on_the_wire(dtype, reduction).itemsize, key, sent)


def _on_the_wire(dtype: torch.dtype, reduction: Reduction) -> torch.dtype:
    return dtype if reduction.wire is None or reduction.hook is not None else dtype_of(reduction.wire)


def real_view(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient, or a view of the real and imaginary parts if it is complex."""
    return torch.view_as_real(grad) if grad.is_complex() else grad


def local_view(grad: torch.Tensor) -> torch.Tensor:
    """Return `real_view` of the gradient, or of its local tensor if it is a DTensor."""
    return real_view(local_tensor(grad))


def lay_out(parameter: torch.Tensor) -> None:
    """Redistribute a DTensor gradient to the placements of its parameter; partial placements are reduced.

    Launches collectives of the mesh: all its ranks must call this for the same gradients in the same order.
    """
    grad = parameter.grad
    if grad is not None and is_dtensor(grad):
        laid_out = redistributed_as(parameter, grad)
        if laid_out is not grad:
            parameter.grad = laid_out


def sparse_gradient(parameter: torch.Tensor, *, absent: bool) -> torch.Tensor:
    """Return the gradient as a coalesced sparse tensor in new memory, without rows if it is `None` or `absent`."""
    grad = None if absent else parameter.grad
    if grad is not None:
        # If the parameter has a use besides the embedding, its gradient is dense on the ranks with that use.
        rows = grad if grad.is_sparse else grad.to_sparse(1)
        return rows.detach().coalesce().clone()
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it is dense and non-overlapping, otherwise contiguous strides.

    torch gives a `.grad` these strides (AccumulateGrad's gradient layout contract).
    """
    expected = 1
    for stride, size in sorted(each for each in zip(tensor.stride(), tensor.shape, strict=True) if each[1] != 1):
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
