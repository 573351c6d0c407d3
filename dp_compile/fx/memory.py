"""How much memory a graph takes at its peak, if it runs in a given order. A simulation on fake tensors.

Memory comes in blocks: tensors of one storage share one. A block is there from the first node that makes a part of it
until its last reader. So are inputs: what the caller gave away is freed after its last use. Parameters are held by the
caller (`hold`), as is what the graph writes to or returns.

What a code generator computes where it is read has no block: pointwise results that only pointwise operations,
reductions and their like use. Views, waits and all-reduces (in place) share the block of their input.

Not in the model: work space of kernels, alignment, memory that a kernel reuses for its result in place, and pointwise
results that are stored because they are used too often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.fx.storages import Storage, storages_of, written_by

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
    stay: frozenset[int]

    def nbytes_of(self, nodes: Iterable[fx.Node]) -> int:
        """The bytes of the blocks that these nodes make, each block once."""
        return sum(self.nbytes[block] for block in {block for node in nodes for block in self.makes[node]})

    def peak(self, order: Iterable[fx.Node]) -> int:
        """The most bytes that are alive at once if the graph's nodes run in this order."""
        nodes = list(order)
        last = {block: number for number, node in enumerate(nodes) for block in (*self.makes[node], *self.reads[node])}
        alive: set[int] = set()
        now, peak = 0, 0
        for number, node in enumerate(nodes):
            now += sum(self.nbytes[block] for block in {*self.makes[node]} - alive)
            alive |= {*self.makes[node]}
            peak = max(peak, now)
            if node.op != "placeholder":  # all inputs are there when the first node runs
                used = alive.intersection(self.makes[node] + self.reads[node]) - self.stay
                freed = {block for block in used if last[block] == number}
                alive -= freed
                now -= sum(self.nbytes[block] for block in freed)
        return peak


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
    return Footprint(
        makes, reads, blocks.nbytes, frozenset(block for node in held for block in blocks.of(node)) | there
    )


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
            sizes.update(zip(self._storages[node], map(_hint, found.values()), strict=True))
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


def _hint(nbytes: Any) -> int:
    """A size in bytes; of one that is not known until run time, what it was when the graph was made."""
    if isinstance(nbytes, int):
        return nbytes
    return int(nbytes.node.hint or 0)


def _op(node: fx.Node) -> str:
    """The name of an op of ATen or of its primitives; empty for any other."""
    target: Any = node.target
    return target.overloadpacket.__name__ if getattr(target, "namespace", "") in ("aten", "prims") else ""


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (torch.Tag.pointwise in tags or _op(node) in _GENERATED)
