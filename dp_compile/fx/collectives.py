"""Collectives in a graph, c10d's functional ones and ours: targets and predicates. No other file spells
`_c10d_functional`."""

from __future__ import annotations

import operator

import torch
import torch.distributed._functional_collectives  # registers the ops
from torch import fx

from dp_compile._torch import pairs

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
GROUPED_ALL_REDUCE = torch.ops._c10d_functional.all_reduce_coalesced.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
PAIRED_ALL_TO_ALL = pairs.ALL_TO_ALL
PAIRED_ALL_GATHER = pairs.ALL_GATHER
_OURS = (PAIRED_ALL_TO_ALL, PAIRED_ALL_GATHER)
_LAUNCHES = (
    REDUCE_SCATTER,
    ALL_TO_ALL,
    ALL_GATHER,
    *_OURS,
    ALL_REDUCE,
    GROUPED_ALL_REDUCE,
    torch.ops._c10d_functional.all_reduce_.default,
    torch.ops._c10d_functional.all_reduce_coalesced_.default,
)


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a functional collective, ours or the model's."""
    if node.op != "call_function" or node.target is WAIT:
        return False
    return node.target in _OURS or getattr(node.target, "namespace", "") == "_c10d_functional"


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is WAIT


def is_all_gather(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (ALL_GATHER, PAIRED_ALL_GATHER)


def waits_of(collective: fx.Node) -> tuple[fx.Node, ...]:
    """The waits on a collective's result, directly or through the items of a grouped one."""
    found: list[fx.Node] = []
    for user in collective.users:
        if is_wait(user):
            found.append(user)
        elif _is_item(user):
            found.extend(waits_of(user))
    return tuple(found)


def is_launch(op: object) -> bool:
    """Whether an op that is being called starts a collective, in place or not, of those that we put into graphs."""
    return op in _LAUNCHES


def is_wait_op(op: object) -> bool:
    return op is WAIT


def wait_counts(collective: fx.Node) -> tuple[int, ...]:
    """How often each tensor that a collective returns is waited for."""
    value = collective.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return (len(waits_of(collective)),)
    counts = [0] * len(value)
    for item in filter(_is_item, collective.users):
        position = item.args[1]
        assert isinstance(position, int)
        counts[position] += len(waits_of(item))
    return tuple(counts)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
