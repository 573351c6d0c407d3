"""What `replicate()` and its options accept, what they refuse and how; across real ranks where ranks matter."""

import copy
import dataclasses
import gc
import math
import re
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, same_on_all_ranks
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

import dp_compile
from dp_compile.config import HOOK_VARIABLE, MONITOR_VARIABLE, ReplicateConfig, monitor_after_s
from dp_compile.errors import ConfigError
from dp_compile.replication.module import replica_of

unsupported = partial(pytest.raises, dp_compile.UnsupportedModuleError)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU())
        self.head = nn.Linear(width, 2)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.usefixtures("fake_group")
class TestLocal:
    def test_one_hook_for_each_trainable_parameter(self):
        model = Net()
        model.head.bias.requires_grad_(False)
        dp_compile.replicate(model)
        hooked = [name for name, parameter in model.named_parameters() if parameter._post_accumulate_grad_hooks]
        assert hooked == ["body.0.weight", "body.0.bias", "head.weight"]

    def test_ignored_with_all_descendants_and_wherever_else_they_appear(self):
        model = Net()
        model.more = nn.ModuleDict({"deep": nn.Sequential(nn.BatchNorm1d(3), model.head)})
        dp_compile.replicate(model, ignored_modules=[model.more], device_id=torch.device("cpu"))
        assert replica_of(model).names == ("body.0.weight", "body.0.bias")
        assert [tensor is model.steps for tensor in replica_of(model).buffers] == [True]

    def test_names_have_no_wrappers(self):
        model = Net()
        model.body[0] = checkpoint_wrapper(model.body[0])
        model.head = torch.compile(model.head, backend="aot_eager")
        assert "body.0._checkpoint_wrapped_module.weight" in dict(model.named_parameters())
        dp_compile.replicate(model, bucket_policy={nn.Linear})
        plain = dp_compile.replicate(Net(), bucket_policy={nn.Linear})
        assert replica_of(model).names == replica_of(plain).names
        assert replica_of(model).plan == replica_of(plain).plan
        model.body[0].double()
        dp_compile.unreplicate(model)
        model.body.requires_grad_(False).to("meta")
        with unsupported(match=r"body\.0\.weight is on the meta device"):
            dp_compile.replicate(model)(torch.ones(1, 4))

    def test_bad_input(self):
        narrow, undecided = Net().bfloat16(), Net().bfloat16()
        narrow.head.bias.grad_dtype, undecided.head.bias.grad_dtype = torch.float32, None
        refused = [
            (Net(), {"ignored_modules": nn.Sequential(nn.Linear(1, 1))}, r"got Sequential. Pass a list: \[module\]"),
            (Net(), {"device_id": "cuda:0"}, "device_id must be the number of a GPU or a torch.device, got 'cuda:0'"),
            (Net(), {"device_id": 0}, r"body\.0\.weight is on cpu, device_id says cuda:0"),
            (Net(), {"device_mesh": "dp"}, "device_mesh must be a DeviceMesh, got str"),
            (Net(), {"process_group": "0"}, "process_group must be a ProcessGroup, got str"),
            (Net(), {"config": {"check_nan": True}}, "config must be a ReplicateConfig, got dict"),
            (Net(), {"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "not in the given process group"),
            (Net().requires_grad_(False), {}, "Net has no parameter that requires a gradient"),
            (lambda x: x, {}, r"takes an nn\.Module, got function"),
            (narrow, {}, r"head\.bias is torch\.bfloat16 and its grad_dtype is torch\.float32"),
            (undecided, {}, r"head\.bias .* grad_dtype is None"),
        ]
        for module, options, message in refused:
            with pytest.raises((dp_compile.ConfigError, dp_compile.UnsupportedModuleError), match=message):
                dp_compile.replicate(module, **options)

    def test_what_the_module_itself_names_is_left_alone(self):
        """As torch's DDP does for torchrec and TRL."""
        model = Net()
        model._ddp_params_and_buffers_to_ignore = ["body.0.weight", "steps"]
        for wrap in (dp_compile.replicate, dp_compile.DistributedDataParallel):
            replica = replica_of(wrap(model))
            assert (replica.names, replica.buffers) == (("body.0.bias", "head.weight", "head.bias"), ())
            dp_compile.unreplicate(model)

    def test_unreplicate_of_the_wrapper(self):
        inner = Net()
        wrapped = dp_compile.DistributedDataParallel(inner)
        gone = weakref.ref(replica_of(wrapped))
        assert dp_compile.unreplicate(wrapped) is wrapped
        gc.collect()
        assert gone() is None
        assert not inner._forward_pre_hooks
        for no_sync in (wrapped.no_sync, partial(dp_compile.no_sync, inner)):
            with unsupported(match="is not replicated"), no_sync():
                pass
        assert wrapped(torch.ones(1, 4)).shape == (1, 2)
        dp_compile.replicate(inner)

    def test_replicate_twice(self):
        model = dp_compile.replicate(Net())
        with unsupported(match=r"Net is replicated already\. Remove this call"):
            dp_compile.replicate(model)
        with unsupported(match="weight is replicated already"):
            dp_compile.replicate(model.head)
        parts = Net()
        dp_compile.replicate(parts.head, bucket_cap_mb=2)
        dp_compile.replicate(parts)
        assert replica_of(parts).names == ("body.0.weight", "body.0.bias")
        assert (replica_of(parts.head).names, replica_of(parts.head).config.bucket_cap_mb) == (("weight", "bias"), 2)

    def test_managed_by_torch(self):
        model = Net()
        fully_shard(model.head, mesh=init_device_mesh("cpu", (2,)))
        dp_compile.replicate(model)
        assert replica_of(model).names == ("body.0.weight", "body.0.bias")
        with unsupported(match="Linear is managed by fully_shard already"):
            dp_compile.replicate(model.head)
        with unsupported(match=r"has no parameter .* under fully_shard"):
            dp_compile.replicate(nn.Sequential(model.head))
        model = Net()
        torch_replicate(model.head)
        with unsupported(match="submodule head is managed by torch's replicate"):
            dp_compile.replicate(model)
        dp_compile.replicate(model, ignored_modules=[model.head])

    def test_buckets_end_where_a_policy_says(self):
        def blocks():
            model = nn.Sequential(nn.Embedding(10, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in "ab"))
            model.append(nn.Linear(8, 10))
            model[3].weight = model[0].weight
            return model

        of_functions = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential})
        policies = ({nn.Sequential}, ModuleWrapPolicy({nn.Sequential}), of_functions)
        plans = [replica_of(dp_compile.replicate(blocks(), bucket_policy=policy)).plan for policy in policies]
        assert len(plans[0].buckets) == 4  # head, two blocks, embedding
        assert all(plan == plans[0] for plan in plans)
        custom = CustomPolicy(lambda module: {"bucket_cap_mb": 4} if isinstance(module, nn.Embedding) else False)
        for policy, text in ((custom, "returned options"), ({int}, "must be a set of module classes or a po")):
            with pytest.raises(dp_compile.ConfigError, match=text):
                dp_compile.replicate(blocks(), bucket_policy=policy)

    def test_device_mesh(self):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
        with pytest.raises(dp_compile.ConfigError, match=r"one dimension, or two .*, got 3\. Take a slice"):
            dp_compile.replicate(Net(), device_mesh=init_device_mesh("cpu", (1, 2, 1)))
        with pytest.raises(dp_compile.ConfigError, match="not both"):
            dp_compile.replicate(Net(), device_mesh=mesh, process_group=dist.group.WORLD)
        model = dp_compile.replicate(Net(), device_mesh=mesh["inner"])
        assert replica_of(model).group.world_size == 2
        with mock.patch.object(dist, "is_initialized", return_value=False):
            with pytest.raises(dp_compile.ConfigError, match="init_process_group"):
                dp_compile.replicate(Net())


@on_ranks("ranks")
def test_first_rank_is_copied():
    torch.manual_seed(dist.get_rank())
    model = Net()
    model.steps.fill_(dist.get_rank() + 5)
    model.head.requires_grad_(False)
    dp_compile.replicate(model)
    assert model.steps.item() == 5
    same_on_all_ranks(model)


def fails(**_):
    raise ZeroDivisionError("a bug")


POLICIES = [MixedPrecisionPolicy(reduce_dtype=each) for each in (torch.float16, torch.bfloat16)]
# What rank 1 does otherwise, by options; and what the error names.
DIFFERENCES = {
    "shape": ({}, "body.0.weight"),
    "parameter order": ({}, 'trainable parameters[0] is "b: float32[2] strides [1]" there'),
    "cap": ({"bucket_cap_mb": 3}, "bucket_cap_mb is 3"),
    "buckets": ({"bucket_policy": {nn.Linear}}, "plan is "),
    "policy": ({"mp_policy": POLICIES[1]}, "mp_policy"),
    "version": ({}, 'dp_compile is "0.0.7" there'),
    "environment": ({}, "DP_COMPILE_DDP_PYTHON_HOOK is false there, true on rank 0"),
}
FAILURES = {
    "frozen": ({}, "UnsupportedModuleError: Net has no parameter that requires a gradient"),
    "bug": ({"bucket_policy": fails}, "ZeroDivisionError: a bug"),
}


def disagree(kinds):
    """Errors, and how long each took; later calls of all ranks still match."""
    second, found = dist.get_rank() == 1, {}
    for how, (options, _) in kinds.items():
        model = Net(width=6 if second and how == "shape" else 4)
        if how == "parameter order":
            model = nn.ParameterDict([(name, torch.ones(2)) for name in ("ba" if second else "ab")])
        model.requires_grad_(not (second and how == "frozen"))
        own = options if second else {"mp_policy": POLICIES[0]} if how == "policy" else {}
        start = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if second and how == "version":
                patch.setitem(dp_compile.replicate.__globals__, "version", lambda name: "0.0.7")
            if second and how == "environment":
                patch.setenv("DP_COMPILE_DDP_PYTHON_HOOK", "0")
            try:
                dp_compile.replicate(model, **own)
            except (dp_compile.DPCompileError, ZeroDivisionError) as error:
                found[how] = f"{type(error).__name__}: {error}", time.monotonic() - start
        dp_compile.replicate(Net())
    return found


def test_ranks_with_other_models(ranks):
    for found in ranks.run(disagree, DIFFERENCES):
        for how, (_, difference) in DIFFERENCES.items():
            text, seconds = found[how]
            assert text.startswith("DesyncError"), how
            assert "rank 1 differs from rank 0" in text
            assert difference in text
            assert "address" not in text
            assert seconds < 30


def test_error_on_one_rank_reaches_the_other(ranks):
    first, second, *_ = ranks.run(disagree, FAILURES)
    for how, (_, error) in FAILURES.items():
        assert second[how][0].startswith(error)
        assert f"rank 1 failed: {error.removeprefix('UnsupportedModuleError: ')}" in first[how][0]


@pytest.mark.parametrize("call", ["replicate", "calibrate"])
@on_ranks("own_ranks")
def test_a_call_that_another_rank_does_not_make(call):
    group = dist.new_group(timeout=timedelta(seconds=2))
    others = [str(rank) for rank in range(1, dist.get_world_size())]
    missing = "rank 1 has" if len(others) == 1 else f"ranks {', '.join(others)} have"
    function = partial(dp_compile.replicate, Net()) if call == "replicate" else dp_compile.calibrate
    text = re.escape(f"{call}(): {missing} not called {call}() after 2 s")
    with pytest.raises(dp_compile.DesyncError, match=text) if dist.get_rank() == 0 else nullcontext():
        function(process_group=group) if dist.get_rank() == 0 else None


@on_ranks("ranks")
def test_a_step_after_the_end_of_the_group():
    group = dist.new_group(list(range(dist.get_world_size())), group_desc="short-lived")
    model = dp_compile.replicate(Net(), process_group=group, config=AOT)
    call = torch.compile(model, backend="aot_eager")
    call(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group(group)
    with torch.no_grad():
        call(torch.ones(1, 4))
    text = r"the gradients of body\.0\.weight and others was destroyed"
    with pytest.raises(dp_compile.CommunicationError, match=text):
        call(torch.ones(1, 4)).sum().backward()


@on_ranks("ranks2")
def test_beside_fully_shard():
    """Part of a model is sharded by torch, the rest replicated."""
    torch.manual_seed(0)
    model = Net()
    alone = copy.deepcopy(model)
    fully_shard(model.body)
    dp_compile.replicate(model, config=AOT)
    run = torch.compile(model, backend="aot_eager")
    batches = [torch.full((2, 4), 1.0 + rank) for rank in range(2)]
    run(batches[dist.get_rank()]).square().mean().backward()
    (sum(alone(batch).square().mean() for batch in batches) / 2).backward()
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        assert float((grad - reference.grad).abs().max()) < 1e-6
    assert dp_compile.report(model).backwards == {"eager hooks": 1}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("tied later", "No longer in the module, because they were tied or replaced after replicate(): head.weight."),
        ("with fully_shard", "reaches a module that fully_shard manages"),
    ],
)
@on_ranks("ranks")
def test_a_backward_that_cannot_be_reduced(how, message):
    model = Net()
    model.head = nn.Linear(4, 4)
    if how == "tied later":
        dp_compile.replicate(model, config=AOT)
        model.head.weight = model.body[0].weight
    else:
        fully_shard(model.body)
        dp_compile.replicate(model.head, config=AOT)
    with pytest.raises(dp_compile.ReductionError, match=re.escape(message)):
        torch.compile(model, backend="aot_eager")(torch.ones(1, 4)).sum().backward()


def test_what_is_not_allowed():
    wrong = [
        *(({"bucket_cap_mb": value}, f"bucket_cap_mb must be .*got {value!r}") for value in (0, math.nan, "25", True)),
        *(({each.name: 7}, f"{each.name} must be .* got 7") for each in dataclasses.fields(ReplicateConfig)[5:]),
        ({"backend": "eager"}, "backend must be one of inductor, aot_eager, got 'eager'"),
        ({"cost": 1.0}, "cost must be an AllReduceCost"),
        ({"mp_policy": "bfloat16"}, "mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ReplicateConfig(**options)
    assert ReplicateConfig(bucket_cap_mb=math.inf).bucket_cap_mb == math.inf


def test_variables_of_the_environment(monkeypatch):
    for text, meaning in (("", 30.0), ("0.5", 0.5), ("0", None), (" Off ", None)):
        monkeypatch.setenv(MONITOR_VARIABLE, text)
        assert monitor_after_s() == meaning
    monkeypatch.setenv(MONITOR_VARIABLE, "soon")
    with pytest.raises(ConfigError, match=f"{MONITOR_VARIABLE} must be a number of seconds >= 0, or off, got 'soon'"):
        monitor_after_s()
    cases = [(None, "", True), (None, " Yes ", True), (None, "OFF", False), (True, "0", True), (False, "1", False)]
    for option, text, expected in cases:
        monkeypatch.setenv(HOOK_VARIABLE, text)
        assert ReplicateConfig(ddp_python_hook=option).uses_python_hook() is expected
    monkeypatch.setenv(HOOK_VARIABLE, "maybe")
    with pytest.raises(ConfigError, match=r"DP_COMPILE_DDP_PYTHON_HOOK must be one of 0, 1, false.*got"):
        ReplicateConfig().uses_python_hook()
