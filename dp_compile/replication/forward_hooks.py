"""What `replicate` puts in front of a module's forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dp_compile._torch import autograd, compiler, distributed
from dp_compile.comm_hooks.comm_hook import HookFunction
from dp_compile.config import ReplicateConfig
from dp_compile.engine.group import Group
from dp_compile.engine.module_names import class_name
from dp_compile.engine.replica import Replica
from dp_compile.errors import ConfigError, ModuleError


class Installed:
    """A forward pre-hook of ours. Copies and pickles of the module have one that does nothing in its place."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return (_Nothing, ())


class _Nothing(Installed):
    def __call__(self, *_: Any) -> None:
        pass


class ForwardCheck(Installed):
    """Refuses what would drop the gradients' hooks or reduce twice."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    @compiler.no_graph_of_its_own
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        refuse_traced_backward()
        around = distributed.active_ddp()
        if around is not None:
            _refuse_torch_ddp(self.replica, module, around)


@compiler.untraced("torch's DistributedDataParallel is around a module that dp_compile replicates")
def _refuse_torch_ddp(replica: Replica, module: nn.Module, around: nn.Module) -> None:
    """Refuse torch's DDP around a replicated module. Its constructor calls nothing of ours, but its forward does.

    Raises:
        ModuleError: both would reduce the same gradients.
    """
    ours = {id(parameter) for parameter in replica.parameters}
    if any(id(parameter) in ours for parameter in distributed.parameters_of_ddp(around)):
        raise ModuleError(
            f"{class_name(module)} is wrapped by torch's DistributedDataParallel and replicated by dp_compile. "
            "Use one. Leave it out, or put dp_compile.DistributedDataParallel in its place, without replicate()."
        )


class InputMover(Installed):
    """Moves the tensors among a module's inputs to a device, as torch's DDP does with `device_ids`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        moved: tuple[tuple[Any, ...], dict[str, Any]] = autograd.tree_map_only(
            torch.Tensor, self._moved, (args, kwargs)
        )
        return moved

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


class Pending(Installed):
    """A module that was given to `replicate` before its parameters had values: it starts with its first forward.

    Installed on the module and on each submodule that owns parameters: a part that ran before the start would get
    gradients that no rank reduces.
    """

    def __init__(
        self,
        root: nn.Module,
        config: ReplicateConfig,
        group: Group,
        start: Callable[[nn.Module, Pending], None],
        *,
        needs_grad: bool,
    ) -> None:
        self._root, self.config, self.group, self._start = weakref.ref(root), config, group, start
        self._needs_grad, self._has_started = needs_grad, False
        self.sync = True
        self.comm_hooks: list[tuple[Any, HookFunction]] = []
        """What `register_comm_hook` was given: registered after the start."""

    @compiler.untraced(
        "a module starts to be replicated with its first forward; run one forward before compiling fullgraph"
    )
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        root = self._root()
        if root is None or (self._needs_grad and not torch.is_grad_enabled()):
            return
        if not self._has_started:  # a wrapper has this hook too, after what it wraps was called
            self._start(root, self)
            self._has_started = True
        remove_forward_hooks(module, only=self)


def remove_forward_hooks(module: nn.Module, only: Installed | None = None) -> None:
    """Take off what this package put in front of the module's forward, or only one of its hooks."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Installed) and only in (None, hook):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def refuse_traced_backward() -> None:
    """Refuse a mode of Dynamo in which no gradient would be reduced.

    Raises:
        ConfigError: it is on.
    """
    if compiler.trace_autograd_ops():
        raise ConfigError(
            "torch._dynamo.config.trace_autograd_ops is on: torch then drops every post-accumulate-grad hook and no "
            "gradient would be reduced. Switch it off and call backward() outside the compiled function."
        )
