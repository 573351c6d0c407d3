"""A captured backward: compiled autograd's graph, its binding to parameters in one backward, and its compiled code.

A compiled-autograd graph takes parameters and hooks as inputs, so modules of the same shape share a graph. Compiled
code is therefore looked up by binding, never by module.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dp_compile._torch import distributed, dynamo
from dp_compile._torch.dtensors import placements_of
from dp_compile.engine import window
from dp_compile.engine.compile import CompiledBackward, NotTraced, OtherMemory, described
from dp_compile.engine.graph import Binding, GradientId, Sites, bind, find_sites
from dp_compile.engine.guards import check_gradients_have_hooks
from dp_compile.engine.hooks import GradHook, reduce_eagerly
from dp_compile.engine.plan_sync import finalize_plans
from dp_compile.errors import DPCompileError, ReductionError
from dp_compile.passes.estimates import Accumulation, Shares, Values, fake_values, ready_shares
from dp_compile.plan.planner import ASSUMED, ESTIMATED, ReadyTimes
from dp_compile.replica.replica import Replica

logger = logging.getLogger("dp_compile.capture")


class CapturedBackward:
    """A compiled-autograd graph and code for each binding to parameters so far. Holds no reference to a model."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        dynamo.refill_constants(graph_module)
        self._graph_module = graph_module
        self._sites = find_sites(graph_module.graph)
        self._compiled: dict[Binding, CompiledBackward] = {}
        self._bound: tuple[object, Binding] | None = None  # key of the last backward, and its binding

    def __call__(self, inputs: list[Any], sizes: Any, scalars: Any, hooks: Sequence[Any], packed: Any) -> Any:
        """Run one backward. Compiled autograd keeps this object and calls it in each backward with the same graph."""
        backward = window.current()
        if backward is None:
            # Another thread's backward was captured while our capture was enabled: run it unchanged.
            return torch.compiler.disable(self._graph_module.forward)(inputs, sizes, scalars, hooks, packed)
        backward.ran = True
        # If user code calls `backward()` under autocast, tracing with Dynamo would apply autocast to AOTAutograd's
        # backward. AOTAutograd's own call of that backward disables autocast (torch 2.11 to 2.15).
        with window.Outside(), dynamo.without_autocast():
            return self._run(backward, inputs, (sizes, scalars, hooks, packed))

    def _run(self, backward: window.BackwardState, inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        replicas, n_inputs = backward.replicas, len(inputs)
        compiled: CompiledBackward | None = None
        try:
            binding = self._bind(backward, inputs, rest[2])
            values: Values = {}
            if binding not in self._compiled or any(each.reduces and each.planning.awaits_graph for each in replicas):
                values = fake_values(self._graph_module, (inputs, *rest))
                if self._finalize_plans(replicas, binding, values):  # plans may have changed, and with them the binding
                    binding = self._bind(backward, inputs, rest[2])
            compiled = self._compiled.get(binding)
            if compiled is None:
                _refuse_shards(rest[2])
                if dynamo.stance() == "eager_on_recompile":
                    return self._run_uncompiled(replicas, inputs, rest)
                captured = bind(self._graph_module, self._sites, binding, len(inputs), replicas, values)
                compiled = self._compiled[binding] = CompiledBackward(captured, replicas)
            return compiled(replicas, inputs, rest)
        except (NotTraced, OtherMemory):
            # NotTraced: another thread is tracing, and Dynamo then skips every frame in the process.
            # OtherMemory: inputs alias differently than at compilation. The next backward compiles again.
            del self._compiled[binding]
        except DPCompileError:
            raise
        except Exception as error:
            # Dynamo, Inductor and fake tensors raise any exception class. Once code has begun, its inputs are consumed.
            if (compiled is not None and compiled.has_begun) or dynamo.asks_for_errors(error):
                raise
            backward.obstacle = described(error)
        del inputs[n_inputs:]
        return self._run_uncompiled(replicas, inputs, rest)

    def _bind(self, backward: window.BackwardState, inputs: Sequence[Any], hooks: Sequence[Any]) -> Binding:
        """Return the binding of the graph's inputs to parameters in this backward: usually the previous binding."""
        replicas, sites = backward.replicas, self._sites
        wanted = tuple(backward.wanted.get(replica, ()) for replica in replicas)
        mine = [hook if type(hook := hooks[call.hook]) is GradHook else None for call in sites.hook_calls]
        existing = [inputs[call.parameter].grad is not None for call in sites.hook_calls]
        layouts: tuple[tuple[str, ...], ...] = ()
        if any(replica.module.dtensors for replica in replicas):
            layouts = tuple(placements_of(inputs[position].grad) for position in sites.accumulations)
        met = mine, existing, layouts, wanted, [(weakref.ref(each), each.reduces, each.plan) for each in replicas]
        if self._bound is not None and met == self._bound[0]:
            return self._bound[1]
        for hook, call in zip(mine, sites.hook_calls, strict=True):
            if hook is not None and hook.replica is None:
                hook(inputs[call.parameter])  # raises: its replica was deleted
        ordinal = {id(replica): position for position, replica in enumerate(replicas)}
        hooked = tuple(
            (ordinal[id(hook.replica)], hook.index) if hook is not None and id(hook.replica) in ordinal else None
            for hook in mine
        )
        got = set(hooked)
        kept = tuple(
            (position, index)
            for position, replica in enumerate(replicas)
            for index, parameter in enumerate(replica.parameters)
            if (position, index) not in got and parameter.grad is not None
        )
        for position, replica in enumerate(replicas):
            if replica.config.check_reductions and replica.state.sync:
                of_replica = [place[1] for place in hooked if place is not None and place[0] == position]
                check_gradients_have_hooks(replica, of_replica, [inputs[each] for each in sites.accumulations])
        code_keys = tuple((replica.planning.code_key, replica.reduces) for replica in replicas)
        binding = Binding(code_keys, hooked, tuple(existing), kept, wanted, layouts)
        is_complete = len(hooked) - hooked.count(None) == sum(len(each.parameters) for each in replicas)
        if is_complete and not sites.unhooked:  # otherwise it depends on parameters that `met` does not include
            self._bound = met, binding
        return binding

    def _finalize_plans(self, replicas: Sequence[Replica], binding: Binding, values: Values) -> bool:
        """Before tracing, finalize plans that await a first captured graph. Return whether there were such plans."""
        synced = [each for each in replicas if each.reduces]
        awaited = [each for each in synced if each.planning.awaits_graph]
        assumed = [each for each in synced if each.planning.ready.basis == ASSUMED]
        if not awaited and not assumed:
            return False
        estimates = estimates_of(self._graph_module, self._sites, binding, values)
        times = dict[Replica, ReadyTimes]()
        for position, replica in enumerate(replicas):
            if found := {index: each for (ordinal, index), each in estimates.items() if ordinal == position}:
                ready, own = ({index: each[place] for index, each in found.items()} for place in (0, 1))
                nominal_s = max(each.backward_s for each in found.values())
                waits_from = min((each.ready for each in found.values() if each.may_wait), default=2.0)
                times[replica] = ReadyTimes(ready, None, ESTIMATED, own, nominal_s, waits_from)
        finalize_plans(synced, times)
        for replica in assumed:
            if replica.planning.ready.basis == ASSUMED and replica in times:
                replica.planning.ready = times[replica]  # for reports only: its plan does not need them
        return bool(awaited)

    def _run_uncompiled(self, replicas: Sequence[Replica], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        """Run the graph without compiling it. Its hooks launch the collectives that compiled code would launch."""
        return reduce_eagerly(replicas, lambda: torch.compiler.disable(self._graph_module.forward)(inputs, *rest))


def _refuse_shards(hooks: Sequence[Any]) -> None:
    """Raise if the graph has a hook of `fully_shard`: gradients would differ from eager ones, as was measured."""
    if any(map(distributed.is_hook_of_fully_shard, hooks)):
        raise ReductionError(
            "a captured backward reaches a module that fully_shard manages. Call replicate() on a module around it, "
            "after fully_shard(): the backward is then not captured, and the gradients are right."
        )


# --- estimated ready times, before tracing -----------------------------------------------------------------------
#
# Compiled autograd drops its nodes' metadata, which was traced with dummies (torch 2.13, `end_capture`). But the real
# inputs are available, and most nodes are aten ops of AOTAutograd's backward: fake tensors propagate through them.


def estimates_of(
    graph_module: fx.GraphModule, sites: Sites, binding: Binding, values: Values
) -> dict[GradientId, Shares]:
    """Estimate when each gradient is ready, from the graph and its `fake_values`; empty if a shape is unknown.

    A shape is unknown if it depends on data, or if a user's hook replaces the gradient.
    """
    nodes = graph_module.graph.find_nodes(op="call_function", target=dynamo.call_accumulate_grad)
    node_of = dict(zip(sites.accumulations, nodes, strict=True))
    accumulations = {
        place: Accumulation(node_of[call.parameter], dynamo.accumulated(node_of[call.parameter]).new, adds)
        for call, place, adds in zip(sites.hook_calls, binding.hooked, binding.into_existing, strict=True)
        if place is not None
    }
    unknown = [each for each in accumulations.values() if not isinstance(values.get(each.gradient), torch.Tensor)]
    if unknown:
        logger.debug("a captured graph does not say when %d of its gradients are ready", len(unknown))
        return {}
    return dict(zip(accumulations, ready_shares(list(accumulations.values()), values), strict=True))
