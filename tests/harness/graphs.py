"""Plans and captured graphs of six models as text, with counters of their steps."""

import re
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dp_compile
from dp_compile._torch import inductor
from dp_compile.train.gpt import GPT, GPTConfig


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )
        self.to(memory_format=torch.channels_last)


class Tied(nn.Module):
    """One weight used by two layers; a frozen one; dtypes that do not share a bucket."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(8, 8), nn.Linear(8, 8)
        self.back.weight = self.there.weight
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = self.fixed(self.back(torch.relu(self.there(x))))
        return self.wide(x.double()).float()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(1)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


HALF = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
COUNTED = ("_c10d_functional.all_reduce", "_c10d_functional.wait_tensor", "copy", "dp_compile.flat_bucket")

MODELS = {
    "gpt": (
        lambda: GPT(GPTConfig(vocabulary=64, context=16, width=16, layers=1, heads=2)),
        lambda: torch.randint(0, 64, (2, 16)),
        {},
    ),
    "convnet": (ConvNet, lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), {}),
    "small_layers": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))),
        lambda: torch.randn(4, 8),
        {"bucket_cap_mb": 0.001},
    ),
    "lookup": (
        lambda: nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)),
        lambda: torch.randint(0, 1000, (4,)),
        {},
    ),
    "tied": (Tied, lambda: torch.randn(4, 8), {}),
    "attention": (Attention, lambda: torch.randn(2, 4, 16), {"mp_policy": HALF}),
}


def describe(name):
    """Plan, counters of three steps, and the graph of the first after all passes, on this rank."""
    build, batch, options = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs = []
    compile_graph = inductor.compile_with_aot_eager

    def recorded(gm, inputs, graph_pass, _=None):
        return compile_graph(gm, inputs, graph_pass, lambda graph, code: graphs.append(code))

    config = dp_compile.ReplicateConfig(backend="aot_eager", **options)
    model = dp_compile.replicate(build(), config=config)
    compiled = torch.compile(model, backend="aot_eager")
    with mock.patch.object(inductor, "compile_with_aot_eager", recorded):
        for step in range(3):
            model.zero_grad(set_to_none=step < 2)
            compiled(batch()).square().mean().backward()
    report = dp_compile.report(model)
    dp_compile.unreplicate(model)
    # Without the deletions and the namespace of each op.
    noise = r"torch\.ops\.(aten\.)?|, layout = torch.strided|, device = device\(type='cpu'\)"
    lines = [re.sub(noise, "", line.partition(";")[0]) for line in graphs[0].strip().splitlines()]
    counters = [f"backwards: {dict(report.backwards)}", f"compilations: {len(graphs)}"]
    counters += [f"{op}: {sum(f' = {op}' in line for line in lines)}" for op in COUNTED]
    return "\n".join([str(report.plan), *counters, *lines]) + "\n"
