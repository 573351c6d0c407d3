"""State of tensor-parallel parameters, sharded over data parallel too: averages, optimizer state, checkpoints.

    mesh (dp, tp)      a parameter of rank (d, t)            its chunk                              gathered
                       DTensor [tp placement] on mesh["tp"]  DTensor [Shard(0), tp placement]       the local part

Equivalent to `chunk_dtensor` and `all_gather_dtensor` of torch's `DTensorExtensions`, which FSDP1 uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dp_compile._torch import dtensors
from dp_compile.errors import ConfigError


def chunk(tensor: torch.Tensor, device_mesh: DeviceMesh | None) -> DTensor:
    """Shard a tensor along its first dimension over data parallel, in addition to its tensor-parallel placement.

    On a (dp, tp) mesh, a parameter with one placement over `tp` becomes a DTensor `[Shard(0), placement]`; a plain
    tensor, equal on all ranks, becomes `[Shard(0), Replicate()]`. The result has new memory and no gradient. Every rank
    of the parent mesh must call it: it runs collectives over `tp` if that shards the first dimension too.

    Args:
        tensor: equal on all ranks of `device_mesh`, with at least one dimension.
        device_mesh: the data-parallel dimension, `mesh["dp"]`. The last of several dimensions shards:
            `mesh["between", "inside"]` gives `[Replicate(), Shard(0), placement]`. The tensor is assumed equal over
            all other dimensions of the parent mesh.

    Raises:
        ConfigError: `device_mesh` is not a slice of a larger mesh, the tensor is on another mesh or distributed over a
            dimension of `device_mesh`, or it is a scalar.
    """
    parent, own = _in_parent(device_mesh)
    if not tensor.dim():
        raise ConfigError("chunk() needs a tensor with at least one dimension, got a scalar. Do not chunk scalars.")
    placements: list[Placement] = [Replicate()] * parent.ndim
    if isinstance(tensor, DTensor):
        dims = _dims_in(tensor.device_mesh, parent)
        if dims is None:
            raise ConfigError(
                f"the tensor's mesh {tensor.device_mesh} is not a slice of {parent}, the parent of device_mesh. Slice "
                "both from one mesh: mesh['tp'] for tensor parallel, mesh['dp'] as device_mesh."
            )
        if set(dims) & set(own):
            raise ConfigError(
                f"the tensor is distributed over {_names(tensor.device_mesh)} of the mesh, and device_mesh includes "
                "one of these dimensions: its ranks may hold different shards. Pass the data-parallel dimension."
            )
        for dim, placement in zip(dims, tensor.placements, strict=True):
            placements[dim] = placement
    # With the global shape: from uneven shards, each rank would infer another one.
    shape: dict[str, Any] = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    whole = DTensor.from_local(dtensors.local_tensor(tensor.detach()), parent, placements, **shape)
    placements[own[-1]] = Shard(0)
    with torch.no_grad():
        part = dtensors.local_tensor(whole.redistribute(placements=placements)).clone()
    return DTensor.from_local(part, parent, placements, **shape)


def gather(tensor: torch.Tensor, device_mesh: DeviceMesh | None) -> torch.Tensor:
    """Return this rank's tensor-parallel part of a `chunk()` result, as a plain tensor.

    Gathers over data parallel only; tensor-parallel shards stay. Every rank of the parent mesh calls it.

    Args:
        tensor: the result of `chunk`, or a tensor that was loaded into it.
        device_mesh: the mesh that was passed to `chunk`.

    Raises:
        ConfigError: `device_mesh` is not a slice of a larger mesh, or the tensor is not on that mesh.
    """
    parent, own = _in_parent(device_mesh)
    if not isinstance(tensor, DTensor) or tensor.device_mesh != parent:
        where = f"a DTensor on {tensor.device_mesh}" if isinstance(tensor, DTensor) else "a plain tensor"
        raise ConfigError(f"gather() needs a DTensor on {parent}, as chunk() makes it, got {where}.")
    placements = [Replicate() if dim in own else each for dim, each in enumerate(tensor.placements)]
    with torch.no_grad():
        return dtensors.local_tensor(tensor.redistribute(placements=placements))


def _in_parent(mesh: DeviceMesh | None) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Return the parent of a mesh slice, and the slice's dimensions in it."""
    parent = dtensors.parent_of(mesh) if isinstance(mesh, DeviceMesh) else None
    dims = None if parent is None or mesh is None or mesh.ndim == parent.ndim else _dims_in(mesh, parent)
    if parent is None or dims is None:
        given = f"a mesh of {_names(mesh)}" if isinstance(mesh, DeviceMesh) else str(mesh)
        raise ConfigError(
            "device_mesh must be a slice, by name, of a mesh that has other dimensions too: mesh['dp'] of "
            f"init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), got {given}."
        )
    return parent, dims


def _dims_in(mesh: DeviceMesh, parent: DeviceMesh) -> tuple[int, ...] | None:
    """Return the dimensions of a slice in its parent, `None` if `mesh` is no slice of `parent`. Compares names, ranks,
    because a DTensor may refer to an equal mesh that was sliced from another one."""
    names, known = mesh.mesh_dim_names or (), parent.mesh_dim_names or ()
    if not names or not set(names) <= set(known) or not torch.equal(parent[names].mesh, mesh.mesh):
        return None
    return tuple(known.index(name) for name in names)


def _names(mesh: DeviceMesh) -> str:
    return ", ".join(mesh.mesh_dim_names or ("no names",))
