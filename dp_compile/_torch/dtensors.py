"""DTensors: a rank's own part of them, and their layout over a mesh. Costs nothing to load.

Where there is one, `torch.distributed.tensor` is loaded; nothing here loads it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dp_compile._torch.missing import loaded, named


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor, a parameter or not."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:  # nearly always
        return False
    module = loaded("torch.distributed.tensor")
    return isinstance(tensor, getattr(module, "DTensor", ()))  # without it while another thread imports the module


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a tensor, in the same memory: its part of a DTensor, all of any other."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = waited_for(tensor.to_local())  # type: ignore[attr-defined]
        return part.detach()  # of a parameter it says that it is one too


def adding_cannot_be_traced(gradient: torch.Tensor | None) -> bool:
    """Whether AOTAutograd fails where a backward adds to a gradient: to a DTensor whose part is a view, as of a bucket.

    Since torch 2.14 its sizes become symbols, which the code around the graph does not expect among the outputs:
    "expected 7 wrapped outputs, got 14" (2.14.1 and 2.15.0; `_grad_context_compatible` in torch/_subclasses/
    meta_utils.py, pytorch#186427). 2.13 traces it.
    """
    if gradient is None or torch.torch_version.TorchVersion(torch.__version__) < "2.14" or not is_dtensor(gradient):
        return False
    return bool(gradient._local_tensor._is_view())  # type: ignore[attr-defined]


def laid_out_as(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The inverse of `local_tensor`: a tensor laid out as `like` of which this rank holds `part`, in its memory."""
    return from_part(part, like) if is_dtensor(like) else part


def from_part(part: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor laid out as another one. Dynamo traces this."""
    with torch.no_grad():
        made: torch.Tensor = type(like).from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return made


def redistributed_as(like: Any, tensor: Any) -> torch.Tensor:
    """A DTensor in the layout of another one on the same mesh; itself if it has that. Dynamo traces this. Where it is
    partial it is added up. Runs collectives: on all ranks of the mesh, in the same order."""
    if tensor.placements == like.placements:
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.redistribute(placements=like.placements)  # type: ignore[no-any-return]


def groups_that_shard(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks over which the elements of a DTensor are spread: none for any other tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    spread = (number for number, each in enumerate(tensor.placements) if not each.is_replicate())  # type: ignore[attr-defined]
    return tuple(mesh.get_group(number) for number in spread if mesh.size(number) > 1)


def layout_of(tensor: Any) -> str:
    """For people, and to compare: how a DTensor is laid out over its mesh, and which part this rank holds."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
    layout = ", ".join(f"{placement} over {name}" for placement, name in zip(tensor.placements, names, strict=True))
    return f"{layout}, part {list(mesh.get_coordinate())} of {list(mesh.shape)}"


def placements_of(tensor: torch.Tensor | None) -> tuple[str, ...]:
    """How a DTensor lies over each dimension of its mesh; empty for any other tensor, and for none."""
    return tuple(map(str, tensor.placements)) if is_dtensor(tensor) else ()  # type: ignore[union-attr]


def waited_for(part: Any) -> torch.Tensor:
    """A part that a collective may still be on its way to."""
    found: torch.Tensor = part if type(part) is torch.Tensor or not hasattr(part, "wait") else part.wait()
    return found


def parent_of(mesh: Any) -> Any:
    """The mesh that another was sliced from; itself if from none."""
    with named():
        return mesh._get_root_mesh()
