"""Gradients that are reduced inside nodes first, then between them: the same as torch's DDP on one level."""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import nullcontext
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
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.insight.report import Report
from dp_compile.testing.ranks import Ranks

BF16 = torch.bfloat16
NODES = ("between", "inside")
TWO_LEVELS = ["exchange", "all_reduce", "all_gather"]


class Net(nn.Module):
    """Sizes that no number of ranks divides, two dtypes, and what some ranks do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = mlp(7), mlp(5), nn.Linear(6, 6, bias=False)
        self.factor = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.factor.prod().float()
        if dist.get_rank() % 2:
            x = x + self.spare(x)
        result: torch.Tensor = self.last(x)
        return result


def check_gradients(ours: nn.Module, theirs: nn.Module, plain: nn.Module, wire: torch.dtype | None) -> None:
    """As near as sums of the same numbers in another order can be told to be.

    Of a sum of N numbers, each rounded and scaled before, no element is further from the truth than N + 1 units in the
    last place of the sum of their magnitudes; both of ours and theirs can be.
    """
    ranks = dist.get_world_size()
    for (name, one), other, local in zip(ours.named_parameters(), theirs.parameters(), plain.parameters(), strict=True):
        magnitude = torch.zeros_like(local) if local.grad is None else local.grad.abs() / ranks
        dist.all_reduce(magnitude)
        if other.grad is None:
            assert one.grad is None, name
            continue
        assert one.grad is not None, name
        assert (one.grad.dtype, one.grad.stride()) == (one.dtype, one.stride()), name
        eps = torch.finfo(one.dtype if wire is None else wire).eps
        assert ((one.grad - other.grad).abs() <= (ranks + 1) * eps * magnitude).all(), name


def run_beside(way: str, wire: torch.dtype | None) -> Report:
    """A step beside torch's DDP, and one with an accumulation; ranks use other parameters."""
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank())  # replicate() has to undo this
    model = Net()
    theirs = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    plain = copy.deepcopy(theirs.module)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NODES)
    policy = MixedPrecisionPolicy(reduce_dtype=wire)
    options = {"find_unused_parameters": True, "mp_policy": policy, "bucket_cap_mb": 1e-4}
    config = dp_compile.ReplicateConfig(backend="aot_eager", **options)
    dp_compile.replicate(model, device_mesh=mesh, config=config)
    run = model if way == "not compiled" else compile_whole(model)
    sides = [
        (run, lambda: dp_compile.no_sync(model), model),
        (theirs, theirs.no_sync, theirs),
        (plain, nullcontext, plain),
    ]
    by_hooks = way == "hooks" or (way == "hooks on some ranks" and dist.get_rank() in (0, 3))
    for step in range(2):
        for call, no_sync, module in sides:
            module.zero_grad()
            for micro in range(2 if step == 1 else 1):
                with no_sync() if step == 1 and micro == 0 else nullcontext():
                    with (
                        warnings.catch_warnings(),
                        torch.autograd.set_detect_anomaly(by_hooks and call is run, check_nan=False),
                    ):
                        warnings.simplefilter("ignore")
                        call(batch(2 * step + micro)).square().mean().backward()
        check_gradients(model, theirs.module, plain, wire)
    report = dp_compile.report(model)
    dp_compile.unreplicate(model)
    return report


def stages_of(report: Report) -> list[list[str]]:
    return [[stage.op for stage in bucket.key.reduction.stages] for bucket in report.plan.buckets]


@pytest.mark.parametrize(("way", "wire"), [("hooks", BF16), ("hooks on some ranks", None), ("not compiled", None)])
def test_as_torch_s_ddp(ranks4: Ranks, way: str, wire: torch.dtype | None) -> None:
    for rank, report in enumerate(ranks4.run(run_beside, way, wire)):
        assert report.backwards["captured" if way == "hooks on some ranks" and rank in (1, 2) else "eager hooks"] == 2
        assert stages_of(report) == [TWO_LEVELS] * len(report.plan.buckets)
        assert len(report.plan.buckets) > 2
        for record in report.captures:
            assert record.graphs == 1
            assert record.collectives in (0, 3 * len(report.plan.buckets))


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


# --- what goes with it ----------------------------------------------------------------------------------------------


def run_bad(what: str) -> str:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NODES)
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NODES)
    options: dict[str, Any] = {"device_mesh": mesh}
    if what == "dimensions":
        options["device_mesh"] = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    if what == "other nodes" and dist.get_rank() == 1:
        options["device_mesh"] = turned
    if what == "one level":
        options["device_mesh"] = None if dist.get_rank() == 2 else mesh
    if what == "no hooks":
        options["ddp_python_hook"] = False
    try:
        model = dp_compile.replicate(mlp(), **options)
        if what == "hook":
            model.register_comm_hook(None, lambda state, bucket: default_hooks.allreduce_hook(None, bucket))
        if what == "functional hook":
            model.register_comm_hook(dp_compile.HookState(), dp_compile.QuantizedHook())  # type: ignore[operator]
    except dp_compile.DPCompileError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dimensions", "device_mesh must have one dimension, or two .*, got 3 \\(a, b, c\\)"),
        ("other nodes", "device_mesh"),
        ("one level", "rank 2 differs from rank 0"),
        ("no hooks", "ddp_python_hook=False asks for, does not have a device_mesh with two dimensions"),
        ("hook", "comm hook .* reduces over one group, but the device_mesh of .* has two dimensions"),
        ("functional hook", "comm hook QuantizedHook reduces the buckets of .*the device_mesh has two dimensions"),
    ],
)
def test_what_is_not_allowed_is_said_on_every_rank(ranks4: Ranks, what: str, said: str) -> None:
    for error in ranks4.run(run_bad, what):
        assert re.search(said, error), error


def run_beside_fsdp(wire: torch.dtype | None, factor: float | None, exact: bool) -> Report:
    """Three steps beside FSDP2's hybrid sharding over the same mesh."""
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
    sides = [(run, torch.optim.SGD(run.parameters(), lr=0.1)) for run in (compile_whole(model), theirs)]
    way = {name: 0.0 for name, _ in model.named_parameters()}
    for step in range(3):
        for run, optimizer in sides:
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()
        for name, one in model.named_parameters():
            way[name] += 0.1 * float(one.grad.abs().max())
    for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        # Of how far it went each rank and each factor may have rounded off one unit, on both sides; and each step did.
        bound = 2 * (dist.get_world_size() + 2) * torch.finfo(wire or one.dtype).eps * way[name]
        bound += 3 * torch.finfo(one.dtype).eps * float(one.detach().abs().max())
        assert (one - other.full_tensor()).abs().max() <= (0.0 if exact else bound), name
    report = dp_compile.report(model)
    dp_compile.unreplicate(model)
    return report


@pytest.mark.parametrize(
    ("wire", "factor", "exact"),
    [
        # Two numbers in each stage and powers of two: no order, no rounding that is not theirs.
        (None, None, True),
        (BF16, None, True),
        (BF16, 8.0, True),
        (None, 6.0, False),  # we multiply before the sum, they divide behind it
    ],
)
def test_as_fsdps_hybrid_sharding(meshed: Ranks, wire: torch.dtype | None, factor: float | None, exact: bool) -> None:
    for report in meshed.run(run_beside_fsdp, wire, factor, exact):
        assert report.backwards == {"captured": 3}
        assert stages_of(report) == [TWO_LEVELS]
