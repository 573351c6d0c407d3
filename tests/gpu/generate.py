"""A process of its own, for CUDA has to be played before torch is there: python generate.py results.json mlp tied ...

Captures the backward of each case on cuda:0 among eight ranks, lets Inductor generate its code for sm_90 and writes it
down with its plan, a JSON object by the case's name. Fake tensors go through the graph: no kernel runs.
"""

from __future__ import annotations

import played

if __name__ == "__main__":
    played.load()

import json
import sys
import traceback
from pathlib import Path
from typing import Any, cast

import cases
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

import dp_compile
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.modules.replicate import replicate_without_values, unreplicate
from dp_compile.plan.backends import CLASSES, FABRIC, Backend

RANKS = 8


class Squared(nn.Module):
    """The loss inside the compiled forward: outside, fake tensors would compute on a device."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()


class Run:
    """The graphs of one case as they are compiled: their code, and the order of launches and waits in them."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.codes: list[str] = []
        self.orders: list[str] = []

    def compiled(self, graph: Any, code: str) -> played.Compiled:
        """What stands for a compiled graph: fake tensors go through the graph."""
        self.codes.append(code)
        self.orders.append(graph_order(graph.graph))

        def call(arguments: list[Any]) -> list[Any]:
            fakes = list(arguments)
            arguments.clear()
            with self.mode:
                outputs = torch.fx.Interpreter(graph).run(*fakes)
            return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

        return call


def graph_order(graph: torch.fx.Graph) -> str:
    """Launches and waits as the passes left them, each wait with its launch's number."""
    launches = [node for node in graph.nodes if is_collective(node)]
    flat = {node: number for number, launch in enumerate(launches) for node in (launch, *launch.users)}
    waits = {node: str(flat[node.args[0]]) for node in graph.nodes if is_wait(node)}
    return "".join("A" if node in launches else waits.get(node, "") for node in graph.nodes)


def result_of(case: cases.Case) -> dict[str, Any]:
    torch._dynamo.reset()
    current.run = run = Run()
    torch.set_default_dtype(case.dtype)
    try:
        with run.mode, torch.device("cuda:0"):
            model, x = case.make()
    finally:
        torch.set_default_dtype(torch.float32)
    # A mesh of CUDA devices would ask them for more than is played.
    mesh = None if case.nodes == 1 else init_device_mesh("cpu", (case.nodes, RANKS // case.nodes))
    with torch._inductor.config.patch(dict(case.settings)):
        config = dp_compile.ReplicateConfig(**{"check_reductions": False, **case.config})
        replicate_without_values(model, config, device_mesh=mesh)
        compiled = torch.compile(Squared(model))
        for _ in range(case.backwards):
            compiled(x).backward()
    record = dp_compile.report(model)
    result = {
        "codes": [code for code in run.codes if "all_reduce_" in code],
        "forwards": [code for code in run.codes if "all_reduce_" not in code],
        "graph_orders": [order for order in run.orders if order],
        "buckets": [
            {
                "stages": [stage.op for stage in bucket.key.reduction.stages],
                "numels": list(zip(*map(bucket.key.reduction.numels, bucket.tensor_numels), strict=True)),
                "members": {each.label: [each.offset, each.numel] for each in bucket.members},
            }
            for bucket in record.plan.buckets
        ],
        "copied": {each.gradient: each.copied for each in record.captures[-1].placements if each.copied},
    }
    unreplicate(model)
    return result


class current:
    """Whose graphs are compiled now."""

    run: Run


def main(target: str, *names: str) -> None:
    played.install()
    cast(dict[str, Backend], CLASSES)["FakeProcessGroup"] = FABRIC
    dist.Backend.register_backend("fabric", _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("fabric", store=FakeStore(), rank=0, world_size=RANKS)
    played.keep_nothing(lambda graph, code: current.run.compiled(graph, code))
    results = {}
    for name in names:
        try:
            results[name] = result_of({**cases.SMALL, **cases.LARGE}[name])
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    Path(target).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
