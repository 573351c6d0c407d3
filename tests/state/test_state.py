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
        part, layout = state.flatten(parameter)
        assert layout is not None
        their_part, spec = torchs.pre_flatten_transform(parameter)
        assert part.data_ptr() == their_part.data_ptr()
        assert (part.is_leaf, part.requires_grad, type(part)) == (True, True, torch.Tensor)
        assert (layout.mesh, layout.placements) == (spec.mesh, spec.placements)
        assert (layout.shape, layout.stride, layout.part) == (spec.shape, spec.stride, their_part.shape)


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
                assert torch.equal(full(state.unflatten(back, state.flatten(parameter)[1])), 2 * value)


def test_uneven_parts_and_other_meshes(meshed: Ranks) -> None:
    meshed.run(uneven)


def round_trips() -> None:
    torchs: Any = DTensorExtensions(torch.cpu)
    mesh = mesh_of((2, 2))["tp"]
    for placement in LAYOUTS:
        rows = values(7)
        parameter = laid_out(rows, mesh, placement)
        part, layout = state.flatten(parameter)
        assert (layout is None) == (placement is None)
        grads = []
        for unflatten in (state.unflatten, torchs.post_unflatten_transform):
            if layout is None:
                assert state.unflatten(part, layout) is parameter
                continue
            each = part.detach().requires_grad_()
            again: Any = unflatten(each, layout if unflatten is state.unflatten else parameter._spec)
            assert again.placements == parameter.placements
            assert again.to_local().data_ptr() == part.data_ptr()
            # A product in which this rank has a part: what comes back is partial over the mesh, and is added up.
            factor = distribute_tensor(values(5, 4), mesh, [Shard(0)])
            (factor @ again.redistribute(placements=[Replicate()], async_op=True).t()).sum().backward()
            assert type(each.grad) is torch.Tensor
            grads.append(each.grad)
            assert not each._backward_hooks or unflatten is not state.unflatten  # one more for each call
        if layout is not None:
            assert torch.equal(*grads)
            plain = rows.clone().requires_grad_()
            (values(5, 4) @ plain.t()).sum().backward()
            assert torch.equal(full(state.unflatten(grads[0], layout)), plain.grad)
    frozen = nn.Parameter(distribute_tensor(values(4), mesh, [Shard(0)]), requires_grad=False)
    assert not state.flatten(frozen)[0].requires_grad
    counts = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    assert state.flatten(counts)[0].dtype == torch.int64


def test_flat_and_back(meshed: Ranks) -> None:
    meshed.run(round_trips)


def nested() -> None:
    torchs: Any = DTensorExtensions(torch.cpu)
    dp = mesh_of((2, 2))["dp"]
    plain = torchs.chunk_tensor(values(4), dp.get_local_rank(), 2, 4, dp.get_group())
    tensors = [plain]
    tp = mesh_of((4,), ("tp",))["tp"]
    tensors.append(
        torchs.chunk_tensor(distribute_tensor(values(16), tp, [Shard(0)]), dist.get_rank(), 4, 4, dist.group.WORLD)
    )
    for tensor in tensors:
        mine, theirs = state.to_load(tensor), torchs.pre_load_state_dict_transform(tensor)
        assert mine[0] is theirs[0]
        assert [each.tensor.data_ptr() for each in mine[1]] == [each.tensor.data_ptr() for each in theirs[1]]
        assert len(mine[1]) == 1
    assert state.to_load(tensors[1])[0] is not tensors[1]


def test_sharded_tensors_are_loaded_as_by_torch(meshed: Ranks) -> None:
    meshed.run(nested)


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}
    torchs: Any = DTensorExtensions(torch.cpu)
    mesh, line = mesh_of((2, 2)), init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    elsewhere = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    parameter = laid_out(values(8), mesh["tp"], Shard(0))
    chunk = state.chunk(parameter, mesh["dp"])
    part, layout = state.flatten(parameter)

    def note(name: str, attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except dp_compile.ConfigError as error:
            said[name] = str(error)

    for name, over in (("no parent", None), ("one dimension", line)):
        with pytest.raises(RuntimeError):
            torchs.chunk_dtensor(parameter, dist.get_rank(), over)
        note(name, lambda over=over: state.chunk(parameter, over))
        note(f"{name}, gathered", lambda over=over: state.gather(chunk, over))
    with pytest.raises(AssertionError):
        torchs.all_gather_dtensor(chunk, elsewhere)
    note("another parent", lambda: state.gather(chunk, elsewhere["dp"]))
    note("not a chunk", lambda: state.gather(part, mesh["dp"]))
    note("no mesh", lambda: state.chunk(parameter, mesh["dp"].get_group()))  # type: ignore[arg-type]
    note("the whole mesh", lambda: state.chunk(parameter, mesh))
    note("of another mesh", lambda: state.chunk(parameter, elsewhere["dp"]))
    note("the same dimension", lambda: state.chunk(parameter, mesh["tp"]))
    note("a chunk", lambda: state.chunk(chunk, mesh["dp"]))
    note("no dimension", lambda: state.chunk(torch.tensor(1.0), mesh["dp"]))
    note("flattened", lambda: state.chunk(parameter, mesh_of((2, 1, 2))["between", "inside"]._flatten("both")))
    note("another part", lambda: state.unflatten(part[1:], layout))
    note("no ShardedTensor", lambda: state.to_load(chunk))
    return said


def test_refusals(meshed: Ranks) -> None:
    expected = {
        "no parent": "there is no parent mesh",
        "no parent, gathered": "there is no parent mesh",
        "one dimension": "must have two at least",
        "one dimension, gathered": "must have two at least",
        "another parent": "gather() needs a DTensor on",
        "not a chunk": "got a plain tensor",
        "no mesh": "must be a DeviceMesh, got",
        "the whole mesh": "a whole mesh (dp, tp)",
        "of another mesh": "Take both from one mesh",
        "the same dimension": "its ranks hold different parts",
        "a chunk": "its ranks hold different parts",
        "no dimension": "got one without any",
        "flattened": "one that was flattened is none",
        "another part": "this rank's part in the layout has shape [4, 4]",
        "no ShardedTensor": "is loaded with gather()",
    }
    for said in meshed.run(refusals):
        assert {name: words in said.get(name, "") for name, words in expected.items()} == dict.fromkeys(
            expected, True
        ), said
