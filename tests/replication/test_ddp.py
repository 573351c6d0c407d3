"""The wrapper class against torch's, on two ranks, also with uneven inputs inside `join()`; and what it refuses."""

import copy
import dataclasses
import inspect
import math
import os
import pickle
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import same_on_all_ranks
from reference_hooks import as_torch_s
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dp_compile
from dp_compile import DistributedDataParallel
from dp_compile.replication.join import joinable
from dp_compile.replication.module import replica_of

pytestmark = pytest.mark.usefixtures("fake_group")
unsupported = partial(pytest.raises, dp_compile.UnsupportedModuleError)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("by_wrapper", [False, True])
@on_ranks("ranks2")
def test_without_hooks_torch_reduces(by_wrapper):
    options = {"bucket_cap_mb": math.inf, "find_unused_parameters": True}
    if by_wrapper:
        with mock.patch.dict(os.environ, DP_COMPILE_DDP_PYTHON_HOOK="0"):
            ours = DistributedDataParallel(build(), **options)
        theirs = TorchDDP(build(), find_unused_parameters=True)
        assert type(ours) is TorchDDP
    else:
        ours = dp_compile.replicate(build(), ddp_python_hook=False, **options)
        theirs = torch_replicate(build(), find_unused_parameters=True)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(3):
        for model in (ours, theirs):
            with dp_compile.no_sync(model) if step else nullcontext():
                with dp_compile.no_sync(model):
                    model.zero_grad()
                model(x).square().mean().backward()
            model(x + step).square().mean().backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
    dp_compile.warmup(ours, [x], lambda x: ours(x).square().mean())
    assert str(dp_compile.report(ours)).endswith("(ddp_python_hook=False), 2 ranks; it does not count its backwards")
    with unsupported(match="torch's own DDP reduces the gradients .* DP_COMPILE_DDP_PYTHON_HOOK=0 .* needs"):
        dp_compile.explain(ours)


def test_without_hooks_the_report_has_the_ranks_of_the_group():
    group, model = dist.new_group([0]), build()
    dp_compile.replicate(model, ddp_python_hook=False, process_group=group)
    for _ in range(2):  # torch makes its DDP in the first forward
        assert "1 rank; " in str(dp_compile.report(model))
        model(torch.randn(6, 4))
    with mock.patch.dict(os.environ, DP_COMPILE_DDP_PYTHON_HOOK="0"):
        assert "1 rank; " in str(dp_compile.report(DistributedDataParallel(build(), process_group=group)))


def test_options_that_are_refused():
    policy, replicate = MixedPrecisionPolicy(torch.bfloat16), dp_compile.replicate
    config = dp_compile.ReplicateConfig(ddp_python_hook=False, mp_policy=policy, check_nan=True)
    by_policy = {"ddp_python_hook": False, "bucket_policy": {nn.Linear}}
    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (DistributedDataParallel, TorchDDP))
    positional = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)]
    for make, options, message in (
        *((make, {"config": config}, "have mp_policy and check_nan") for make in (replicate, DistributedDataParallel)),
        (replicate, by_policy, "does not have bucket_policy"),
        (DistributedDataParallel, {"dim": 1}, "dim must be 0, .*, got 1"),
        (DistributedDataParallel, {"init_sync": False}, "init_sync must be True: .*, got False"),
        (DistributedDataParallel, {"device_ids": [0, 1]}, "device_ids and output_device must be one device"),
        (DistributedDataParallel, {"device_ids": [0]}, "0.weight is on cpu, device_ids or output_device is cuda:0"),
        (DistributedDataParallel, {"bucket_cap_mb": -3}, "bucket_cap_mb must be > 0 .*, got -3"),
        *((DistributedDataParallel, {name: None}, f"no argument {name}: ") for name in theirs if name not in ours),
        (DistributedDataParallel, {"mixed_precision": None}, "mixed_precision: pass mp_policy"),
        (replicate, {"backend": "aot_eager"}, r"pass config=dp_compile.ReplicateConfig\(backend=...\)"),
        (replicate, {"bucket_size_mb": 5}, r"^replicate\(\) has no argument .*: did you mean bucket_cap_mb"),
        (replicate, {"typo": 5}, "its arguments are broadcast_buffers, .*, static_graph"),
    ):
        with pytest.raises(dp_compile.ConfigError, match=message):
            make(build(), **options)


AOT = dp_compile.ReplicateConfig(backend="aot_eager")


class TestInTorchsPlace:
    def test_attributes_that_frameworks_read(self):
        model, twin = build(), build()
        for kind, each in ((DistributedDataParallel, model), (TorchDDP, twin)):
            kind._set_params_and_buffers_to_ignore_for_model(each, ["3.bias", "1.running_mean"])
        ours, theirs = DistributedDataParallel(model), TorchDDP(twin)
        assert isinstance(ours, TorchDDP)
        assert not isinstance(model, TorchDDP)
        assert isinstance(torch.compile(ours, backend="aot_eager")._orig_mod, TorchDDP)
        for name in ("process_group", "device_ids", "output_device", "dim", "device", "device_type"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("static_graph", "find_unused_parameters", "broadcast_buffers", "require_backward_grad_sync"):
            assert getattr(ours, name) is getattr(theirs, name), name
        with ours.no_sync():
            assert not ours.require_backward_grad_sync
        ours.require_backward_grad_sync = False
        assert not replica_of(ours).state.sync
        for call in ("_rebuild_buckets", "_delay_all_reduce", "prepare_for_backward"):
            getattr(ours.reducer, call)([])
        missing = {name for name in dir(TorchDDP) if name[0] != "_"} - {*dir(DistributedDataParallel), *dir(ours)}
        # The last three end a backward in parts, since torch 2.15.
        in_parts = {"finalize_backward", "require_manual_backward_finalization", "should_finalize_after_backward"}
        gone = {"gather", "scatter", "to_kwargs", "will_sync_module_buffers"}
        assert missing - in_parts - gone == set()
        mesh = init_device_mesh("cpu", (2,))
        assert DistributedDataParallel(build(), device_mesh=mesh).device_mesh is mesh

    def test_again_once_the_wrapper_is_gone(self):
        model = build()
        DistributedDataParallel(model)
        with unsupported(match=r"replicated already. Remove this call"):
            DistributedDataParallel(model)
        second = DistributedDataParallel(dp_compile.unreplicate(model), bucket_cap_mb=2)
        assert replica_of(second).config.bucket_cap_mb == 2
        assert len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ours: pickle.loads(pickle.dumps(ours))])
def test_copies_evaluate_and_do_not_train(copied):
    """torch's would reduce: one that is trained without reducing must not pass silently."""
    ours = DistributedDataParallel(build(), config=AOT)
    ours.compile(backend="aot_eager")  # a copy that kept that would run, and train, the original
    twin = copied(ours)
    assert type(twin) is DistributedDataParallel
    assert type(twin.module) is nn.Sequential
    with torch.no_grad():
        assert torch.equal(twin.eval()(torch.ones(2, 4)), ours.eval()(torch.ones(2, 4)))
    for call in (twin, torch.compile(twin, backend="aot_eager")):
        with unsupported(match="reduces no gradients"):
            call(torch.ones(2, 4))
    DistributedDataParallel(twin.module)(torch.ones(2, 4)).sum().backward()


@on_ranks("ranks2")
def test_checkpoints_of_torch_ddp_and_of_the_wrapper():
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
def test_torch_ddp_around_a_replicated_module():
    model = dp_compile.replicate(build(), config=AOT)
    around, text = TorchDDP(model), "^Sequential is wrapped by torch's DistributedDataParallel and replicated by dp_c"
    inside = TorchDDP(torch.compile(model, backend="aot_eager"))
    for call in (around, torch.compile(around, backend="aot_eager"), inside):
        with unsupported(match=text):
            call(torch.ones(2, 4)).sum().backward()
    # torch's DDP around a module whose other part we reduce: no gradient is reduced twice, nothing to refuse.
    model = build()
    dp_compile.replicate(model[3], config=AOT)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["3.weight", "3.bias"])
    call = TorchDDP(model)
    call(torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
    assert_from_first_rank(parameter.grad for parameter in model.parameters())


def assert_from_first_rank(tensors):
    for each in tensors:
        first = each.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, each)


class OwnBuffers(nn.Module):
    """A buffer of each rank, perhaps of another size, and a parameter that starts differently."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mine", torch.full((size,), float(dist.get_rank())))
        self.register_buffer("wide", torch.full((1, 1), float(dist.get_rank())).expand(2, 3))
        self.register_buffer("small", torch.full((3,), dist.get_rank(), dtype=torch.int32).to(torch.uint16))

    def forward(self, x):
        return self.layer(x) + self.mine.mean() + self.wide.sum()


OPTIONS = {dp_compile.replicate: {"broadcast_buffers": False}, DistributedDataParallel: {"forward_sync_buffers": False}}


@pytest.mark.parametrize("wrap", OPTIONS)
@on_ranks("ranks2")
def test_buffers_of_each_rank(wrap):
    """`broadcast_buffers=False` leaves them alone from the start on, `forward_sync_buffers=False` from then on."""
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
    assert_from_first_rank([inner.layer.weight, inner.layer.weight.grad])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_a_buffer_that_cannot_be_copied():
    for sparse in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()):
        model = build()
        model.register_buffer("adjacency", sparse)
        for wrap in (dp_compile.replicate, DistributedDataParallel):
            with unsupported(match=r"adjacency is torch.sparse.*broadcast_buffers=False"):
                wrap(model)
        DistributedDataParallel(model, broadcast_buffers=False)


CONFIG = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0005)


class Net(nn.Module):
    """With running statistics, and a branch that not every batch takes."""

    def __init__(self, branches=False):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.side = nn.Linear(6, 12) if branches else None
        self.double()  # differences are differences, not rounding that a small batch's statistics blow up

    def forward(self, x, side=False):
        hidden = self.first(x)
        if side and self.side is not None:
            hidden = hidden + self.side(x)
        return self.last(self.norm(hidden).relu())


def batches(count, salt=0):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + salt)
    for _ in range(count):
        yield torch.randn(5, 6, generator=generator, dtype=torch.float64)


def twins():
    """Our wrapper, what to call, and torch's DDP, all from the same start."""
    torch.manual_seed(0)
    theirs, ours = TorchDDP(model := Net()), DistributedDataParallel(copy.deepcopy(model), config=CONFIG)
    return ours, torch.compile(ours, backend="aot_eager"), theirs


def train(model, run, count, *, micro_steps=1, **options):
    """Train inside `join`; the number of steps, and what was raised."""
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), 0
    try:
        with model.join(**options):
            for number, x in enumerate(batches(count * micro_steps)):
                local = (number + 1) % micro_steps != 0
                with model.no_sync() if local else nullcontext():
                    run(x).square().mean().backward()
                if not local:
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
    except RuntimeError as error:
        return steps, str(error)
    return steps, ""


def same_state(ours, theirs):
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, n=name: f"{n}: {text}")


def run_uneven(counts, settings, hook=False):
    """What is raised, if ranks stop with the first one. `hook`: both sides have a comm hook that remembers."""
    ours, run, theirs = twins()
    for each in (ours, theirs) if hook else ():
        each.register_comm_hook({}, as_torch_s)
    count = counts[dist.get_rank()]
    steps = train(ours, run, count, **settings)
    assert steps == train(theirs, theirs, count, **settings)
    if steps[1]:
        assert steps[0] == min(counts)
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))
        return steps[1]
    assert steps[0] == count
    same_state(ours, theirs)
    same_on_all_ranks(ours)
    # And what follows is ordinary training again.
    for each, call in ((ours, run), (theirs, theirs)):
        each.zero_grad()
        call(next(batches(1, salt=7))).square().mean().backward()
    return ""


@pytest.mark.parametrize(
    ("counts", "divide", "micro_steps", "hook"),
    [((2, 5), True, 1, False), ((0, 3), False, 2, False), ((2, 5), False, 1, True)],
)
def test_uneven_inputs(ranks2, counts, divide, micro_steps, hook):
    ranks2.run(run_uneven, counts, {"divide_by_initial_world_size": divide, "micro_steps": micro_steps}, hook)


def test_throw_on_early_termination(ranks2):
    first, second = ranks2.run(run_uneven, (2, 4), {"throw_on_early_termination": True})
    assert "Rank 0 exhausted all inputs" in first
    assert "Detected at least one rank that exhausted inputs" in second


@on_ranks("ranks2")
def test_beside_a_joinable_of_torch():
    """With a joinable of torch: an optimizer whose ranks each hold a part of the state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns of something torch deprecates

    ours, run, theirs = twins()
    for model, call in ((ours, run), (theirs, theirs)):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with Join([model, optimizer]):
            for x in batches((2, 4)[dist.get_rank()]):
                call(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    same_state(ours, theirs)


@on_ranks("ranks2")
def test_a_plan_is_settled_while_a_rank_has_no_inputs():
    torch.manual_seed(0)
    model = dp_compile.replicate(Net(), config=dp_compile.ReplicateConfig(backend="aot_eager"))
    call = torch.compile(model, backend="aot_eager")
    with dp_compile.join(model):
        for x in batches((6, 0)[dist.get_rank()]):
            model.zero_grad()
            call(x).square().mean().backward()
    model.zero_grad()
    call(next(batches(1))).square().mean().backward()
    report = dp_compile.report(model)
    assert sum(report.backwards.values()) == (7, 1)[dist.get_rank()]
    plans = [None, None]
    dist.all_gather_object(plans, report.plan)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("kind", ["unused", "nan"])
@on_ranks("ranks2")
def test_errors_reach_a_rank_without_inputs(kind):
    """Rank 1 goes on alone, and leaves parameters out, or has a loss that is not a number."""
    model = dp_compile.replicate(Net(branches=True), config=dataclasses.replace(CONFIG, check_nan=kind == "nan"))
    call = torch.compile(model, backend="aot_eager")

    def train_on():
        with dp_compile.join(model):
            for number, x in enumerate(batches((1, 3)[dist.get_rank()])):
                factor = float("nan") if kind == "nan" and number else 1.0
                (factor * call(x, kind == "nan" or number == 0).square().mean()).backward()

    text = r"not finite: first\.weight \(nan\).*The loss was not finite on rank 1"
    if kind == "unused":
        text = f"on {'this rank' if dist.get_rank() else 'rank 1'}: side.weight, side.bias"
    with pytest.raises(dp_compile.ReductionError, match=text):
        train_on()


def test_join_refuses():
    inside, outside = (dp_compile.replicate(nn.Linear(2, 2), config=CONFIG) for _ in range(2))
    call = torch.compile(lambda x: outside(inside(x)), backend="aot_eager")
    with dp_compile.join(inside, enable=False):
        call(torch.ones(1, 2)).sum().backward()
    reaches = pytest.raises(dp_compile.ConfigError, match="reaches the replicated modules of weight, weight")
    with dp_compile.join(inside), reaches:
        call(torch.ones(1, 2)).sum().backward()
    call(torch.ones(1, 2)).sum().backward()
    second = pytest.raises(dp_compile.ConfigError, match="Join must list it first")
    with Join([joinable(outside), joinable(inside)]), second, dp_compile.compiled_backward():
        inside(torch.ones(1, 2)).sum().backward()
    whole = dp_compile.replicate(nn.Sequential(dp_compile.replicate(nn.Linear(2, 2)), nn.Linear(2, 2)))
    with pytest.raises(dp_compile.ConfigError, match="separately replicated parts"):
        dp_compile.join(whole).__enter__()


@on_ranks("ranks2")
def test_a_divide_factor_is_what_sums_are_divided_by():
    config = dp_compile.ReplicateConfig(backend="aot_eager", gradient_divide_factor=1.0)
    model = dp_compile.replicate(nn.Linear(1, 1, bias=False), config=config)
    run = torch.compile(model, backend="aot_eager")
    with dp_compile.join(model, divide_by_initial_world_size=False):
        for expected in (2.0, 1.0) if dist.get_rank() == 0 else (2.0,):
            model.zero_grad()
            run(torch.ones(1, 1)).sum().backward()
            assert float(model.weight.grad) == expected
