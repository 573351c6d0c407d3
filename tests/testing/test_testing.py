"""The tools for users' suites: what they see, what they let through, and what they stop and say."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from planted import WaitsAtOnce
from torch import fx, nn

import dp_compile
from dp_compile import testing
from dp_compile.errors import ModuleError
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.flags import MORE
from dp_compile.testing.golden import ACCEPT_VARIABLE, INLINE_VARIABLE, assert_text
from dp_compile.testing.schedule import Compute, Launch, Wait, schedule

WIDTH = 64


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def make_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


ONE_BUCKET_A_LAYER = dp_compile.ReplicateConfig(bucket_cap_mb=0.0158, first_bucket_cap_mb=0.0158)
TRAINING = testing.Training(make_model=Layers, make_batch=make_batch, loss_fn=loss_fn, config=ONE_BUCKET_A_LAYER)
look_at = partial(testing.backward_of, link="nvlink4", ranks=2, device="cpu-core")


@pytest.fixture(scope="module")
def seen(fake_group: dist.ProcessGroup) -> testing.SeenBackward:
    return look_at(TRAINING)


def complaint(check: Any, *args: Any, **kwargs: Any) -> str:
    """What an assertion says when it fails."""
    with pytest.raises(AssertionError) as failed:
        check(*args, **kwargs)
    return str(failed.value)


# --- what is seen -----------------------------------------------------------------------------------------------------


def test_the_texts(seen: testing.SeenBackward) -> None:
    testing.assert_plan(
        seen,
        """\
3 buckets, 6 gradients, 50,148 bytes
0: 16,640 bytes, 2 gradients, float32 sum, layers.4.bias .. layers.4.weight
1: 16,640 bytes, 2 gradients, float32 sum, layers.2.bias .. layers.2.weight
2: 16,868 bytes, 2 gradients, float32 sum, layers.0.bias .. layers.0.weight + flags
""",
    )
    testing.assert_graph(
        seen,
        """\
   ... 13 inputs
   ... 15 nodes: t 3, mul 2, new_empty_strided 2, copy 1, div 1, expand 1, other 5
   grad layers.4.weight = copy(new_empty_strided, t): float32[64, 64]
   bucket 0 = flat_bucket([grad layers.4.bias, grad layers.4.weight]): float32[4160]
>> launch 0 = all_reduce(bucket 0, sum, 0): float32[4160]
   ... 15 nodes: t 5, detach 2, mm 2, new_empty_strided 2, copy 1, sum 1, other 2
   grad layers.2.weight = copy(new_empty_strided, t): float32[64, 64]
   bucket 1 = flat_bucket([grad layers.2.bias, grad layers.2.weight]): float32[4160]
>> launch 1 = all_reduce(bucket 1, sum, 0): float32[4160]
   ... 15 nodes: t 5, detach 2, mm 2, new_empty_strided 2, copy 1, sum 1, other 2
   grad layers.0.weight = copy(new_empty_strided, t): float32[64, 64]
   bucket 2 = flat_bucket([grad layers.0.bias, grad layers.0.weight, flags]): float32[4217]
>> launch 2 = all_reduce(bucket 2, sum, 0): float32[4217]
<< wait 0 = wait_tensor(launch 0): float32[4160]
<< wait 1 = wait_tensor(launch 1): float32[4160]
<< wait 2 = wait_tensor(launch 2): float32[4217]
   ... 7 nodes: as_strided 7
   return 7 tensors: reduced flags, reduced layers.2.weight, .. 4 more .., reduced layers.0.weight
""",
    )


def test_the_counts(seen: testing.SeenBackward) -> None:
    testing.assert_counts(seen, collectives=3, captures=1, recompiles=0, graph_breaks=0)
    testing.assert_counts(seen, reduced_nbytes=4 * (3 * (WIDTH * WIDTH + WIDTH) + 6 + MORE))
    assert (seen.counts.kernels, seen.counts.copied_nbytes) == (None, None)


def test_all_of_it_is_told_in_short(seen: testing.SeenBackward) -> None:
    told = str(seen)
    assert told.startswith(f"{seen.plan_text}\n{seen.graph_text}\n")
    assert_expected_inline(
        told.removeprefix(f"{seen.plan_text}\n{seen.graph_text}\n"),
        """\
collectives 3, reduced_nbytes 50,148, captures 1, recompiles 0, graph_breaks 0
sent bytes: all_reduce whole float32 50,148
compute alone 0.655 ms, with communication 0.671 ms, 0.0152 ms exposed
  predicted: nvlink4, 2 ranks, cpu-core at 40% of its peak
simulated peak memory: 705.2 KiB, as torch's DDP 754.2 KiB""",
    )


def test_the_same_again_gives_the_same(seen: testing.SeenBackward) -> None:
    assert look_at(TRAINING) == seen


def test_a_model_that_needs_no_memory(seen: testing.SeenBackward) -> None:
    on_meta = look_at(TRAINING, on="meta")
    assert (on_meta.plan_text, on_meta.graph_text, on_meta.counts) == (seen.plan_text, seen.graph_text, seen.counts)
    assert on_meta.schedule == seen.schedule


def test_nothing_of_the_training_is_left_behind(seen: testing.SeenBackward) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    owners = sys.modules["dp_compile.engine.owners"].owners
    before = set(owners)  # of other tests of this process, which Python has not collected yet
    look_at(TRAINING)
    assert torch.equal(torch.rand(1), expected)
    assert set(owners) <= before


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 512), nn.Linear(512, 512), nn.Linear(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@pytest.mark.usefixtures("fake_group")
def test_without_a_cost_the_plan_is_for_the_stated_link() -> None:
    default = replace(TRAINING, make_model=Wide, config=dp_compile.ReplicateConfig())
    given = replace(TRAINING, config=dp_compile.ReplicateConfig(cost=AllReduceCost(0.0, 1e-9)))
    assert len(look_at(default, on="meta", link="nvlink4").plan.buckets) == 1
    assert len(look_at(default, on="meta", link="loopback").plan.buckets) == 2
    assert len(look_at(given, on="meta", link="nvlink4").plan.buckets) > 2


@pytest.mark.usefixtures("fake_group")
def test_torchs_own_plan_takes_two_backwards() -> None:
    found = look_at(replace(TRAINING, config=dp_compile.ReplicateConfig(strategy="ddp")))
    testing.assert_counts(found, collectives=2, captures=1, recompiles=0)


@pytest.mark.usefixtures("fake_group")
def test_units_of_a_policy_are_buckets() -> None:
    per_layer = replace(TRAINING, config=dp_compile.ReplicateConfig(), bucket_policy=(nn.Linear,))
    testing.assert_counts(look_at(per_layer), collectives=3)


class NotCompiled(Layers):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Hooked(nn.Module):
    """With a hook that only plain Python can run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.register_full_backward_hook(print_nothing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def print_nothing(module: nn.Module, *gradients: Any) -> None:
    print(end="")


@pytest.mark.usefixtures("fake_group")
def test_a_backward_that_breaks_is_not_captured() -> None:
    with pytest.raises(ModuleError, match=r"went another way: eager hooks, .* TORCH_LOGS=dp_compile says why"):
        look_at(replace(TRAINING, make_model=Hooked))


class Unused(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Lazy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.LazyLinear(WIDTH)


@pytest.mark.usefixtures("fake_group")
def test_what_the_meta_device_cannot_know_is_an_error() -> None:
    with pytest.raises(dp_compile.ModuleError, match=r"without a gradient: unused.weight, unused.bias"):
        look_at(replace(TRAINING, make_model=Unused), on="meta")
    zeros = replace(ONE_BUCKET_A_LAYER, unused_parameters="zeros")
    testing.assert_counts(look_at(replace(TRAINING, make_model=Unused, config=zeros), on="meta"), captures=1)
    with pytest.raises(dp_compile.ModuleError, match=r"layers.0.weight is lazy"):
        look_at(replace(TRAINING, make_model=Lazy), on="meta")
    assert look_at(replace(TRAINING, make_model=Lazy)).counts == look_at(TRAINING).counts


@pytest.mark.usefixtures("fake_group")
def test_without_passes_every_gradient_is_reduced_where_it_stands() -> None:
    found = look_at(replace(TRAINING, passes=()))
    testing.assert_counts(found, collectives=7)
    assert found.memory is None
    with pytest.raises(dp_compile.ConfigError, match="no pass of this training simulates the peak memory"):
        testing.assert_peak_below(found)


# --- predicted times --------------------------------------------------------------------------------------------------

COST = AllReduceCost(1.0, 0.5)
"""A second and half a second for each byte."""


def test_a_schedule_runs_events_one_after_the_other() -> None:
    events = [Compute(2.0), Launch("a", 2), Compute(1.0), Launch("b", 2), Wait("a"), Compute(3.0), Wait("b"), Wait("b")]
    found = schedule(events, COST, "as stated")
    first, second = found.collectives
    assert (first.launch_s, first.start_s, first.finish_s, first.wait_s, first.stalled_s) == (2.0, 2.0, 4.0, 3.0, 1.0)
    assert (second.launch_s, second.start_s, second.finish_s, second.wait_s, second.stalled_s) == (3, 4, 6, 7, 0)
    assert (found.backward_s, found.end_s, found.exposed_s, found.end_if_waited_last_s) == (6.0, 7.0, 1.0, 6.0)


def test_what_nobody_waits_for_ends_too() -> None:
    assert schedule([Launch("a", 4), Compute(1.0)], COST, "").end_s == 3.0


def test_predicted_times_are_those_of_the_link_and_the_device(seen: testing.SeenBackward) -> None:
    slower = look_at(TRAINING, link="ethernet-25").schedule
    assert slower.backward_s == seen.schedule.backward_s
    assert slower.exposed_s > seen.schedule.exposed_s > 0
    faster = look_at(TRAINING, device="h100-sxm").schedule
    assert faster.backward_s < seen.schedule.backward_s
    assert "nvlink4, 2 ranks, h100-sxm at 40% of its peak" in faster.basis


# --- planted regressions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClonesGradients:
    """Each gradient is copied before it is put into its bucket."""

    name: ClassVar[str] = "clones-gradients"
    realises_plan: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        for reduction in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
            gradient = reduction.args[0]
            with graph.inserting_before(reduction):
                clone = graph.call_function(torch.ops.aten.clone.default, (gradient,))
            clone.meta["val"] = gradient.meta["val"]
            reduction.update_arg(0, clone)
        return PassResult(changed=True)


@pytest.mark.usefixtures("fake_group")
def test_a_wait_moved_early_is_stopped_and_named(seen: testing.SeenBackward) -> None:
    limit_ms = seen.schedule.exposed_s * 1.5e3
    testing.assert_exposed_below(seen, ms=limit_ms)
    planted = look_at(replace(TRAINING, passes=(*DEFAULT_PASSES, WaitsAtOnce())))
    said = complaint(testing.assert_exposed_below, planted, ms=limit_ms)
    assert "wait for launch 0" in said
    assert "waits come too early" in said
    assert "layers.4.bias .. layers.4.weight" in said
    assert "+<< wait 0 = wait_tensor(launch 0)" in complaint(testing.assert_graph, planted, seen.graph_text)
    testing.assert_plan(planted, seen.plan_text)


@pytest.mark.usefixtures("fake_group")
def test_a_bucket_too_many_is_stopped_and_named(seen: testing.SeenBackward) -> None:
    first, *rest = seen.plan.buckets
    halves = [replace(first, members=first.members[:1]), replace(first, members=first.members[1:])]
    planted = look_at(
        replace(TRAINING, config=dp_compile.ReplicateConfig(), plan=replace(seen.plan, buckets=(*halves, *rest)))
    )
    said = complaint(testing.assert_counts, planted, collectives=3, recompiles=0)
    assert "1 of 2 counts differ" in said
    assert "collectives: expected 3, found 4" in said
    assert "launch 0: 256 B, 1 gradient, layers.4.bias" in said
    assert "+4 buckets" in complaint(testing.assert_plan, planted, seen.plan_text)


@pytest.mark.usefixtures("fake_group")
def test_a_copy_put_back_is_stopped_and_named(seen: testing.SeenBackward) -> None:
    planted = replace(TRAINING, passes=(ClonesGradients(), *DEFAULT_PASSES))
    assert "clone" in complaint(testing.assert_graph, look_at(planted), seen.graph_text)
    good, bad = (look_at(each, backend="inductor") for each in (TRAINING, planted))
    testing.assert_counts(good, copied_nbytes=0)
    testing.assert_untouched_in_flight(good)
    touched = replace(good, touched=("line 7: extern_kernels.mm writes buf1[0:4] while all_reduce_ is under way",))
    assert "extern_kernels.mm writes buf1[0:4]" in complaint(testing.assert_untouched_in_flight, touched)
    assert good.counts.kernels is not None
    said = complaint(testing.assert_counts, bad, copied_nbytes=0)
    assert f"copied_nbytes: expected 0, found {3 * 4 * (WIDTH * WIDTH + WIDTH):,} bytes" in said
    assert "layers.4.weight, 16.0 KiB: a clone stands before its bucket" in said


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"link": "string"}, "link must be one of nvlink4, .*, got 'string'"),
        ({"device": "abacus"}, "device must be one of .*, got 'abacus'"),
        ({"ranks": 1}, "ranks must be an integer >= 2, got 1"),
        ({"ranks": True}, "ranks must be an integer >= 2, got True"),
        ({"ranks": 8}, "a fake process group of 2 ranks is up, but ranks=8"),
        ({"efficiency": 2.0}, "efficiency must be a share of the peak"),
        ({"backend": "other"}, "backend must be one of inductor, aot_eager, got 'other'"),
        ({"on": "gpu"}, "on must be 'cpu' or 'meta', got 'gpu'"),
        ({"on": "meta", "backend": "inductor"}, "on 'meta' no code can be generated"),
    ],
)
@pytest.mark.usefixtures("fake_group")
def test_wishes_that_cannot_be(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        look_at(TRAINING, **wish)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"make_model": Layers()}, "Training.make_model must be a function, got Layers. A module is not enough"),
        ({"make_batch": 3}, "Training.make_batch must be a function, got int"),
        ({"config": {}}, "Training.config must be a ReplicateConfig, got dict"),
        ({"passes": [WaitsAtOnce()]}, "Training.passes must be a tuple of passes, or None, got list"),
    ],
)
def test_a_training_that_is_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        replace(TRAINING, **given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"make_model": dict}, dp_compile.ConfigError, "Training.make_model must return an nn.Module, got dict"),
        ({"loss_fn": lambda model, x: model(x)}, dp_compile.ModuleError, "loss_fn must return a scalar"),
        (
            {"config": dp_compile.ReplicateConfig(ddp_python_hook=False)},
            dp_compile.ConfigError,
            "ddp_python_hook is off: torch's reducer would reduce, and nothing is captured",
        ),
        ({"make_model": NotCompiled}, dp_compile.ModuleError, r"the backward was not captured: was the forward comp"),
        (
            {"config": dp_compile.ReplicateConfig(replan_after=3)},
            dp_compile.ConfigError,
            "replan_after=3 plans from measured times",
        ),
    ],
)
@pytest.mark.usefixtures("fake_group")
def test_a_training_with_nothing_to_look_at(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        look_at(replace(TRAINING, **given))


def test_counts_have_names(seen: testing.SeenBackward) -> None:
    with pytest.raises(dp_compile.ConfigError, match=r"one of collectives, reduced_nbytes, .*; got 'collective'"):
        testing.assert_counts(seen, collective=3)
    with pytest.raises(dp_compile.ConfigError, match="none was given"):
        testing.assert_counts(seen)
    with pytest.raises(dp_compile.ConfigError, match=r"read off generated code: backward_of\("):
        testing.assert_untouched_in_flight(seen)
    with pytest.raises(dp_compile.ConfigError, match=r"kernels can only be counted in generated code: backward_of\("):
        testing.assert_counts(seen, kernels=3)


def test_limits_are_numbers(seen: testing.SeenBackward) -> None:
    for check in (testing.assert_exposed_below, testing.assert_end_below):
        with pytest.raises(dp_compile.ConfigError, match="ms must be"):
            check(seen, ms=float("nan"))
    with pytest.raises(dp_compile.ConfigError, match="nbytes must be"):
        testing.assert_peak_below(seen, nbytes=-1)


def test_times_and_memory_that_are_too_much(seen: testing.SeenBackward) -> None:
    testing.assert_end_below(seen, ms=seen.schedule.end_s * 1.01e3)
    said = complaint(testing.assert_end_below, seen, ms=seen.schedule.end_s * 1e3)
    assert said.startswith("end of backward and communication: ")
    assert "nvlink4, 2 ranks, cpu-core" in said
    assert "buckets are launched too late" in said
    said = complaint(testing.assert_end_below, seen, ms=seen.schedule.backward_s * 1e3)
    assert "compute alone takes longer than that" in said
    assert seen.memory is not None
    testing.assert_peak_below(seen)
    testing.assert_peak_below(seen, nbytes=seen.memory.nbytes + 1)
    said = complaint(testing.assert_peak_below, seen, nbytes=seen.memory.nbytes)
    assert f"({seen.memory.nbytes:,} bytes), expected less than" in said
    worse = replace(seen, memory=replace(seen.memory, ddp_nbytes=1))
    assert "expected not more than torch's DDP, 1 B" in complaint(testing.assert_peak_below, worse)


# --- golden texts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def not_accepting(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in (ACCEPT_VARIABLE, INLINE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_missing_file_says_how_to_make_it(
    seen: testing.SeenBackward, tmp_path: Path, not_accepting: pytest.MonkeyPatch
) -> None:
    not_accepting.chdir(tmp_path)
    path = tmp_path / "golden" / "plan.txt"
    assert complaint(testing.assert_plan, seen, path) == (
        "there is no golden file golden/plan.txt for the plan yet. Make it with pytest --dp-compile-accept (or "
        "DP_COMPILE_ACCEPT=1), read it, and commit it."
    )
    not_accepting.setenv(ACCEPT_VARIABLE, "1")
    testing.assert_plan(seen, path)
    not_accepting.setenv(ACCEPT_VARIABLE, "0")
    testing.assert_plan(seen, path)
    path.write_text(path.read_text().replace("3 buckets", "2 buckets"))
    said = complaint(testing.assert_plan, seen, path)
    assert "the plan is not the one in golden/plan.txt (- expected, + found):" in said
    assert "  -2 buckets, 6 gradients" in said
    assert "  +3 buckets, 6 gradients" in said
    assert said.endswith("(or DP_COMPILE_ACCEPT=1), look at what changed in git, and commit it.")


SUITE = '''\
from dp_compile import testing


def test(seen):
    testing.assert_plan(
        seen,
        """\\
an older plan
""",
    )
'''


def test_a_text_in_a_test_is_accepted_by_expecttest(
    seen: testing.SeenBackward, tmp_path: Path, not_accepting: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "suite_of_a_user.py"
    path.write_text(SUITE)
    spec = importlib.util.spec_from_file_location("suite_of_a_user", path)
    assert spec is not None
    assert spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    said = complaint(suite.test, seen)
    assert "the plan is not the one in the test" in said
    assert "  -an older plan" in said
    assert "EXPECTTEST_ACCEPT=1" in said
    not_accepting.setenv(INLINE_VARIABLE, "1")
    suite.test(seen)
    assert seen.plan_text in path.read_text()
    assert "an older plan" not in path.read_text()


def test_rewriting_takes_expecttest(not_accepting: pytest.MonkeyPatch) -> None:
    not_accepting.setattr("dp_compile.testing.golden.expecttest", None)
    not_accepting.setenv(INLINE_VARIABLE, "1")
    with pytest.raises(dp_compile.ConfigError, match="rewriting a test takes expecttest"):
        assert_text("found\n", "expected\n", "plan")


def test_something_else_is_no_golden_text(seen: testing.SeenBackward) -> None:
    with pytest.raises(dp_compile.ConfigError, match=r"must be a text, or the pathlib.Path of a golden file, got int"):
        testing.assert_plan(seen, 3)  # type: ignore[arg-type]


# --- real processes ---------------------------------------------------------------------------------------------------


_made: list[nn.Module] = []


def tripled_every_other_time() -> nn.Module:
    """One gradient is three times that of the model made before. A pass cannot do that: it would be refused."""
    model = Layers()
    if len(_made) % 2:
        model.get_parameter("layers.2.weight").register_hook(lambda grad: 3 * grad)
    _made.append(model)
    return model


def batch_or_death(rank: int, step: int) -> torch.Tensor:
    if step == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return make_batch(rank, step)


def batch_or_trouble(rank: int, step: int) -> torch.Tensor:
    if step == 1 and rank == 0:
        raise ValueError("no more data on this rank")
    while step == 1:
        time.sleep(0.1)
    return make_batch(rank, step)


def test_a_training_is_that_of_torchs_ddp(ranks2: testing.Ranks) -> None:
    worst = testing.assert_same_training(TRAINING, ranks=ranks2, steps=3)
    assert worst.max_abs <= worst.allowed
    double = testing.assert_same_training(TRAINING, ranks=ranks2, steps=2, dtype=torch.float64, backend=None)
    assert double.relative < 1e-12


def test_a_wrong_gradient_is_named(ranks2: testing.Ranks) -> None:
    planted = replace(TRAINING, make_model=tripled_every_other_time)
    said = complaint(testing.assert_same_training, planted, ranks=ranks2, steps=2)
    assert "the first in step 0:" in said
    assert "gradient of layers.2.weight, rank 0, step 0: off by" in said
    assert "gradient of layers.2.weight, rank 1, step 0: off by" in said
    assert "layers.4.weight, rank 0, step 0" not in said


def other_on_the_second(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that is told apart: DDP's model is the first that a rank makes one for."""
    optimizers_made.append(1)
    return torch.optim.SGD(parameters, lr=0.1 * len(optimizers_made))


optimizers_made: list[int] = []


def test_parameters_are_compared_too(ranks2: testing.Ranks) -> None:
    other = replace(TRAINING, make_optimizer=other_on_the_second)
    said = complaint(testing.assert_same_training, other, ranks=ranks2, steps=1)
    assert "12 tensors, the first in step 0:" in said
    assert "parameter of layers." in said
    assert "every gradient was equal: compare what the optimizer does with both" in said


def test_a_training_that_is_not_captured_is_no_proof(ranks2: testing.Ranks) -> None:
    eager = replace(TRAINING, config=dp_compile.ReplicateConfig(ddp_python_hook=False))
    said = complaint(testing.assert_same_training, eager, ranks=ranks2, steps=1)
    assert "the training is the same, but no backward was captured" in said
    assert "torch's C++ reducer" in said


def test_ranks_that_raise_or_hang_are_shown(own_ranks: testing.Ranks) -> None:
    with pytest.raises(testing.RankError) as failed:
        testing.assert_same_training(replace(TRAINING, make_batch=batch_or_trouble), ranks=own_ranks, timeout_s=10)
    said = str(failed.value)
    assert "--- rank 0: Traceback" in said
    assert "ValueError: no more data on this rank" in said
    assert "\nrank 0: ValueError: no more data on this rank\nrank 1: hangs\n" in said
    assert "--- rank 1: hangs:" in said
    assert "in batch_or_trouble" in said


def test_a_rank_that_native_code_kills_says_where(own_ranks: testing.Ranks) -> None:
    with pytest.raises(testing.RankError) as failed:
        testing.assert_same_training(replace(TRAINING, make_batch=batch_or_death), ranks=own_ranks, timeout_s=60)
    said = str(failed.value)
    assert f"rank 1: died with exit code {-signal.SIGSEGV}\n" in said
    assert "Fatal Python error: Segmentation fault" in said
    assert "in batch_or_death" in said


class Interrupted(BaseException):
    """As a test runner's time-out, or Ctrl-C."""


def interrupt(*_: object) -> None:
    raise Interrupted


def test_a_call_that_is_interrupted_does_not_answer_the_next(own_ranks: testing.Ranks) -> None:
    assert own_ranks.run(pow, 2, 3) == [8, 8]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            own_ranks.run(time.sleep, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert own_ranks.run(pow, 2, 4) == [16, 16]


def test_an_interrupt_while_a_pool_is_stopped_leaves_none_behind(
    own_ranks: testing.Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_ranks.run(pow, 2, 3) == [8, 8]
    process = own_ranks._processes[-1]
    with monkeypatch.context() as patch:
        patch.setattr(process, "join", interrupt)
        with pytest.raises(Interrupted):
            own_ranks.stop()
    assert own_ranks.run(pow, 2, 4) == [16, 16]


def test_what_cannot_be_pickled_reaches_no_rank(own_ranks: testing.Ranks) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        own_ranks.run(lambda: None)
    assert own_ranks.run(pow, 2, 5) == [32, 32]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 1}, "ranks must be an integer >= 2, got 1"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"backend": "other"}, "backend must be one of inductor, aot_eager or None, got 'other'"),
        ({"rtol": -1.0}, "rtol must be"),
    ],
)
def test_a_comparison_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        testing.assert_same_training(TRAINING, **given)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(dp_compile.ConfigError, match=r"Training.make_model cannot be sent .*lambda"):
        testing.assert_same_training(replace(TRAINING, make_model=lambda: Layers()))
