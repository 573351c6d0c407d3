"""The program of Ray Train in docs/integrations.md on two local workers, one of which dies, beside one process.

    python tests/integrations/ray_run.py FOLDER PROGRAM

Ray pickles what stands in the script that is run, so that workers import nothing of the tests.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from torch import nn

import dp_compile

STEPS, DIES_BEFORE = 8, 5
storage = sys.argv[1]
made: list[nn.Module] = []


def make_model() -> nn.Module:
    torch.manual_seed(0)
    made.append(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    return made[-1]


def drawn(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 1 dies here once; before the last step each says which way its backwards went."""
    died = Path(storage, "died")
    if step == DIES_BEFORE and rank == 1 and not died.exists():
        died.touch()
        os._exit(1)
    if step == STEPS - 1:
        Path(storage, f"ways{rank}").write_text(json.dumps(dp_compile.report(made[-1]).backwards))
    return drawn(step, rank)


def alone() -> nn.Module:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        parts = [drawn(step, rank) for rank in range(2)]
        x, y = (torch.cat([part[which] for part in parts]) for which in range(2))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def said_by(rank: int, what: str) -> Any:
    return json.loads(Path(storage, f"{what}{rank}").read_text())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    exec(Path(sys.argv[2]).read_text(), globals())
    with globals()["result"].checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "state.pt"))
    assert state["done"] == STEPS
    assert Path(storage, "died").exists()
    first, second = (said_by(rank, "ways") for rank in range(2))
    assert first == second
    assert set(first) == {"captured"}
    assert first["captured"] < STEPS - 1  # it went on from a checkpoint
    for name, expected in alone().state_dict().items():
        torch.testing.assert_close(state["model"][name], expected, rtol=1e-5, atol=1e-6)
    print("through")
