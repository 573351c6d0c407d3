"""torch's own `_apply_optimizer_in_backward`, called before `replicate()`: taken over, as torch's DDP does.

It makes an optimizer for each parameter, whose hook steps as soon as there is a gradient; of one rank, that would be.
Here its hooks are taken off, and those optimizers step with reduced gradients: in a captured backward as `in_backward`
lets them, else at the backward's end. Nobody calls `step()`; a backward under `no_sync` accumulates.

Whoever holds those optimizers, as checkpoints and schedulers do, sees what happens: the one that steps for all of a
class works with their own groups and states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dp_compile._torch import optim
from dp_compile.engine.updates import Wanted
from dp_compile.errors import ModuleError
from dp_compile.modules.replicated_module import replica_of
from dp_compile.modules.tensor_parallel import refuse_dtensors
from dp_compile.optim.in_backward import InBackward, check_of_torch
from dp_compile.optim.partial_steps import check_kind

CALL = "_apply_optimizer_in_backward()"


def check(module: nn.Module, trainable: Mapping[str, nn.Parameter]) -> Callable[[], None]:
    """Whether the optimizers of these parameters can step behind reductions. Returns what lets them, once it starts.

    Args:
        module: the one that is replicated.
        trainable: its parameters, by name.

    Raises:
        ModuleError: a parameter has several optimizers.
        ConfigError: an optimizer is none of those that update each parameter by itself; or there are DTensors.
    """
    refuse_dtensors(module, CALL)
    chosen = {name: found for name, each in trainable.items() if (found := optim.in_backward_optimizers(each))}
    if several := [name for name, found in chosen.items() if len(found) > 1]:
        raise ModuleError(f"torch's {CALL} was called more than once for {', '.join(several)}. Call it once for each.")
    by_class: dict[type[torch.optim.Optimizer], list[torch.optim.Optimizer]] = {}
    for (optimizer,) in chosen.values():
        check_kind(optimizer)
        check_of_torch(optimizer)
        by_class.setdefault(type(optimizer), []).append(optimizer)

    def take_over() -> None:
        replica = replica_of(module)
        # The first one puts all of them back, when the module is released.
        put_back = [optim.take_step_hooks_off(trainable[name]) for name in chosen]
        for optimizers in by_class.values():
            updates = Applied(replica, _together(optimizers), None, None, None)
            updates.put_back, put_back = put_back, []
            updates.install()
            replica.after.updates.append(updates)

    return take_over


def _together(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer that works with the groups and the states of several of its class, and lives as long as they do."""
    made = type(optimizers[0])([dict(optimizers[0].param_groups[0])])  # type: ignore[call-arg]

    def link(*_: Any) -> None:
        """Do so from now on: who loads a state gets new groups and states."""
        made.param_groups = [group for each in optimizers for group in each.param_groups]
        made.state.clear()
        for each in optimizers:
            for parameter in (parameter for group in each.param_groups for parameter in group["params"]):
                made.state[parameter] = each.state[parameter]

    link()
    for each in optimizers:
        each.register_load_state_dict_post_hook(link)
    return made


class Applied(InBackward):
    """The optimizers of one class that were applied to parameters of a module: they step without being told."""

    put_back: Sequence[Callable[[], None]] = ()
    """What lets them step as they did, once the module is not replicated any more."""

    def wanted(self, *, keep_graph: bool) -> Wanted:
        wanted = super().wanted(keep_graph=keep_graph)
        return Wanted() if wanted.obstacle else wanted  # the step comes in any case, at the end

    def ended(self) -> None:
        super().ended()
        self._alive().step()
        for group in self._alive().param_groups:
            for parameter in group["params"]:
                optim.note_step(optim.in_backward_optimizers(parameter))

    def released(self) -> None:
        super().released()
        for each in self.put_back:
            each()
