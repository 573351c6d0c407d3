"""What Inductor made of our order: launches and waits in the code that really runs."""

from __future__ import annotations

import re

import pytest
import torch
from generated_code import read_code
from torch import nn
from torch._inductor.utils import run_and_get_code

import dp_compile


def code_of_backward(model: nn.Module, x: torch.Tensor) -> str:
    """The generated code of the one captured backward of a replicated model."""
    torch._dynamo.reset()
    loss = torch.compile(model)(x).square().mean()
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(loss.backward)
    (code,) = (code for code in codes if "all_reduce" in code)
    assert not read_code(code).faults
    return code[code.index("def call(") :]


def shape_of(code: str) -> str:
    """One letter a call: `m` a GEMM, `k` a generated kernel, `A` an all-reduce, `W` a wait."""
    letters = {
        r"_c10d_functional\.all_reduce": "A",
        r"_c10d_functional\.wait_tensor": "W",
        r"extern_kernels\.": "m",
        r"^\s*cpp_fused": "k",
    }
    found = [letter for line in code.splitlines() for pattern, letter in letters.items() if re.search(pattern, line)]
    return "".join(found)


@pytest.mark.usefixtures("fake_group")
def test_launches_stand_behind_their_last_gradient_and_waits_at_the_end() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))
    dp_compile.replicate(model, bucket_cap_mb=0.03)
    shape = shape_of(code_of_backward(model, torch.randn(8, 64)))
    launches = dp_compile.report(model).captures[0].collectives
    assert launches == 3
    assert shape.count("A") == launches
    # Of 11 GEMMs (6 for weights, 5 for inputs) 3 make the first bucket's gradients; 8 run while it is reduced.
    compute, waits = shape.rstrip("W"), len(shape) - len(shape.rstrip("W"))
    assert waits == launches
    assert [part.count("m") for part in compute.split("A")] == [3, 4, 4, 0]
