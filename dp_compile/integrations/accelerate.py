"""accelerate: `from dp_compile.integrations.accelerate import Accelerator`, with all other code unchanged.

accelerate's `prepare_model` wraps a model with torch's DDP, and compiles the result. Here accelerate's method does
neither: it prepares the model as for evaluation, with the compiler off. Then this module wraps and compiles.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from accelerate import Accelerator as AcceleratesOwn  # users may replace accelerate's public name by ours
from accelerate.utils import DistributedType, DynamoBackend, is_compiled_module
from accelerate.utils.other import has_repeated_blocks, is_repeated_blocks
from torch import nn

from dp_compile._torch.compiler import compile_in_place
from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError
from dp_compile.integrations.common import options, refuse_managed, refuse_other_versions
from dp_compile.replication.ddp import DistributedDataParallel
from dp_compile.replication.module import unwrap

refuse_other_versions("accelerate")

_WHOLE: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_OTHERS: Final = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
_SPLITS: Final = ("dp_shard_size", "tp_size", "cp_size", "sp_size")
_PREPARED: Final = "_is_accelerate_prepared"
_PLAIN_FORWARD: Final = "_original_forward"  # accelerate's name of the forward that it wrapped in autocast


class Accelerator(AcceleratesOwn):  # type: ignore[misc]
    """accelerate's `Accelerator`, whose `prepare` wraps models with `dp_compile.DistributedDataParallel`.

    Takes the arguments of accelerate's class; `DistributedDataParallelKwargs` keeps its meaning. With `dynamo_plugin`
    or `dynamo_backend` the prepared model is compiled, and its backward and reductions become one graph. Regional
    compilation compiles the blocks in place.

    In a compiled model, `trigger_sync_in_backward` and `join_uneven_inputs` find the wrapper; `unwrap_model`
    removes it only from its result.

    Args:
        replicate_config: options of `dp_compile.replicate`; `DistributedDataParallelKwargs` overrides its fields.

    Raises:
        ConfigError: accelerate is set to shard models, to split them otherwise, or to train in fp8.
    """

    def __init__(self, *args: Any, replicate_config: ReplicateConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_up(replicate_config)

    def _set_up(self, replicate_config: ReplicateConfig | None) -> None:
        self.replicate_config = options(replicate_config, self.state.dynamo_plugin.backend.value.lower())
        # The type is not enough: on CPUs, accelerate ignores a request for sharding.
        asked = [name for name in _OTHERS if os.environ.get(name, "false").lower() == "true"]
        kind = self.distributed_type
        asked += [] if kind in _WHOLE else [f"distributed_type {kind.value}"]
        degrees = {name: getattr(self.parallelism_config, name, None) or 1 for name in _SPLITS}
        asked += [f"parallelism_config {name}={degree}" for name, degree in degrees.items() if degree > 1]
        asked += ["mixed_precision='fp8'"] if self.mixed_precision == "fp8" else []
        if asked:
            raise ConfigError(
                f"{' and '.join(asked)} (from a plugin, `accelerate config` or the environment) is not supported. This "
                "Accelerator keeps whole parameters on each rank and splits batches only, in float32, 'bf16' or 'fp16'."
                " Use accelerate's own Accelerator instead."
            )

    @classmethod
    def take_over(cls, accelerator: AcceleratesOwn, replicate_config: ReplicateConfig | None = None) -> AcceleratesOwn:
        """Convert accelerate's own `Accelerator`, which has prepared no model yet, to this class.

        Raises a ConfigError like the constructor, and for an object of another class.
        """
        if type(accelerator) is not AcceleratesOwn:
            kind = type(accelerator)
            raise ConfigError(
                f"the accelerator is a {kind.__module__}.{kind.__qualname__}, which cannot become dp_compile's. Derive "
                "it from dp_compile.integrations.accelerate.Accelerator."
            )
        accelerator.__class__ = cls
        accelerator._set_up(replicate_config)
        return accelerator

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Same as accelerate's, but wrap for training in `dp_compile.DistributedDataParallel`, and compile that."""
        is_again = isinstance(unwrap(model), DistributedDataParallel) and getattr(model, _PREPARED, False)
        if evaluation_mode or is_again or self.distributed_type == DistributedType.NO:
            return super().prepare_model(model, device_placement, evaluation_mode)
        refuse_managed(model, "Accelerator.prepare()")
        inner = unwrap(model)
        if _PLAIN_FORWARD in vars(inner) and _PREPARED not in vars(inner):  # prepared earlier, in a discarded wrapper
            # unwrap_model(keep_fp32_wrapper=False) would also remove decorators of the model's author.
            inner.forward = vars(inner).pop(_PLAIN_FORWARD)
        plugin = self.state.dynamo_plugin
        before, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        finally:
            plugin.backend = before
        # Only the wrapper is marked as prepared: the bare model, passed again, must be prepared again.
        vars(unwrap(prepared)).pop(_PREPARED, None)
        ready = self._wrap(prepared) if any(each.requires_grad for each in prepared.parameters()) else prepared
        if plugin.backend != DynamoBackend.NO and not is_compiled_module(prepared):
            if plugin.use_regional_compilation:
                _compile_regions(ready, plugin.to_kwargs())
            else:
                ready = cast(nn.Module, torch.compile(ready, **plugin.to_kwargs()))
        setattr(ready, _PREPARED, True)
        return ready

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Same as accelerate's, but also for a compiled model, which accelerate's method ignores."""
        return AcceleratesOwn.trigger_sync_in_backward(unwrap(model))

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Same as accelerate's, but leave the wrapper in a compiled `model`: only the returned model is without it."""
        wrapper = unwrap(model)
        if not keep_torch_compile or wrapper is model or not isinstance(wrapper, DistributedDataParallel):
            return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        inner = super().unwrap_model(wrapper, keep_fp32_wrapper, keep_torch_compile)
        return type(model)(inner, cast(Any, model).dynamo_ctx)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Same as accelerate's, but also for compiled models."""
        return super().join_uneven_inputs([unwrap(each) for each in joinables], even_batches)

    def _wrap(self, model: nn.Module) -> DistributedDataParallel:
        given = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        if self.device.type != "cpu" and os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") != "true":
            given |= {"device_ids": [self.device.index], "output_device": self.device.index}
        wrapped = DistributedDataParallel(model, config=self.replicate_config, **given)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        return wrapped


def _compile_regions(module: nn.Module, options: dict[str, Any]) -> None:
    """Same as accelerate's `compile_regions`, but in place: accelerate's copies every module that contains a block."""
    if is_repeated_blocks(module):
        for block in module.children():
            compile_in_place(block, **options)
    elif has_repeated_blocks(module):
        for child in module.children():
            _compile_regions(child, options)
    else:
        compile_in_place(module, **options)
