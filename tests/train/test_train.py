"""`dp-compile train`: its text, its options, and real runs of the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from dp_compile.cli import main as cli
from dp_compile.errors import ConfigError
from dp_compile.insight.explain import explanation_of
from dp_compile.insight.step import Step
from dp_compile.insight.timeline import timeline_picture
from dp_compile.train.check import Verdict
from dp_compile.train.data import batches, held_out_batches, load_corpus
from dp_compile.train.loop import COMPILE_STEPS, Timing, make_optimizer
from dp_compile.train.options import CHECK_TOLERANCE, TrainOptions

TINY = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4")


def write_files(root: Path, count: int = 20) -> Path:
    for number in range(count):
        (root / f"module_{number:02}.py").write_text(f"value = {number}\n" * 10)
    return root


def test_the_corpus_is_the_same_every_time_and_split_by_file() -> None:
    one, two = load_corpus(128), load_corpus(128)
    assert torch.equal(one.train, two.train)
    assert torch.equal(one.held_out, two.held_out)
    assert one.train_files == tuple(sorted(one.train_files))
    assert not set(one.train_files) & set(one.held_out_files)
    assert len(one.held_out) > 100_000
    assert not [file for file in one.train_files + one.held_out_files if "site-packages" in file]


def test_no_held_out_text_is_in_the_training_text(tmp_path: Path) -> None:
    corpus = load_corpus(16, write_files(tmp_path))
    assert corpus.held_out_files == ("module_09.py", "module_19.py")
    assert b"value = 9\n" in bytes(corpus.held_out.tolist())
    assert b"value = 9\n" not in bytes(corpus.train.tolist())


def test_targets_are_the_inputs_one_token_later_and_ranks_get_different_ones(tmp_path: Path) -> None:
    data = load_corpus(16, write_files(tmp_path)).train

    def first(rank: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(islice(batches(data, context=16, batch_size=3, rank=rank, world_size=2, seed=seed), 2))

    inputs, targets = first(0)[0]
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, first(0)[0][0])
    others = (first(0)[1], first(1)[0], first(0, seed=1)[0])
    assert not [other for other, _ in others if torch.equal(inputs, other)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 200])
def test_every_held_out_window_is_evaluated_once_for_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    data = load_corpus(16, write_files(tmp_path)).held_out
    shares = [
        held_out_batches(data, context=16, batch_size=5, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert all(shares)
    assert sum(len(inputs) for share in shares for inputs, _ in share) == max(128, world_size)


def test_a_place_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found 3 Python files under .*, need 10 or more"):
        load_corpus(16, write_files(tmp_path, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "--ranks must be >= 1, got 0"),
        (("--width", "130", "--heads", "4"), "--width must be a multiple of --heads, got width 130 and 4 heads"),
        (("--heads", "0"), "--heads must be >= 1, got 0"),
        (("--batch-size", "0"), "--batch-size must be >= 1, got 0"),
        (("--steps", "-3"), "--steps must be >= 1, got -3"),
        (("--evaluate-every", "0"), "--evaluate-every must be >= 1, got 0"),
        (("--momentum", "1"), "--momentum must be >= 0 and < 1, got 1"),
        (("--steps", "many"), "argument --steps: invalid int value: 'many'"),
        (("--bucket-cap-mb", "0"), "--bucket-cap-mb must be a number > 0, got 0"),
        (("--lr", "nan"), "--lr must be a number > 0, got nan"),
        (("--seed", "-1"), "--seed must be between 0 and 2**63 - 1, got -1"),
        (("--timeout-s", "inf"), "--timeout-s must be a number > 0 and finite, got inf"),
        (("--reduce-dtype", "bf16"), "--reduce-dtype must be one of float16, bfloat16, got 'bf16'"),
        (("--mp", "bfloat16"), "--mp must be one of bf16, fp16, got 'bfloat16'"),
        (("--comm-hook", "powersgd"), "--comm-hook must be one of bf16, fp16, int8, fp8, got 'powersgd'"),
        (
            ("--comm-hook", "int8", "--reduce-dtype", "float16"),
            "--comm-hook and --reduce-dtype both say",
        ),
        (("--topology", "star"), "topology must be one of complete, ring, one-peer-exp"),
        (
            ("--topology", "ring", "--ranks", "3"),
            "topology 'ring' pairs neighbours and needs an even world_size, got 3",
        ),
        (
            ("--topology", "ring", "--optimizer", "in-backward"),
            "with --topology no gradient is reduced. Leave --optimi",
        ),
        (("--tp", "0"), "--tp must be >= 1, got 0"),
        (("--tp", "3", "--ranks", "4"), "--ranks must be a multiple of --tp 3, got 4"),
        (("--tp", "2", "--context", "33"), "--context must be a multiple of --tp 2, got 33"),
        (("--tp", "2", "--optimizer", "sharded"), "--optimizer sharded does not work with --tp: an optimizer in the"),
        (("--tp", "2", "--comm-hook", "int8"), "--comm-hook int8 does not work with --tp: a hook would see parts"),
        (("--tp", "2", "--topology", "complete"), "--topology complete does not work with --tp: parameters are mixed"),
        (("--tp", "2", "--no-ddp-python-hook"), "--no-ddp-python-hook does not work with --tp: torch's C++ reducer"),
        (
            ("--optimizer", "adam"),
            "--optimizer must be one of plain, in-backward, sharded, crossing, sharded-crossing, got 'adam'",
        ),
        (("--context", "100000000"), "--context must be < "),
        (("--save-step", "/no/such/place/step.json"), "--save-step must be a file in a directory that exists, got"),
        (("--step", "5"), "unrecognized arguments: --step 5"),
    ],
)
def test_bad_options_say_so_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["train", *arguments])
    except SystemExit as stop:  # argparse's own refusals
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.startswith("dp-compile: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_another_number_of_ranks_than_torchrun_started_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--ranks", "2"]) == 2
    assert "--ranks is 2, but torchrun started 4" in capsys.readouterr().err


def test_a_bad_environment_variable_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DP_COMPILE_DDP_PYTHON_HOOK", "maybe")
    assert cli.main(["train"]) == 2
    assert "DP_COMPILE_DDP_PYTHON_HOOK must be one of" in capsys.readouterr().err


def test_a_small_cap_holds_for_the_first_bucket_too() -> None:
    assert TrainOptions(bucket_cap_mb=0.25).replicate_config().caps_mb() == (0.25, 0.25)
    assert TrainOptions(bucket_cap_mb=4).replicate_config().caps_mb() == (4, 1.0)


def test_step_times_leave_out_compilation() -> None:
    timing = Timing()
    for step in range(COMPILE_STEPS):
        timing.add(step, 30.0)
    assert timing.describe(1000, recent=True) == ""
    for step in range(COMPILE_STEPS, COMPILE_STEPS + 40):
        timing.add(step, 0.2 if step < COMPILE_STEPS + 30 else 0.1)
    assert timing.compile_s == 30.0 * COMPILE_STEPS
    assert timing.describe(1000, recent=True) == "100.0 ms/step, 10,000 tokens/s"
    assert timing.describe(1000, recent=False) == "175.0 ms/step, 5,714 tokens/s"


@pytest.mark.parametrize(
    ("difference", "passed"),
    [(0.0, True), (CHECK_TOLERANCE, True), (1.1 * CHECK_TOLERANCE, False), (float("inf"), False)],
)
def test_the_check_passes_up_to_its_tolerance(difference: float, passed: bool) -> None:
    verdict = Verdict("norm.bias", difference, 1.0, 25, CHECK_TOLERANCE)
    assert verdict.passed is passed
    assert str(verdict).startswith("check passed" if passed else "check FAILED")
    assert "in norm.bias" in str(verdict)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dp_compile", "train", *TINY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_ranks_train_and_end_where_torch_does(tmp_path: Path) -> None:
    saved = tmp_path / "step.json"
    process = start("--steps", "22", "--check", "--bucket-cap-mb", "0.02", "--save-step", str(saved))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    assert err == ""
    losses = re.search(r"held-out loss went from ([\d.]+) to ([\d.]+) nats per byte", out)
    assert losses is not None, out
    assert float(losses[2]) < float(losses[1]) - 0.5
    assert "2 on cpu (gloo)" in out
    assert "mode: python hooks, 2 ranks, backwards: 22 captured" in out
    plan = re.search(r"^plan: (\d+) buckets, (\d+) gradients", out, re.MULTILINE)
    capture = re.search(r"(\d+) gradients \+ 1 flag word -> (\d+) collectives, 1 graph", out)
    assert plan is not None, out
    assert capture is not None, out
    assert plan[1] == capture[2]
    assert int(capture[1]) == int(plan[2])
    assert re.search(r"^backward: \S+ ms, .*, measured in the first steps, ", out, re.MULTILINE), out
    assert 1 < int(plan[1]) < int(plan[2])
    assert "check passed" in out
    step = Step.from_json(saved.read_text())
    assert (step.world_size, len(step.plan.buckets)) == (2, int(plan[1]))


@pytest.mark.nightly
def test_a_momentum_is_of_sgd() -> None:
    model = torch.nn.Linear(1, 1)
    assert type(make_optimizer(model, TrainOptions())) is torch.optim.AdamW
    for options, momentum in ((TrainOptions(momentum=0.5), 0.5), (TrainOptions(check=True), 0.9)):
        made = make_optimizer(model, options)
        assert type(made) is torch.optim.SGD
        assert made.defaults["momentum"] == momentum


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("option", "name", "beside"),
    [
        ("--reduce-dtype", "bfloat16", "eager"),
        ("--mp", "bf16", "compiled, with casts of its parameters"),
    ],
)
def test_other_dtypes_end_where_torch_does(option: str, name: str, beside: str) -> None:
    process = start("--steps", "8", "--check", option, name)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    assert f"check passed: parameters after 8 steps, beside torch's DistributedDataParallel ({beside})" in out
    assert "backwards: 8 captured" in out
    assert "sum in bfloat16" in out
    wire = TrainOptions(**{option[2:].replace("-", "_"): name}).replicate_config().wire_dtype
    assert wire == torch.bfloat16


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int8", "all_to_all all_gather by dp_compile.engine.quantized_hook.QuantizedHook(dtype=torch.int8"),
        ("fp8", "QuantizedHook(dtype=torch.float8_e4m3fn"),
        ("bf16", "sum in bfloat16"),
    ],
)
def test_a_comm_hook_ends_where_torch_does(name: str, said: str) -> None:
    process = start("--steps", "8", "--check", "--comm-hook", name)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    assert "check passed: parameters after 8 steps, beside torch's DistributedDataParallel (eager)" in out
    assert "backwards: 8 captured" in out
    assert said in out


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["in-backward", "sharded", "crossing", "sharded-crossing"])
def test_updates_in_the_backward_end_where_torch_does(optimizer: str) -> None:
    process = start("--steps", "8", "--check", "--optimizer", optimizer)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    assert "check passed: parameters after 8 steps, beside torch's DistributedDataParallel (eager)" in out
    assert re.search(r"^  \d+ parameters updated in it$", out, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize(("option", "beside"), [((), "eager"), (("--mp", "bf16"), "compiled, with casts of its")])
def test_tensor_parallel_ends_where_torch_does(option: tuple[str, ...], beside: str, tmp_path: Path) -> None:
    """Two copies of the model, each on two ranks, beside torch's DDP with two whole ones."""
    file = tmp_path / "step.json"
    process = start("--steps", "8", "--check", "--ranks", "4", "--tp", "2", "--save-step", str(file), *option)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    assert f"check passed: parameters after 8 steps, beside torch's DistributedDataParallel ({beside}" in out
    assert "4 on cpu (gloo), 4 sequences for each 2, which share a copy of the model: 256 tokens per step" in out
    assert "python hooks, 2 ranks, backwards: 8 captured" in out
    step = Step.from_json(file.read_text())
    assert {each.ranks for each in step.ready.collectives} == {2}
    assert "the model sends" in str(explanation_of(step))
    assert "model sends" in timeline_picture(step)


@pytest.mark.nightly
def test_a_topology_ends_where_all_gathers_do() -> None:
    process = start("--steps", "8", "--check", "--topology", "one-peer-exp", "--ranks", "4")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    assert "check passed: parameters after 8 steps, beside D-PSGD by all-gathers and a mixing matrix (eager)" in out
    assert "topology one-peer-exp, period 2 steps, spectral gap 1 a period (by a formula)" in out
    assert "backwards: 8 captured" in out


def children(parent: int) -> list[int]:
    """The rank processes, in the order in which they were started."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [pid for pid in map(int, text.split()) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until_training(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any(line.startswith("step     0") for line in process.stdout)


def assert_all_gone(group: int) -> None:
    """Every process of the session that `start` made has ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("processes were left behind")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_killed_ends_the_run_and_is_named() -> None:
    process = start("--steps", "100000")
    wait_until_training(process)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "dp-compile: error: rank 1 was killed by SIGKILL; the other ranks were stopped.\n"
    assert_all_gone(process.pid)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="counts processes of a session")
def test_ctrl_c_ends_cleanly() -> None:
    process = start("--steps", "100000")
    wait_until_training(process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "\ndp-compile: interrupted, all ranks stopped\n")
    assert_all_gone(process.pid)
