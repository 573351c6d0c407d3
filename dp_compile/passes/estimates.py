"""When each gradient of a captured graph is ready, by what the nodes before it have to compute. Reads only."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from dp_compile._torch import dynamo
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.ready_times import Estimate, Product

aten = torch.ops.aten

FLOPS_PER_BYTE: Final = {"cpu": 8.0, "cuda": 200.0}
"""Where a roofline bends: FLOPs that take as long as moving one byte. Common machines; only ratios of nodes matter."""

# What comes between a product and its reduction without changing a number; an item is one of an accumulation.
_HANDING_ON: Final = (aten.t.default, aten.permute.default, aten.transpose.int, operator.getitem)

# Functions of compiled autograd that put the inputs and outputs of AOTAutograd's backward into order.
_SORTING: Final = ("call_aot_bwd_prologue", "call_aot_bwd_epilogue")


def ready_shares(graph: fx.Graph) -> Mapping[tuple[int, int], Estimate]:
    """For each reduction, by replica and index, the share of the graph's work that stands before it.

    For a gradient that is a product also the share that is the product, and the one of a copy of its result.

    Work of a node is the larger of its bytes and its FLOPs over `FLOPS_PER_BYTE` (roofline: Williams, Waterman,
    Patterson, CACM 2009); FLOPs as torch's flop counter has them. `graph` is as Dynamo leaves it, with fake tensors in
    `meta["example_value"]`; of a dynamic size counts the example's value, and nothing is guarded on it. A graph without
    work gives every gradient the share 1.
    """
    done, at = 0.0, dict[tuple[int, int], tuple[float, fx.Node | None]]()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is REDUCE_GRAD:
            index, replica = node.args[1:3]
            at[replica, index] = done, _product_behind(node)
        elif node.op in ("call_function", "call_method"):
            done += _work(node)
    return {
        place: Estimate(before / done if done else 1.0, _product(node, done)) for place, (before, node) in at.items()
    }


def _product(node: fx.Node | None, total: float) -> Product | None:
    if node is None or not total:
        return None
    return Product(_work(node) / total, 2 * _nbytes(node.meta["example_value"]) / total)


def _product_behind(reduction: fx.Node) -> fx.Node | None:
    """The 2-D product that a reduction reduces, if nobody else uses it and nothing is added to it."""
    node = reduction.all_input_nodes[0]
    while len(node.users) == 1:
        if node.target is aten.mm.default:
            return node
        if node.target in _HANDING_ON or (_is_accumulation(node) and node.args[2] is None):
            node = node.all_input_nodes[0]
        else:
            return None
    return None


def _is_accumulation(node: fx.Node) -> bool:
    """Whether a node is compiled autograd's op that hands out `(the gradient + what was there, ...)`."""
    return getattr(node.target, "__name__", "") == "AccumulateGrad" and len(node.args) > 2


def _work(node: fx.Node) -> float:
    if node.target is operator.getitem or getattr(node.target, "__name__", "") in _SORTING:
        return 0.0  # The lists that these take and make hold other fake tensors for the same memory.
    if _is_accumulation(node) and node.args[2] is None:
        return 0.0  # It hands its gradient on.
    value = node.meta.get("example_value")
    outputs = list(_tensors(value))
    inputs = [t for each in node.all_input_nodes for t in _tensors(each.meta.get("example_value"))]
    if not outputs or _is_view(outputs, inputs):
        return 0.0
    nbytes = sum(_nbytes(tensor) for tensor in (*inputs, *outputs))
    return max(nbytes, _flops(node, value) / FLOPS_PER_BYTE.get(outputs[0].device.type, 100.0))


def _is_view(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    """Whether a node only hands on memory of its inputs. What writes into an input counts as a view too: rare."""
    memory = {StorageWeakRef(tensor.untyped_storage()) for tensor in inputs}
    return all(StorageWeakRef(tensor.untyped_storage()) in memory for tensor in outputs)


def _flops(node: fx.Node, value: Any) -> float:
    formula: Callable[..., Any] | None = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _static(each.meta.get("example_value")))
    return float(formula(*args, **kwargs, out_val=_static(value)))


def _static(value: Any) -> Any:
    """The value with plain sizes: a formula would turn a dynamic one into a constant, and each new size recompile."""
    if isinstance(value, torch.Tensor):
        return torch.empty([dynamo.size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_static(each) for each in value)
    return dynamo.size_hint(value) if isinstance(value, torch.SymInt) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _nbytes(tensor: torch.Tensor) -> float:
    return math.prod(map(dynamo.size_hint, tensor.shape)) * tensor.element_size()
