"""For `lightning`: once this is imported, its `Trainer` and its `Fabric` know `strategy="dp_compile"`.

Its registry is the only place where it looks for strategies, no entry point fills it. Its twin: `pytorch_lightning.py`.
"""

from __future__ import annotations

from dp_compile.integrations.checks import refuse_other_versions

refuse_other_versions("lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402

from dp_compile.integrations.strategies import NAME, FabricStrategy, TrainerStrategy  # noqa: E402


class DPCompileStrategy(TrainerStrategy, DDPStrategy):  # type: ignore[misc]
    __doc__ = TrainerStrategy.__doc__


class DPCompileFabricStrategy(FabricStrategy, FabricDDPStrategy):  # type: ignore[misc]
    __doc__ = FabricStrategy.__doc__


_WHAT = "the gradients' reductions captured with the backward"
StrategyRegistry.register(NAME, DPCompileStrategy, description=_WHAT, override=True)
STRATEGY_REGISTRY.register(NAME, DPCompileFabricStrategy, description=_WHAT, override=True)
