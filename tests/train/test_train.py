"""`dp-compile train`: its options, and real runs of the command; `torchrun` in two network namespaces over one link."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import resumable_run
import torch

from dp_compile.bench import networks
from dp_compile.bench.networks import ADDRESSES, Network, NetworkError, open_network
from dp_compile.cli import main as cli
from dp_compile.insight.step import Step

TINY = ("--layers", "1", "--width", "32")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--ranks", "0"), {}, "--ranks must be an integer >= 1, got 0"),
        (("--width", "130"), {}, "--width must be a multiple of 32, got 130"),
        (("--bucket-cap-mb", "0"), {}, "bucket_cap_mb must be"),
        (("--save-step", "/no/such/place/step.json"), {}, "--save-step must be a file in a directory that exists"),
        ((), {"DP_COMPILE_DDP_PYTHON_HOOK": "0"}, "DP_COMPILE_DDP_PYTHON_HOOK must be unset or 1"),
        (("--ranks", "2"), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, "--ranks must be 4, as torchrun has"),
    ],
)
def test_bad_options_say_so_in_one_line(arguments, environment, message, capsys, monkeypatch):
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


def start(*arguments, **variables):
    command = [sys.executable, "-m", "dp_compile", "train", *TINY, *arguments]
    pipe, environment = subprocess.PIPE, {**os.environ, **variables}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def test_two_ranks_train_and_end_where_torch_does(tmp_path):
    saved = tmp_path / "step.json"
    process = start("--steps", "22", "--check", "--bucket-cap-mb", "0.02", "--save-step", str(saved))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    # A build of torch for GPUs on a machine that has none but CUDA's folder logs it; kineto logs the profiler's start.
    of_torch = ("No CUDA runtime is found", "SyncActivityProfilerHandler.cpp", "DeviceProperties.cpp")
    of_torch += ("torch/profiler/profiler.py", "_warn_once(")  # of 2.11, of its own default
    printed = [line for line in err.splitlines() if line and not any(each in line for each in of_torch)]
    assert printed == ["compiling the first step ..."]
    losses = [float(each) for each in re.findall(r"  loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 0.5
    assert re.search(r"^step    22  loss \S+  \S+ ms/step, \S+ tokens/s$", out, re.MULTILINE)
    assert "2 on cpu (gloo)" in out
    assert "mode: dp_compile, 2 ranks; backwards: 22 captured" in out
    assert re.search(r"^plan: 3 buckets, 16 gradients", out, re.MULTILINE), out
    assert "check passed" in out
    step = Step.from_json(saved.read_text())
    assert (step.world_size, len(step.plan.buckets)) == (2, 3)
    assert step.measured is not None


def children(parent):
    """The rank processes, in the order in which they were started."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [pid for pid in map(int, text.split()) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.nightly
@pytest.mark.parametrize("ends", ["a rank is killed", "Ctrl-C"])
def test_an_end_of_one_is_the_end_of_all(ends, tmp_path):
    process = start("--steps", "100000", TMPDIR=str(tmp_path))
    assert any(line.startswith("compiling") for line in process.stderr)
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


@pytest.fixture
def agent():
    """Starts what `torchrun` is on a machine, 0 or 1, with a program and variables."""
    with ExitStack() as stack:
        try:
            bed = stack.enter_context(open_network(Network("shaped", rate_mbit=1000.0), ranks=2))
        except NetworkError as error:
            pytest.skip(f"there are no two machines to play: {error}")
        started = []

        def start(machine, *program, **variables):
            host, last = ADDRESSES[0].rsplit(".", 1)
            command = [networks._tool("ip"), "netns", "exec", bed.spaces[machine], sys.executable]
            command += ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
            command += ["--rdzv-backend=c10d", "--rdzv-id=run"]
            command += [f"--rdzv-endpoint={ADDRESSES[0]}:29500", f"--local-addr={host}.{int(last) + machine}"]
            # Who serves the store is found by names of hosts, and both have this machine's.
            command += [f"--rdzv-conf=is_host={int(machine == 0)}"]
            # torch 2.13 keeps one store over all attempts, where gloo finds addresses of dead ranks: pytorch#135712.
            shown = {**os.environ, **bed.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
            pipe = subprocess.PIPE
            started.append(subprocess.Popen([*command, *program], env=shown, stdout=pipe, stderr=pipe, text=True))
            return started[-1]

        yield start
        for process in started:
            process.kill()
            process.communicate()  # its pipes are closed


def ended(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    return out


@pytest.mark.nightly
def test_the_main_job(agent):
    both = [agent(each, "--module", "dp_compile", "train", *TINY, "--steps", "12", "--check") for each in range(2)]
    (out,) = filter(None, map(ended, both))  # rank 0 speaks
    assert "2 on cpu (gloo)" in out
    assert "backwards: 12 captured" in out
    assert "check passed" in out


@pytest.mark.nightly
def test_a_machine_that_is_lost_and_comes_back(agent, ranks2, tmp_path):
    """Its agent and rank are killed, all go on from torch's distributed checkpoint when another one is there."""
    result = tmp_path / "result.pt"
    program = (resumable_run.__file__, str(tmp_path / "interrupted"), str(result))
    stays, goes = agent(0, *program), agent(1, *program, DIES="")
    assert goes.wait(timeout=300) != 0
    back = agent(1, *program)
    out = ended(stays) + ended(back)
    assert f"starts at step {resumable_run.KILL_AT}" in out
    resumed = torch.load(result)
    expected = ranks2.run(resumable_run.train, str(tmp_path / "whole"))[0]
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
