"""python profiled.py FOLDER [cpu]: a GPT on one rank, ours and torch's DDP: peak memory, a profiler trace, a step file.

On a GPU with NCCL; `cpu` is to try the script itself, with gloo.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import dp_compile
from dp_compile.train.gpt import GPT, GPTConfig

STEPS = 5


def train(model: nn.Module, tokens: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compiled = torch.compile(model)
    for _ in range(steps):
        compiled(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak(model: nn.Module, tokens: torch.Tensor) -> int | None:
    """Bytes at the peak of a settled step; unknown on a CPU."""
    train(model, tokens, STEPS)
    if tokens.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train(model, tokens, STEPS)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main(folder: str, device: str = "cuda") -> None:
    out, cuda = Path(folder), device == "cuda"
    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=dist.FileStore(f"{meeting}/store", 1), rank=0, world_size=1
        )
        config = GPTConfig(vocabulary=32768, context=1024, width=1024, layers=12, heads=16) if cuda else GPTConfig()
        batch = 4 if cuda else 2
        torch.manual_seed(0)
        tokens = torch.randint(0, config.vocabulary, (batch, config.context), device=device)
        peaks = {"torch_ddp_nbytes": peak(DistributedDataParallel(GPT(config).to(device)), tokens)}
        torch.compiler.reset()
        torch.manual_seed(0)
        model = dp_compile.replicate(GPT(config).to(device))
        peaks["dp_compile_nbytes"] = peak(model, tokens)
        (out / "memory.json").write_text(json.dumps(peaks, indent=1) + "\n")
        print(dp_compile.report(model))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities) as profiled:
            train(model, tokens, STEPS)
        profiled.export_chrome_trace(str(out / "trace.json.gz"))
        (out / "step.json").write_text(dp_compile.step_of(model).to_json())
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
