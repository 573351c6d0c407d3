"""Meshes of two and three dimensions for the tests with tensor parallel, over the ranks of `meshed`."""

import functools

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dp_compile._torch import distributed


@functools.cache
def mesh_of(shape, names=None):
    return init_device_mesh(
        "cpu", shape, mesh_dim_names=names or (("dp", "tp") if len(shape) == 2 else ("between", "inside", "tp"))
    )


def keep_groups():
    """torch keeps what it learns of DTensors by mesh, with groups that a rank of the tests would end (torch 2.13)."""
    distributed.end_other_groups = lambda: None


def full(tensor):
    """All of a tensor on this rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
