"""What a functional comm hook remembers from one backward to the next: tensors for each gradient, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dp_compile.comm_hooks.functional import FunctionalHook, State
from dp_compile.errors import ConfigError, UnsupportedModuleError

Tensors = dict[str, dict[str, torch.Tensor]]
"""By parameter, then by the hook's own name."""


class HookState:
    """The state of a `FunctionalHook`: `model.register_comm_hook(dp_compile.HookState(), hook)`. For one module.

    Each rank has its own, and saves and loads its own: what was not sent yet differs from rank to rank. It is kept by
    parameter name, so it may be loaded whichever buckets there are.
    """

    def __init__(self) -> None:
        self.backwards = 0
        """Synchronised backwards so far."""
        self._tensors: Tensors = {}
        self._is_bound = False

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors: `{"backwards": int, "tensors": {parameter: {name: tensor}}}`."""
        return {"backwards": self.backwards, "tensors": _copies(self._tensors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank; before `register_comm_hook()`, which compares ranks.

        Raises:
            ConfigError: it is no such state.
            UnsupportedModuleError: a module uses this one already.
        """
        self.check_free()
        try:
            self.backwards, self._tensors = state_dict["backwards"], _copies(state_dict["tensors"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"state_dict is not the state of a comm hook: {error!r}. Pass the result of HookState.state_dict()."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        HookState.__init__(self)
        self.load_state_dict(state)

    # --- for the engine

    def check_free(self) -> None:
        """Check that no module uses it.

        Raises:
            UnsupportedModuleError: one does.
        """
        if self._is_bound:
            raise UnsupportedModuleError(
                "this HookState belongs to a replicated module already. Make one for each module, and load it before "
                "register_comm_hook()."
            )

    def bind(self, hook: FunctionalHook, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Belong to a module from now on: begin with what was loaded, else with the hook's initial state."""
        pairs = zip(names, parameters, strict=True)
        fresh = {name: initial_state(hook, name, each) for name, each in pairs if not each.is_complex()}
        if self._tensors:
            check_alike(self._tensors, fresh)
            _copy(self._tensors, fresh)
        self._tensors, self._is_bound = fresh, True

    def unbind(self) -> None:
        self._is_bound = False

    def of(self, name: str) -> State:
        return self._tensors.get(name, {})

    def restore(self, state_dict: Mapping[str, Any]) -> None:
        """Copy what `state_dict` gave back, after a warm-up."""
        self.backwards = state_dict["backwards"]
        _copy(state_dict["tensors"], self._tensors)


def _copies(tensors: Mapping[str, State]) -> Tensors:
    return {name: {key: each.clone() for key, each in state.items()} for name, state in tensors.items()}


def _copy(source: Mapping[str, State], target: Tensors) -> None:
    for name, state in target.items():
        for key, tensor in state.items():
            tensor.copy_(source[name][key])


def initial_state(hook: FunctionalHook, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a hook remembers at first of a gradient, in new memory.

    Raises:
        ConfigError: it is no state; the text names the parameter.
    """
    # The shape without the memory.
    like = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    with torch.no_grad():
        state = dict(hook.initial_state(like))
    for key, tensor in state.items():
        if not isinstance(key, str) or not key or "," in key or not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"the state of comm hook {hook!r} for {name} must be tensors by names without commas, got {key!r}: "
                f"{type(tensor).__name__}."
            )
    return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}


def check_alike(given: Mapping[str, State], wanted: Mapping[str, State]) -> None:
    """Whether a state that is loaded has the tensors that a hook has.

    Raises:
        ConfigError: it has not; the text names a parameter.
    """
    for name in sorted({*given, *wanted}):
        kinds = [
            None if state is None else {key: (tuple(each.shape), each.dtype) for key, each in sorted(state.items())}
            for state in (given.get(name), wanted.get(name))
        ]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"the loaded comm hook state does not match {name}: it has {kinds[0] or 'nothing'}, the hook expects "
                f"{kinds[1] or 'nothing'}. Load a state that was saved with this model and this hook."
            )
