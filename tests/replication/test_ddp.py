"""The wrapper class against torch's, on two ranks; and what it refuses.

It trains as torch's in `test_join.py`, `test_module.py::test_comm_hook_as_torch_ddp` and the fuzzer's runs (`wrapper`).
"""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dp_compile
from dp_compile import DistributedDataParallel
from dp_compile.replication.module import replica_of


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("by_wrapper", [False, True])
@on_ranks("ranks2")
def test_without_hooks_torch_reduces(by_wrapper: bool) -> None:
    options: dict[str, Any] = {"bucket_cap_mb": math.inf, "find_unused_parameters": True}
    theirs: nn.Module = build()
    if by_wrapper:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DP_COMPILE_DDP_PYTHON_HOOK", "0")
            ours: nn.Module = DistributedDataParallel(build(), **options)
        theirs = TorchDDP(theirs, find_unused_parameters=True)
        assert type(ours) is TorchDDP
    else:
        ours = dp_compile.replicate(build(), ddp_python_hook=False, **options)
        torch_replicate(theirs, find_unused_parameters=True)
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().mean().backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
    for model in (ours, theirs):
        model.zero_grad()
    with dp_compile.no_sync(ours):
        with dp_compile.no_sync(ours):
            pass
        ours(x).square().mean().backward()
    with dp_compile.no_sync(theirs):
        theirs(x).square().mean().backward()
    for model in (ours, theirs):
        model(x).square().mean().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    dp_compile.warmup(ours, [x], lambda x: ours(x).square().mean())
    assert str(dp_compile.report(ours)).startswith("mode: torch's own DDP")
    with pytest.raises(dp_compile.UnsupportedModuleError, match="torch's own DDP reduces the gradients"):
        dp_compile.explain(ours)


@pytest.mark.usefixtures("fake_group")
def test_without_hooks_options_that_torch_does_not_have_are_refused() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16)
    config = dp_compile.ReplicateConfig(ddp_python_hook=False, mp_policy=policy, check_nan=True)
    for make in (dp_compile.replicate, DistributedDataParallel):
        with pytest.raises(dp_compile.ConfigError, match="does not have mp_policy and check_nan"):
            make(build(), config=config)
    with pytest.raises(dp_compile.ConfigError, match="does not have bucket_policy"):
        dp_compile.replicate(build(), ddp_python_hook=False, bucket_policy={nn.Linear})


@pytest.mark.usefixtures("fake_group")
def test_refuses() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dim": 1}, "dim must be 0, .*, got 1"),
        ({"init_sync": False}, "init_sync must be True: .*, got False"),
        ({"device_ids": [0, 1]}, "device_ids must hold one device"),
        ({"device_ids": [0]}, "0.weight is on cpu, device_ids says cuda:0"),
        ({"bucket_cap_mb": -3}, "bucket_cap_mb must be > 0 .*, got -3"),
    ]
    for options, message in refused:
        with pytest.raises(dp_compile.ConfigError, match=message):
            DistributedDataParallel(build(), **options)


# --- in the place of torch's class ------------------------------------------------------------------------------

AOT = dp_compile.ReplicateConfig(backend="aot_eager")


@pytest.mark.usefixtures("fake_group")
class TestInTorchsPlace:
    def test_counts_as_torch_s(self) -> None:
        assert isinstance(DistributedDataParallel(build()), TorchDDP)
        assert not isinstance(build(), TorchDDP)
        assert isinstance(torch.compile(DistributedDataParallel(build()), backend="aot_eager")._orig_mod, TorchDDP)

    def test_attributes_that_frameworks_read(self) -> None:
        model, twin = build(), build()
        for kind, each in ((DistributedDataParallel, model), (TorchDDP, twin)):
            kind._set_params_and_buffers_to_ignore_for_model(each, ["3.bias", "1.running_mean"])
        ours, theirs = DistributedDataParallel(model), TorchDDP(twin)
        for name in ("process_group", "device_ids", "output_device", "dim", "device", "device_type"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("static_graph", "find_unused_parameters", "broadcast_buffers", "require_backward_grad_sync"):
            assert getattr(ours, name) is getattr(theirs, name), name
        with ours.no_sync():
            assert not ours.require_backward_grad_sync
        ours.require_backward_grad_sync = False
        assert not replica_of(ours).state.sync
        ours.reducer._rebuild_buckets()
        ours.reducer._delay_all_reduce()
        ours.reducer.prepare_for_backward([])
        missing = {name for name in dir(TorchDDP) if name[0] != "_"} - {*dir(DistributedDataParallel), *dir(ours)}
        # The last three end a backward in parts, since torch 2.15.
        in_parts = {"finalize_backward", "require_manual_backward_finalization", "should_finalize_after_backward"}
        gone = {"gather", "scatter", "to_kwargs", "will_sync_module_buffers"}
        assert missing - in_parts - gone == set()
        mesh = init_device_mesh("cpu", (2,))
        assert DistributedDataParallel(build(), device_mesh=mesh).device_mesh is mesh

    def test_again_once_the_wrapper_is_gone(self) -> None:
        model = build()
        DistributedDataParallel(model)
        with pytest.raises(
            dp_compile.UnsupportedModuleError, match=r"replicated already. Call dp_compile.unreplicate\(\)"
        ):
            DistributedDataParallel(model)
        second = DistributedDataParallel(dp_compile.unreplicate(model), bucket_cap_mb=2)
        assert replica_of(second).config.bucket_cap_mb == 2
        assert len(model._forward_pre_hooks) == 1


def copied(ours: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(ours)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_evaluate_and_do_not_train(how: str) -> None:
    """torch's would reduce: one that is trained without reducing must not pass silently."""
    torch._dynamo.reset()
    ours = DistributedDataParallel(build(), config=AOT)
    ours.compile(backend="aot_eager")  # a copy that kept that would run, and train, the original
    twin = copied(ours, how)
    assert type(twin) is DistributedDataParallel
    assert type(twin.module) is nn.Sequential
    with torch.no_grad():
        assert torch.equal(twin.eval()(torch.ones(2, 4)), ours.eval()(torch.ones(2, 4)))
    for call in (twin, torch.compile(twin, backend="aot_eager")):
        with pytest.raises(dp_compile.UnsupportedModuleError, match="reduces no gradients"):
            call(torch.ones(2, 4))
    DistributedDataParallel(twin.module)(torch.ones(2, 4)).sum().backward()


@on_ranks("ranks2")
def test_checkpoints_of_torch_ddp_and_of_the_wrapper() -> None:
    """Both ways, by `state_dict` and by torch.distributed.checkpoint, which takes the prefix off."""
    for wrap, other_wrap in ((DistributedDataParallel, TorchDDP), (TorchDDP, DistributedDataParallel)):
        saved = wrap(build())
        with torch.no_grad():
            saved.module[0].weight.fill_(3.0)
        loaded = other_wrap(build())
        loaded.load_state_dict(saved.state_dict())
        assert bool((loaded.module[0].weight == 3).all())
        state = get_model_state_dict(saved)
        assert list(state) == list(build().state_dict())
        assert list(saved.state_dict()) == list(loaded.state_dict())
        loaded = other_wrap(build())
        assert not set_model_state_dict(loaded, state).missing_keys
        assert bool((loaded.module[0].weight == 3).all())


@on_ranks("ranks2")
def test_torch_ddp_around_a_replicated_module() -> None:
    torch._dynamo.reset()
    model = dp_compile.replicate(build(), config=AOT)
    around, text = TorchDDP(model), "^Sequential is wrapped by torch's DistributedDataParallel and replicated by dp_c"
    inside = TorchDDP(torch.compile(model, backend="aot_eager"))
    for call in (around, torch.compile(around, backend="aot_eager"), inside):
        with pytest.raises(dp_compile.UnsupportedModuleError, match=text):
            call(torch.ones(2, 4)).sum().backward()


@on_ranks("ranks2")
def test_torch_ddp_beside_a_replicated_part() -> None:
    """torch's DDP around a module whose other part we reduce: no gradient is reduced twice, nothing to refuse."""
    model = build()
    dp_compile.replicate(model[3], config=AOT)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["3.weight", "3.bias"])
    call = TorchDDP(model)
    call(torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
    for name, parameter in model.named_parameters():
        grads = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, parameter.grad)
        assert torch.equal(grads[0], grads[1]), name


# --- torch's meaning of torch's words ----------------------------------------------------------------------------


class OwnBuffers(nn.Module):
    """A buffer of each rank, perhaps of another size, and a parameter that starts differently."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mine", torch.full((size,), float(dist.get_rank())))
        self.register_buffer("wide", torch.full((1, 1), float(dist.get_rank())).expand(2, 3))
        self.register_buffer("small", torch.full((3,), dist.get_rank(), dtype=torch.int32).to(torch.uint16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.mine.mean() + self.wide.sum()


OPTIONS = {
    dp_compile.replicate: {"broadcast_buffers": False},
    DistributedDataParallel: {"forward_sync_buffers": False},
}


@pytest.mark.parametrize("wrap", OPTIONS)
@on_ranks("ranks2")
def test_buffers_of_each_rank(wrap: Any) -> None:
    """`broadcast_buffers=False` leaves them alone from the start on, `forward_sync_buffers=False` from then on."""
    torch._dynamo.reset()
    rank, keeps = dist.get_rank(), wrap is dp_compile.replicate
    inner = OwnBuffers(2 + rank if keeps else 2)
    model = wrap(inner, config=AOT, **OPTIONS[wrap])
    assert float(inner.mine[0]) == float(inner.wide[0, 0]) == float(inner.small[0]) == (rank if keeps else 0)
    call = torch.compile(model, backend="aot_eager")
    for step in range(2):
        call(torch.ones(2, 4)).square().mean().backward()
        with torch.no_grad():
            inner.mine.add_(rank)
        assert float(inner.mine[0]) == (rank if keeps else 0) + (step + 1) * rank
    for each in (inner.layer.weight, inner.layer.weight.grad):
        first = each.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, each)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_a_buffer_that_cannot_be_copied() -> None:
    for sparse in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()):
        model = build()
        model.register_buffer("adjacency", sparse)
        for wrap in (dp_compile.replicate, DistributedDataParallel):
            with pytest.raises(
                dp_compile.UnsupportedModuleError, match=r"adjacency is torch.sparse.*broadcast_buffers=False"
            ):
                wrap(model)
        DistributedDataParallel(model, broadcast_buffers=False)
