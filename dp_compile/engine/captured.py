"""A captured backward: compiled autograd's graph, what it means in one backward, and its compiled forms.

A graph of compiled autograd takes parameters and hooks as inputs, so the same graph serves every module of the same
shape. Compiled code is chosen by the binding, never by the module.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dp_compile._torch import distributed, dynamo
from dp_compile.engine import window
from dp_compile.engine.binding import Binder, Binding, find_sites
from dp_compile.engine.compilation import CompiledBackward, NotTraced, OtherMemory, described
from dp_compile.engine.hooks import reduce_eagerly
from dp_compile.engine.reduced_graph import CapturedGraph, give_zeros_for_none
from dp_compile.engine.replica import Replica, Revision
from dp_compile.engine.settling import settle
from dp_compile.engine.shapes import estimates_of
from dp_compile.errors import DPCompileError, ReductionError
from dp_compile.plan.ready_times import ASSUMED, estimated_times

logger = logging.getLogger("dp_compile.capture")


def capture() -> dynamo.CaptureBackward:
    """Inside, backwards are captured."""
    return dynamo.CaptureBackward(CapturedBackward)


class CapturedBackward:
    """A graph of compiled autograd, with a compiled form for each binding that was met. Holds no model."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        give_zeros_for_none(graph_module)
        self._graph_module = graph_module
        self._sites = find_sites(graph_module.graph)
        self._binder = Binder(self._sites)
        self._compiled: dict[Binding, CompiledBackward] = {}

    def __call__(self, inputs: list[Any], sizes: Any, scalars: Any, hooks: Sequence[Any], packed: Any) -> Any:
        """Run one backward. Compiled autograd keeps this object and calls it in each backward with the same graph."""
        backward = window.current()
        if backward is None:
            # Another thread's backward slipped into our window: run it as it is.
            return torch.compiler.disable(self._graph_module.forward)(inputs, sizes, scalars, hooks, packed)
        backward.ran = True
        # Dynamo, which traces this graph, would cast what AOTAutograd's backward computes for whoever calls
        # `backward()` inside of autocast; its own call of that backward switches autocast off (torch 2.11 to 2.15).
        with window.Outside(), dynamo.without_autocast():
            return self._run(backward, inputs, (sizes, scalars, hooks, packed))

    def _run(self, backward: window.Backward, inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        replicas, n_inputs = backward.replicas, len(inputs)
        compiled: CompiledBackward | None = None
        try:
            binding = self._binder.bind(replicas, inputs, rest[2])
            if self._settle(replicas, binding, inputs, rest):  # other plans: a binding says which
                binding = self._binder.bind(replicas, inputs, rest[2])
            compiled = self._compiled.get(binding)
            if compiled is None:
                _refuse_shards(rest[2])
                if dynamo.stance() == "eager_on_recompile":
                    return self._run_uncompiled(replicas, inputs, rest)
                captured = CapturedGraph(self._graph_module, self._sites, binding, len(inputs))
                compiled = self._compiled[binding] = CompiledBackward(captured, replicas)
            return compiled(replicas, inputs, rest)
        except (NotTraced, OtherMemory):
            # Another thread is tracing something, and Dynamo then leaves every frame in the process alone.
            # Or code that writes to parameters cannot be sure any more what reads them: it is made anew next time.
            del self._compiled[binding]
        except DPCompileError:
            raise
        except Exception as error:
            # Dynamo, Inductor and fake tensors raise exceptions of any class. Once code runs its inputs are used up.
            if (compiled is not None and compiled.has_begun) or dynamo.asks_for_errors(error):
                raise
            backward.obstacle = described(error)
        del inputs[n_inputs:]
        return self._run_uncompiled(replicas, inputs, rest)

    def _settle(self, replicas: Sequence[Replica], binding: Binding, inputs: list[Any], rest: tuple[Any, ...]) -> bool:
        """Before anything is traced: the plans of a first backward, from its graph. Returns whether there were any."""
        synced = [each for each in replicas if each.reduces]
        awaited = [each for each in synced if each.awaits(Revision.FROM_GRAPH)]
        assumed = [each for each in synced if each.ready.basis == ASSUMED]
        if not awaited and (not assumed or binding in self._compiled):
            return False
        estimates, collectives = estimates_of(self._graph_module, self._sites, binding, inputs, *rest[:3])
        shares: dict[Replica, dict[int, float]] = {}
        for (ordinal, index), share in estimates.items():
            shares.setdefault(replicas[ordinal], {})[index] = share
        times = {replica: estimated_times(found, collectives) for replica, found in shares.items()}
        settle(synced, times)
        for replica in assumed:
            if replica.ready.basis == ASSUMED and replica in times:  # its plan needs none; they tell people more
                replica.ready = times[replica]
        return bool(awaited)

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
