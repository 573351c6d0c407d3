"""Aliasing and mutation of nodes, and the peak memory of a graph in a given order, simulated on fake tensors.

Tensors of one storage share a block. A block, also of an input, lives from the node that first creates a part of it to
its last reader. Blocks of parameters (`hold`), unused inputs, mutated tensors and outputs live until the end. Results
that generated code inlines have no block: pointwise results whose readers are all pointwise ops, reductions and the
like. Views, waits and all-reduces (in place) share the block of their input.

Not modelled: workspace of kernels, alignment, results that a kernel writes into its input's memory, and pointwise
results that are stored because they have many readers.
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

Storage = StorageWeakRef  # equal for tensors that share memory

_PURE_MODULES: Final = frozenset({"_operator", "builtins", "math", "operator", "torch"})


def storages_of(node: fx.Node) -> dict[Storage, Any]:
    """Return the storages of a node's result, with their sizes in bytes (an int, or symbolic)."""
    return storages_in(node.meta.get("val"))


def storages_in(value: Any) -> dict[Storage, Any]:
    """Return the storages of the tensors in a value, with their sizes in bytes (an int, or symbolic)."""
    storages = [each.untyped_storage() for each in tensors_in(value)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the strided tensors in a value; others, such as sparse ones, have no storage."""
    return (each for each in _flat(value) if isinstance(each, torch.Tensor) and each.layout is torch.strided)


def viewed_by(node: fx.Node) -> fx.Node | None:
    """Return the node of which `node` is a view by its op's schema; `None` if it is no view."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):  # of a multi-output op
        return node.args[0] if viewed_by(node.args[0]) is not None else None
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return None
    returned = [each.alias_info for each in node.target._schema.returns]
    is_view = len(returned) == 1 and returned[0] is not None
    return node.args[0] if is_view and isinstance(node.args[0], fx.Node) else None


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the inputs that a node mutates; for an unknown call, all inputs.

    Higher-order operators in a functional graph are functional, except Triton's `triton_kernel_wrapper_mutation`.
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
    """Return whether a node draws random numbers or is unknown: all such nodes have to keep their order."""
    if node.op not in ("call_function", "call_module", "call_method") or _is_plain_function(node):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags


def _is_plain_function(node: fx.Node) -> bool:
    """Return whether a node is `getitem` or arithmetic on sizes."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") in _PURE_MODULES


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


# --- peak memory ------------------------------------------------------------------------------------------------------

HELD: Final = "dp_compile_held"
_GENERATED: Final = frozenset({  # inlined into readers, although not tagged as pointwise
    "_to_copy", "constant_pad_nd", "embedding", "full", "gather", "index", "select_scatter", "slice_scatter", "zeros",
    "iota",
})  # fmt: skip
_REDUCING: Final = frozenset({  # their inputs can be inlined; their own results are stored
    "amax", "amin", "argmax", "argmin", "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "mean",
    "prod", "scatter", "scatter_add", "sum", "var", "var_mean",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Footprint:
    """The blocks that each node creates and reads, their sizes in bytes, and those that live until the end."""

    makes: Mapping[fx.Node, tuple[int, ...]]
    reads: Mapping[fx.Node, tuple[int, ...]]
    nbytes: Mapping[int, int]
    stay: Collection[int]

    def peak(self, order: Iterable[fx.Node]) -> int:
        """Return the largest number of bytes alive at once if the graph's nodes run in this order."""
        nodes = list(order)
        last = {block: number for number, node in enumerate(nodes) for block in (*self.makes[node], *self.reads[node])}
        made, changes = set[int](), [0] * (len(nodes) + 1)
        for number, node in enumerate(nodes):
            for block in {*self.makes[node]} - made:
                made.add(block)
                changes[number] += self.nbytes[block]
                # All inputs are alive when the first node runs, also unused ones.
                if block not in self.stay and nodes[last[block]].op != "placeholder":
                    changes[last[block] + 1] -= self.nbytes[block]
        return max(itertools.accumulate(changes))


def hold(graph: fx.Graph, held: Sequence[bool]) -> None:
    """Mark the graph inputs that the caller keeps, by position; no-op if the graph has another number of inputs."""
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
    """Return the memory blocks of a graph, and which nodes use them.

    Args:
        lives_in: nodes whose memory is part of another node's memory, which is allocated with the first of them.
        stores: nodes into which pointwise inputs are inlined.
        without: nodes that create and read no memory.
        kept: nodes whose memory exists before and after the graph runs.
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
    """The blocks of a graph's nodes: storages, united if one is known to lie in another."""

    def __init__(self, graph: fx.Graph, lives_in: Mapping[fx.Node, fx.Node], without: frozenset[fx.Node]) -> None:
        self._without = without
        self._parent: dict[int, int] = {}
        self._storages: dict[fx.Node, tuple[int, ...]] = {}
        numbers: dict[Storage, int] = {}
        sizes: dict[int, int] = {}
        for node in graph.nodes:
            # The output's value was recorded before passes ran, and takes no further memory.
            found = {} if node.op == "output" else storages_of(node)
            self._storages[node] = tuple(numbers.setdefault(storage, len(numbers)) for storage in found)
            # A symbolic size counts with its value at capture.
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
        """Return the blocks of the nodes' results."""
        numbers = (number for node in nodes if node not in self._without for number in self._storages[node])
        return tuple(dict.fromkeys(map(self._root, numbers)))

    def inlined(self, stores: frozenset[fx.Node]) -> dict[int, fx.Node]:
        """Return the blocks that are never stored, with the node that computes each."""
        found: dict[int, fx.Node] = {}
        for block, (maker, *views) in self._members.items():
            if not _is_pointwise(maker) or any(block not in self.of(*view.all_input_nodes) for view in views):
                continue  # not pointwise, or created by several nodes
            users = [user for node in (maker, *views) for user in node.users if user not in self._without]
            if users and all(self._can_inline(user) or user in stores for user in users):
                found[block] = maker
        return found

    def _can_inline(self, user: fx.Node) -> bool:
        """Return whether a node can read a value that is not stored, as generated code and views can."""
        if user.op != "call_function" or written_by(user):
            return False
        is_view = bool(self._storages[user]) and set(self.of(user)) <= set(self.of(*user.all_input_nodes))
        return is_view or _is_pointwise(user) or _op(user) in _REDUCING

    def read_by(self, node: fx.Node, inlined: Mapping[int, fx.Node]) -> tuple[int, ...]:
        """Return the stored blocks that a node reads, directly or through inlined values."""
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
    """Return the name of an op of ATen or prims; empty for any other."""
    target: Any = node.target
    return target.overloadpacket.__name__ if getattr(target, "namespace", "") in ("aten", "prims") else ""


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (torch.Tag.pointwise in tags or _op(node) in _GENERATED)
