"""Parameters and their state beside tensor parallel, spread over data parallel too: flat, in chunks, and whole again.

    mesh (dp, tp)      a parameter of rank (d, t)          its chunk                        gathered
                       DTensor [tp placement] on mesh["tp"]  DTensor [Shard(0), tp placement]   the local part of before

What torch's `torch.distributed.tensor.parallel.fsdp.DTensorExtensions` does for FSDP, for whoever keeps state of a
replicated module once over the ranks of `dp`: averages of parameters, an optimizer's state, checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dp_compile._torch import dtensors
from dp_compile.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """How a DTensor lies over its mesh, apart from its values: all that `unflatten` needs beside a rank's part.

    `shape` and `stride` are those of the whole; `part`: the shape of what this rank holds.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    part: torch.Size


def flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout | None]:
    """This rank's part of a DTensor, in the same memory, and its layout; any other tensor as it is, and `None`.

    The part is a leaf: it requires a gradient where the tensor does, and gets one of its own.

    Args:
        tensor: a DTensor, a parameter or not, or a plain tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    part = dtensors.own_part(tensor).requires_grad_(tensor.requires_grad)
    return part, Layout(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride(), part.shape)


def unflatten(part: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """The inverse of `flatten`, in the same memory; a gradient comes back to `part`, laid out as it is.

    Runs nothing. The backward may add up over the mesh, on the stream on which this was called.

    Args:
        part: what this rank holds.
        layout: what `flatten` gave; `None`: `part` itself is returned.

    Raises:
        ConfigError: a part of another shape than the layout's.
    """
    if layout is None:
        return part
    if part.shape != layout.part:
        raise ConfigError(
            f"unflatten() got a part of shape {list(part.shape)}, and this rank's part in the layout has shape "
            f"{list(layout.part)}. Hand over what flatten() gave, or gather() of its chunk."
        )
    if part.requires_grad:
        # Of a view: a hook on the part itself would stay there, one more for each call.
        part = part.view_as(part)
        part.register_hook(dtensors.waited_for)
    return _laid_out(part, layout.mesh, layout.placements, layout.shape, layout.stride)


def chunk(tensor: torch.Tensor, device_mesh: DeviceMesh | None) -> DTensor:
    """A tensor cut along its first dimension over data parallel, beside how tensor parallel has cut it.

    On a (dp, tp) mesh a parameter with one placement over `tp` gives a DTensor `[Shard(0), placement]`; a plain tensor,
    the same on all ranks, `[Shard(0), Replicate()]`. In memory of its own, without a gradient. Runs collectives over
    `tp` where that cuts the first dimension too: every rank of the parent mesh has to call it.

    Args:
        tensor: the same on all ranks of `device_mesh`; with one dimension at least.
        device_mesh: the dimension of data parallel, `mesh["dp"]`. Of several the last is cut over, so that
            `mesh["between", "inside"]` gives `[Replicate(), Shard(0), placement]`. Over all other dimensions of the
            parent mesh the tensor is taken for equal.

    Raises:
        ConfigError: `device_mesh` is no part of a larger mesh, the tensor lies on another one or on the same
            dimensions, or it has no dimension.
    """
    parent, own = _of_parent(device_mesh)
    if not tensor.dim():
        raise ConfigError("chunk() needs a tensor with a first dimension, got one without any. Keep it as it is.")
    placements = _in_parent(tensor, parent, own)
    whole = _laid_out(dtensors.own_part(tensor.detach()), parent, placements, tensor.shape, tensor.stride())
    placements[own[-1]] = Shard(0)
    with torch.no_grad():
        part = dtensors.own_part(whole.redistribute(placements=placements)).clone()
    return _laid_out(part, parent, placements, tensor.shape, tensor.stride())


def gather(tensor: torch.Tensor, device_mesh: DeviceMesh | None) -> torch.Tensor:
    """The inverse of `chunk`: what this rank holds beside tensor parallel, as a plain tensor.

    Gathers over data parallel only: what tensor parallel has cut stays cut. `unflatten` makes a DTensor of it again.
    Every rank of the parent mesh has to call it.

    Args:
        tensor: what `chunk` gave, or was loaded into it.
        device_mesh: the one that `chunk` was given.

    Raises:
        ConfigError: `device_mesh` is no part of a larger mesh, or the tensor does not lie on that.
    """
    parent, own = _of_parent(device_mesh)
    if not isinstance(tensor, DTensor) or tensor.device_mesh != parent:
        where = f"a DTensor on {tensor.device_mesh}" if isinstance(tensor, DTensor) else "a plain tensor"
        raise ConfigError(f"gather() needs a DTensor on {parent}, as chunk() makes it, got {where}.")
    placements = list(tensor.placements)
    for place in own:
        placements[place] = Replicate()
    with torch.no_grad():
        return dtensors.own_part(tensor.redistribute(placements=placements))


def to_load(tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """What a rank loads of a `ShardedTensor`, in which older checkpoints of FSDP are: the tensor, and its local shards.

    Of one that tensor parallel has nested into another the inner one, which lies over data parallel. A DTensor is
    loaded by `gather`.

    Args:
        tensor: a `ShardedTensor`.

    Raises:
        ConfigError: another tensor.
    """
    shards = dtensors.shards_of(tensor)
    if shards is None:
        raise ConfigError(
            f"to_load() takes a ShardedTensor, got a {type(tensor).__name__}. What chunk() made is loaded with "
            "gather()."
        )
    inner = dtensors.shards_of(shards[0].tensor) if len(shards) == 1 else None
    return (tensor, shards) if inner is None else (shards[0].tensor, inner)


def _laid_out(
    part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """With the shape of the whole: ranks would guess another one each where they do not share a dimension evenly."""
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _of_parent(mesh: DeviceMesh | None) -> tuple[DeviceMesh, tuple[int, ...]]:
    """The mesh of which another is a part, and which of its dimensions that is."""
    if mesh is None:
        raise ConfigError(
            "device_mesh is None: there is no parent mesh. Pass the dimension of data parallel: mesh['dp']."
        )
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"device_mesh must be a DeviceMesh, got {type(mesh).__name__}.")
    parent = dtensors.parent_of(mesh)
    if parent.ndim < 2:
        raise ConfigError(
            f"the parent of device_mesh has {parent.ndim} dimension, and must have two at least: for data parallel and "
            "for tensor parallel. Make one with init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp'))."
        )
    if mesh.ndim == parent.ndim:
        raise ConfigError(
            f"device_mesh is a whole mesh ({_names(mesh)}), and must be the dimension of it that data parallel uses: "
            "mesh['dp']."
        )
    places = _places(mesh, parent)
    if places is None:
        raise ConfigError(
            f"device_mesh ({_names(mesh)}) is no slice of its parent ({_names(parent)}); one that was flattened is "
            "none. Pass a dimension by its name: mesh['dp']."
        )
    return parent, places


def _in_parent(tensor: torch.Tensor, parent: DeviceMesh, own: tuple[int, ...]) -> list[Placement]:
    """How a tensor lies over all dimensions of the parent mesh."""
    placements: list[Placement] = [Replicate()] * parent.ndim
    if not isinstance(tensor, DTensor):
        return placements
    places = _places(tensor.device_mesh, parent)
    if places is None:
        raise ConfigError(
            f"the tensor lies on {tensor.device_mesh}, which is no slice of {parent}, as device_mesh is. Take both "
            "from one mesh: mesh['tp'] for tensor parallel, mesh['dp'] here."
        )
    for place, placement in zip(places, tensor.placements, strict=True):
        if place in own:
            raise ConfigError(
                f"the tensor is laid out over {_names(tensor.device_mesh)} of the mesh, and device_mesh has a "
                "dimension of those: its ranks hold different parts. Pass the dimension of data parallel."
            )
        placements[place] = placement
    return placements


def _places(mesh: DeviceMesh, parent: DeviceMesh) -> tuple[int, ...] | None:
    """Which dimensions of another mesh a mesh is; `None`: it is no slice of it.

    By names and ranks: what torch keeps of a DTensor may name an equal mesh, sliced from another one.
    """
    names, known = mesh.mesh_dim_names or (), parent.mesh_dim_names or ()
    if not names or not set(names) <= set(known) or not torch.equal(parent[names].mesh, mesh.mesh):
        return None
    return tuple(known.index(name) for name in names)


def _names(mesh: DeviceMesh) -> str:
    return ", ".join(mesh.mesh_dim_names or ("without names",))
