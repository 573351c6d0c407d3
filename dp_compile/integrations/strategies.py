"""Mixins for the strategies of both packages of Lightning.

`lightning` and `pytorch_lightning` are copies of one another with separate classes, so each gets a derived class.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from dp_compile.config import ReplicateConfig
from dp_compile.integrations.common import options, refuse_managed, refuse_other_versions, take_off
from dp_compile.replication.ddp import DistributedDataParallel

NAME = "dp_compile"  # the value of `strategy=`


class _Wrapping:
    def __init__(self, *args: Any, replicate_config: ReplicateConfig | None = None, **kwargs: Any) -> None:
        self.replicate_config = options(replicate_config)
        super().__init__(*args, **kwargs)

    def _wrap(self: Any, model: nn.Module) -> DistributedDataParallel:
        refuse_managed(model, f"strategy {NAME!r}")
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        return DistributedDataParallel(model, device_ids=device_ids, config=self.replicate_config, **self._ddp_kwargs)


class TrainerStrategy(_Wrapping):
    """Mixin for the `DDPStrategy` of Lightning's `Trainer`: wraps modules with `dp_compile.DistributedDataParallel`.

    Takes the arguments of `DDPStrategy`. Comm hooks are registered on CPUs too, where Lightning silently ignores them.
    Pass the compiled module, `trainer.fit(torch.compile(module))`, or compile parts of it in the module itself.

    Args:
        replicate_config: options of `dp_compile.replicate`; options of torch's DDP in `kwargs` override them.

    Raises:
        ConfigError: an option is not supported.
    """

    _setup_model = _Wrapping._wrap

    def _register_ddp_hooks(self: Any) -> None:
        hook, around = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, hook if around is None else around(hook))

    def teardown(self) -> None:
        """Do as Lightning's strategy, and unreplicate the module."""
        wrapper = getattr(self, "model", None)
        super().teardown()  # type: ignore[misc]
        take_off(wrapper)


class FabricStrategy(_Wrapping):
    """Mixin for the `DDPStrategy` of Lightning Fabric: wraps modules as `TrainerStrategy` does."""

    setup_module = _Wrapping._wrap


def register_strategies(trainer: str, fabric: str) -> tuple[type[Any], type[Any]]:
    """Create and register the strategies of a Lightning package: no entry point fills its registries. `trainer`,
    `fabric`: the modules in which the package has its `Trainer` and its `Fabric`."""
    package = trainer.partition(".")[0]
    refuse_other_versions(package)
    home = {"__module__": f"dp_compile.integrations.{package}"}
    of_trainer: Any = import_module(f"{trainer}.strategies")
    of_fabric: Any = import_module(f"{fabric}.strategies")
    made: type[Any] = type("DPCompileStrategy", (TrainerStrategy, of_trainer.DDPStrategy), home)
    made_for_fabric: type[Any] = type("DPCompileFabricStrategy", (FabricStrategy, of_fabric.DDPStrategy), home)
    what = "the gradients' reductions captured with the backward"
    of_trainer.StrategyRegistry.register(NAME, made, description=what, override=True)
    of_fabric.STRATEGY_REGISTRY.register(NAME, made_for_fabric, description=what, override=True)
    return made, made_for_fabric
