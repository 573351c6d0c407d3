"""A captured backward as a Python file that rebuilds its graph and runs our passes: no model, no GPU, one process.

    recorded = Recorded(world_size=2)
    arg0_1 = recorded.input("arg0_1", ("float32", (3, 4), (4, 1)))
    mm = recorded.call("mm", "aten.mm.default", (arg0_1, arg0_1), {}, ("float32", (3, 4), (4, 1)))
    recorded.output((mm,))
    recorded.run(PASSES, PLANS)

Values are fake tensors on CPU: computed anew by each op, so that views share memory as they did. Where that fails, as
for an op that only a GPU has, or gives something else, the recorded dtype, shape and strides count. Sizes that were
dynamic have the values of the example.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import map_arg
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_compile._torch import dynamo
from dp_compile.errors import DPCompileError
from dp_compile.fx.memory import HELD
from dp_compile.fx.printer import is_op
from dp_compile.insight.dump_files import STAGES_FILE, read_capture
from dp_compile.insight.graph_names import collectives_of
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.result import GraphPass
from dp_compile.plan.buckets import BucketPlan

_CPU: Final = "cpu"


class NotRecordable(DPCompileError):
    """A graph holds something that cannot be written down as Python."""


# --- writing it -------------------------------------------------------------------------------------------------


def repro_source(
    graph: fx.Graph, plans: Sequence[BucketPlan], passes: Sequence[GraphPass], *, world_size: int, about: str
) -> str:
    """The text of a file that rebuilds `graph`, runs `passes` over it and prints the collectives that come out.

    Args:
        graph: as the pipeline gets it, with fake values in `meta["val"]`.
        plans: one for each replica in the backward.
        passes: values whose `repr` makes them anew, as that of a frozen dataclass does.
        world_size: ranks of the group.
        about: a line that says what was captured.

    Raises:
        NotRecordable: the graph calls a function with no public name, or a graph inside the graph, or a pass cannot
            be imported.
    """
    imports = sorted({_import_of(type(graph_pass)) for graph_pass in passes})
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    others = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    parts = [
        f'"""{about}\n\nThe graph before the passes. Run it with: python repro.py\n"""',
        "\n".join(["import torch", "", *imports, "from dp_compile.insight.repro import Recorded"]),
        f"PASSES = ({''.join(f'{graph_pass!r}, ' for graph_pass in passes)})",
        f"PLANS = [\n{''.join(f'    {_plan(plan)!r},{chr(10)}' for plan in plans)}]",
        f"recorded = Recorded(world_size={world_size})",
        "\n".join(map(_statement, [*inputs, *others])),
        'if __name__ == "__main__":\n    raise SystemExit(recorded.run(PASSES, PLANS, __file__))',
    ]
    return "\n\n".join(parts) + "\n"


def _import_of(kind: type) -> str:
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise NotRecordable(f"pass {kind.__qualname__} of {kind.__module__} cannot be imported by another process")
    return f"from {kind.__module__} import {kind.__qualname__}"


def _plan(plan: BucketPlan) -> dict[str, Any]:
    """A plan as data, with the names of groups, on CPU."""
    data = plan.to_dict()
    for bucket, each in zip(plan.buckets, data["buckets"], strict=True):
        each["key"] |= {"reduction": bucket.key.reduction.to_dict(), "device": _CPU}
    return data


def _statement(node: fx.Node) -> str:
    if node.op == "output":
        return f"recorded.output({_source(node.args[0])})"
    value = _source(describe(node.meta.get("val")))
    if node.op == "placeholder":
        return f"{node.name} = recorded.input({node.name!r}, {value}, held={node.meta.get(HELD)!r})"
    if node.op == "get_attr":
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise NotRecordable(f"{node.name} is a graph inside the graph")
        return f"{node.name} = recorded.input({node.name!r}, {value}, held=True)"
    if node.op != "call_function":
        raise NotRecordable(f"{node.name} is a {node.op}, only calls of functions can be recorded")
    args, kwargs = _source(node.args), _source(dict(node.kwargs))
    return f"{node.name} = recorded.call({node.name!r}, {_target(node)!r}, {args}, {kwargs}, {value})"


def _target(node: fx.Node) -> str:
    target = node.target
    if is_op(target):
        return str(target)
    name = getattr(target, "__name__", "")
    for module in (operator, math, torch):
        if getattr(module, name, None) is target:
            return f"{module.__name__.lstrip('_')}:{name}"
    raise NotRecordable(f"{node.name} calls {target}, which has no public name")


def _source(value: Any) -> str:
    """Python that makes a value: of nodes their names, of symbolic sizes the example's, every device the CPU."""
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_source, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_source(item)}' for key, item in value.items())}}}"
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.device):
        return f"torch.device({_CPU!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, slice):
        return f"slice({_source(value.start)}, {_source(value.stop)}, {_source(value.step)})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.SymInt):
        return repr(dynamo.size_hint(value))
    raise NotRecordable(f"an argument is a {type(value).__name__}")


def describe(value: Any) -> Any:
    """A value as data: a tensor's dtype, shape and strides, of several a list, a size as a number."""
    if isinstance(value, torch.Tensor):
        shape, stride = map(_numbers, (value.shape, value.stride()))
        return str(value.dtype).removeprefix("torch."), shape, stride
    if isinstance(value, (list, tuple)):
        return [describe(each) for each in value]
    if isinstance(value, (int, torch.SymInt)):
        return dynamo.size_hint(value)
    return None


def _numbers(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(map(dynamo.size_hint, sizes))


# --- running it -------------------------------------------------------------------------------------------------


class Recorded:
    """A graph that is built again, node by node, on a fake process group."""

    def __init__(self, world_size: int) -> None:
        self.graph = fx.Graph()
        self._world_size = world_size
        self._held: list[bool | None] = []
        self._fake = dynamo.fake_tensors()

    def input(self, name: str, value: Any, held: bool | None = None) -> fx.Node:
        """An input of the graph. `held`: its caller keeps its memory; `None`: not known."""
        node = self.graph.placeholder(name)
        node.meta["val"] = self._made(value)
        self._held.append(held)
        return node

    def call(self, name: str, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> fx.Node:
        """A call of an op (`aten.mm.default`) or of a function (`operator:getitem`)."""
        function = _function(target)
        node = self.graph.create_node("call_function", function, args, dict(kwargs), name)
        node.meta["val"] = self._computed(function, node, value)
        return node

    def output(self, result: Any) -> None:
        self.graph.output(result)

    def run(self, passes: Sequence[GraphPass], plans: Sequence[Mapping[str, Any]], file: str) -> int:
        """Run the passes and print the collectives, in their order. Returns 1 if they are not those of the dump."""
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self._world_size)
        found = self.collectives(passes, [BucketPlan.from_dict(plan) for plan in plans])
        print("\n".join(found))
        if not (Path(file).parent / STAGES_FILE).exists():
            return 0
        original = read_capture(Path(file).parent).collectives
        if not original:
            print("The dump does not say which collectives the original had: its compilation did not end.")
            return 0
        print("the same collectives as in the dump" if found == original else "NOT the collectives of the dump")
        return 0 if found == original else 1

    def collectives(self, passes: Sequence[GraphPass], plans: Sequence[BucketPlan]) -> tuple[str, ...]:
        """Run the passes and tell the collectives that come out, in their order."""
        held = () if None in self._held else tuple(map(bool, self._held))
        Pipeline(passes, plans, lambda records: None, held)(self.graph)
        return collectives_of(self.graph, plans)

    def _made(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._made(each) for each in value]
        if isinstance(value, tuple):
            dtype, shape, stride = value
            with self._fake:
                return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
        return value

    def _computed(self, function: Callable[..., Any], node: fx.Node, value: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        try:
            with self._fake:
                result = function(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return self._made(value)
        return result if describe(result) == value else self._made(value)


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    if name:
        found: Callable[..., Any] = getattr({"operator": operator, "math": math, "torch": torch}[module], name)
        return found
    found_op: Any = torch.ops
    for part in target.split("."):
        if (found_op := getattr(found_op, part, None)) is None:
            raise NotRecordable(
                f"op {target} is not registered. Import the module that defines it at the top of this file."
            )
    return cast(Callable[..., Any], found_op)
