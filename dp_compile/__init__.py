"""Data-parallel training under `torch.compile`, fast and safe. Start with `dp_compile.replicate(model)`."""

from dp_compile.backward import compiled_backward as compiled_backward
from dp_compile.calibration import calibrate as calibrate
from dp_compile.config import ReplicateConfig as ReplicateConfig
from dp_compile.distributed import DistributedDataParallel as DistributedDataParallel
from dp_compile.errors import CommunicationError as CommunicationError
from dp_compile.errors import ConfigError as ConfigError
from dp_compile.errors import DesyncError as DesyncError
from dp_compile.errors import DPCompileError as DPCompileError
from dp_compile.errors import InvalidGraphError as InvalidGraphError
from dp_compile.errors import ModuleError as ModuleError
from dp_compile.errors import ReductionError as ReductionError
from dp_compile.errors import UnsupportedTorchError as UnsupportedTorchError
from dp_compile.explain import explain as explain
from dp_compile.join import join as join
from dp_compile.join import joinable as joinable
from dp_compile.logs import configure_from_environment
from dp_compile.measuring import Measurement as Measurement
from dp_compile.measuring import measure as measure
from dp_compile.observe import report as report
from dp_compile.observe import step_of as step_of
from dp_compile.profiling import measured_step as measured_step
from dp_compile.replicate import replicate as replicate
from dp_compile.replicate import unreplicate as unreplicate
from dp_compile.replicated_module import ReplicatedModule as ReplicatedModule
from dp_compile.replicated_module import no_sync as no_sync
from dp_compile.warmup import WarmupRecord as WarmupRecord
from dp_compile.warmup import warmup as warmup
from dp_compile.what_if import WhatIf as WhatIf
from dp_compile.what_if import what_if as what_if

__all__ = [
    "CommunicationError",
    "ConfigError",
    "DPCompileError",
    "DesyncError",
    "DistributedDataParallel",
    "InvalidGraphError",
    "Measurement",
    "ModuleError",
    "ReductionError",
    "ReplicateConfig",
    "ReplicatedModule",
    "UnsupportedTorchError",
    "WarmupRecord",
    "WhatIf",
    "calibrate",
    "compiled_backward",
    "explain",
    "join",
    "joinable",
    "measure",
    "measured_step",
    "no_sync",
    "replicate",
    "report",
    "step_of",
    "unreplicate",
    "warmup",
    "what_if",
]

configure_from_environment()
