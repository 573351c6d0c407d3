"""The tools for users' suites: what they find and report; and the suite in docs/example_suite passes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import dp_compile
from dp_compile import testing
from dp_compile.plan.flags import MORE
from dp_compile.testing.backward import ACCEPT_VARIABLE

WIDTH = 64


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def forward(self, x):
        return self.layers(x)


def make_batch(rank, step):
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_fn(model, x):
    return model(x).square().mean()


ONE_BUCKET_A_LAYER = dp_compile.ReplicateConfig(bucket_cap_mb=0.0158)
TRAINING = testing.Training(make_model=Layers, make_batch=make_batch, loss_fn=loss_fn, config=ONE_BUCKET_A_LAYER)
look_at = partial(testing.backward_of, link="nvlink4", ranks=2)


@pytest.fixture(scope="module")
def seen():
    return look_at(TRAINING)


def complaint(check, *args, **kwargs):
    """What an assertion says when it fails."""
    with pytest.raises(AssertionError) as failed:
        check(*args, **kwargs)
    return str(failed.value)


PLAN = """\
3 buckets, 6 gradients, 50,148 bytes
0: 16,640 bytes, float32 sum, 2 gradients: layers.4.bias .. layers.4.weight
1: 16,640 bytes, float32 sum, 2 gradients: layers.2.bias .. layers.2.weight
2: 16,868 bytes, float32 sum, 2 gradients: layers.0.bias .. layers.0.weight + flags
"""
GRAPH = """\
   ... 16 nodes
   bucket 0 = 2 gradients: layers.4.bias .. layers.4.weight: float32[4160]
>> launch 0 = all_reduce(bucket 0, sum): float32[4160]
   ... 16 nodes
   bucket 1 = 2 gradients: layers.2.bias .. layers.2.weight: float32[4160]
>> launch 1 = all_reduce(bucket 1, sum): float32[4160]
   ... 16 nodes
   bucket 2 = 2 gradients: layers.0.bias .. layers.0.weight + flags: float32[4217]
>> launch 2 = all_reduce(bucket 2, sum): float32[4217]
<< wait 0: float32[4160]
<< wait 1: float32[4160]
<< wait 2: float32[4217]
   ... 7 nodes
   return 7 tensors
"""


def test_what_is_seen(seen):
    testing.assert_plan(seen, PLAN)
    testing.assert_graph(seen, GRAPH)
    nbytes = 4 * (3 * (WIDTH * WIDTH + WIDTH) + 6 + MORE)
    testing.assert_counts(seen, collectives=3, reduced_nbytes=nbytes, graphs=2, captures=1, recompiles=0)
    assert str(seen) == f"{PLAN}\n{GRAPH}\ncollectives 3, reduced_nbytes {nbytes:,}, graphs 2, captures 1, recompiles 0"


def test_the_same_again_and_on_the_meta_device_and_nothing_is_left(seen):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    owners = sys.modules["dp_compile.replica.replica"].owners
    before = set(owners)  # of other tests of this process, which Python has not collected yet
    assert look_at(TRAINING) == seen
    on_meta = look_at(TRAINING, on="meta")
    assert (on_meta.plan_text, on_meta.graph_text, on_meta.counts) == (seen.plan_text, seen.graph_text, seen.counts)
    assert torch.equal(torch.rand(1), expected)
    assert set(owners) <= before
    assert not torch.distributed.is_initialized()


class NotCompiled(Layers):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class Unused(Layers):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


def test_unused_parameters_are_an_error_on_the_meta_device_too():
    with pytest.raises(dp_compile.UnsupportedModuleError, match=r"without a gradient: unused.weight, unused.bias"):
        look_at(replace(TRAINING, make_model=Unused), on="meta")
    allowed = replace(ONE_BUCKET_A_LAYER, find_unused_parameters=True)
    testing.assert_counts(look_at(replace(TRAINING, make_model=Unused, config=allowed)), captures=1)


def test_a_bucket_too_many_is_seen(seen):
    planted = look_at(replace(TRAINING, config=dp_compile.ReplicateConfig(bucket_cap_mb=1e-4)))
    found = len(planted.plan.buckets)
    assert found > 3
    said = complaint(testing.assert_counts, planted, collectives=3, recompiles=0)
    assert said.startswith(f"1 of 2 counts differ:\n  collectives: expected 3, found {found}\n")
    assert "    bucket 0 = 1 gradient: layers.4.bias: float32[64]" in said
    assert f"+{found} buckets" in complaint(testing.assert_plan, planted, seen.plan_text)


def test_a_training_with_nothing_to_look_at():
    for given, message in (
        ({"loss_fn": lambda model, x: model(x)}, "loss_fn must return a scalar"),
        ({"make_model": NotCompiled}, r"not captured but ran as eager hooks\. .* TORCH_LOGS=dp_com"),
    ):
        with pytest.raises(dp_compile.UnsupportedModuleError, match=message):
            look_at(replace(TRAINING, **given))


def test_a_missing_file_says_how_to_make_it(seen, tmp_path, monkeypatch):
    monkeypatch.delenv(ACCEPT_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "golden" / "plan.txt"
    assert complaint(testing.assert_plan, seen, path).startswith(
        "there is no golden file golden/plan.txt for the plan yet. Make it with pytest --dp-compile-accept (or "
    )
    monkeypatch.setenv(ACCEPT_VARIABLE, "1")
    testing.assert_plan(seen, path)
    monkeypatch.setenv(ACCEPT_VARIABLE, "0")
    testing.assert_plan(seen, path)
    path.write_text(path.read_text().replace("3 buckets", "2 buckets"))
    said = complaint(testing.assert_plan, seen, path)
    assert "the plan is not the one in golden/plan.txt (- expected, + found):" in said
    assert "  -2 buckets, 6 gradients" in said


_made = []


def tripled_every_other_time():
    """One gradient is three times that of the model made before. A pass cannot do that: it would be refused."""
    model = Layers()
    if len(_made) % 2:
        model.get_parameter("layers.2.weight").register_hook(lambda grad: 3 * grad)
    _made.append(model)
    return model


def batch_or_trouble(rank, step):
    if step == 1 and rank == 0:
        raise ValueError("no more data on this rank")
    while step == 1:
        time.sleep(0.1)
    return make_batch(rank, step)


def batch_or_death(rank, step):
    if step == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return make_batch(rank, step)


def test_a_training_is_that_of_torchs_ddp(ranks2):
    assert testing.assert_same_training(TRAINING, ranks=ranks2, steps=3) < 1e-4


def test_a_wrong_gradient_is_named(ranks2):
    planted = replace(TRAINING, make_model=tripled_every_other_time)
    said = complaint(testing.assert_same_training, planted, ranks=ranks2, steps=2)
    assert "the first in step 0:" in said
    assert "gradient of layers.2.weight, rank 0, step 0: off by" in said
    assert "gradient of layers.2.weight, rank 1, step 0: off by" in said
    assert "layers.4.weight, rank 0, step 0" not in said


def test_ranks_that_raise_hang_or_are_killed_are_shown(own_ranks):
    def trouble(make_batch):
        with pytest.raises(testing.RankError) as failed:
            testing.assert_same_training(replace(TRAINING, make_batch=make_batch), ranks=own_ranks, timeout_s=60)
        return str(failed.value)

    said = trouble(batch_or_trouble)
    assert "\nrank 0: ValueError: no more data on this rank\nrank 1: hangs\n--- rank 0: Traceback" in said
    assert "--- rank 1: hangs:" in said
    assert "in batch_or_trouble" in said
    said = trouble(batch_or_death)
    assert f"rank 1: died with exit code {-signal.SIGSEGV}\n" in said
    assert "Fatal Python error: Segmentation fault" in said
    assert "in batch_or_death" in said


def test_a_call_that_is_interrupted_does_not_answer_the_next(own_ranks):
    assert own_ranks.run(pow, 2, 3) == [8, 8]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # as a test runner's time-out, or Ctrl-C
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            own_ranks.run(time.sleep, 1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert own_ranks.run(pow, 2, 4) == [16, 16]


ROOT = Path(__file__).parents[2]
SUITE = ROOT / "docs" / "example_suite"


@pytest.fixture
def copied(tmp_path):
    """The suite where no configuration of this project holds."""
    return Path(shutil.copytree(SUITE, tmp_path / "suite", ignore=shutil.ignore_patterns("__pycache__")))


def run_suite(directory, *options):
    environment = {name: value for name, value in os.environ.items() if name != ACCEPT_VARIABLE}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.nightly
def test_the_suite_passes(copied):
    ended = run_suite(copied)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout


@pytest.mark.nightly
def test_golden_files_are_made_by_the_option(copied):
    shutil.rmtree(copied / "golden")
    ended = run_suite(copied, "--dp-compile-accept", "-k", "reduced_together or launched")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert texts(copied / "golden") == texts(SUITE / "golden")


def texts(golden):
    """But for how many ops compute between reductions: torch 2.15 has others for a product."""
    return {path.name: re.sub(r"\d+ nodes", "nodes", path.read_text()) for path in golden.iterdir()}
