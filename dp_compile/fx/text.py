"""A graph as text that a person reads: what has a name on lines of its own, what has none folded into counts.

       0.weight: float32[16, 8]                               an input with a name
       ... 37 nodes: mul 9, mm 4, other 24                    everything without one, in a row
    >> launch 0 = all_reduce(flat 0, sum): float32[96]        a collective starts
    << wait 0 = wait_tensor(launch 0): float32[96]            somebody waits for it
       return 2 tensors: a, b

The names that a tracer numbers (`primals_17`, `mm_3`) do not appear, so that the text of a graph changes only where
the graph does. The same graph with the same names gives the same text in every process.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from dp_compile.fx.collectives import is_collective, is_wait

LAUNCH_MARK: Final = ">> "
WAIT_MARK: Final = "<< "
_NO_MARK: Final = "   "
_MOST_OPS: Final = 6
_MOST_ITEMS: Final = 4


def outline(graph: fx.Graph, names: Mapping[fx.Node, str], *, shown: Collection[fx.Node] | None = None) -> str:
    """The text of a graph, a line for each node that is in `names`, or is a collective or a wait.

    Arguments that are numbers are left out; `graph.python_code` has them.

    Args:
        graph: with values in `meta["val"]`, or as Dynamo leaves it in `meta["example_value"]`.
        names: what nodes are called, here and where others use them. A node without one is called by its op there.
        shown: which of those with a name have a line of their own; `None`: all.
    """
    lines: list[str] = []
    with_line = names if shown is None else shown
    for folds, nodes in itertools.groupby(list(graph.nodes), lambda node: _kind(node, with_line)):
        if folds == _SHOWN:
            lines += [_line(node, names) for node in nodes]
        else:
            lines.append(_NO_MARK + _folded(list(nodes), folds))
    return "\n".join(lines) + "\n"


_SHOWN: Final = ""


def _kind(node: fx.Node, shown: Collection[fx.Node]) -> str:
    """What a node is counted as when it is folded; `_SHOWN` if it has a line of its own."""
    if node in shown or node.op == "output" or is_collective(node) or is_wait(node):
        return _SHOWN
    return "input" if node.op == "placeholder" else "node"


def _folded(nodes: Sequence[fx.Node], noun: str) -> str:
    number = f"... {len(nodes)} {noun}{'' if len(nodes) == 1 else 's'}"
    if noun == "input":
        return number
    ops = sorted(Counter(map(_op, nodes)).items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{op} {times}" for op, times in ops[:_MOST_OPS]]
    rest = sum(times for _, times in ops[_MOST_OPS:])
    return f"{number}: {', '.join([*shown, *([f'other {rest}'] if rest else [])])}"


def _line(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.op == "output":
        outputs = list(_leaves(node.args[0]))
        number = f"return {len(outputs)} tensor{'' if len(outputs) == 1 else 's'}"
        return f"{_NO_MARK}{number}: {', '.join(_shortened(outputs, names))}" if outputs else f"{_NO_MARK}{number}"
    mark = LAUNCH_MARK if is_collective(node) else WAIT_MARK if is_wait(node) else _NO_MARK
    name, what = names.get(node, _op(node)), type_text(node.meta.get("val", node.meta.get("example_value")))
    if node.op == "placeholder":
        return f"{mark}{name}: {what}"
    given = (argument for argument in (*node.args, *node.kwargs.values()) if _is_told(argument))
    arguments = [_text(argument, names) for argument in given]
    return f"{mark}{name} = {_op(node)}({', '.join(arguments)}): {what}"


def _op(node: fx.Node) -> str:
    """The op's own name: no namespace, no overload."""
    if node.op in ("placeholder", "get_attr"):
        return "input" if node.op == "placeholder" else "constant"
    return last_name(node)


def _is_told(argument: Any) -> bool:
    """Numbers and lists of them are left to the full form of a graph."""
    return isinstance(argument, (fx.Node, str)) or any(isinstance(each, fx.Node) for each in _leaves([argument]))


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names.get(value, _op(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_shortened(value, names))}]"
    return str(value)


def _shortened(values: Sequence[Any], names: Mapping[fx.Node, str]) -> list[str]:
    """The items as text; of many only the first and the last, and how many are between."""
    if len(values) <= _MOST_ITEMS:
        return [_text(value, names) for value in values]
    first, second, last = (_text(value, names) for value in (values[0], values[1], values[-1]))
    return [first, second, f".. {len(values) - 3} more ..", last]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


# --- ops and values ---


def op_name(node: fx.Node) -> str:
    """`aten.mm`, `_c10d_functional.all_reduce`, `getitem`: the overload only where it is not the default."""
    target = node.target
    if is_op(target):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


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
