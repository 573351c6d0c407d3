"""What nodes do to memory, and how much a graph takes at its peak in a given order: a simulation on fake tensors.

Memory comes in blocks: tensors of one storage share one. A block is there from the first node that makes a part of it
until its last reader, inputs too. Parameters are held by the caller (`hold`), as is what the graph writes to or
returns. What a code generator computes where it is read has no block: pointwise results that only pointwise operations,
reductions and their like use. Views, waits and all-reduces (in place) share the block of their input.

Not in the model: work space of kernels, alignment, memory that a kernel reuses for its result in place, and pointwise
results that are stored because they are used too often.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from dp_compile.fx.collectives import is_collective, is_wait

Storage = StorageWeakRef
"""Equal for two tensors that share memory."""

_PURE_MODULES: Final = frozenset({"_operator", "builtins", "math", "operator", "torch"})


def storages_of(node: fx.Node) -> dict[Storage, Any]:
    """The storages that a node's result lies in, with their sizes in bytes (an int, or symbolic)."""
    return storages_in(node.meta.get("val"))


def storages_in(value: Any) -> dict[Storage, Any]:
    """The same of a result."""
    storages = [each.untyped_storage() for each in tensors_in(value)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result that have a storage: not sparse ones."""
    return (each for each in _flat(value) if isinstance(each, torch.Tensor) and each.layout is torch.strided)


def viewed_by(node: fx.Node) -> fx.Node | None:
    """What the result of a node is a view of, by what is called; `None` if it is no view."""
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
    given = dict(zip((each.name for each in arguments), node.args, strict=False)) | dict(node.kwargs)
    written = [given.get(each.name) for each in arguments if each.is_write]
    return tuple(each for each in _flat(written) if isinstance(each, fx.Node))


def is_ordered(node: fx.Node) -> bool:
    """Whether it matters when a node runs among others of its kind: it draws random numbers, or is not known."""
    if node.op not in ("call_function", "call_module", "call_method") or _is_plain_function(node):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags


def _is_plain_function(node: fx.Node) -> bool:
    """`getitem` and arithmetic on sizes."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") in _PURE_MODULES


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


# --- its peak ---------------------------------------------------------------------------------------------------------

HELD: Final = "dp_compile_held"
_GENERATED: Final = frozenset({
    "_to_copy", "constant_pad_nd", "embedding", "full", "gather", "index", "select_scatter", "slice_scatter", "zeros",
    "iota",
})  # fmt: skip
"""Computed where they are read, although they are not tagged as pointwise."""
_REDUCING: Final = frozenset({
    "amax", "amin", "argmax", "argmin", "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "mean",
    "prod", "scatter", "scatter_add", "sum", "var", "var_mean",
})  # fmt: skip
"""Read what is computed on the way, and store their own result."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Which blocks each node makes and reads, their sizes in bytes, and which stay until the end."""

    makes: Mapping[fx.Node, tuple[int, ...]]
    reads: Mapping[fx.Node, tuple[int, ...]]
    nbytes: Mapping[int, int]
    stay: Collection[int]

    def peak(self, order: Iterable[fx.Node]) -> int:
        """The most bytes that are alive at once if the graph's nodes run in this order."""
        nodes = list(order)
        last = {block: number for number, node in enumerate(nodes) for block in (*self.makes[node], *self.reads[node])}
        made, changes = set[int](), [0] * (len(nodes) + 1)
        for number, node in enumerate(nodes):
            for block in {*self.makes[node]} - made:
                made.add(block)
                changes[number] += self.nbytes[block]
                # All inputs are there when the first node runs.
                if block not in self.stay and nodes[last[block]].op != "placeholder":
                    changes[last[block] + 1] -= self.nbytes[block]
        return max(itertools.accumulate(changes))


def hold(graph: fx.Graph, held: Sequence[bool]) -> None:
    """Note which inputs of a graph its caller keeps, by position; nothing is noted if there are more or fewer."""
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) == len(held):
        for node, is_held in zip(inputs, held, strict=True):
            node.meta[HELD] = is_held


def footprint(
    graph: fx.Graph,
    *,
    lives_in: Mapping[fx.Node, fx.Node] | None = None,
    stores: Collection[fx.Node] = (),
    without: Collection[fx.Node] = (),
    kept: Collection[fx.Node] = (),
) -> Footprint:
    """The blocks of a graph.

    Args:
        lives_in: nodes whose memory is a part of another node's, from when the first of them is computed.
        stores: nodes that compute their inputs, if these are pointwise, on the way to where they store them.
        without: nodes that make nothing and read nothing.
        kept: nodes whose memory is there before the graph runs, and after it.
    """
    blocks = _Blocks(graph, lives_in or {}, frozenset(without))
    inlined = blocks.inlined(frozenset(stores))
    reads = {node: blocks.read_by(node, inlined) for node in graph.nodes}
    makes = {node: tuple(block for block in blocks.of(node) if block not in inlined) for node in graph.nodes}
    there = {block for node in kept for block in makes[node]}
    first = next(iter(graph.nodes))
    makes[first] = tuple(dict.fromkeys((*makes[first], *sorted(there))))
    held = [node for node in graph.find_nodes(op="placeholder") if node.meta.get(HELD, False)]
    held += graph.output_node().all_input_nodes
    held += [written for node in graph.nodes for written in written_by(node)]
    return Footprint(makes, reads, blocks.nbytes, there.union(*map(blocks.of, held)))


class _Blocks:
    """Which nodes share memory: storages, joined where one is known to lie in another."""

    def __init__(self, graph: fx.Graph, lives_in: Mapping[fx.Node, fx.Node], without: frozenset[fx.Node]) -> None:
        self._without = without
        self._parent: dict[int, int] = {}
        self._storages: dict[fx.Node, tuple[int, ...]] = {}
        numbers: dict[Storage, int] = {}
        sizes: dict[int, int] = {}
        for node in graph.nodes:
            # The value of the output was noted before passes ran, and is no further memory.
            found = {} if node.op == "output" else storages_of(node)
            self._storages[node] = tuple(numbers.setdefault(storage, len(numbers)) for storage in found)
            # Of a size that is not known until run time, what it was when the graph was made.
            known = [each if isinstance(each, int) else int(each.node.hint or 0) for each in found.values()]
            sizes.update(zip(self._storages[node], known, strict=True))
        for node, home in lives_in.items():
            self._unite(self._storages[node], self._storages[home][:1] * len(self._storages[node]))
        for node in graph.nodes:
            if is_wait(node) or (is_collective(node) and "all_reduce" in str(node.target)):
                given = [number for source in node.all_input_nodes for number in self._storages[source]]
                self._unite(self._storages[node], given)
        self.nbytes: dict[int, int] = {}
        for number, size in sizes.items():
            root = self._root(number)
            self.nbytes[root] = max(size, self.nbytes.get(root, 0))
        self._members: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for block in self.of(node):
                self._members.setdefault(block, []).append(node)

    def _unite(self, numbers: Sequence[int], others: Sequence[int]) -> None:
        for one, other in zip(numbers, others, strict=False):
            if self._root(one) != self._root(other):
                self._parent[self._root(one)] = self._root(other)

    def _root(self, number: int) -> int:
        while number in self._parent:
            number = self._parent[number]
        return number

    def of(self, *nodes: fx.Node) -> tuple[int, ...]:
        """The blocks that the results of nodes lie in."""
        numbers = (number for node in nodes if node not in self._without for number in self._storages[node])
        return tuple(dict.fromkeys(map(self._root, numbers)))

    def inlined(self, stores: frozenset[fx.Node]) -> dict[int, fx.Node]:
        """Blocks that never are in memory, with the node that computes them."""
        found: dict[int, fx.Node] = {}
        for block, (maker, *views) in self._members.items():
            if not _is_pointwise(maker) or any(block not in self.of(*view.all_input_nodes) for view in views):
                continue  # not generated code, or of several makers
            users = [user for node in (maker, *views) for user in node.users if user not in self._without]
            if users and all(self._can_inline(user) or user in stores for user in users):
                found[block] = maker
        return found

    def _can_inline(self, user: fx.Node) -> bool:
        """Whether a node can read what is not in memory, as generated code and views do."""
        if user.op != "call_function" or written_by(user):
            return False
        is_view = bool(self._storages[user]) and set(self.of(user)) <= set(self.of(*user.all_input_nodes))
        return is_view or _is_pointwise(user) or _op(user) in _REDUCING

    def read_by(self, node: fx.Node, inlined: Mapping[int, fx.Node]) -> tuple[int, ...]:
        """The blocks in memory that a node reads, through everything that is computed on the way."""
        if node in self._without or any(block in inlined for block in self.of(node)):
            return ()
        seen: dict[int, None] = {}
        stack = list(self.of(*node.all_input_nodes))
        while stack:
            block = stack.pop()
            if block not in seen:
                seen[block] = None
                if block in inlined:
                    stack.extend(self.of(*inlined[block].all_input_nodes))
        return tuple(block for block in seen if block not in inlined)


def _op(node: fx.Node) -> str:
    """The name of an op of ATen or of its primitives; empty for any other."""
    target: Any = node.target
    return target.overloadpacket.__name__ if getattr(target, "namespace", "") in ("aten", "prims") else ""


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (torch.Tag.pointwise in tags or _op(node) in _GENERATED)
