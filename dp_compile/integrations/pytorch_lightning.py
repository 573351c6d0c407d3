"""For `pytorch_lightning`: importing this module registers `strategy="dp_compile"` with its `Trainer` and `Fabric`."""

from __future__ import annotations

from dp_compile.integrations.strategies import register_strategies

DPCompileStrategy, DPCompileFabricStrategy = register_strategies("pytorch_lightning", "lightning_fabric")
