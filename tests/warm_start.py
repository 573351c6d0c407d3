"""CPU seconds of a process until three steps are done: plain torch.compile, compiled DDP, this package; one rank.

    python tests/warm_start.py [--layers 6 --width 512] [--rounds 3]

Modes run in turns in new processes that share one folder of Inductor's cache; the first round fills it and is not
counted. CPU time, not wall time: it depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

MODES = ("compute", "ddp_compiled", "ours")


def train(mode: str, layers: int, width: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import dp_compile
    from dp_compile.train.gpt import GPT, GPTConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(GPTConfig(vocabulary=256, context=128, width=width, layers=layers, heads=4))
    wrap = {"compute": lambda: model, "ddp_compiled": lambda: DistributedDataParallel(model)}
    compiled = torch.compile(wrap.get(mode, lambda: dp_compile.replicate(model))())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(0, 256, (4, 128))
        torch.nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.mode:
        train(given.mode, given.layers, given.width)
        return
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        for number in range(given.rounds + 1):
            for mode in MODES:
                took = cpu_seconds([sys.executable, *sys.argv, "--mode", mode], environment)
                seconds[mode] += [took] if number else []
    plain = statistics.median(seconds["compute"])
    for mode, found in seconds.items():
        middle = statistics.median(found)
        print(f"{mode:13} {middle:6.2f} s  {middle / plain:.2f}  ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
