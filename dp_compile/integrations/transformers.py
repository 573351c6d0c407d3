"""transformers: `DPCompileTrainer` in place of `Trainer`, or `DPCompileMixin` before a trainer class of one's own.

A `Trainer` leaves wrapping and compiling to an `Accelerator`; this one lets that become the one of `accelerate.py`.
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
    """Stands before `transformers.Trainer`, or a class derived from it: `class MyTrainer(DPCompileMixin, SFTTrainer)`.

    All of `TrainingArguments` is as before: `torch_compile=True` with its backend compiles the model, `ddp_*` are what
    they are for torch's DDP, `average_tokens_across_devices` stays exact. Checkpoints have the model's own class and
    keys, a run can be continued by the other kind of trainer.

    When training has ended, or failed, the model is a plain one again: another trainer can have it. Until then, for
    callbacks up to `on_train_end`, `dp_compile.report(model)` has what happened.

    A model that was evaluated before it is trained is reduced here too. transformers' own trainer does not wrap it.

    Args:
        replicate_config: options of `dp_compile.replicate`; what `ddp_*` arguments say wins over its fields.

    Raises:
        ConfigError: one process has several GPUs, models are to be sharded, or what `Accelerator` refuses.
        UnsupportedModuleError: the model is wrapped or replicated already.
    """

    def __init__(self, *args: Any, replicate_config: ReplicateConfig | None = None, **kwargs: Any) -> None:
        _trainer(self)
        self.replicate_config = replicate_config
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's, and the accelerator becomes ours."""
        trainer = _trainer(self)
        if trainer.args.n_gpu > 1:
            raise ConfigError(
                f"one process has {trainer.args.n_gpu} GPUs: transformers would use torch's DataParallel in it. Start "
                f"a process for each: torchrun --nproc-per-node {trainer.args.n_gpu} ..."
            )
        if isinstance(trainer.model, nn.Module):
            refuse_managed(trainer.model, type(self).__name__)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        Accelerator.take_over(trainer.accelerator, self.replicate_config)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's."""
        trainer = _trainer(self)
        # What evaluation, or the last training, prepared and compiled is taken for a wrapped model otherwise.
        trainer.model_wrapped = trainer.model
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            take_off(unwrap(trainer.model_wrapped))

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; an UnsupportedModuleError if the model was not prepared here, and would not be reduced."""
        inner, by_hooks = unwrap(model), (self.replicate_config or ReplicateConfig()).uses_python_hook()
        is_wrapped = isinstance(inner, DistributedDataParallel) if by_hooks else distributed.is_torch_ddp(inner)
        has_others = _trainer(self).args.world_size > 1
        if has_others and not is_wrapped and any(parameter.requires_grad for parameter in inner.parameters()):
            raise UnsupportedModuleError(
                f"{class_name(inner)} was not wrapped by dp_compile: it was loaded in shards, or {type(self).__name__} "
                "prepares models in another way. Load it whole on each rank; or use a trainer without "
                "DPCompileMixin."
            )
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]


class DPCompileTrainer(DPCompileMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` over this package; see `DPCompileMixin`."""


def _trainer(of: object) -> Any:
    """The trainer that a mixin is a part of."""
    if not isinstance(of, transformers.Trainer):
        raise ConfigError(
            f"{type(of).__name__} has DPCompileMixin but is no transformers.Trainer. Derive it from both, the mixin "
            "first: class MyTrainer(DPCompileMixin, Trainer)."
        )
    return of
