"""`.ci/gpu`: what it says where there is no GPU; and with one, what only a GPU can show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import run_and_get_code

import dp_compile
from dp_compile.testing.generated_code import read_code
from dp_compile.train.gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[2]
FILES = (
    "fabric.json fabric.txt machine.txt memory.json nccl.json nccl.txt profile.txt step.json summary.txt tests.txt "
    "timeline.html timeline.txt trace.json.gz"
).split()


def ci_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests/gpu/on_a_gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_every_file_says_so(tmp_path: Path) -> None:
    done = ci_gpu("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert {path.read_text() for path in tmp_path.iterdir()} == {"not run: no GPU\n"}
    assert "missing: " in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    done = ci_gpu("--out", str(tmp_path / "results"))
    assert done.returncode == 1
    assert "missing: torch" in done.stderr or "missing: no GPU" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_with_one_rank_trains_as_without(tmp_path: Path, dtype: torch.dtype) -> None:
    """And in the real code too nobody touches what the network has."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = GPT(GPTConfig()).to("cuda", dtype)
        tokens = torch.randint(0, 256, (2, 128), device="cuda")
        expected = gradients(model, tokens)
        model.zero_grad()
        dp_compile.replicate(model, bucket_cap_mb=0.5)
        loss = torch.compile(model)(tokens).float().square().mean()
        with torch._inductor.config.patch(fx_graph_cache=False):
            _, codes = run_and_get_code(loss.backward)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = expected[name].abs().max()
            assert (parameter.grad - expected[name]).abs().max() <= scale * (1e-3 if dtype == torch.float32 else 5e-2)
        (code,) = (code for code in codes if "all_reduce" in code)
        assert not read_code(code).faults
        assert dp_compile.report(model).captures[0].collectives > 2
    finally:
        dist.destroy_process_group()


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model(tokens).float().square().mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
