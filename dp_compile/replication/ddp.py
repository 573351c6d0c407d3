"""`DistributedDataParallel`: the wrapper class, for code that calls `DDP(model)`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from dp_compile._torch import autograd
from dp_compile._torch.distributed import set_parameters_to_ignore
from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError, UnsupportedModuleError, require
from dp_compile.replica.group import resolve_group
from dp_compile.replica.precision import ATTRIBUTE, Precision
from dp_compile.replication.join import ReplicaJoinable, join
from dp_compile.replication.module import ReplicatedModule, moved, remove_forward_hooks, replica_of, unwrap
from dp_compile.replication.replicate import OPTIONS, checks_names, merge_options, options_of_torch, replicate_module
from dp_compile.replication.selection import device_of, is_waiting

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class DistributedDataParallel(nn.Module, ReplicaJoinable):
    """Wraps a module as torch's `DistributedDataParallel` does, and replicates it by `dp_compile.replicate`.

    Keyword names are torch's, and `state_dict` keys have the prefix `module.` as in torch. The wrapper passes
    `isinstance(model, torch.nn.parallel.DistributedDataParallel)` and has the attributes that frameworks read. So
    `torch.nn.parallel.DistributedDataParallel = dp_compile.DistributedDataParallel` makes frameworks use it. Copies and
    unpickled wrappers, such as averages of weights, can only evaluate: wrap their `.module` to train it. The arguments
    below differ from torch's.

    Args:
        device_ids: `None`, or one device to which inputs are moved. The module must already be on it.
        dim: only 0, the batch dimension.
        broadcast_buffers: as in `ReplicateConfig`: at the start and after synchronised backwards, not before forwards.
        init_sync: only `True`: ranks compare their state and receive the first rank's at the start.
        bucket_cap_mb: as in `ReplicateConfig`; without it, `config` determines the bucket boundaries.
        gradient_as_bucket_view, static_graph: `True` as in `ReplicateConfig`; `False` leaves it to `config`.
        device_mesh: as in `replicate`; it may have two dimensions.
        forward_sync_buffers: if given, overrides `broadcast_buffers`, and buffers are broadcast at the start too.
        ddp_python_hook: as in `replicate`; `False`: the call returns torch's own `DistributedDataParallel`.
        mp_policy: as in `replicate`, but applied by the wrapper's forward, not by that of `.module`.
        config: all options in one object; an argument given here overrides its field.

    Raises the errors of `replicate`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return torch's own wrapper with `ddp_python_hook=False` or `DP_COMPILE_DDP_PYTHON_HOOK=0`."""
        try:
            given = inspect.signature(DistributedDataParallel.__init__).bind(None, *args, **kwargs).arguments
            options = merge_options(given.get("config"), {name: given[name] for name in OPTIONS & given.keys()})
        except (TypeError, ConfigError):  # copying or unpickling; otherwise __init__ raises the error, on all ranks
            return super().__new__(cls)
        if options.uses_python_hook():
            return super().__new__(cls)
        group = resolve_group(given.get("process_group"), given.get("device_mesh"))
        theirs = {name: value for name, value in given.items() if name not in {"self", "config", *OPTIONS}}
        return TorchDDP(**options_of_torch(options, group), **theirs)

    @checks_names
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
        *,
        device_mesh: DeviceMesh | None = None,
        forward_sync_buffers: bool | None = None,
        ddp_python_hook: bool | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        config: ReplicateConfig | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        require(dim == 0, "dim", "0, the batch dimension", dim)
        require(bool(init_sync), "init_sync", "True: ranks start from the first rank's state", init_sync)
        if isinstance(module, nn.Module) and is_waiting(module, frozenset()):
            raise UnsupportedModuleError(
                f"{type(module).__name__} has lazy parameters, or parameters or buffers on the meta device. Give "
                "them values first, or use dp_compile.replicate(), which can wait for the first forward."
            )
        self._inputs_to = _one_device(module, device_ids, output_device)
        self._is_copy = False
        given = {
            "ddp_python_hook": ddp_python_hook,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph or None,
            "gradient_as_bucket_view": gradient_as_bucket_view or None,
            "broadcast_buffers": broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers,
            "init_sync_buffers": None if forward_sync_buffers is None else True,
            "mp_policy": mp_policy,
        }
        self.module = replicate_module(
            module, given, process_group=process_group, device_mesh=device_mesh, config=config, keeps_class=True
        )

        config = replica_of(self).config
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.device = next(self.module.parameters()).device
        self.device_type = self.device.type
        on_gpu = self._inputs_to is not None and self._inputs_to.type != "cpu"
        self.device_ids = [self.device.index] if on_gpu else None
        self.output_device = self.device.index if on_gpu else None
        self.dim, self.gradient_as_bucket_view = dim, bool(config.gradient_as_bucket_view)
        self.static_graph = config.static_graph
        self.find_unused_parameters = config.find_unused_parameters and not config.static_graph
        self.broadcast_buffers = self.forward_sync_buffers = config.broadcast_buffers
        self.require_forward_param_sync = False  # buffers are copied after backwards; accelerate sets it
        self.parameters_to_ignore = set(getattr(unwrap(module), "_ddp_params_and_buffers_to_ignore", ()))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Input tensors are moved to its device if `device_ids` was given. A profile names the call
        as torch's DDP does, unless the wrapper itself is compiled."""
        if torch.compiler.is_compiling() or not autograd.profiler_is_on():  # this order avoids a guard on the profiler
            return self._run(inputs, kwargs)
        with torch.profiler.record_function("DistributedDataParallel.forward"):
            return self._run(inputs, kwargs)

    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_copy and torch.is_grad_enabled():
            raise UnsupportedModuleError(
                "a copy, or a loaded pickle, of a DistributedDataParallel reduces no gradients. Wrap its .module to "
                "train it, or call it under torch.no_grad()."
            )
        if self._inputs_to is not None:
            inputs, kwargs = moved((inputs, kwargs), self._inputs_to)
        inner = unwrap(self.module)
        precision: Precision | None = vars(inner).get(ATTRIBUTE)
        if precision is None:
            return self.module(*inputs, **kwargs)
        return precision.run(inner, self.module, inputs, kwargs)

    _dp_compile_wraps = True  # `inner_module` looks for this attribute
    no_sync, register_comm_hook = ReplicatedModule.no_sync, ReplicatedModule.register_comm_hook

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """Train with a different number of batches on each rank; see `dp_compile.join`."""
        return join(
            self.module,
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Restore a copy or an unpickled wrapper, which reduces no gradients."""
        super().__setstate__(attributes | {"_is_copy": True})  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        for submodule in self.modules():
            remove_forward_hooks(submodule)

    # --- attributes of torch's wrapper that frameworks read

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group over which gradients are averaged."""
        return replica_of(self).group.process_group

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards reduce gradients. To be set before a backward (with torch's DDP: before the forward)."""
        return replica_of(self).state.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        replica_of(self).state.sync = bool(value)

    _set_params_and_buffers_to_ignore_for_model = staticmethod(set_parameters_to_ignore)

    @property
    def reducer(self) -> SimpleNamespace:
        """A stand-in for torch's C++ reducer: frameworks call its methods, which do nothing, before a backward."""
        calls = "prepare_for_forward", "prepare_for_backward", "_rebuild_buckets", "_delay_all_reduce"
        return SimpleNamespace(**dict.fromkeys(calls, lambda *_: None))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return no data. Lightning calls this and reads one entry, which is optional in torch."""
        return {}


# Frameworks and torch.distributed.checkpoint check for torch's class before they strip the prefix `module.`.
TorchDDP.register(DistributedDataParallel)
# Without this, help() shows the arguments of `__new__`.
DistributedDataParallel.__new__.__signature__ = inspect.signature(DistributedDataParallel.__init__)  # type: ignore[attr-defined]


def _one_device(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    """Return the device for inputs, `None` if none is given. Raises ConfigError if it is not that of the parameters."""
    given = [each for each in (*(device_ids or ()), output_device) if each is not None]
    devices = [device_of(each if isinstance(each, int) else torch.device(each)) for each in given]
    if not devices:
        return None
    if len(devices) > 2 or devices[0] != devices[-1]:
        raise ConfigError(f"device_ids and output_device must be one device, got {device_ids} and {output_device}.")
    device = devices[0]
    for name, parameter in module.named_parameters():
        if parameter.device != device:
            raise ConfigError(
                f"{name} is on {parameter.device}, device_ids or output_device is {device}. Call module.to({device})."
            )
    return device
