"""A process of its own, for CUDA has to be played before torch is there: python generate.py results.json mlp tied ...

Captures the backward of each case on cuda:0 among eight ranks, lets Inductor generate its code for sm_90, runs it on
the CPU beside eager code, and writes down what came of it, a JSON object by the case's name.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import played

if __name__ == "__main__":
    played.load()

import contextlib
import itertools
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, cast
from unittest import mock

import cases
import interpreted
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

import dp_compile
from dp_compile._torch import distributed, inductor
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.modules.replicate import replicate_without_values, unreplicate
from dp_compile.plan.backends import CLASSES, FABRIC, GLOO, Backend
from dp_compile.plan.reduction import Averaging, mean

RANKS = 8


class Squared(nn.Module):
    """The loss inside the compiled forward: outside, fake tensors would compute on a device."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()


class Run:
    """One case: its graphs as they are compiled, and what running them gave."""

    def __init__(self, case: cases.Case) -> None:
        self.case, self.mode, self.values = case, FakeTensorMode(), interpreted.Values()
        self.codes: list[str] = []
        self.orders: list[str] = []
        self.graph_orders: list[str] = []
        self.planted: dict[str, str] = {}

    def make(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        torch.set_default_dtype(self.case.dtype)
        try:
            return self.case.make()
        finally:
            torch.set_default_dtype(torch.float32)

    def compiled(self, graph: Any, code: str) -> played.Compiled:
        """What stands for a compiled graph: fake tensors through the graph, real ones through the code."""
        self.codes.append(code)
        self.graph_orders.append(graph_order(graph.graph))
        network = interpreted.Network(ranks_of)
        run = interpreted.load(code, network) if self.case.runs else None

        def call(arguments: list[Any]) -> list[Any]:
            fakes, reals = list(arguments), [self.values.of(each) for each in arguments]
            arguments.clear()
            if run is not None and self.case.plants and "all_reduce_" in code:
                self.planted = {name: tried(text, reals) for name, text in planted(code).items()}
            with self.mode:
                outputs = torch.fx.Interpreter(graph).run(*fakes)
            outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
            if run is not None:
                network.order = ""
                for fake, real in zip(outputs, run(reals), strict=True):
                    if isinstance(fake, torch.Tensor):
                        self.values.put(fake, real)
                self.orders.append(network.order)
            return outputs

        return call

    def loaded(self, code: str) -> played.Compiled:
        """What stands for code that may have been found: there is no graph, and fake tensors follow the real ones."""
        self.codes.append(code)
        network = interpreted.Network(ranks_of)
        run = interpreted.load(code, network)

        def call(arguments: list[Any]) -> list[Any]:
            fakes, reals = list(arguments), [self.values.of(each) for each in arguments]
            arguments.clear()
            given = {id(real): fake for real, fake in zip(reals, fakes, strict=True)}
            network.order = ""
            outputs = run([*reals])
            self.orders.append(network.order)
            # What it was given and returns has to be the same tensor among the fake ones, too.
            return [given[id(each)] if id(each) in given else self.values.fake_of(each, self.mode) for each in outputs]

        return call


def graph_order(graph: torch.fx.Graph) -> str:
    """Launches and waits as the passes left them, each wait with its launch's number."""
    launches = [node for node in graph.nodes if is_collective(node)]
    flat = {node: number for number, launch in enumerate(launches) for node in (launch, *launch.users)}
    waits = {node: str(flat[node.args[0]]) for node in graph.nodes if is_wait(node)}
    return "".join("A" if node in launches else waits.get(node, "") for node in graph.nodes)


def ranks_of(group: str) -> int:
    return distributed.group_of_name(group).size()


_SPOILT = ("freed", "{} = empty_strided_cuda((1, ), (1, ), torch.float32)"), ("written", "{}.zero_()")
_LAUNCH = re.compile(r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(all_\w+|reduce_\w+)\.default\((\w+)")


def planted(code: str) -> dict[str, str]:
    """The code with a fault in what it does with its first bucket, in each stage of its reduction."""
    lines = code.splitlines()
    launch = next(number for number, line in enumerate(lines) if _LAUNCH.search(line))
    bucket = _LAUNCH.search(lines[launch])[3]
    product = max(number for number in range(launch) if "extern_kernels" in lines[number])
    other = next(number for number in range(launch, len(lines)) if re.match(r"\s*\w+ = empty_strided", lines[number]))
    size = re.search(r"= empty_strided\w*\((\(.*?\)), (\(.*?\)), torch", lines[other])
    above = re.sub(r"= empty.*", f"= reinterpret_tensor({bucket}, {size[1]}, {size[2]}, 0)", lines[other])
    faults = {
        "early launch": _joined([*lines[:product], lines[launch], *lines[product:launch], *lines[launch + 1 :]]),
        "a buffer over a bucket in flight": _joined([*lines[:other], above, *lines[other + 1 :]]),
    }
    memory: str | None = bucket
    for number, line in enumerate(lines):
        found = _LAUNCH.search(line)
        if found is None or found[3] != memory:
            continue
        memory, indent = found[1] or found[3], line[: len(line) - len(line.lstrip())]
        wait = next(at for at in range(number, len(lines)) if f"wait_tensor.default({memory})" in lines[at])
        behind = next(at for at in range(number + 1, len(lines)) if "assert_" not in lines[at])
        faults[f"missing wait for {found[2]}"] = _joined([*lines[:wait], *lines[wait + 1 :]])
        named = {found[3]: "is given", memory: "returns"}
        for (name, of), (what, done) in itertools.product(named.items(), _SPOILT):
            text = [*lines[:behind], indent + done.format(name), *lines[behind:]]
            faults[f"what {found[2]} {of} is {what} in flight"] = _joined(text)
    return faults


def _joined(lines: list[str]) -> str:
    return "\n".join(lines)


def tried(code: str, arguments: list[Any]) -> str:
    """What running a faulty code is stopped by; nothing if nothing stops it."""
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    try:
        outputs = interpreted.load(code, interpreted.Network(ranks_of))(copies)
    except interpreted.FlightError as error:
        return str(error)
    found = any(isinstance(each, torch.Tensor) and bool(each.isnan().any()) for each in outputs)
    return "NaN in what it returns" if found else ""


@contextlib.contextmanager
def settings_of(case: cases.Case) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(dict(case.settings)))
        if case.mix_order_reduction:
            compile_fx = inductor._compile_fx

            def as_torch_has_it(*args: Any, config_patches: dict[str, Any], **options: Any) -> Any:
                patches = {name: each for name, each in config_patches.items() if "mix_order" not in name}
                return compile_fx(*args, config_patches=patches, **options)

            stack.enter_context(mock.patch.object(inductor, "_compile_fx", as_torch_has_it))
        if case.reduce_op == "sum":
            summed = mean("0", GLOO, RANKS)
            stack.enter_context(mock.patch.object(Averaging, "reduction", return_value=summed))
        if case.flash:
            stack.enter_context(flash_attention())
        yield


def mesh_of(case: cases.Case) -> DeviceMesh | None:
    """Of the type of a device that is there: a mesh of CUDA devices would ask them for more than is played."""
    return None if case.nodes == 1 else init_device_mesh("cpu", (case.nodes, RANKS // case.nodes))


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """A CPU build has no chooser of attention kernels for CUDA: without this it is always the plain mathematics."""

    def attention(query: Any, key: Any, value: Any, *_: Any, is_causal: bool = False, **__: Any) -> Any:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, 0.0, is_causal)[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()


def result_of(case: cases.Case) -> dict[str, Any]:
    torch._dynamo.reset()
    current.run = run = Run(case)
    real_model, real_x = run.make()
    with run.mode, torch.device("cuda:0"):
        model, x = run.make()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        run.values.put(tensor, real_model.state_dict(keep_vars=True)[name].detach().clone())
    run.values.put(x, real_x)
    options = {"check_reductions": False, **case.config}
    with settings_of(case):
        replicate_without_values(model, dp_compile.ReplicateConfig(**options), device_mesh=mesh_of(case))
        if case.hook is not None:
            model.register_comm_hook(None, case.hook)
        compiled = torch.compile(Squared(model))
        for _ in range(case.backwards):
            if not case.keeps:
                model.zero_grad()
            compiled(x).backward()
    record = dp_compile.report(model)
    backwards = [code for code in run.codes if "all_reduce_" in code]
    result = {
        "codes": backwards,
        "forwards": [code for code in run.codes if "all_reduce_" not in code],
        "orders": [order for order in run.orders if "A" in order],
        "graph_orders": [order for order in run.graph_orders if order],
        "planted": run.planted,
        "planted_texts": planted(backwards[-1]) if case.plants else {},
        "buckets": [
            {
                "stages": [stage.op for stage in bucket.key.reduction.stages],
                "numels": list(zip(*map(bucket.key.reduction.numels, bucket.tensor_numels), strict=True)),
                "members": {each.label: [each.offset, each.numel] for each in bucket.members},
            }
            for bucket in record.plan.buckets
        ],
        "report": str(record),
        "copied": {each.gradient: each.copied for each in record.captures[-1].placements if each.copied},
        "differences": differences(run, model, real_model, real_x) if case.runs else {},
        "assumed": run.values.assumed,
        "gradients": digests(run, model) if case.runs else {},
    }
    unreplicate(model)
    return result


def digests(run: Run, model: nn.Module) -> dict[str, str]:
    """By parameter: its gradient's bits."""
    used = ((name, each.grad) for name, each in model.named_parameters() if each.grad is not None)
    gradients = {name: run.values.of(grad).contiguous() for name, grad in used}
    return {name: sha256(each.view(torch.uint8).numpy().tobytes()).hexdigest() for name, each in gradients.items()}


def differences(run: Run, model: nn.Module, real_model: nn.Module, real_x: torch.Tensor) -> dict[str, float]:
    """By parameter: the largest difference from eager CPU code's gradient, as a part of the largest element."""
    for _ in range(run.case.backwards if run.case.keeps else 1):
        Squared(real_model)(real_x).backward()
    found = {}
    for name, parameter in real_model.named_parameters():
        given, expected = model.get_parameter(name).grad, parameter.grad
        if given is None or expected is None:
            found[name] = 0.0 if given is expected else math.inf
            continue
        got = run.values.of(given).double()
        difference = (got - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
        found[name] = float(difference) if bool(got.isfinite().all()) else math.inf
    return found


class current:
    """Whose graphs are compiled now."""

    run: Run


def begin() -> None:
    """The GPU, an interpreter of its code, and the ranks."""
    played.install()
    interpreted.install()
    cast(dict[str, Backend], CLASSES)["FakeProcessGroup"] = FABRIC
    dist.Backend.register_backend("fabric", _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("fabric", store=FakeStore(), rank=0, world_size=RANKS)


def main(target: str, *names: str) -> None:
    begin()
    played.keep_nothing(lambda graph, code: current.run.compiled(graph, code))
    results = {}
    for name in names:
        start = time.perf_counter()
        try:
            results[name] = result_of({**cases.SMALL, **cases.LARGE}[name])
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        results[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(name, results[name]["seconds"], file=sys.stderr, flush=True)
        Path(target).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
