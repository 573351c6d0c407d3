"""Backward graphs out of entries that torch itself wrote to AOTAutograd's cache: as they were, with every node.

torch serializes a graph as Python code and traces that again (2.13, `torch.fx.graph_module.reduce_graph_module`). A
call that is given no tensor, as of `full` or `iota`, runs while it traces, and a tensor of full size stands in the
graph instead. Gradients that are made from such tensors are not computed in their buckets, in every warm start.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import reduce_graph_module
from torch.overrides import TorchFunctionMode


def read_whole(forward: Any) -> None:
    """Let the backward of a compiled forward be read with every node, if it comes from such an entry.

    Args:
        forward: the class of AOTAutograd's autograd function.
    """
    info = getattr(forward, "_lazy_backward_info", None)
    serialized = getattr(getattr(info, "bw_module_fn", None), "__self__", None)
    if getattr(serialized, "fn", None) is reduce_graph_module:
        info.bw_module_fn = functools.partial(_read, *serialized.args)  # type: ignore[union-attr]


def _read(body: dict[str, Any], import_block: str) -> Any:
    tracer = body.get("_tracer_cls") or fx.Tracer
    with_all = type(tracer.__name__, (_WithCallsOfNoTensor, tracer), {})
    module = reduce_graph_module({**body, "_tracer_cls": with_all}, import_block)
    module.graph._tracer_cls = body.get("_tracer_cls")  # type: ignore[union-attr]
    return module


class _WithCallsOfNoTensor(fx.Tracer):
    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        with _AsNodes(self):
            return super().trace(*args, **kwargs)


class _AsNodes(TorchFunctionMode):
    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and not _has_proxy([*args, *kwargs.values()]):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


def _has_proxy(arguments: Any) -> bool:
    if isinstance(arguments, (list, tuple)):
        return any(map(_has_proxy, arguments))
    return isinstance(arguments, fx.Proxy)
