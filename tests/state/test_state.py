"""State over data and tensor parallel as torch's extension of FSDP, also where that fails."""

import re

import pytest
import torch
import torch.distributed as dist
from meshes import full, mesh_of
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

import dp_compile
from dp_compile import state

LAYOUTS = (None, Replicate(), Shard(0), Shard(1))


def values(rows, columns=4):
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + 1


def laid_out(value, mesh, placement):
    """A parameter beside tensor parallel; `None`: one that it leaves alone."""
    parameter = nn.Parameter(value.clone())
    return parameter if placement is None else nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))


def own(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@on_ranks("meshed")
def test_as_torchs_extension():
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


def cases():
    """The parent, its part of data parallel and that of tensor parallel; torch needs the latter to be the last."""
    for shape in ((2, 2), (4, 1)):
        mesh = mesh_of(shape)
        yield mesh, mesh["dp"], mesh["tp"]
    mesh = mesh_of((2, 2), ("tp", "dp"))
    yield mesh, mesh["dp"], mesh["tp"]
    mesh = mesh_of((2, 1, 2))
    yield mesh, mesh["between", "inside"], mesh["tp"]
    yield mesh, mesh["between"], mesh["tp"]


@on_ranks("meshed")
def test_uneven_parts_and_other_meshes():
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


@on_ranks("meshed")
def test_refusals():
    torchs = DTensorExtensions(torch.cpu)
    mesh, line = mesh_of((2, 2)), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    elsewhere = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    parameter = laid_out(values(8), mesh["tp"], Shard(0))
    chunk = state.chunk(parameter, mesh["dp"])
    for over in (None, line):
        with pytest.raises(RuntimeError):
            torchs.chunk_dtensor(parameter, dist.get_rank(), over)
    flattened = mesh_of((2, 1, 2))["between", "inside"]._flatten("both")
    parent = "mesh['dp'] of init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), got None"
    for attempt, words in (
        (lambda: state.chunk(parameter, None), parent),
        (lambda: state.gather(chunk, line), "got a mesh of dp"),
        (lambda: state.gather(chunk, elsewhere["dp"]), "gather() needs a DTensor on"),
        (lambda: state.gather(own(parameter), mesh["dp"]), "got a plain tensor"),
        (lambda: state.chunk(parameter, mesh), "got a mesh of dp, tp"),
        (lambda: state.chunk(parameter, elsewhere["dp"]), "Slice both from one mesh"),
        (lambda: state.chunk(parameter, mesh["tp"]), "its ranks may hold different shards"),
        (lambda: state.chunk(chunk, mesh["dp"]), "its ranks may hold different shards"),
        (lambda: state.chunk(torch.tensor(1.0), mesh["dp"]), "got a scalar"),
        (lambda: state.chunk(parameter, flattened), "got a mesh of both"),
    ):
        with pytest.raises(dp_compile.ConfigError, match=re.escape(words)):
            attempt()
