"""For `pytorch_lightning`: once this is imported, its `Trainer` and its `Fabric` know `strategy="dp_compile"`."""

from __future__ import annotations

from dp_compile.integrations.strategies import register_strategies

DPCompileStrategy, DPCompileFabricStrategy = register_strategies("pytorch_lightning", "lightning_fabric")
