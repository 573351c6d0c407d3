"""`dp-compile train`: its options, and real runs of the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dp_compile.cli import main as cli
from dp_compile.insight.step import Step

TINY = ("--layers", "1", "--width", "32")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--ranks", "0"), {}, "--ranks must be an integer >= 1, got 0"),
        (("--width", "130"), {}, "--width must be a multiple of 32, got 130"),
        (("--bucket-cap-mb", "0"), {}, "bucket_cap_mb must be"),
        (("--mp", "bf16", "--comm-hook", "int8"), {}, "--mp must be without --comm-hook, got 'bf16'"),
        (("--save-step", "/no/such/place/step.json"), {}, "--save-step must be a file in a directory that exists"),
        ((), {"DP_COMPILE_DDP_PYTHON_HOOK": "0"}, "DP_COMPILE_DDP_PYTHON_HOOK must be unset"),
        (
            ("--ranks", "2"),
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
            "--ranks must be the 4 of torchrun",
        ),
    ],
)
def test_bad_options_say_so_in_one_line(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        status = cli.main(["train", *arguments])
    except SystemExit as stop:  # argparse's own refusals
        status = stop.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.startswith("dp-compile: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dp_compile", "train", *TINY, *arguments]
    pipe, environment = subprocess.PIPE, {**os.environ, **variables}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def test_two_ranks_train_and_end_where_torch_does(tmp_path: Path) -> None:
    saved = tmp_path / "step.json"
    process = start("--steps", "22", "--check", "--bucket-cap-mb", "0.02", "--save-step", str(saved))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    # A build of torch for GPUs on a machine that has none but CUDA's folder logs it; kineto logs the profiler's start.
    of_torch = ("No CUDA runtime is found", "SyncActivityProfilerHandler.cpp", "DeviceProperties.cpp")
    of_torch += ("torch/profiler/profiler.py", "_warn_once(")  # of 2.11, of its own default
    assert [line for line in err.splitlines() if line and not any(each in line for each in of_torch)] == []
    losses = [float(each) for each in re.findall(r"held-out loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 0.5
    assert re.search(r"^step    22  held-out loss \S+  \S+ ms/step, \S+ tokens/s$", out, re.MULTILINE)
    assert "2 on cpu (gloo)" in out
    assert "mode: python hooks, 2 ranks, backwards: 22 captured" in out
    assert re.search(r"^plan: 3 buckets, 16 gradients", out, re.MULTILINE), out
    assert "check passed" in out
    step = Step.from_json(saved.read_text())
    assert (step.world_size, len(step.plan.buckets)) == (2, 3)
    assert step.measured is not None


def children(parent: int) -> list[int]:
    """The rank processes, in the order in which they were started."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [pid for pid in map(int, text.split()) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ends", ["a rank is killed", pytest.param("Ctrl-C", marks=pytest.mark.nightly)])
def test_an_end_of_one_is_the_end_of_all(ends: str, tmp_path: Path) -> None:
    process = start("--steps", "100000", TMPDIR=str(tmp_path))
    assert any(line.startswith("step     0") for line in process.stdout)
    ranks = children(process.pid)
    if ends == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    if ends == "Ctrl-C":
        assert (process.returncode, err) == (130, "\ndp-compile: interrupted\n")
    else:
        assert process.returncode == 1
        assert err.startswith("dp-compile: error: a rank failed, all were stopped; in the order")
        assert "\nrank 1: died with exit code -9\n" in err
    assert not [each for each in ranks if Path(f"/proc/{each}").exists()]
    assert {each.name.partition("_")[0] for each in tmp_path.iterdir()} <= {"torchinductor"}  # a cache
