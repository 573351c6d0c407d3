"""Checkpoints that one version of torch writes and another one reads. Started by `tests/state/test_versions.py`.

usage: checkpoint_run.py write DIRECTORY
       checkpoint_run.py read DIRECTORY ...

Two ranks, started by this program. `write` trains three steps with a plain, and three with a sharded optimizer, and
saves both: the model's state dict by `torch.save`, model and optimizer by torch's distributed checkpoint, and
`full_state_dict`; each tensor once more in `values.pt`. `read` loads all of them into new modules and optimizers,
compares each tensor, trains a step, and writes a line for each directory: its name, and "loads" or the error. Or
`LOADS_FILES`: `torch.save` only. Since torch 2.15 the metadata of
torch's distributed checkpoint has strides, and older versions load none of it, without this package too:
`pickle.load(open(f"{checkpoint}/.metadata", "rb"))` raises "too many values to unpack (expected 5)" in
`TensorProperties.__setstate__`.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils import _pytree as pytree

import dp_compile
from dp_compile.optim import full_state_dict, in_backward
from dp_compile.testing.ranks import Ranks

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

    def tensors(self) -> dict[str, torch.Tensor]:
        """All, whole, by names."""
        states = {
            "plain": self.plain.state_dict(),
            "plain optimizer": self.optimizer.state_dict(),
            "sharded": self.sharded.state_dict(),
            "sharded optimizer": full_state_dict(self.parts),
        }
        found, _ = pytree.tree_flatten_with_path(states)
        return {pytree.keystr(path): value for path, value in found if isinstance(value, torch.Tensor)}

    def close(self) -> None:
        for module in (self.plain, self.sharded):
            dp_compile.unreplicate(module)


def write(directory: Path) -> None:
    both = Both(seed=0)
    both.train(STEPS)
    found = both.tensors()
    model, optimizer = get_state_dict(both.plain, both.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "plain")
    full = full_state_dict(both.parts)
    dcp.save({"model": both.sharded.state_dict(), "optimizer": full}, checkpoint_id=directory / "sharded")
    if dist.get_rank() == 0:
        torch.save(both.plain.state_dict(), directory / "model.pt")
        torch.save({"optimizer": both.optimizer.state_dict(), "sharded optimizer": full}, directory / "optimizers.pt")
        torch.save({"strides": HAS_STRIDES, "tensors": found}, directory / "values.pt")
    both.close()


def read(directory: Path) -> str:
    """Raises if anything is not what was written."""
    written = torch.load(directory / "values.pt")
    expected: dict[str, torch.Tensor] = written["tensors"]
    # By torch.save: the plain model, and both optimizers from whole state dicts.
    both = Both(seed=1)
    both.plain.load_state_dict(torch.load(directory / "model.pt"))
    saved = torch.load(directory / "optimizers.pt")
    both.optimizer.load_state_dict(saved["optimizer"])
    both.parts.load_state_dict(saved["sharded optimizer"])
    compare(both, expected, but="['sharded']")
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


def compare(both: Both, expected: dict[str, torch.Tensor], but: str = "nothing") -> None:
    found = both.tensors()
    same = {name for name, value in found.items() if name in expected and torch.equal(value, expected[name])}
    if wrong := sorted(name for name in (expected.keys() | found) - same if not name.startswith(but)):
        raise ValueError(f"not what was written: {', '.join(wrong)}")


if __name__ == "__main__":
    ranks = Ranks(2)
    for each in sys.argv[2:]:
        answers = ranks.outcomes({"write": write, "read": read}[sys.argv[1]], Path(each))
        failed = next((str(answer) for ok, answer in answers if not ok), "")
        if failed:
            print(failed, file=sys.stderr)
            ranks.stop()
        if sys.argv[1] == "read":
            print(f"{each}\t{failed.strip().splitlines()[-1] if failed else answers[0][1]}", flush=True)
        elif failed:
            sys.exit(1)
    ranks.stop()
