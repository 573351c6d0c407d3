"""Several replicated modules on one group: each rank knows whose gradients it reduces, and each keeps its own way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, batch, mlp
from parity import compare
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.errors import DPCompileError
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.testing.ranks import Ranks

# --- other modules on other ranks --------------------------------------------------------------------------------


def run_mix(way: str) -> str:
    """In the fourth step rank 0 needs the first head, rank 1 the second: of the same shapes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    heads = [dp_compile.replicate(nn.Sequential(nn.Linear(6, 6)), config=AOT) for _ in range(2)]
    runs = [torch.compile(head, backend="aot_eager") if way != "not compiled" else head for head in heads]
    try:
        for number in range(4):
            for run in runs if number < 3 else [runs[dist.get_rank()]]:
                with torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False):
                    run(batch(number)).square().mean().backward()
    except DPCompileError as error:
        return str(error)
    finally:
        for head in heads:
            dp_compile.unreplicate(head)
    return "no error"


@pytest.mark.parametrize("way", ["captured", "eager hooks", "not compiled"])
def test_ranks_that_reduce_different_modules_together(ranks2: Ranks, way: str) -> None:
    """Gradients of two modules were averaged with each other, without an error."""
    errors = ranks2.run(run_mix, way)
    for error in errors:
        assert "reduced different modules together" in error
        assert "rank 0 the module of 0.weight" in error
        assert "rank 1 the module of 0.weight" in error


# --- modules of different kinds in one backward --------------------------------------------------------------------

SECOND: dict[str, dict[str, Any]] = {
    "other passes": {"passes": DEFAULT_PASSES[:1]},
    "torch's DDP": {},
}


def run_kinds(kind: str) -> dict[str, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = [mlp(), mlp()]
    theirs = [DistributedDataParallel(copy.deepcopy(each)) for each in ours]
    first, of_torch = dp_compile.replicate(ours[0], config=AOT), kind == "torch's DDP"
    second: nn.Module = (
        DistributedDataParallel(ours[1]) if of_torch else dp_compile.replicate(ours[1], config=AOT, **SECOND[kind])
    )
    compiled = torch.compile(first, backend="aot_eager")
    for number in range(3):
        for model in (*ours, *theirs):
            model.zero_grad()
        second(compiled(batch(number))).square().mean().backward()
        theirs[1](theirs[0](batch(number))).square().mean().backward()
        for mine, other in zip(ours, theirs, strict=True):
            compare(mine, other.module, f"step {number}", rtol=1e-5, atol=1e-6)
    report = dp_compile.report(first)
    for each in [first] if of_torch else [first, second]:
        dp_compile.unreplicate(each)
    return dict(report.backwards)


@pytest.mark.parametrize("kind", SECOND)
def test_modules_of_different_kinds_in_one_backward(ranks: Ranks, kind: str) -> None:
    for backwards in ranks.run(run_kinds, kind):
        assert backwards == {"eager hooks": 3}
