"""Checkpoints that one version of torch writes and another one reads. Started by `tests/state/test_versions.py`.

usage: checkpoint_run.py write DIRECTORY
       checkpoint_run.py read DIRECTORY ...

Two ranks, started by this program. `write` trains three steps with a plain, and three with a sharded optimizer, and
saves both: the model's state dict by `torch.save`, model and optimizer by torch's distributed checkpoint, and
`full_state_dict`. `values.json` has a digest of each tensor. `read` loads all of them into modules and
new optimizers, compares each tensor with its digest, trains a step, and writes a line for each
directory: its name, and "loads" or the error. Or `LOADS_FILES`: `torch.save` only. Since torch 2.15 the metadata of
torch's distributed checkpoint has strides, and older versions load none of it, without this package too:
`pickle.load(open(f"{checkpoint}/.metadata", "rb"))` raises "too many values to unpack (expected 5)" in
`TensorProperties.__setstate__`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dp_compile
from dp_compile.optim import full_state_dict, in_backward

RANKS = 2
STEPS = 3
LOADS_FILES = "loads files, as torch's distributed checkpoint of 2.15 has strides in its metadata"
HAS_STRIDES = "strides" in TensorProperties.__dataclass_fields__


class Both:
    """A module with a plain optimizer and one with a sharded optimizer in its backward."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        # Five columns and a bias: a bucket is cut inside of a parameter.
        self.plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).bfloat16().float()
        self.sharded = copy.deepcopy(self.plain)
        config = dp_compile.ReplicateConfig(backend="aot_eager")
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        self.parts = torch.optim.AdamW(self.sharded.parameters(), lr=0.01)
        for module in (self.plain, self.sharded):
            dp_compile.replicate(module, config=config)
        in_backward(self.sharded, self.parts, shard=True)
        self.runs = [torch.compile(each, backend="aot_eager") for each in (self.plain, self.sharded)]

    def train(self, steps: int) -> None:
        for step in range(steps):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            for run, optimizer in zip(self.runs, (self.optimizer, self.parts), strict=True):
                run(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    def digests(self) -> dict[str, str]:
        """Of every tensor, whole, by names."""
        states = {
            "plain": self.plain.state_dict(),
            "plain optimizer": self.optimizer.state_dict(),
            "sharded": self.sharded.state_dict(),
            "sharded optimizer": full_state_dict(self.parts),
        }
        return {name: digest(value) for name, value in tensors_of("", states)}

    def close(self) -> None:
        for module in (self.plain, self.sharded):
            dp_compile.unreplicate(module)


def tensors_of(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, (dict, list, tuple)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_of(f"{prefix}/{key}", each)


def digest(value: torch.Tensor) -> str:
    value = value.detach().contiguous()
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def write(directory: Path) -> None:
    both = Both(seed=0)
    both.train(STEPS)
    found = both.digests()
    model, optimizer = get_state_dict(both.plain, both.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "plain")
    full = full_state_dict(both.parts)
    dcp.save({"model": both.sharded.state_dict(), "optimizer": full}, checkpoint_id=directory / "sharded")
    if dist.get_rank() == 0:
        torch.save(both.plain.state_dict(), directory / "model.pt")
        torch.save({"optimizer": both.optimizer.state_dict(), "sharded optimizer": full}, directory / "optimizers.pt")
        (directory / "values.json").write_text(json.dumps({"strides": HAS_STRIDES, "tensors": found}))
    both.close()


def read(directory: Path) -> str:
    """Raises if anything is not what was written."""
    written = json.loads((directory / "values.json").read_text())
    expected: dict[str, str] = written["tensors"]
    # By torch.save: the plain model, and both optimizers from whole state dicts.
    both = Both(seed=1)
    both.plain.load_state_dict(torch.load(directory / "model.pt"))
    saved = torch.load(directory / "optimizers.pt")
    both.optimizer.load_state_dict(saved["optimizer"])
    both.parts.load_state_dict(saved["sharded optimizer"])
    compare(both, expected, but="/sharded/")
    both.train(1)
    both.close()
    if written["strides"] and not HAS_STRIDES:
        return LOADS_FILES
    # By torch's distributed checkpoint.
    both = Both(seed=2)
    model, optimizer = get_state_dict(both.plain, both.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "plain")
    set_state_dict(both.plain, both.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    # A plain optimizer's state has the shapes of the whole.
    whole = copy.deepcopy({"model": both.sharded.state_dict(), "optimizer": both.optimizer.state_dict()})
    dcp.load(whole, checkpoint_id=directory / "sharded")
    both.sharded.load_state_dict(whole["model"])
    both.parts.load_state_dict(whole["optimizer"])
    compare(both, expected)
    both.train(1)
    both.close()
    return "loads"


def compare(both: Both, expected: dict[str, str], but: str = "nothing") -> None:
    found = both.digests()
    other = [name for name in expected.keys() | found if expected.get(name) != found.get(name)]
    if wrong := sorted(name for name in other if not name.startswith(but)):
        raise ValueError(f"not what was written: {', '.join(wrong)}")


def serve(rank: int, store: str, what: str, directories: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    for each in directories:
        if what == "write":
            write(Path(each))
            continue
        try:
            found = read(Path(each))
        except (Exception, CheckpointException) as error:  # the latter is none
            traceback.print_exc()
            found = f"{type(error).__name__}: {error}".replace("\n", " ")
        if rank == 0:
            print(f"{each}\t{found}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (f"{folder}/store", sys.argv[1], sys.argv[2:]), nprocs=RANKS)
