"""For `pytorch_lightning`: an import registers `strategy="dp_compile"` with its `Trainer` and its `Fabric`."""

from __future__ import annotations

from dp_compile.integrations.strategies import register_strategies

DPCompileStrategy, DPCompileFabricStrategy = register_strategies("pytorch_lightning", "lightning_fabric")
