"""The way of one gradient, by the files that are entered while something is done to it. One process, fake group."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity import AOT, compile_whole
from torch import fx, nn

import dp_compile

ROOT = Path(dp_compile.__file__).parent
TOOLS = ("_torch", "fx")  # they know neither gradients nor buckets
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
# What can be done to a gradient: mark it, change its nodes, reduce it.
TOUCHES = [
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (fx.Graph, "create_node"),
    *((fx.Node, name) for name in ("prepend", "append", "replace_all_uses_with")),
    *((dist, name) for name in ("all_reduce", "reduce_scatter_tensor")),
]


@pytest.mark.parametrize("way", ["captured", "eager"])
def test_a_gradient_passes_the_files_of_the_design(fake_group, monkeypatch, way):
    entered = {}

    def noting(call):
        def called(*args, **kwargs):
            frame, stack = sys._getframe(1), []
            while frame is not None:
                stack.append(Path(frame.f_code.co_filename))
                frame = frame.f_back
            ours = [each.relative_to(ROOT) for each in reversed(stack) if each.is_relative_to(ROOT)]
            entered.update(dict.fromkeys(each.as_posix() for each in ours if each.parts[0] not in TOOLS))
            return call(*args, **kwargs)

        return called

    for owner, name in TOUCHES:
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    model = nn.Sequential(nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 3, bias=False))
    dp_compile.replicate(model, config=AOT)
    compiled = compile_whole(model) if way == "captured" else model
    compiled(torch.randn(4, 7)).sum().backward()
    stations = dict.fromkeys(next((n for n, files in enumerate(WAY) if file in files), file) for file in entered)
    if way == "captured":
        assert list(stations) == [0, 1, 2, 3, 5, 4, 6, 7], entered  # the compiler asks for the graph
    else:
        assert set(stations) <= {0, 1, 2, 6}, entered
