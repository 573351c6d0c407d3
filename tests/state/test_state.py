"""State over data parallel beside tensor parallel: as torch's extension of FSDP has it, and right where that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import full, mesh_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

import dp_compile
from dp_compile import state
from dp_compile.testing.ranks import Ranks

LAYOUTS: tuple[Placement | None, ...] = (None, Replicate(), Shard(0), Shard(1))


def values(rows: int, columns: int = 4) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + 1


def laid_out(value: torch.Tensor, mesh: DeviceMesh, placement: Placement | None) -> Any:
    """A parameter beside tensor parallel; `None`: one that it leaves alone."""
    parameter = nn.Parameter(value.clone())
    return parameter if placement is None else nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))


def own(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def beside_torch() -> None:
    torchs = DTensorExtensions(torch.cpu)
    for shape in ((2, 2), (1, 4), (4, 1), (1, 2, 2)):
        mesh = mesh_of(shape)
        over = mesh["dp"] if mesh.ndim == 2 else mesh["between", "inside"]
        for placement in LAYOUTS[mesh.ndim - 2 :]:  # of a plain tensor torch cuts the first of three dimensions
            parameter = laid_out(values(8), mesh["tp"], placement)
            mine, theirs = state.chunk(parameter, over), torchs.chunk_dtensor(parameter, dist.get_rank(), over)
            assert (mine.device_mesh, mine.placements) == (theirs.device_mesh, theirs.placements)
            assert (mine.shape, mine.stride(), mine.requires_grad) == (theirs.shape, theirs.stride(), False)
            assert torch.equal(mine.to_local(), theirs.to_local())
            back = state.gather(mine, over)
            assert type(back) is torch.Tensor
            assert torch.equal(back, torchs.all_gather_dtensor(theirs, mesh))
            assert torch.equal(back, own(parameter))


def test_as_torchs_extension(meshed: Ranks) -> None:
    meshed.run(beside_torch)


def cases() -> Iterator[tuple[DeviceMesh, DeviceMesh, DeviceMesh]]:
    """The parent, its part of data parallel and that of tensor parallel; torch needs the latter to be the last."""
    for shape in ((2, 2), (4, 1)):
        mesh = mesh_of(shape)
        yield mesh, mesh["dp"], mesh["tp"]
    mesh = mesh_of((2, 2), ("tp", "dp"))
    yield mesh, mesh["dp"], mesh["tp"]
    mesh = mesh_of((2, 1, 2))
    yield mesh, mesh["between", "inside"], mesh["tp"]
    yield mesh, mesh["between"], mesh["tp"]


def uneven() -> None:
    """Eleven rows, that no mesh shares evenly; one, of which most ranks hold nothing."""
    for mesh, dp, tp in cases():
        for rows in (11, 1):
            value = values(rows, 3)
            for placement in (*LAYOUTS, Partial()):
                parameter = laid_out(value, tp, placement)
                chunk = state.chunk(parameter, dp)
                assert chunk.device_mesh == mesh
                assert chunk.shape == value.shape
                assert torch.equal(full(chunk), value)
                held = chunk.to_local()
                assert held.untyped_storage().nbytes() == held.numel() * held.element_size()  # not of the whole
                assert held.numel() == 0 or held.data_ptr() != own(parameter).data_ptr()
                with torch.no_grad():
                    held.mul_(2)
                back = state.gather(chunk, dp)
                assert type(back) is torch.Tensor
                assert torch.equal(back, 2 * own(parameter))


def test_uneven_parts_and_other_meshes(meshed: Ranks) -> None:
    meshed.run(uneven)


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}
    torchs: Any = DTensorExtensions(torch.cpu)
    mesh, line = mesh_of((2, 2)), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    elsewhere = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    parameter = laid_out(values(8), mesh["tp"], Shard(0))
    chunk = state.chunk(parameter, mesh["dp"])
    for over in (None, line):
        with pytest.raises(RuntimeError):
            torchs.chunk_dtensor(parameter, dist.get_rank(), over)
    flattened = mesh_of((2, 1, 2))["between", "inside"]._flatten("both")
    attempts: dict[str, Callable[[], object]] = {
        "no parent": lambda: state.chunk(parameter, None),
        "one dimension, gathered": lambda: state.gather(chunk, line),
        "another parent": lambda: state.gather(chunk, elsewhere["dp"]),
        "not a chunk": lambda: state.gather(own(parameter), mesh["dp"]),
        "the whole mesh": lambda: state.chunk(parameter, mesh),
        "of another mesh": lambda: state.chunk(parameter, elsewhere["dp"]),
        "the same dimension": lambda: state.chunk(parameter, mesh["tp"]),
        "a chunk": lambda: state.chunk(chunk, mesh["dp"]),
        "no dimension": lambda: state.chunk(torch.tensor(1.0), mesh["dp"]),
        "flattened": lambda: state.chunk(parameter, flattened),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except dp_compile.ConfigError as error:
            said[name] = str(error)
    return said


def test_refusals(meshed: Ranks) -> None:
    expected = {
        "no parent": "mesh['dp'] of init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), got None",
        "one dimension, gathered": "got a mesh of dp",
        "another parent": "gather() needs a DTensor on",
        "not a chunk": "got a plain tensor",
        "the whole mesh": "got a mesh of dp, tp",
        "of another mesh": "Slice both from one mesh",
        "the same dimension": "its ranks hold different shards",
        "a chunk": "its ranks hold different shards",
        "no dimension": "got a scalar",
        "flattened": "got a mesh of both",
    }
    for said in meshed.run(refusals):
        assert {name for name, words in expected.items() if words not in said.get(name, "")} == set(), said
