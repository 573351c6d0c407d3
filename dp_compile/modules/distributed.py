"""`DistributedDataParallel`: the wrapper class, for code that says `DDP(model)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import autograd
from dp_compile.config import ReplicateConfig
from dp_compile.engine.comm_hook import HookFunction
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.modules.join import join, join_hook, joinable
from dp_compile.modules.replicate import replicate
from dp_compile.modules.replicated_module import (
    no_sync,
    register_comm_hook,
    replica_of,
    restore_class,
    share_replica,
    unwrap,
)
from dp_compile.modules.selection import device_of, is_waiting

_REFUSED = {
    "delay_all_reduce_named_params": "pass the modules that own them as ignored_modules to dp_compile.replicate()",
    "param_to_hook_all_reduce": "use dp_compile.replicate() with the default schedule",
    "mixed_precision": "use torch.autocast",
    "skip_all_reduce_unused_params": "use find_unused_parameters=True",
    "bucket_cap_mb_list": "use bucket_cap_mb",
    "batched_grad_copy": "leave it out: gradients are views of their buckets, there are no copies to batch",
}


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a module as torch's `DistributedDataParallel` does, on `dp_compile.replicate`.

    Same keyword names as torch's. `state_dict` keys have the prefix `module.`, as there. What torch's reducer does
    with `gradient_as_bucket_view` and `static_graph` happens here anyway: gradients are views of their buckets, and
    a captured backward is static; both are accepted and change nothing in the result.

    Args:
        module: the module to wrap; also found as `.module`.
        device_ids: `None`, or one device: inputs are moved there. The module has to be there already.
        output_device: `None`, or the same device.
        dim: only 0, the batch dimension.
        broadcast_buffers: copy the first rank's buffers to all ranks after each synchronised backward.
        init_sync: only `True`: ranks compare and copy their state at the start.
        process_group: whom to average with.
        bucket_cap_mb: MiB at which a bucket is closed, 25 by default.
        find_unused_parameters: see `ReplicateConfig`.
        check_reduction: without effect, as in torch; see `ReplicateConfig.check_reductions`.
        device_mesh: a mesh with one dimension, in place of `process_group`.
        forward_sync_buffers: torch's newer name of `broadcast_buffers`.
        ddp_python_hook: as in `replicate`.
        config: all options in one value; an argument given here wins over its field.

    Raises:
        ConfigError: an option is not supported or has a value that is not allowed.
        ModuleError, DesyncError: as `replicate`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool | None = None,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        device_mesh: DeviceMesh | None = None,
        forward_sync_buffers: bool | None = None,
        *,
        ddp_python_hook: bool | None = None,
        config: ReplicateConfig | None = None,
        **unsupported: Any,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        _refuse(unsupported)
        if dim != 0:
            raise ConfigError(f"dim must be 0, got {dim}. Only the batch dimension is split over ranks.")
        if not init_sync:
            raise ConfigError("init_sync=False is not supported: ranks always start from the first rank's state.")
        if isinstance(module, nn.Module) and is_waiting(module, frozenset()):
            raise ModuleError(
                f"{type(module).__name__} has lazy parameters, or parameters on the meta device. Give them values "
                "first, or use dp_compile.replicate(), which can wait for the first forward."
            )
        self.device = _one_device(module, device_ids, output_device)
        self.module = replicate(
            module,
            ddp_python_hook=ddp_python_hook,
            process_group=process_group,
            device_mesh=device_mesh,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers,
            config=config,
        )
        restore_class(unwrap(self.module))  # as in torch, where `.module` keeps its class; it can be copied
        share_replica(self, self.module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, with tensors moved to its device if `device_ids` was given."""
        if self.device is not None:
            inputs, kwargs = autograd.tree_map_only(torch.Tensor, self._to_device, (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside; the first backward after it reduces the sums."""
        with no_sync(self.module):
            yield

    def register_comm_hook(self, state: Any, hook: HookFunction) -> None:
        """Let `hook(state, bucket)` reduce the buckets, called by torch's C++ reducer; backwards are not captured then.

        Raises:
            ModuleError: there is a hook already, or a backward has run already.
            ConfigError: the hook is not a function of (state, bucket), or not offered for the group's backend.
        """
        register_comm_hook(self.module, state, hook)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Train with a different number of batches on each rank; see `dp_compile.join`."""
        return join(
            self.module,
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join([ddp, optimizer])`: what this rank does once it has no inputs left."""
        return join_hook(self, replica_of(self.module), **kwargs)

    @property
    def join_device(self) -> torch.device:
        return joinable(self.module).join_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return joinable(self.module).join_process_group

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in _REFUSED:
            raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument '{name}'")
        if value:
            raise ConfigError(f"{name} is not supported; {_REFUSED[name]}.")


def _one_device(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    if device_ids is None and output_device is None:
        return None
    if device_ids is None or len(device_ids) != 1:
        raise ConfigError(f"device_ids must hold one device (output_device the same), got {device_ids}.")
    device = device_of(device_ids[0], "device_ids")
    if output_device is not None and device_of(output_device, "output_device") != device:
        raise ConfigError(f"output_device must be the device of device_ids, {device}, got {output_device}.")
    for name, parameter in module.named_parameters():
        if parameter.device != device:
            raise ConfigError(f"{name} is on {parameter.device}, device_ids says {device}. Call module.to({device}).")
    return device
