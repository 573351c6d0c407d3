"""The cost of the link that plans rest on: measured once, in bins, and remembered for such ranks.

How could it be wrong without a word? By ranks that take different figures, and so make different plans; by figures of
another link, or of a machine that was busy; by a new plan in each run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile.engine import calibration
from dp_compile.plan.cost import AllReduceCost, CostFit
from dp_compile.testing.ranks import Ranks


def replicated() -> tuple[AllReduceCost, str, int]:
    """The cost that a module's plan rests on, in a new group of all ranks, where it is from, and its buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = dp_compile.replicate(model, process_group=dist.new_group())
    model(torch.ones(2, 64)).sum().backward()
    step = dp_compile.step_of(model)
    return step.cost, step.cost_source, len(step.plan.buckets)


def train_on_links(directory: str) -> list[tuple[AllReduceCost, str, int]]:
    file, found = Path(directory, "dp_compile_links.json"), []
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": directory, "DP_COMPILE_LINK": "remembered"}):
        noise = CostFit(AllReduceCost(1e-6, 1e-9), residual=0.5)
        with mock.patch.object(calibration._Sweep, "fit", return_value=noise):
            found.append(replicated())
        assert not file.exists()
        dist.barrier()
        measured = CostFit(AllReduceCost(80e-6, 1.1e-9), residual=0.1)
        with mock.patch.object(calibration._Sweep, "fit", return_value=measured):
            if dist.get_rank() == 0:
                file.write_text("[not a file of ours")
            found.append(replicated())
        dist.barrier()
        if dist.get_rank() == 0:
            remembered = json.loads(file.read_text())
            (key,) = remembered
            assert "gloo" in key
            remembered[key] |= {"alpha_s": 2.0**-6, "beta_s_per_byte": 2.0**-30}
            file.write_text(json.dumps(remembered))
        found.append(replicated())
        with mock.patch.dict("os.environ", DP_COMPILE_LINK="nominal"):
            found.append(replicated())
        with mock.patch.dict("os.environ", DP_COMPILE_LINK="measured"):
            found.append(replicated())
    return found


def test_the_link_is_measured_once_and_remembered(ranks2: Ranks, tmp_path: Path) -> None:
    one, other = ranks2.run(train_on_links, str(tmp_path))
    assert one == other
    noisy, binned, remembered, off, real = one
    assert noisy == off
    assert "not measured" in off[1]
    assert binned[0] == AllReduceCost(64e-6, 1e-9)
    assert "in factors of two" in binned[1]
    assert remembered[0] == AllReduceCost(2.0**-6, 2.0**-30)
    assert remembered[2] < binned[2]
    if "in factors of two" in real[1]:
        assert math.log2(real[0].alpha_s * 1e6).is_integer()
        assert math.log2(1e-9 / real[0].beta_s_per_byte).is_integer()
