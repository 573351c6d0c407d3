"""Data-parallel training under `torch.compile`, fast and safe. Start with `dp_compile.replicate(model)`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_compile.comm_hooks.functional import FunctionalHook as FunctionalHook
    from dp_compile.comm_hooks.functional import HookBucket as HookBucket
    from dp_compile.comm_hooks.functional import HookState as HookState
    from dp_compile.comm_hooks.quantized import QuantizedHook as QuantizedHook
    from dp_compile.config import ReplicateConfig as ReplicateConfig
    from dp_compile.engine.backward import compiled_backward as compiled_backward
    from dp_compile.errors import CommunicationError as CommunicationError
    from dp_compile.errors import ConfigError as ConfigError
    from dp_compile.errors import DesyncError as DesyncError
    from dp_compile.errors import DPCompileError as DPCompileError
    from dp_compile.errors import ReductionError as ReductionError
    from dp_compile.errors import UnsupportedModuleError as UnsupportedModuleError
    from dp_compile.insight.observe import explain as explain
    from dp_compile.insight.observe import measure as measure
    from dp_compile.insight.observe import report as report
    from dp_compile.insight.observe import step_of as step_of
    from dp_compile.insight.predict import predict as predict
    from dp_compile.replication.calibration import calibrate as calibrate
    from dp_compile.replication.ddp import DistributedDataParallel as DistributedDataParallel
    from dp_compile.replication.join import join as join
    from dp_compile.replication.module import ReplicatedModule as ReplicatedModule
    from dp_compile.replication.module import no_sync as no_sync
    from dp_compile.replication.replicate import replicate as replicate
    from dp_compile.replication.replicate import unreplicate as unreplicate
    from dp_compile.replication.warmup import warmup as warmup

# The module of each name, imported on the first access: importing torch takes seconds, importing its compilers takes as
# long again, and a process that only reads a step file needs neither.
_HOME = {
    name: home
    for home, names in {
        "comm_hooks.functional": "FunctionalHook HookBucket HookState",
        "comm_hooks.quantized": "QuantizedHook",
        "config": "ReplicateConfig",
        "engine.backward": "compiled_backward",
        "replication.calibration": "calibrate",
        "errors": "CommunicationError ConfigError DPCompileError DesyncError ReductionError UnsupportedModuleError",
        "insight.observe": "explain measure report step_of",
        "insight.predict": "predict",
        "replication.ddp": "DistributedDataParallel",
        "replication.join": "join",
        "replication.module": "ReplicatedModule no_sync",
        "replication.replicate": "replicate unreplicate",
        "replication.warmup": "warmup",
    }.items()
    for name in names.split()
}
__all__ = sorted([*_HOME, "optim"])


def __getattr__(name: str) -> Any:
    if name == "optim":  # a subpackage: `dp_compile.optim.in_backward`
        return import_module("dp_compile.optim")
    if name not in _HOME:
        raise AttributeError(f"module 'dp_compile' has no attribute '{name}'")
    globals()[name] = value = getattr(import_module(f"dp_compile.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
