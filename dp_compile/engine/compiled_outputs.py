"""Corrections of gradients from AOTAutograd's code in an eager backward, to equal those of a captured backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dp_compile._torch import autograd
from dp_compile.replica.replica import Replica, owners


@dataclass(eq=False, slots=True)
class CorrectedOutputs:
    """A context that corrects two faults of torch 2.13, which `torch.compile` also has without this package.

    **Hooks of unused parameters.** A mixed precision policy casts every parameter at the start of a forward. Code for
    a batch that skips some parameters has their casts but returns no gradient for them. The engine passes None on and
    calls their hooks nevertheless. This context disables all hooks of such parameters, those of the user too.

    **Gradients that share memory.** Inductor removes the copies that autograd made (`remove_noop_ops`). Two gradients
    may then share memory: adding to one, or clipping it, changes both. This context copies one of them.
    """

    nodes: Iterable[Any]  # AOTAutograd's backward nodes in the graph
    replicas: Collection[Replica]
    handles: list[Any] = field(default_factory=list)
    left_out: dict[tuple[Replica, int], dict[int, Any]] = field(default_factory=dict)
    """The disabled hooks of unused parameters."""

    def __enter__(self) -> None:
        self.handles += [node.register_hook(partial(self._returned, node)) for node in self.nodes]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        for (replica, index), hooks in self.left_out.items():
            autograd.hooks_behind(replica.parameters[index]).update(hooks)

    def _returned(
        self, node: Any, gradients: Sequence[torch.Tensor | None], _: object
    ) -> tuple[torch.Tensor | None, ...]:
        given, memories = list(gradients), set[int]()
        for position, (gradient, (following, _)) in enumerate(zip(gradients, node.next_functions, strict=True)):
            if gradient is None:
                leaf = autograd.leaf_behind(following)
                place = None if leaf is None else owners.find(leaf)
                if place is not None and place[0] in self.replicas:
                    self.handles.append(following.register_prehook(partial(self._reached, place)))
            elif type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.numel():
                memory = gradient.untyped_storage().data_ptr()
                if memory in memories:
                    given[position] = gradient.clone()
                memories.add(memory)
        return tuple(given)

    def _reached(self, place: tuple[Replica, int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Disable a parameter's hooks if its total gradient is None. Runs before the gradient is accumulated."""
        hooks = autograd.hooks_behind(place[0].parameters[place[1]])
        if gradients[0] is None:
            self.left_out.setdefault(place, {}).update(hooks)
            hooks.clear()
        else:  # enable them again: only a nested backward had no gradient for it
            hooks.update(self.left_out.pop(place, {}))
