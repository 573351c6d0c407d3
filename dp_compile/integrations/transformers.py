"""transformers: `DPCompileTrainer` in place of `Trainer`, or `DPCompileMixin` as first base of a user's class.

A `Trainer` leaves wrapping and compiling to an `Accelerator`. The mixin converts that object to this package's class.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from dp_compile._torch import distributed
from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError, UnsupportedModuleError
from dp_compile.integrations.accelerate import Accelerator
from dp_compile.integrations.common import refuse_managed, refuse_other_versions, take_off
from dp_compile.replica.module_names import class_name
from dp_compile.replication.ddp import DistributedDataParallel
from dp_compile.replication.module import unwrap

refuse_other_versions("transformers")


class DPCompileMixin:
    """Mixin for `transformers.Trainer`, or a class derived from it: `class MyTrainer(DPCompileMixin, SFTTrainer)`.

    All `TrainingArguments` keep their meaning: `torch_compile=True` compiles the model with its backend, `ddp_*` are
    as for torch's DDP, `average_tokens_across_devices` stays exact. Checkpoints have the model's own class and keys,
    so a trainer with or without this mixin can continue a run.

    After training, or an error in it, the model is unreplicated, and another trainer can use it. Callbacks up to
    `on_train_end` can call `dp_compile.report(model)`.

    Gradients of a model that was evaluated before training are reduced too; transformers' own trainer omits that.

    Args:
        replicate_config: options of `dp_compile.replicate`; `ddp_*` arguments override its fields.

    Raises:
        ConfigError: one process has several GPUs, models would be sharded, or `Accelerator` raises a ConfigError.
        UnsupportedModuleError: the model is wrapped or replicated already.
    """

    def __init__(self, *args: Any, replicate_config: ReplicateConfig | None = None, **kwargs: Any) -> None:
        if not isinstance(self, transformers.Trainer):
            raise ConfigError(
                f"{type(self).__name__} has DPCompileMixin but is no transformers.Trainer. Derive it from both, the "
                "mixin first: class MyTrainer(DPCompileMixin, Trainer)."
            )
        self.replicate_config = replicate_config
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Do as `transformers.Trainer`, then convert its accelerator to the `Accelerator` of this package."""
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"one process has {self.args.n_gpu} GPUs: transformers would use torch's DataParallel in it. Start "
                f"a process for each: torchrun --nproc-per-node {self.args.n_gpu} ..."
            )
        if isinstance(self.model, nn.Module):
            refuse_managed(self.model, type(self).__name__)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        Accelerator.take_over(self.accelerator, self.replicate_config)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Train as `transformers.Trainer`, then unreplicate the model."""
        # Otherwise a model that evaluation or the last training prepared would pass for a wrapped one.
        self.model_wrapped = self.model
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            take_off(unwrap(self.model_wrapped))

    def training_step(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Do as `transformers.Trainer`; raise an UnsupportedModuleError if the model was not wrapped for reduction."""
        inner, by_hooks = unwrap(model), (self.replicate_config or ReplicateConfig()).uses_python_hook()
        is_wrapped = isinstance(inner, DistributedDataParallel) if by_hooks else distributed.is_torch_ddp(inner)
        has_others = self.args.world_size > 1
        if has_others and not is_wrapped and any(parameter.requires_grad for parameter in inner.parameters()):
            raise UnsupportedModuleError(
                f"{class_name(inner)} was not wrapped by dp_compile: it was loaded in shards, or {type(self).__name__} "
                "prepares models in another way. Load it whole on each rank; or use a trainer without "
                "DPCompileMixin."
            )
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]


class DPCompileTrainer(DPCompileMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with `DPCompileMixin`, whose documentation has arguments and errors."""
