"""A captured backward: compiled autograd's graph, what it means in one backward, and its compiled forms.

A graph of compiled autograd takes parameters and hooks as inputs, so the same graph serves every module of the same
shape. Compiled code is chosen by the binding, never by the module.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dp_compile._torch import distributed, dynamo
from dp_compile.engine import window
from dp_compile.engine.binding import Binder, Binding, find_sites
from dp_compile.engine.compilation import CompiledBackward, NotTraced, first_line
from dp_compile.engine.hooks import reduce_eagerly
from dp_compile.engine.logs import warn_once
from dp_compile.engine.reduced_graph import CapturedGraph, give_zeros_for_none
from dp_compile.engine.replica import Replica
from dp_compile.engine.settling import Shares, settle
from dp_compile.errors import ReductionError

logger = logging.getLogger("dp_compile.capture")


def capture() -> contextlib.AbstractContextManager[None]:
    """Inside, backwards are captured."""
    return dynamo.capture_backward(CapturedBackward)


class CapturedBackward:
    """A graph of compiled autograd, with a compiled form for each binding that was met. Holds no model."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        give_zeros_for_none(graph_module)
        self._graph_module = graph_module
        self._sites = find_sites(graph_module.graph)
        self._binder = Binder(self._sites)
        self._compiled: dict[Binding, CompiledBackward] = {}
        self._shares: dict[Binding, dict[int, Shares]] = {}
        """What is known of ready times, by binding without the plans."""

    def __call__(self, inputs: list[Any], sizes: Any, scalars: Any, hooks: Sequence[Any], packed: Any) -> Any:
        backward = window.current()
        if backward is None:
            # Another thread's backward slipped into our window: run it as it is.
            return torch.compiler.disable(self._graph_module.forward)(inputs, sizes, scalars, hooks, packed)
        backward.ran = True
        with window.outside():
            return self._run(backward.replicas, inputs, (sizes, scalars, hooks, packed))

    def _run(self, replicas: tuple[Replica, ...], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        binding = self._binder.bind(replicas, inputs, rest[2])
        if (shares := self._shares.get(binding.without_plans())) is not None:
            settle([replica for replica in replicas if replica.sync], shares)
            binding = self._binder.bind(replicas, inputs, rest[2])
        compiled = self._compiled.get(binding)
        if compiled is None:
            _refuse_shards(rest[2])
            captured = CapturedGraph(self._graph_module, self._sites, binding, len(inputs))
            compiled = self._compiled[binding] = CompiledBackward(captured, replicas)
        if compiled.gave_up:
            return self._run_uncompiled(replicas, inputs, rest)
        try:
            outputs = compiled(replicas, inputs, rest)
        except NotTraced:
            # Another thread is tracing something, and Dynamo then leaves every frame in the process alone.
            del self._compiled[binding]
            return self._run_uncompiled(replicas, inputs, rest)
        except dynamo.RECOMPILE_LIMIT_ERRORS as error:
            compiled.gave_up = True
            message = "a backward is not compiled any more, it was recompiled too often: %s"
            warn_once(logger, replicas, message, first_line(error))
            return self._run_uncompiled(replicas, inputs, rest)
        if compiled.shares:
            # The plans were settled from its graph: what was compiled is the code of another binding.
            self._shares.setdefault(binding.without_plans(), compiled.shares)
            del self._compiled[binding]
            self._compiled[binding.with_plans_of(replicas)] = compiled
        return outputs

    def _run_uncompiled(self, replicas: Sequence[Replica], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        """Run the graph node by node; the hooks reduce. The same collectives as the compiled form."""
        return reduce_eagerly(replicas, lambda: torch.compiler.disable(self._graph_module.forward)(inputs, *rest))


def _refuse_shards(hooks: Sequence[Any]) -> None:
    """Refuse to capture the hooks of `fully_shard`: the captured code gives other gradients than they do (measured)."""
    if any(distributed.is_hook_of_fully_shard(hook) for hook in hooks):
        raise ReductionError(
            "a captured backward reaches a module that fully_shard manages. Call replicate() on a module around it, "
            "after fully_shard(): the backward is then not captured, and the gradients are right."
        )
