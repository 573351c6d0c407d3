"""The training of docs/guide.md: a GPT of 4 layers, and the lines that look inside."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

import dp_compile
from dp_compile.train.gpt import GPT, GPTConfig
from dp_compile.train.job import load_corpus

CONTEXT, BATCH_SIZE = 16, 1  # little to compute, so that communication matters on a CPU


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bucket-cap-mb", type=float)
    parser.add_argument("--plan")
    parser.add_argument("--save", required=True, help="NAME: writes NAME.json and NAME_trace.json.gz")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=CONTEXT, width=128, layers=4, heads=4))
    dp_compile.calibrate()  # measures what an all-reduce costs here
    config = dp_compile.ReplicateConfig(bucket_cap_mb=options.bucket_cap_mb)
    dp_compile.replicate(model, config=config, plan=options.plan)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text, generator = load_corpus()[0], torch.Generator().manual_seed(0)

    def train(steps: int) -> None:
        for _ in range(steps):
            starts = torch.randint(len(text) - CONTEXT, (dist.get_world_size(), BATCH_SIZE), generator=generator)
            tokens = text[starts[dist.get_rank()][:, None] + torch.arange(CONTEXT + 1)].long()
            F.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(10)  # compiles
    with dp_compile.measure(model) as measurement:
        train(200)
    if dist.get_rank() == 0:
        fastest = min(measurement.backwards, key=lambda backward: backward.backward_s)  # least disturbed by others
        step = replace(
            dp_compile.step_of(model),
            measured=replace(fastest, source="the fastest of 200, by dp_compile.measure()"),
        )
        Path(f"{options.save}.json").write_text(step.to_json())
        print(measurement, flush=True)
        print(f"the fastest backward {fastest.backward_s * 1e3:.3g} ms", flush=True)
    with torch.profiler.profile() as profile:
        train(3)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(f"{options.save}_trace.json.gz")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
