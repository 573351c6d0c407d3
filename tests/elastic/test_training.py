"""Trainings that lose ranks and gain others, in processes.

How could it be wrong without a word? By an average over ranks that are gone, by ranks whose parameters, buffers or
optimizers differ, by a step that some ranks have done and others have not.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from docs_scripts import python_of
from script import Net, batch, digest
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.elastic.training import Step
from dp_compile.errors import CommunicationError
from dp_compile.testing.ranks import Ranks

PLACES = ("forward", "backward", "optimizer", "between")
FAULTS = [f"{place}:{what}" for place in PLACES for what in ("kill", "stop")]
FAULTS += [f"{place}:{what}" for place in PLACES if place != "backward" for what in ("raise", "sleep")]
"""In a backward a thread strikes: it can raise nothing in another one."""


def train(directory: Path, *faults: str, ranks: int = 3, restarts: int = 0, last: int, steps: int = 3) -> list[Any]:
    """Each finished block of each process, in the order in which they ended."""
    script = str(Path(__file__).with_name("script.py"))
    options = ["--ranks", str(ranks), "--restarts", str(restarts), "--kill-after", "3"]
    command = [sys.executable, "-m", "dp_compile.elastic", *options, script, str(last), str(steps), str(directory)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory)}
    run = subprocess.run([*command, *faults], capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def check(blocks: list[Any], losses: int) -> None:
    """All processes are equal after each step, and lose one step at a loss."""
    for step in {each["to"] for each in blocks if each["to"] > each["from"]}:
        ended = [each for each in blocks if each["to"] == step and each["from"] == step - 1]
        assert len({each["digest"] for each in ended}) == 1, ended
        assert len({each["ranks"] for each in ended}) == 1 or len(ended) > ended[0]["ranks"]
    lost = Counter(each["process"] for each in blocks if each["to"] == each["from"])
    assert max(lost.values(), default=0) <= losses, lost


def on_two_ranks(directory: str, step: int, steps: int, by_torch: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The same steps from what was saved at the loss, on ranks that have lost none; by torch or by us."""
    inner, rank = Net(), torch.distributed.get_rank()
    if by_torch:
        model: Any = DistributedDataParallel(inner, find_unused_parameters=True)
        run, no_sync = model, model.no_sync
    else:
        model = dp_compile.replicate(inner, find_unused_parameters=True)
        run, no_sync = torch.compile(model, backend="aot_eager"), partial(dp_compile.no_sync, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for each, state in zip((inner, optimizer, scheduler), torch.load(f"{directory}/{step}.pt"), strict=True):
        each.load_state_dict(state)
    found = []
    for number in range(step, step + steps):
        with no_sync():
            run(batch(number, rank, 0)).square().mean().backward()
        run(batch(number, rank, 1)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(digest(inner))
    return found, {name: value.detach() for name, value in inner.named_parameters()}


def test_a_rank_is_killed_and_another_joins(tmp_path: Path, ranks2: Ranks) -> None:
    """The two that are left equal ranks that have lost none, and compile nothing; the new one equals them."""
    blocks = train(tmp_path, "1@3:backward:kill", restarts=1, last=2)
    check(blocks, losses=1)
    (lost,) = {each["from"] for each in blocks if each["to"] == each["from"]}
    alone = {each["to"]: each["digest"] for each in blocks if each["ranks"] == 2 and each["to"] > each["from"]}
    steps = max(alone) - lost
    (ours, ended), _ = ranks2.run(on_two_ranks, str(tmp_path), lost, steps, False)
    (_, expected), _ = ranks2.run(on_two_ranks, str(tmp_path), lost, steps, True)
    assert ours == [alone[lost + number + 1] for number in range(steps)]
    torch.testing.assert_close(ended, expected, rtol=1e-3, atol=1e-4)  # hundreds of steps of AdamW
    for process in ("0", "2"):
        captures = [each["captures"] for each in blocks if each["process"] == process and each["to"] > 2]
        assert len(set(captures)) == 1, "code was compiled for another number of ranks"
    after = [each for each in blocks if each["ranks"] == 3 and each["from"] > lost + 1]
    assert {each["process"] for each in after} == {"0", "2", "joined 1"}
    assert len({each["captures"] for each in after if each["process"] == "joined 1"}) == 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_before_the_block_is_not_lost(goes_on: bool) -> None:
    """A vote that cannot be launched: the block runs, and then its step is lost, or the error is raised."""
    early = CommunicationError("a rank is gone")
    training: Any = mock.Mock(_begin=mock.Mock(side_effect=early), _lose=mock.Mock(return_value=goes_on))
    with nullcontext() if goes_on else pytest.raises(CommunicationError, match="a rank is gone"), Step(training):
        pass
    training._lose.assert_called_once_with(early)
    training._lose.return_value = False
    with pytest.raises(KeyboardInterrupt), Step(training):
        raise KeyboardInterrupt
    training._end.assert_not_called()


@pytest.mark.nightly
def test_the_page(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(python_of("algorithms.md", "Elastic training"))
    command = [sys.executable, "-m", "dp_compile.elastic", "--ranks", "3", "--restarts", "2", str(script)]
    assert subprocess.run(command, timeout=240, check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_every_place(tmp_path: Path, fault: str) -> None:
    start_s = time.monotonic()
    blocks = train(tmp_path, f"0@3:{fault}", restarts=0, last=1)
    check(blocks, losses=1)
    assert {each["process"] for each in blocks[-3:]} == {"1", "2"}
    assert time.monotonic() - start_s < 120


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(int(os.environ.get("DP_COMPILE_ELASTIC_SEQUENCES", "10"))))
def test_random_sequences(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    ranks, faults = drawn.choice([2, 3, 4]), []
    for process in drawn.sample(range(ranks), drawn.randint(1, ranks - 1)):
        faults.append(f"{process}@{drawn.randint(0, 6)}:{drawn.choice(FAULTS)}")
    blocks = train(tmp_path, *faults, ranks=ranks, restarts=drawn.randint(0, 2), last=1)
    check(blocks, losses=len(faults))
