"""The way of one gradient through the package: the files of docs/design.md, in that order, and no other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._inductor.utils import fresh_cache

import dp_compile

ROOT = Path(dp_compile.__file__).parent
TOOLS = ("_torch", "fx")
"""Rooms of tools: they know neither gradients nor buckets."""
WAY = (
    ("replication/replicate.py",),
    ("engine/hooks.py",),
    ("engine/backward.py",),
    ("engine/capture.py",),
    ("engine/graph.py",),
    ("engine/compile.py", "passes/pipeline.py"),
    ("passes/bucketing.py", "passes/reduction.py"),
    ("passes/overlap.py", "passes/lowering.py"),
)
TOUCHES = [
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (fx.Graph, "create_node"),
    *((fx.Node, name) for name in ("prepend", "append", "replace_all_uses_with")),
    *((dist, name) for name in ("all_reduce", "reduce_scatter_tensor")),
]
"""What can be done to a gradient: mark it, change its nodes, reduce it."""


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files on the stack whenever something is done to a gradient, the first to be entered first."""
    files: list[str] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            frame, stack = sys._getframe(1), list[str]()
            while frame is not None:
                stack.append(frame.f_code.co_filename)
                frame = frame.f_back  # type: ignore[assignment]
            ours = (Path(each).relative_to(ROOT) for each in reversed(stack) if Path(each).is_relative_to(ROOT))
            files.extend(each.as_posix() for each in ours if each.parts[0] not in TOOLS)
            return call(*args, **kwargs)

        return called

    for owner, name in TOUCHES:
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    return files


@pytest.mark.parametrize("way", ["captured", "eager"])
def test_a_gradient_passes_the_files_of_the_design(fake_group: object, entered: list[str], way: str) -> None:
    model = dp_compile.replicate(nn.Sequential(nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 3, bias=False)))
    compiled = torch.compile(model) if way == "captured" else model
    with fresh_cache():  # passes run, and are not found done
        compiled(torch.randn(4, 7)).sum().backward()
    files = list(dict.fromkeys(entered))
    stations = [next((n for n, station in enumerate(WAY) if file in station), file) for file in files]
    if way == "captured":
        assert list(dict.fromkeys(stations)) == [0, 1, 2, 3, 5, 4, 6, 7], files  # the compiler asks for the graph
    else:
        assert set(stations) <= {0, 1, 2, 6}, files
