"""A training that is started by `python -m dp_compile.elastic`; one line of JSON for each block on standard output.

Its arguments: the last generation, and its steps; a directory; and faults, each `PROCESS@BLOCK:PLACE:WHAT`. The
batch of a step is a function of the step and the rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile import elastic
from dp_compile.elastic.training import JOIN_VARIABLE

TIMEOUT_S = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def batch(step: int, rank: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + micro))


def digest(model: nn.Module) -> str:
    tensors = [each.detach().numpy().tobytes() for each in model.state_dict().values()]
    return hashlib.sha1(b"".join(tensors)).hexdigest()[:12]


def strike(what: str) -> None:
    if what in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    elif what == "raise":
        raise ValueError("a fault of this rank's own")
    elif what == "sleep":
        time.sleep(60)  # left out meanwhile, and killed


def main(last: int, steps: int, directory: str, *faults: str) -> None:
    torch.set_num_threads(1)
    elastic.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    process = os.environ.get(JOIN_VARIABLE) or os.environ["RANK"]
    model = dp_compile.replicate(Net(), find_unused_parameters=True)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    training = elastic.Training(model, optimizer, scheduler)
    planned = dict(each.split("@") for each in faults)
    at, place, what = planned.get(process, "-1:-:-").split(":")
    generation, since = 0, 0
    for block in itertools.count():
        step, is_struck = training.steps, block == int(at)
        start_s = time.monotonic()
        with training.step():
            for micro in (0, 1):
                with dp_compile.no_sync(model) if micro == 0 else contextlib.nullcontext():
                    loss = compiled(batch(step, training.rank, micro)).square().mean()
                    if is_struck and place == "forward" and micro == 1:
                        strike(what)
                    if is_struck and place == "backward" and micro == 1:
                        threading.Timer(0.001, strike, [what]).start()
                    loss.backward()
            if is_struck and place == "optimizer":
                strike(what)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if is_struck and place == "between":
            strike(what)
        line = {
            "process": process,
            "from": step,
            "to": training.steps,
            "ranks": training.world_size,
            "rank": training.rank,
            "seconds": round(time.monotonic() - start_s, 3),
            "digest": digest(model),
            "captures": len(dp_compile.report(model).captures),
        }
        os.write(1, f"{json.dumps(line)}\n".encode())  # whole, also where others write too
        if line["from"] == line["to"] and training.rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], f"{directory}/{step}.pt")
        if training.generation != generation:
            generation, since = training.generation, training.steps
        if training.generation >= last and training.steps >= since + steps:
            break
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
