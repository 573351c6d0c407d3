"""What a node does to memory: which storages its result lies in, what it writes to, whether its turn can be seen."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

Storage = StorageWeakRef
"""Equal for two tensors that share memory."""

_PURE_MODULES: Final = frozenset({"_operator", "builtins", "math", "operator", "torch"})


def storages_of(node: fx.Node) -> dict[Storage, Any]:
    """The storages that a node's result lies in, with their sizes in bytes (an int, or symbolic)."""
    return {StorageWeakRef(storage): storage.nbytes() for storage in _storages(node.meta.get("val"))}


def viewed_by(node: fx.Node) -> fx.Node | None:
    """What the result of a node is a view of, by what is called; nothing if it is none."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):  # one of several
        return node.args[0] if viewed_by(node.args[0]) is not None else None
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return None
    returned = [each.alias_info for each in node.target._schema.returns]
    is_view = len(returned) == 1 and returned[0] is not None
    return node.args[0] if is_view and isinstance(node.args[0], fx.Node) else None


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """What a node writes to. Of calls that nothing is known about: everything that they are given.

    Higher-order operators are functional where a graph is, but for Triton's `triton_kernel_wrapper_mutation`.
    """
    if node.op not in ("call_function", "call_module", "call_method") or _is_plain_function(node):
        return ()
    if not isinstance(node.target, torch._ops.OpOverload):
        known = isinstance(node.target, torch._ops.HigherOrderOperator) and "mutation" not in node.target.name()
        return () if known else tuple(node.all_input_nodes)
    arguments = node.target._schema.arguments
    if not node.target._schema.is_mutable:
        return ()
    given = [*zip(arguments, node.args, strict=False)]
    given += [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
    written = [value for argument, value in given if argument.is_write]
    return tuple(each for value in written for each in _nodes(value))


def is_ordered(node: fx.Node) -> bool:
    """Whether it matters when a node runs among others of its kind: it draws random numbers, or is not known."""
    if node.op not in ("call_function", "call_module", "call_method") or _is_plain_function(node):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags


def _is_plain_function(node: fx.Node) -> bool:
    """`getitem` and arithmetic on sizes."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") in _PURE_MODULES


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _storages(each)


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _nodes(each)
