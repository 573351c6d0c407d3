"""c10d's functional collectives in a graph: targets and predicates. No pass names `_c10d_functional` itself."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed._functional_collectives  # registers the ops
from torch import fx

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
_LAUNCHES = (REDUCE_SCATTER, ALL_TO_ALL, ALL_GATHER, ALL_REDUCE, torch.ops._c10d_functional.all_reduce_.default)


def is_collective(node: fx.Node) -> bool:
    """Return whether a node launches a functional collective, ours or the model's."""
    is_functional = node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional"
    return is_functional and node.target is not WAIT


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is WAIT


def count_waits(collective: fx.Node) -> int:
    """Return the number of waits for a collective's result, or for the items of a coalesced result of the model."""
    items = (user for user in collective.users if user.target is operator.getitem)
    return sum(map(is_wait, collective.users)) + sum(map(count_waits, items))


def by_group(collectives: Iterable[fx.Node]) -> defaultdict[str, list[fx.Node]]:
    """Return the collectives of each process group, in the given order."""
    found: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for node in collectives:
        found[str(node.args[-1])].append(node)
    return found


def is_launch(op: object) -> bool:
    """Return whether an op launches a collective of a kind that we insert into graphs, in place or not."""
    return op in _LAUNCHES
