"""What a captured graph's inputs mean in one backward: which gradient is whose.

A graph of compiled autograd takes parameters and hooks as inputs, so the same graph serves every module of the same
shape. Compiled code is chosen by the binding, never by the module.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dp_compile._torch import dynamo
from dp_compile._torch.dtensors import placements_of
from dp_compile.engine.hooks import GradHook, check_gradients_have_hooks
from dp_compile.engine.replica import Replica
from dp_compile.engine.updates import Wanted
from dp_compile.plan.buckets import BucketPlan

Place = tuple[int, int]
"""Which gradient: the replica's position in this backward, the parameter's index in the replica."""


Layouts = tuple[tuple[str, ...], ...]
"""The placements of tensors, of each none or one for each dimension of its mesh."""


@dataclass(frozen=True, slots=True)
class HookCall:
    """A call of a post-accumulate-grad hook: its node and the positions of hook and parameter in the inputs."""

    node: str
    hook: int
    parameter: int


@dataclass(frozen=True, slots=True)
class Sites:
    """Where a graph accumulates gradients and calls hooks.

    `accumulations` are positions of the tensors in the inputs; `unhooked` those of them that have no hook at all.
    """

    accumulations: tuple[int, ...]
    unhooked: tuple[int, ...]
    hook_calls: tuple[HookCall, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """What the sites of a graph mean in one backward. Equal bindings run the same code.

    `hooked[i]` and `into_existing[i]` (did the parameter have a gradient before?) belong to `sites.hook_calls[i]`;
    `kept` are the parameters without a new gradient that have an old one.
    """

    code_keys: tuple[tuple[str, bool], ...]
    hooked: tuple[Place | None, ...]
    into_existing: tuple[bool, ...]
    kept: tuple[Place, ...]
    wanted: tuple[tuple[Wanted, ...], ...] = ()
    """What optimizers update in it, of each replica."""
    layouts: Layouts = ()
    """Beside DTensor parameters: how the gradients lie that parameters had before. Dynamo does not look at that."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """What was met last, and the binding it had. Holds hooks of ours and weak references, so no model."""

    hooks: list[GradHook | None]
    existing: list[bool]
    switches: list[tuple[weakref.ref[Replica], bool, BucketPlan, tuple[Wanted, ...]]]
    unhooked: list[weakref.ref[torch.Tensor]]
    layouts: Layouts
    binding: Binding

    def matches(
        self,
        hooks: list[GradHook | None],
        existing: list[bool],
        replicas: Sequence[Replica],
        unhooked: Sequence[torch.Tensor],
        layouts: Layouts,
    ) -> bool:
        return (
            existing == self.existing
            and layouts == self.layouts
            and len(replicas) == len(self.switches)
            and all(
                replica is ref()
                and replica.reduces == reduces
                and replica.plan is plan
                and replica.after.wanted == wanted
                for replica, (ref, reduces, plan, wanted) in zip(replicas, self.switches, strict=True)
            )
            and all(map(operator.is_, hooks, self.hooks))
            and all(tensor is ref() for tensor, ref in zip(unhooked, self.unhooked, strict=True))
        )


class Binder:
    """Finds the binding of each backward of one graph. Nearly always it is that of the last, which is quick to see."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._memory: _Memory | None = None

    def bind(self, replicas: tuple[Replica, ...], inputs: Sequence[Any], hooks: Sequence[Any]) -> Binding:
        """The binding of one backward.

        Raises:
            ReductionError: a parameter gets a gradient that no hook reduces.
        """
        sites = self._sites
        mine = [hook if type(hook := hooks[call.hook]) is GradHook else None for call in sites.hook_calls]
        existing = [inputs[call.parameter].grad is not None for call in sites.hook_calls]
        unhooked = [inputs[position] for position in sites.unhooked]
        layouts: Layouts = ()
        if any(replica.dtensors for replica in replicas):
            layouts = tuple(placements_of(inputs[position].grad) for position in sites.accumulations)
        if self._memory is not None and self._memory.matches(mine, existing, replicas, unhooked, layouts):
            return self._memory.binding
        for hook in mine:
            if hook is not None and hook.replica is None:
                hook(inputs[sites.hook_calls[mine.index(hook)].parameter])  # says that nobody reduces it any more
        binding = _bind(replicas, mine, existing, layouts)
        _check(replicas, binding, [inputs[position] for position in sites.accumulations])
        complete = len(binding.hooked) - binding.hooked.count(None) == sum(len(each.parameters) for each in replicas)
        if complete:  # else parameters that it does not use have old gradients or not, which a memory does not compare
            switches = [(weakref.ref(each), each.reduces, each.plan, each.after.wanted) for each in replicas]
            self._memory = _Memory(
                mine, existing, switches, [weakref.ref(tensor) for tensor in unhooked], layouts, binding
            )
        return binding


def _bind(
    replicas: Sequence[Replica], hooks: Sequence[GradHook | None], existing: Sequence[bool], layouts: Layouts
) -> Binding:
    ordinal = {id(replica): position for position, replica in enumerate(replicas)}
    hooked = tuple(
        (ordinal[id(hook.replica)], hook.index) if hook is not None and id(hook.replica) in ordinal else None
        for hook in hooks
    )
    got = set(hooked)
    kept = tuple(
        (position, index)
        for position, replica in enumerate(replicas)
        for index, parameter in enumerate(replica.parameters)
        if (position, index) not in got and parameter.grad is not None
    )
    code_keys = tuple((replica.code_key, replica.reduces) for replica in replicas)
    return Binding(
        code_keys, hooked, tuple(existing), kept, tuple(replica.after.wanted for replica in replicas), layouts
    )


def _check(replicas: Sequence[Replica], binding: Binding, accumulated: Sequence[torch.Tensor]) -> None:
    for ordinal, replica in enumerate(replicas):
        if replica.config.check_reductions and replica.sync:
            hooked = [place[1] for place in binding.hooked if place is not None and place[0] == ordinal]
            check_gradients_have_hooks(replica, hooked, accumulated)


def find_sites(graph: fx.Graph) -> Sites:
    accumulations = tuple(
        position_of(node.args[0]) for node in graph.find_nodes(op="call_function", target=dynamo.call_accumulate_grad)
    )
    hook_calls = tuple(
        HookCall(node.name, position_of(node.args[0]), position_of(node.args[1]))
        for node in graph.find_nodes(op="call_function", target=dynamo.call_hook)
        if node.kwargs.get("hook_type") == "post_acc_grad_hook"
    )
    with_hook = {call.parameter for call in hook_calls}
    unhooked = tuple(position for position in accumulations if position not in with_hook)
    return Sites(accumulations, unhooked, hook_calls)


def position_of(node: object) -> int:
    """`k` of a node `getitem(placeholder, k)`."""
    assert isinstance(node, fx.Node)
    assert node.target is operator.getitem, node
    position = node.args[1]
    assert isinstance(position, int)
    return position
