"""`torchrun` on two machines: an agent in each of two network namespaces, which reach each other over one link."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import resumable_run
import torch

from dp_compile.bench import networks
from dp_compile.bench.networks import ADDRESSES, Network, NetworkError, open_network
from dp_compile.testing.ranks import Ranks

pytestmark = pytest.mark.nightly
Agent = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def agent() -> Iterator[Agent]:
    """Starts what `torchrun` is on a machine, 0 or 1, with a program and variables."""
    with ExitStack() as stack:
        try:
            bed = stack.enter_context(open_network(Network("shaped", rate_mbit=1000.0), ranks=2))
        except NetworkError as error:
            pytest.skip(f"there are no two machines to play: {error}")
        started: list[subprocess.Popen[str]] = []

        def start(machine: int, *program: str, **variables: str) -> subprocess.Popen[str]:
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


def ended(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    return out


def test_the_main_job(agent: Agent) -> None:
    sizes = ("--layers", "1", "--width", "32", "--steps", "12")
    both = [agent(machine, "--module", "dp_compile", "train", *sizes, "--check") for machine in range(2)]
    (out,) = filter(None, map(ended, both))  # rank 0 speaks
    assert "2 on cpu (gloo)" in out
    assert "backwards: 12 captured" in out
    assert "check passed" in out


def test_a_machine_that_is_lost_and_comes_back(agent: Agent, ranks2: Ranks, tmp_path: Path) -> None:
    """Its agent and rank are killed, all go on from torch's distributed checkpoint when another one is there."""
    result = tmp_path / "result.pt"
    program = (resumable_run.__file__, str(tmp_path / "interrupted"), str(result))
    stays, goes = agent(0, *program, WHO_DIES="nobody"), agent(1, *program, WHO_DIES="agent")
    assert goes.wait(timeout=300) != 0
    back = agent(1, *program, WHO_DIES="nobody")
    out = ended(stays) + ended(back)
    assert f"starts at step {resumable_run.KILL_AT}" in out
    resumed = torch.load(result)
    expected = ranks2.run(resumable_run.train, str(tmp_path / "whole"), False)[0]
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
