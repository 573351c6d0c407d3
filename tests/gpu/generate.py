"""A separate process, for CUDA has to be played before torch is there: python generate.py results.json mlp tied ...

Captures the backward of each case on cuda:0 among eight ranks, lets Inductor generate its code for sm_90 and writes it
down with its plan, a JSON object by the case's name. Fake tensors go through the graph: no kernel runs.
"""

import played

if __name__ == "__main__":
    played.load()

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

import dp_compile
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.plan.backends import CLASSES, FABRIC, Backend
from dp_compile.replication.replicate import replicate_module, unreplicate

RANKS = 8
Subject = tuple[nn.Module, torch.Tensor]
Results = dict[str, dict[str, Any]]
"""What `generate.py` writes down, by the case's name."""


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too."""

    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(97, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 97, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(F.gelu(self.body(self.words(x))))


def mlp():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU()))), torch.randn(8, 64)


def embedding():
    return nn.Sequential(nn.Embedding(97, 24), nn.Linear(24, 5)), torch.randint(0, 97, (2, 11))


def odd():
    layers = (layer for _ in range(2) for layer in (nn.Linear(6, 3), nn.GELU(), nn.LayerNorm(3), nn.Linear(3, 6)))
    return nn.Sequential(*layers), torch.randn(7, 6)


def padded():
    return nn.Sequential(nn.Linear(65, 63), nn.GELU(), nn.Linear(63, 65)), torch.randn(64, 65)


@dataclass(frozen=True)
class Case:
    """`cap`: of a bucket in bytes, 0: the planner's. `settings`: of Inductor. `nodes`: more than 1 are two levels."""

    make: Callable[[], Subject]
    cap: int = 0
    dtype: torch.dtype = torch.float32
    policy: MixedPrecisionPolicy | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    backwards: int = 1
    nodes: int = 1


BF16 = torch.bfloat16
CASES = MappingProxyType(
    {
        "mlp": Case(mlp, 31_457),
        "odd": Case(odd, 200),
        "embedding-bf16": Case(embedding, dtype=BF16),
        "kept": Case(lambda: (Tied(), torch.randint(0, 97, (2, 11))), 2_000, backwards=2),
        "wire-bf16": Case(mlp, 15_000, policy=MixedPrecisionPolicy(reduce_dtype=BF16)),
        "policy-bf16": Case(mlp, 15_000, policy=MixedPrecisionPolicy(BF16, BF16)),
        "two-level": Case(mlp, 31_457, nodes=2),
        "padded": Case(padded, settings={"shape_padding": True, "force_shape_pad": True}),
    }
)


class Squared(nn.Module):
    """The loss inside the compiled forward: outside, fake tensors would compute on a device."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).float().square().mean()


def graph_order(graph):
    """Launches and waits as the passes left them, each wait with its launch's number."""
    launches = [node for node in graph.nodes if is_collective(node)]
    flat = {node: number for number, launch in enumerate(launches) for node in (launch, *launch.users)}
    waits = {node: str(flat[node.args[0]]) for node in graph.nodes if is_wait(node)}
    return "".join("A" if node in launches else waits.get(node, "") for node in graph.nodes)


def result_of(case):
    torch._dynamo.reset()
    mode, codes, orders = FakeTensorMode(), list[str](), list[str]()

    def compiled(graph, code):
        """What stands for a compiled graph: fake tensors go through the graph."""
        codes.append(code)
        orders.append(graph_order(graph.graph))

        def call(arguments):
            fakes = list(arguments)
            arguments.clear()
            with mode:
                outputs = torch.fx.Interpreter(graph).run(*fakes)
            return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

        return call

    played.install(compiled)
    torch.set_default_dtype(case.dtype)
    try:
        with mode, torch.device("cuda:0"):
            model, x = case.make()
    finally:
        torch.set_default_dtype(torch.float32)
    # A mesh of CUDA devices would ask them for more than is played.
    mesh = None if case.nodes == 1 else init_device_mesh("cpu", (case.nodes, RANKS // case.nodes))
    cap_mb = case.cap / 2**20 if case.cap else None
    config = dp_compile.ReplicateConfig(check_reductions=False, bucket_cap_mb=cap_mb, mp_policy=case.policy)
    with torch._inductor.config.patch(dict(case.settings)):
        replicate_module(model, {}, config=config, device_mesh=mesh, needs_values=False)
        step = torch.compile(Squared(model))
        for _ in range(case.backwards):
            step(x).backward()
    record = dp_compile.report(model)
    buckets = [
        {
            "stages": [stage.op for stage in bucket.key.reduction.stages],
            "numels": list(bucket.key.reduction.numels(bucket.numel)),
            "members": {each.gradient.name: [each.offset, each.gradient.numel] for each in bucket.members},
        }
        for bucket in record.plan.buckets
    ]
    unreplicate(model)
    return {
        "codes": [code for code in codes if "all_reduce_" in code],
        "forwards": [code for code in codes if "all_reduce_" not in code],
        "graph_orders": [order for order in orders if order],
        "buckets": buckets,
        "copied": [each.gradient for each in record.captures[-1].placements if each.is_copied],
    }


def main(target, *names):
    cast(dict[str, Backend], CLASSES)["FakeProcessGroup"] = FABRIC
    dist.Backend.register_backend("fabric", _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("fabric", store=FakeStore(), rank=0, world_size=RANKS)
    results = {}
    for name in names:
        try:
            results[name] = result_of(CASES[name])
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    Path(target).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
