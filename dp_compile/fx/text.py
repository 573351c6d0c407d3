"""A graph as text: nodes that have a name, and collectives, on lines of their own, all others as a count.

       0.weight: float32[16, 8]                               an input with a name
       ... 37 nodes                                           those without one, in a row
    >> launch 0 = all_reduce(flat 0, sum): float32[96]        a collective starts
    << wait 0 = wait_tensor(launch 0): float32[96]            its result is waited for
       return 2 tensors: a, b

The names that a tracer numbers (`primals_17`, `mm_3`) do not appear, so the text changes only where the graph does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.plan.words import count

_MOST_NAMES: Final = 4


def outline(graph: fx.Graph, names: Mapping[fx.Node, str]) -> str:
    """The text of a graph, with values in `meta["val"]`, or in `meta["example_value"]` as Dynamo leaves it.

    A node without one of `names` has its op's name where others use it. Arguments that are numbers are left out.
    """

    def has_line(node: fx.Node) -> bool:
        return node in names or node.op == "output" or is_collective(node) or is_wait(node)

    lines: list[str] = []
    for with_lines, group in itertools.groupby(list(graph.nodes), has_line):
        nodes = list(group)
        lines += [_line(node, names) for node in nodes] if with_lines else [f"   ... {count(len(nodes), 'node')}"]
    return "\n".join(lines) + "\n"


def _line(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op == "output":
        outputs = node.all_input_nodes
        return f"   return {count(len(outputs), 'tensor')}: {', '.join(_listed(outputs, names))}"
    mark = ">> " if is_collective(node) else "<< " if is_wait(node) else "   "
    what = type_text(node.meta.get("val", node.meta.get("example_value")))
    if node.op == "placeholder":
        return f"{mark}{names[node]}: {what}"
    given = [*_listed(node.all_input_nodes, names), *(each for each in node.args if isinstance(each, str))]
    return f"{mark}{names.get(node, last_name(node))} = {last_name(node)}({', '.join(given)}): {what}"


def _listed(nodes: Sequence[fx.Node], names: Mapping[fx.Node, str]) -> list[str]:
    more = [f"{len(nodes) - _MOST_NAMES} more"] if len(nodes) > _MOST_NAMES else []
    return [*(names.get(node, last_name(node)) for node in nodes[:_MOST_NAMES]), *more]


def last_name(node: fx.Node) -> str:
    """`mm`: an op's name without namespace and overload; `input`."""
    if node.op == "placeholder":
        return "input"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return str(getattr(node.target, "__name__", node.target))


def type_text(value: Any) -> str:
    """A value's dtype and shape, `float32[2, 3]`; of several how many; of what is no tensor the Python type."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} tensors"
    return type(value).__name__
