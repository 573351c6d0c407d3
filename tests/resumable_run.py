"""A training that can be interrupted: `resumable_run.py CHECKPOINTS RESULT`, with a checkpoint after each step.

In step `KILL_AT` a rank with the variable `DIES` kills itself and its agent of `torchrun`.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dp_compile

STEPS = 6
KILL_AT = 3


def train(directory):
    """Train from the latest checkpoint in `directory` to the end. Returns the parameters."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = load(directory, model, optimizer)
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    compiled = torch.compile(model, backend="aot_eager")
    print(f"rank {dist.get_rank()} starts at step {first}", flush=True)
    for number in range(first, STEPS):
        if number == KILL_AT and "DIES" in os.environ:
            for process in (os.getppid(), os.getpid()):
                os.kill(process, signal.SIGKILL)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{directory}/{number + 1}")
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def load(directory, model, optimizer):
    """Load the latest complete checkpoint. Returns how many steps it has had."""
    complete = [int(path.parent.name) for path in Path(directory).glob("*/.metadata")]
    if not complete:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{directory}/{max(complete)}")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return max(complete)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parameters = train(sys.argv[1])
    if dist.get_rank() == 0:
        torch.save(parameters, sys.argv[2])
    dist.destroy_process_group()
