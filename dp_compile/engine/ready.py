"""A compiled backward that runs without Dynamo after its first run.

In each backward, what Dynamo would check is checked here (`Fits`), and what its bytecode does around the compiled
graph, putting gradients where they belong, is done here (`Ready`), as it was seen in the backward that compiled. Both
take a part of the time that they take Dynamo. Only graphs in which nothing else happens qualify (`check_plain`).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch
from torch import fx

from dp_compile._torch import dynamo, guards
from dp_compile._torch.guards import Fits as Fits
from dp_compile.engine.graph import CapturedGraph, ToReduce
from dp_compile.engine.replica import Replica
from dp_compile.fx.text import is_op

_HOMES: Final = ("dp_compile", "torch", "_operator", "math")


class NotPlain(Exception):
    """Dynamo has to run a backward; the message says why."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Code of a backward that needs no Dynamo.

    `places` belong to what the code returns, in its order: the position of the parameter in the inputs whose gradient
    it is, or, below zero, `-1 - n` for the `n`th of what is returned. `constants`: what it takes after the inputs.
    """

    code: Callable[..., Sequence[Any]]
    fits: Callable[[Sequence[Any]], bool]
    places: tuple[int, ...]
    constants: tuple[torch.Tensor, ...] = ()

    def run(self, inputs: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """One backward, whose inputs fit; empties their list."""
        parameters = {place: inputs[place] for place in self.places if place >= 0}
        return [], self._put(parameters, self.code(inputs, *self.constants))

    def _put(self, parameters: Mapping[int, torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What Dynamo's bytecode does with the outputs: gradients to their parameters; the rest is returned."""
        returned: dict[int, torch.Tensor] = {}
        for place, output in zip(self.places, outputs, strict=True):
            if place >= 0:
                parameters[place].grad = output
            else:
                returned[-1 - place] = output
        return [returned[number] for number in sorted(returned)]


def places_of(
    parameters: Mapping[int, torch.Tensor], outputs: Sequence[Any], returned: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Where the outputs of code went, as was seen in a backward that it just ran.

    Raises:
        NotPlain: some went nowhere, or something did not come from there.
    """
    gradients = {id(each.grad): position for position, each in parameters.items() if each.grad is not None}
    others = {id(each): number for number, each in enumerate(returned)}
    places = []
    for output in outputs:
        if id(output) not in gradients and id(output) not in others:
            raise NotPlain("one of its results goes to neither a gradient nor to us")
        places.append(gradients[id(output)] if id(output) in gradients else -1 - others[id(output)])
    if len({*places}) != len(places) or len(places) != len(gradients) + len(others):
        raise NotPlain("some of its gradients are none of its results")
    return tuple(places)


def takes_list_first(graph: fx.Graph) -> bool:
    """Whether a graph that Dynamo made of a plain one takes a list of tensors, and then nothing but constants."""
    first, *others = [each.meta.get("example_value") for each in graph.find_nodes(op="placeholder")] or [None]
    are_tensors = all(isinstance(each, torch.Tensor) for each in [*(first or ()), *others])
    return isinstance(first, list) and are_tensors and not graph.find_nodes(op="get_attr")


def check_plain(captured: CapturedGraph, replicas: Sequence[Replica], wanted: ToReduce) -> None:
    """Whether `Fits` and `Ready` know all that Dynamo does with a captured graph in each backward.

    Raises:
        NotPlain: there is more to it: code of the user's runs in it, or it takes something else than tensors.
    """
    if any(captured.binding.into_existing) or captured.binding.kept or captured.sites.unhooked:
        raise NotPlain("gradients are added to those of before")
    if None in captured.binding.hooked:
        raise NotPlain("a hook of the user's runs in it")
    if wanted.updates or any(replica.after.scattered for replica in replicas):
        raise NotPlain("an optimizer takes part in it")
    if any(replica.dtensors for replica in replicas):
        raise NotPlain("a DTensor takes part in it")
    if any(replica.comm_hook is not None for replica in replicas):
        raise NotPlain("a comm hook takes part in it")
    for node in captured.graph_module.graph.nodes:
        if node.op == "placeholder":
            _check_input(node)
        elif node.op in ("call_method", "call_module"):
            raise NotPlain(f"it has a {node.op} node")
        elif node.op == "call_function" and not is_op(node.target):
            _check_function(node)


def _check_input(node: fx.Node) -> None:
    reads = [user for user in node.users if user.users or user.target is not operator.getitem]
    if node.target == "hooks":
        reads = [read for read in reads if not all(map(_is_hook_after_accumulation, read.users))]
    if node.target != "inputs" and reads:
        raise NotPlain(f"it takes {node.target}, not only tensors")


def _is_hook_after_accumulation(node: fx.Node) -> bool:
    """Of ours, which are taken out, or one that the binding tells of."""
    return node.target is dynamo.call_hook and node.kwargs.get("hook_type") == "post_acc_grad_hook"


def _check_function(node: fx.Node) -> None:
    if guards.is_prologue(node):
        if guards.handles_subclasses(node):
            raise NotPlain("tensors of a class of their own pass through it")
    elif not (_is_hook_after_accumulation(node) or guards.is_op_of_autograd(node.target) or _is_known(node.target)):
        raise NotPlain(f"it calls {getattr(node.target, '__name__', node.target)}")


def _is_known(function: Any) -> bool:
    """Whether a function is torch's or ours, found under its name, and calls none that it is given."""
    if not isinstance(function, (FunctionType, BuiltinFunctionType)):
        return False
    if function in (dynamo.call_hook, dynamo.call_backward):
        return False
    if getattr(torch, function.__name__, None) is function:  # `torch.zeros` has the path of a class of its own
        return True
    module = str(function.__module__)
    found: Any = sys.modules.get(module)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function and module.partition(".")[0] in _HOMES
