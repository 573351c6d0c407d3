"""A graph as short, stable text for people and golden tests, and its operations as counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx


def short(graph: fx.Graph) -> str:
    """One line a node: `name = op(arguments)`, placeholders with dtype and shape. Metadata is left out."""
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {type_text(node.meta.get('val'))}")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        else:
            arguments = [_text(argument) for argument in node.args]
            arguments += [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
            lines.append(f"{node.name} = {op_name(node)}({', '.join(arguments)})")
    return "\n".join(lines)


def op_name(node: fx.Node) -> str:
    """`aten.mm`, `_c10d_functional.all_reduce`, `getitem`: the overload only where it is not the default."""
    target = node.target
    if is_op(target):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def op_counts(graph: fx.Graph) -> Mapping[str, int]:
    """How often each op is called, under its last name, and `nodes` for all nodes."""
    counts = Counter(last_name(node) for node in graph.nodes if node.op == "call_function")
    counts["nodes"] = len(graph.nodes)
    return dict(counts)


def last_name(node: fx.Node) -> str:
    """`mm`: an op's name without namespace and overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return op_name(node)


def is_op(target: object) -> bool:
    """Whether a node's target is an op with a public name, as `str` gives it: `aten.mm.default`."""
    return isinstance(target, torch._ops.OpOverload)


def type_text(value: Any) -> str:
    """A value's dtype and shape, `float32[2, 3]`; of several how many; of what is no tensor the Python type."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} tensors"
    return type(value).__name__


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item) for item in value)}]"
    return str(value)
