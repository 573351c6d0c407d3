"""Gradients that are reduced inside nodes first, then between them: the same as torch's DDP on one level."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, batch, mlp
from meshes import mesh_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.engine.calibration import calibrate
from dp_compile.insight.report import Report
from dp_compile.testing.ranks import Ranks

BF16 = torch.bfloat16
NODES = ("between", "inside")
TWO_LEVELS = ["exchange", "all_reduce", "all_gather"]


class Net(nn.Module):
    """Sizes that no number of ranks divides, two dtypes, and what some ranks do not use."""

    def __init__(self, uneven: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.spare = mlp(7), mlp(5), nn.Linear(6, 6, bias=False)
        self.factor = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.uneven = uneven

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.factor.prod().float()
        if not self.uneven or dist.get_rank() % 2:
            x = x + self.spare(x)
        result: torch.Tensor = self.last(x)
        return result


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def anomaly(on: bool) -> AbstractContextManager[object]:
    """Backwards inside are not captured."""
    return torch.autograd.detect_anomaly(check_nan=False) if on else nullcontext()


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "hooks": compiled,
    "hooks on some ranks": compiled,
    "not compiled": lambda module: module,
}


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


def run_beside(way: str, uneven: bool, wire: torch.dtype | None) -> Report:
    """A step beside torch's DDP; if ranks use other parameters, another one with an accumulation."""
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank())  # replicate() has to undo this
    model = Net(uneven)
    theirs = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=uneven)
    plain = copy.deepcopy(theirs.module)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NODES)
    policy = MixedPrecisionPolicy(reduce_dtype=wire)
    options = {"find_unused_parameters": uneven, "mp_policy": policy, "bucket_cap_mb": 1e-4}
    config = dp_compile.ReplicateConfig(backend="aot_eager", **options)
    dp_compile.replicate(model, device_mesh=mesh, config=config)
    run = WAYS[way](model)
    sides = [
        (run, lambda: dp_compile.no_sync(model), model),
        (theirs, theirs.no_sync, theirs),
        (plain, nullcontext, plain),
    ]
    by_hooks = way == "hooks" or (way == "hooks on some ranks" and dist.get_rank() in (0, 3))
    for step in range(2 if uneven else 1):
        for call, no_sync, module in sides:
            module.zero_grad()
            for micro in range(2 if step == 1 else 1):
                with no_sync() if step == 1 and micro == 0 else nullcontext():
                    with warnings.catch_warnings(), anomaly(by_hooks and call is run):
                        warnings.simplefilter("ignore")
                        call(batch(2 * step + micro)).square().mean().backward()
        check_gradients(model, theirs.module, plain, wire)
    report = dp_compile.report(model)
    dp_compile.unreplicate(model)
    return report


def stages_of(report: Report) -> list[list[str]]:
    return [[stage.op for stage in bucket.key.reduction.stages] for bucket in report.plan.buckets]


@pytest.mark.parametrize(
    ("way", "uneven", "wire"),
    [
        ("hooks", True, BF16),
        ("hooks on some ranks", True, None),
        ("not compiled", True, None),
    ],
)
def test_as_torch_s_ddp(ranks4: Ranks, way: str, uneven: bool, wire: torch.dtype | None) -> None:
    names = dict.fromkeys(("hooks", "not compiled"), "eager hooks")
    for rank, report in enumerate(ranks4.run(run_beside, way, uneven, wire)):
        expected = "eager hooks" if way == "hooks on some ranks" and rank in (0, 3) else names.get(way, "captured")
        assert report.backwards[expected] == (2 if uneven else 1)
        assert stages_of(report) == [TWO_LEVELS] * len(report.plan.buckets)
        assert len(report.plan.buckets) > 2
        for record in report.captures:
            assert (record.graphs, record.deferred) == (1, False)
            assert record.collectives in (0, 3 * len(report.plan.buckets))


def gradient_of(model: nn.Module, value: float) -> float:
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(torch.full((1, 1), value)).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return float(parameter.grad)


def run_other_meshes() -> tuple[str, list[tuple[list[list[str]], float]]]:
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
    compiled(wide)(batch(0).double()).square().mean().backward()
    for parameter, each in zip(wide.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, each, rtol=1e-12, atol=1e-15)
    return said, found


def test_meshes_of_other_shapes(ranks4: Ranks) -> None:
    one, two = [["all_reduce"]], [TWO_LEVELS]
    for rank, (said, found) in enumerate(ranks4.run(run_other_meshes)):
        assert ("this rank is not in the given device_mesh" in said) is (rank == 3)
        assert found == [(one, 1.0)] * (rank < 3) + [(one, 1.5), (one, 1.5), (two, 1.5)]


class Odd(nn.Module):
    """A bucket without elements, a gradient whose sum does not fit into float16, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 3, dtype=torch.bfloat16))
        self.short = nn.Parameter(torch.ones(1, dtype=torch.float16))
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.first.sum() + self.empty.double().sum() + (self.short * x).double().sum()
        return total + torch.view_as_real(self.turn * (1 + dist.get_rank() * 1j)).double().sum()


def run_odd(by_hooks: bool) -> tuple[float, list[complex], int]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NODES)
    model = dp_compile.replicate(Odd(), device_mesh=mesh, config=AOT)
    with warnings.catch_warnings(), anomaly(by_hooks):
        warnings.simplefilter("ignore")
        compiled(model)(torch.full((1,), 30_000.0, dtype=torch.float16)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
    assert set(dp_compile.report(model).backwards) == {"eager hooks" if by_hooks else "captured"}
    return float(model.short.grad), model.turn.grad.tolist(), model.empty.grad.numel()


@pytest.mark.parametrize("by_hooks", [False, True])
def test_odd_gradients(ranks4: Ranks, by_hooks: bool) -> None:
    for half, turn, empty in ranks4.run(run_odd, by_hooks):
        assert half == 30_000.0
        # d/dt of Re(tz) + Im(tz) is (1 + i) conj(z); the average of conj(1 + ri) over four ranks is 1 - 1.5i
        assert turn == [pytest.approx((1 + 1j) * (1 - 1.5j), rel=1e-6)] * 3
        assert empty == 0


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
    if what == "reducer":
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
        ("reducer", "device_mesh with two dimensions needs dp_compile's hooks, but ddp_python_hook is False"),
        ("hook", "comm hook .* is called by torch's C\\+\\+ reducer, which knows one level of network"),
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
    sides = [(run, torch.optim.SGD(run.parameters(), lr=0.1)) for run in (compiled(model), theirs)]
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


def run_accumulated() -> str:
    """Three micro-steps, of which only the last sends anything: the gradients of one process with all of the batch."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NODES)
    torch.manual_seed(0)
    model = mlp(7).double()
    alone = copy.deepcopy(model)
    dp_compile.replicate(model, device_mesh=mesh, config=AOT)
    try:
        model.set_requires_all_reduce(False)  # type: ignore[operator]
        said = ""
    except dp_compile.ConfigError as error:
        said = str(error)
    model.set_requires_all_reduce(True)  # type: ignore[operator]
    run = compiled(model)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
        run(batch(micro).double()).square().sum().backward()
    everything = [[torch.zeros(3, 6, dtype=torch.float64) for _ in range(4)] for _ in range(3)]
    for micro, parts in enumerate(everything):
        dist.all_gather(parts, batch(micro).double())
    (alone(torch.cat([part for parts in everything for part in parts])).square().sum() / 4).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert dp_compile.report(model).backwards == {"captured without sync": 2, "captured": 1}
    return said


def test_accumulation_is_that_of_one_process_with_the_joint_batch(ranks4: Ranks) -> None:
    for said in ranks4.run(run_accumulated):
        assert "set_requires_all_reduce(False) is not supported: each rank has whole gradients" in said


def run_measured() -> tuple[str, str]:
    """Stages are measured, and buckets planned from that, as on one level."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NODES)
    config = dp_compile.ReplicateConfig(backend="aot_eager", replan_after=2)
    model = dp_compile.replicate(mlp(7), device_mesh=mesh, config=config)
    run = torch.compile(model, backend="aot_eager")
    for number in range(4):
        run(batch(number)).square().mean().backward()
    report, fitted = dp_compile.report(model), calibrate(device_mesh=mesh)
    assert fitted.cost.inside is not None
    assert fitted.cost.between is not None
    assert stages_of(report) == [TWO_LEVELS] * len(report.plan.buckets)
    return fitted.to_json(), report.plan.signature()


def test_levels_are_measured_alike_on_every_rank(ranks4: Ranks) -> None:
    first, *others = ranks4.run(run_measured)
    assert all(each == first for each in others)
