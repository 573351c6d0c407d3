"""A graph as a text that is the same in every process that makes the same graph, for keys of what is kept on disk.

Names of nodes, addresses and the number of times that something was compiled before are not in it; every constant is.
What has no text of that kind is refused: a key that leaves something out would serve a graph for another one.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx

from dp_compile.fx.printer import is_op

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_BY_NAME = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class NoText(Exception):
    """Something in a graph that no text stands for; the message says what."""


def digest(*parts: str) -> str:
    """A hash over texts, which says where one ends."""
    text = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        text.update(len(raw).to_bytes(8, "big") + raw)
    return text.hexdigest()


def text_of(graph: fx.Graph, name_of: Callable[[fx.Node], str | None] = lambda node: None) -> str:
    """A line for each node: its number, what it calls, and with what.

    Reads of an input that nobody uses are left out: taking a call out of a graph leaves them behind.

    Args:
        name_of: a name for what a node calls, of targets that have none of their own.

    Raises:
        NoText: something in the graph has no text.
    """
    return "\n".join(_lines(graph, name_of))


def _lines(graph: fx.Graph, name_of: Callable[[fx.Node], str | None]) -> Iterator[str]:
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if _reads_for_nobody(node):
            continue
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            yield f"%{numbers[node]} placeholder {node.target}"
        elif node.op in ("call_function", "output"):
            called = "output" if node.op == "output" else _target(node, name_of)
            given = f"{_text(node.args, numbers)} {_text(dict(node.kwargs), numbers)}"
            yield f"%{numbers[node]} {called} {given}"
        else:
            raise NoText(f"a {node.op} node, {node.target}")


def _reads_for_nobody(node: fx.Node) -> bool:
    return not node.users and node.target is operator.getitem


def _target(node: fx.Node, name_of: Callable[[fx.Node], str | None]) -> str:
    target: Any = node.target
    if is_op(target):
        return f"op {target}"
    given = name_of(node)
    if given is not None:
        return given
    name = name_of_function(target)
    if name is None:
        raise NoText(f"a call of {getattr(target, '__qualname__', target)!s}, which no module has under its name")
    return name


def name_of_function(function: Any) -> str | None:
    """`module:name` of a function that is found there, so that the name says which one it is; else `None`."""
    if not isinstance(function, (FunctionType, BuiltinFunctionType)):
        return None
    name, module, path = function.__name__, str(function.__module__), function.__qualname__
    if getattr(torch, name, None) is function:  # `torch.zeros` has the path of a class of its own
        return f"torch:{name}"
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is function else None


def _text(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    """A constant, or the number of a node. The type is said: `1`, `1.0` and `True` are equal, and not the same."""
    if isinstance(value, fx.Node):
        if value not in numbers:
            raise NoText(f"a use of {value}, which comes later")
        return f"%{numbers[value]}"
    if type(value) in _PLAIN or isinstance(value, _BY_NAME):
        return f"{type(value).__name__}({value!r})"
    if isinstance(value, (list, tuple)):  # also torch.Size, and the lists of fx
        kind = "list" if isinstance(value, list) else "tuple"
        return f"{kind}({', '.join(_text(each, numbers) for each in value)})"
    if isinstance(value, dict):
        pairs = (f"{_text(key, numbers)}: {_text(each, numbers)}" for key, each in value.items())
        return f"dict({', '.join(pairs)})"
    if isinstance(value, slice):
        return f"slice({', '.join(_text(each, numbers) for each in (value.start, value.stop, value.step))})"
    raise NoText(f"a constant of type {type(value).__name__}")
