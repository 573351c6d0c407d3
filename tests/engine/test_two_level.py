"""Gradients that are reduced inside nodes first, then between them: as FSDP2's hybrid sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from on_ranks import on_ranks
from parity import AOT, batch, compile_whole, eagerly, expect_average, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dp_compile

BF16 = torch.bfloat16
NODES = ("between", "inside")
TWO_LEVELS = ["exchange", "all_reduce", "all_gather"]


def stages_of(report):
    return [[stage.op for stage in bucket.key.reduction.stages] for bucket in report.plan.buckets]


@on_ranks("ranks4")
def test_meshes_of_other_shapes():
    """A mesh that rank 3 is not in, meshes with a dimension of size one, and a slice."""
    three = DeviceMesh("cpu", [[0], [1], [2]], mesh_dim_names=NODES)
    larger = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("rows", "columns", "other"))
    flat = [init_device_mesh("cpu", shape, mesh_dim_names=NODES) for shape in ((1, 4), (4, 1))]
    if dist.get_rank() == 3:
        with pytest.raises(dp_compile.ConfigError, match="this rank is not in the given device_mesh"):
            dp_compile.replicate(nn.Linear(1, 1, bias=False), device_mesh=three, config=AOT)
    for mesh in (*([three] if dist.get_rank() < 3 else ()), *flat, larger["rows", "columns"]):
        model = dp_compile.replicate(nn.Linear(1, 1, bias=False), device_mesh=mesh, config=AOT)
        compile_whole(model)(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        assert float(model.weight.grad) == (1.0 if mesh is three else 1.5)
        on_one_level = mesh is three or mesh in flat
        assert stages_of(dp_compile.report(model)) == [["all_reduce"] if on_one_level else TWO_LEVELS]
    # Nodes whose ranks are no neighbours.
    turned, wide, alone = DeviceMesh("cpu", [[0, 2], [1, 3]]), mlp().double(), mlp().double()
    dp_compile.replicate(wide, device_mesh=turned, config=AOT)
    alone.load_state_dict(wide.state_dict())
    for run in (compile_whole(wide), alone):
        run(batch(0).double()).square().mean().backward()
    expect_average(wide, alone, rtol=1e-12, atol=1e-15)
    costs = [None] * 4
    dist.all_gather_object(costs, dp_compile.calibrate(device_mesh=turned).cost)
    assert None not in (costs[0].inside, costs[0].between)
    assert len(set(costs)) == 1  # levels are measured, alike on every rank


@on_ranks("ranks4")
def test_what_is_not_allowed_is_said_on_every_rank():
    mesh, turned = (DeviceMesh("cpu", each, mesh_dim_names=NODES) for each in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))

    hooked = dp_compile.replicate(mlp(), device_mesh=mesh)

    def replicated(device_mesh, **options):
        dp_compile.replicate(mlp(), device_mesh=device_mesh, **options)

    def a_hook(state, bucket):
        return default_hooks.allreduce_hook(None, bucket)

    attempts = [
        (lambda: replicated(three), r"device_mesh must have one dimension, or two .*, got 3 \(a, b, c\)"),
        (lambda: replicated(turned if dist.get_rank() == 1 else mesh), "device_mesh"),
        (lambda: replicated(None if dist.get_rank() == 2 else mesh), "rank 2 differs from rank 0"),
        (lambda: replicated(mesh, ddp_python_hook=False), "does not have a device_mesh with two dimensions"),
        (lambda: hooked.register_comm_hook(None, a_hook), "reduces over one group, but the device_mesh .* has two dim"),
        (
            lambda: hooked.register_comm_hook(dp_compile.HookState(), dp_compile.QuantizedHook()),
            "comm hook QuantizedHook reduces each bucket .*the device_mesh of .* has two dimensions",
        ),
    ]
    for attempt, text in attempts:
        with pytest.raises(dp_compile.DPCompileError, match=text):
            attempt()


def run_beside_fsdp(way, wire, factor, exact):
    """Three steps, and the same by FSDP2's hybrid sharding over the same mesh."""
    by_hooks = way == "hooks on some ranks" and dist.get_rank() in (0, 3)
    torch.manual_seed(0)
    model, mesh, policy = mlp(7), mesh_of((2, 2), NODES), MixedPrecisionPolicy(reduce_dtype=wire)
    theirs = copy.deepcopy(model)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    dp_compile.replicate(model, device_mesh=mesh, config=AOT, mp_policy=policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        theirs.set_gradient_divide_factor(factor)
        theirs.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    ours = model if way == "not compiled" else compile_whole(model)
    sides = [(run, torch.optim.SGD(run.parameters(), lr=0.1)) for run in (ours, theirs)]
    gone = {name: 0.0 for name, _ in model.named_parameters()}
    for step in range(3):
        for run, optimizer in sides:
            optimizer.zero_grad()
            with eagerly(by_hooks and run is ours):
                run(batch(step)).square().mean().backward()
            optimizer.step()
        for name, one in model.named_parameters():
            gone[name] += 0.1 * float(one.grad.abs().max())
    for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        # Of how far it went each rank and each factor may have rounded off one unit, on both sides; and each step did.
        bound = 2 * (dist.get_world_size() + 2) * torch.finfo(wire or one.dtype).eps * gone[name]
        bound += 3 * torch.finfo(one.dtype).eps * float(one.detach().abs().max())
        assert (one - other.full_tensor()).abs().max() <= (0.0 if exact else bound), name
    return dp_compile.report(model)


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
def test_as_fsdps_hybrid_sharding(meshed, way, wire, factor, exact):
    for rank, report in enumerate(meshed.run(run_beside_fsdp, way, wire, factor, exact)):
        is_captured = way == "captured" or (way == "hooks on some ranks" and rank in (1, 2))
        assert report.backwards == {"captured" if is_captured else "eager hooks": 3}
        assert stages_of(report) == [TWO_LEVELS] * len(report.plan.buckets)
        assert {record.collectives for record in report.captures} <= {3 * len(report.plan.buckets)}
