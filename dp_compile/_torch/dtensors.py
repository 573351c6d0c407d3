"""DTensors: their local shards and their layouts over a mesh. Costs nothing to load.

Never imports `torch.distributed.tensor`: if a DTensor exists, that module is loaded already.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dp_compile._torch.missing import loaded, named


def is_dtensor(tensor: object) -> bool:
    """Return whether an object is a DTensor, including parameters."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:  # fast path
        return False
    module = loaded("torch.distributed.tensor")
    return isinstance(tensor, getattr(module, "DTensor", ()))  # absent while another thread imports the module


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, any other tensor itself. Shares the tensor's memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = waited_for(tensor.to_local())  # type: ignore[attr-defined]
        return part.detach()  # `to_local` of a parameter returns a tensor that claims to be a parameter


def adding_cannot_be_traced(gradient: torch.Tensor | None) -> bool:
    """Return whether AOTAutograd fails to trace accumulation into `gradient`: a DTensor whose local shard is a view.

    Views of a bucket are such shards. Since torch 2.14 their sizes become symbolic graph outputs. AOTAutograd's wrapper
    then raises "expected 7 wrapped outputs, got 14" (2.14.1 and 2.15.0; `_grad_context_compatible` in
    torch/_subclasses/meta_utils.py, pytorch#186427). 2.13 traces it.
    """
    if gradient is None or torch.torch_version.TorchVersion(torch.__version__) < "2.14" or not is_dtensor(gradient):
        return False
    return bool(gradient._local_tensor._is_view())  # type: ignore[attr-defined]


def laid_out_as(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the layout of `like` and local shard `part`, in its memory: inverse of `local_tensor`."""
    return from_part(part, like) if is_dtensor(like) else part


def from_part(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor with the layout of `like` and local shard `part`. Dynamo can trace this."""
    with torch.no_grad():
        made: torch.Tensor = type(like).from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return made


def redistributed_as(like: Any, tensor: Any) -> torch.Tensor:
    """Redistribute a DTensor to the placements of `like` on the same mesh, a no-op if equal. Sums partial placements.
    Runs collectives: call it on all ranks of the mesh in the same order. Dynamo can trace this."""
    if tensor.placements == like.placements:
        return tensor
    with torch.no_grad():
        return tensor.redistribute(placements=like.placements)


def groups_that_shard(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the mesh dimensions over which a DTensor is not replicated, () for any other tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    spread = (number for number, each in enumerate(tensor.placements) if not each.is_replicate())  # type: ignore[attr-defined]
    return tuple(mesh.get_group(number) for number in spread if mesh.size(number) > 1)


def layout_of(tensor: Any) -> str:
    """Return a readable, comparable string of a DTensor's placements and this rank's mesh coordinate."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
    layout = ", ".join(f"{placement} over {name}" for placement, name in zip(tensor.placements, names, strict=True))
    return f"{layout}, part {list(mesh.get_coordinate())} of {list(mesh.shape)}"


def placements_of(tensor: torch.Tensor | None) -> tuple[str, ...]:
    """Return a DTensor's placement per mesh dimension as strings, () for any other tensor and for None."""
    return tuple(map(str, tensor.placements)) if is_dtensor(tensor) else ()  # type: ignore[union-attr]


def waited_for(part: Any) -> torch.Tensor:
    """Return a local tensor after waiting for the asynchronous collective that may still write it."""
    return part if type(part) is torch.Tensor or not hasattr(part, "wait") else part.wait()


def parent_of(mesh: Any) -> Any:
    """Return the root mesh of a mesh: itself, unless it is a slice."""
    with named():
        return mesh._get_root_mesh()
