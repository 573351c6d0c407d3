"""Gradients that are reduced inside nodes first, then between them: as FSDP2's hybrid sharding.

Beside torch's DDP they are run by the fuzzer (`levels`), with unused parameters, accumulation and several buckets.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from parity import AOT, batch, compile_whole, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dp_compile
from dp_compile.insight.report import Report
from dp_compile.testing.ranks import Ranks

BF16 = torch.bfloat16
NODES = ("between", "inside")
TWO_LEVELS = ["exchange", "all_reduce", "all_gather"]


def stages_of(report: Report) -> list[list[str]]:
    return [[stage.op for stage in bucket.key.reduction.stages] for bucket in report.plan.buckets]


def gradient_of(model: nn.Module, value: float) -> float:
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(torch.full((1, 1), value)).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return float(parameter.grad)


def run_other_meshes() -> tuple[str, list[tuple[list[list[str]], float]], str]:
    """Of a mesh that rank 3 is not in; stages and average of meshes with a dimension of size one, and of a slice."""
    torch._dynamo.reset()
    rank, said, found = dist.get_rank(), "", []
    three = DeviceMesh("cpu", [[0], [1], [2]], mesh_dim_names=NODES)
    larger = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("rows", "columns", "other"))
    flat = [init_device_mesh("cpu", shape, mesh_dim_names=NODES) for shape in ((1, 4), (4, 1))]
    for mesh in (three, *flat, larger["rows", "columns"]):
        model = nn.Linear(1, 1, bias=False)
        try:
            dp_compile.replicate(model, device_mesh=mesh, config=AOT)
        except dp_compile.ConfigError as error:
            said = str(error)
            continue
        average = gradient_of(model, float(rank))
        found.append((stages_of(dp_compile.report(model)), average))
    # Nodes whose ranks are no neighbours.
    turned, wide = DeviceMesh("cpu", [[0, 2], [1, 3]]), mlp().double()
    dp_compile.replicate(wide, device_mesh=turned, config=AOT)
    expected = torch.autograd.grad(wide(batch(0).double()).square().mean() / 4, list(wide.parameters()))
    for each in expected:
        dist.all_reduce(each)
    compile_whole(wide)(batch(0).double()).square().mean().backward()
    for parameter, each in zip(wide.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, each, rtol=1e-12, atol=1e-15)
    fitted = dp_compile.calibrate(device_mesh=turned)
    assert None not in (fitted.cost.inside, fitted.cost.between)
    return said, found, fitted.cost


def test_meshes_of_other_shapes(ranks4: Ranks) -> None:
    one, two, results = [["all_reduce"]], [TWO_LEVELS], ranks4.run(run_other_meshes)
    assert len({fitted for *_, fitted in results}) == 1  # levels are measured, alike on every rank
    for rank, (said, found, _) in enumerate(results):
        assert ("this rank is not in the given device_mesh" in said) is (rank == 3)
        assert found == [(one, 1.0)] * (rank < 3) + [(one, 1.5), (one, 1.5), (two, 1.5)]


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NODES)
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NODES)
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))

    def note(what: str, hook: Any = None, **options: Any) -> None:
        try:
            model: Any = dp_compile.replicate(mlp(), **{"device_mesh": mesh} | options)
            model.register_comm_hook(dp_compile.HookState() if hook is not a_hook else None, hook)
        except dp_compile.DPCompileError as error:
            said[what] = str(error)

    def a_hook(state: Any, bucket: Any) -> Any:
        return default_hooks.allreduce_hook(None, bucket)

    note("dimensions", device_mesh=three)
    note("other nodes", device_mesh=turned if dist.get_rank() == 1 else mesh)
    note("one level", device_mesh=None if dist.get_rank() == 2 else mesh)
    note("no hooks", ddp_python_hook=False)
    note("hook", a_hook)
    note("functional hook", dp_compile.QuantizedHook())
    return said


REFUSED = {
    "dimensions": r"device_mesh must have one dimension, or two .*, got 3 \(a, b, c\)",
    "other nodes": "device_mesh",
    "one level": "rank 2 differs from rank 0",
    "no hooks": "ddp_python_hook=False asks for, does not have a device_mesh with two dimensions",
    "hook": "comm hook .* reduces over one group, but the device_mesh of .* has two dimensions",
    "functional hook": "comm hook QuantizedHook reduces the buckets of .*the device_mesh has two dimensions",
}


def test_what_is_not_allowed_is_said_on_every_rank(ranks4: Ranks) -> None:
    for said in ranks4.run(refusals):
        assert {what: bool(re.search(text, said[what])) for what, text in REFUSED.items()} == dict.fromkeys(said, True)


def run_beside_fsdp(way: str, wire: torch.dtype | None, factor: float | None, exact: bool) -> Report:
    """Three steps beside FSDP2's hybrid sharding over the same mesh."""
    by_hooks = way == "hooks on some ranks" and dist.get_rank() in (0, 3)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh, policy = mlp(7), mesh_of((2, 2), NODES), MixedPrecisionPolicy(reduce_dtype=wire)
    theirs = copy.deepcopy(model)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    dp_compile.replicate(model, device_mesh=mesh, config=AOT, mp_policy=policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)  # type: ignore[operator]
        theirs.set_gradient_divide_factor(factor)
        theirs.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    ours = model if way == "not compiled" else compile_whole(model)
    sides = [(run, torch.optim.SGD(run.parameters(), lr=0.1)) for run in (ours, theirs)]
    gone = {name: 0.0 for name, _ in model.named_parameters()}
    for step in range(3):
        for run, optimizer in sides:
            optimizer.zero_grad()
            with (
                warnings.catch_warnings(action="ignore"),
                torch.autograd.set_detect_anomaly(by_hooks and run is ours, check_nan=False),
            ):
                run(batch(step)).square().mean().backward()
            optimizer.step()
        for name, one in model.named_parameters():
            gone[name] += 0.1 * float(one.grad.abs().max())
    for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        # Of how far it went each rank and each factor may have rounded off one unit, on both sides; and each step did.
        bound = 2 * (dist.get_world_size() + 2) * torch.finfo(wire or one.dtype).eps * gone[name]
        bound += 3 * torch.finfo(one.dtype).eps * float(one.detach().abs().max())
        assert (one - other.full_tensor()).abs().max() <= (0.0 if exact else bound), name
    report = dp_compile.report(model)
    dp_compile.unreplicate(model)
    return report


@pytest.mark.parametrize(
    ("way", "wire", "factor", "exact"),
    [
        # Two numbers in each stage and powers of two: no order, no rounding that is not theirs.
        ("hooks on some ranks", None, None, True),
        ("not compiled", BF16, None, True),
        ("captured", BF16, 8.0, True),
        ("captured", None, 6.0, False),  # we multiply before the sum, they divide after it
    ],
)
def test_as_fsdps_hybrid_sharding(
    meshed: Ranks, way: str, wire: torch.dtype | None, factor: float | None, exact: bool
) -> None:
    for rank, report in enumerate(meshed.run(run_beside_fsdp, way, wire, factor, exact)):
        is_captured = way == "captured" or (way == "hooks on some ranks" and rank in (1, 2))
        assert report.backwards == {"captured" if is_captured else "eager hooks": 3}
        assert stages_of(report) == [TWO_LEVELS] * len(report.plan.buckets)
        assert {record.collectives for record in report.captures} <= {3 * len(report.plan.buckets)}
