"""What `dp-compile train` can be told, and the checks that need neither data nor devices."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError
from dp_compile.plan.topologies import topology

CHECK_TOLERANCE: Final = 1e-4
"""Largest absolute difference of a parameter that passes `--check`; `check.py` says why."""

REDUCE_DTYPES: Final = ("float16", "bfloat16")

CHECK_TOLERANCES: Final = {
    None: CHECK_TOLERANCE, "float16": 1e-3, "bfloat16": 5e-3, "int8": 5e-3, "float8_e4m3fn": 8e-3,
}  # fmt: skip
"""By the dtype in which gradients travel: what rounds to the other neighbour makes steps of its last bit.

Measured over 25 steps on 2 ranks, where float32 makes 2e-7: float16 1.1e-4 (2 layers of width 64, context 64), bfloat16
9.7e-4 there and 4.4e-4 with the defaults. In eight bits, beside an average in float32, with what is lost sent later:
int8 7.1e-4, and float8_e4m3fn in blocks of 256 4.0e-3, in buckets of 1 MiB. A gradient that is not averaged makes 1e-2.
"""

MP_TOLERANCE: Final = 2e-2
"""With `--mp`, where products round as well. Measured in bfloat16: 0 with the small sizes above, 3.8e-3 with the
defaults, where parameters move by 0.43; beside eager code, which rounds elsewhere, it was 3.9e-2. So one bias that is
not averaged is seen without `--mp` only."""

MP_DTYPES: Final = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `--mp` calls the dtypes of compute."""

COMM_HOOKS: Final = {None: None, "bf16": "bfloat16", "fp16": "float16", "int8": "int8", "fp8": "float8_e4m3fn"}
"""What `--comm-hook` calls the dtypes in which gradients travel by a hook: torch's own, or `QuantizedHook`."""

OPTIMIZERS: Final = ("plain", "in-backward", "sharded", "crossing", "sharded-crossing")
"""Where parameters are updated: in `optimizer.step()`; behind each reduction in the backward; there, each rank a part;
where the next forward reads them; in the backward, each rank a part, which the others get where they read it."""

_NOT_MIXED: Final = ("reduce_dtype", "comm_hook", "bucket_cap_mb", "save_step")
"""Options on gradients that are reduced, or what explains their reduction."""

_BESIDE_TENSOR_PARALLEL: Final = {
    "comm_hook": "a hook would see parts of gradients. --reduce-dtype casts them",
    "topology": "parameters are mixed as a whole",
    "optimizer": "an optimizer in the backward does not know DTensor parameters. Leave it out",
}
"""Options that are refused with `--tp`, and why."""

_CHOICES: Final[dict[str, Collection[str | None]]] = {
    "reduce_dtype": REDUCE_DTYPES,
    "mp": MP_DTYPES,
    "comm_hook": COMM_HOOKS,
    "optimizer": OPTIMIZERS,
}

CHECK_STEPS: Final = 25
CHECK_LR: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One training run. Sizes are in tokens, sequences or layers, `timeout_s` in seconds.

    `batch_size` counts sequences per rank, `evaluate_every` steps from one held-out loss to the next. `check` trains
    torch's DDP beside the run and compares. `seed` decides the parameters and the batches. `mp`: the dtype of compute,
    `bf16` or `fp16`; the loss stays float32, and is not scaled. `comm_hook`: a name of `COMM_HOOKS`. `momentum`: of
    SGD, in the place of AdamW. `optimizer`: where parameters are updated, of `OPTIMIZERS`. `topology`: a name of
    `dp_compile.plan.topologies`: ranks mix parameters, and reduce no gradient.
    `tp`: how many of the ranks share one copy of the model, as tensor parallel spreads it.
    `save_step`: a file for what explains the step (`dp_compile.step.Step`), which rank 0 writes at the end.

    Raises:
        ConfigError: a value is not allowed.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch_size: int = 8
    steps: int = 300
    evaluate_every: int = 100
    ranks: int = 2
    tp: int = 1
    bucket_cap_mb: float | None = None
    reduce_dtype: str | None = None
    mp: str | None = None
    comm_hook: str | None = None
    optimizer: str = "plain"
    topology: str | None = None
    lr: float = 2e-3
    momentum: float | None = None
    seed: int = 0
    ddp_python_hook: bool | None = None
    check: bool = False
    timeout_s: float = 600.0
    save_step: str | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "batch_size", "steps", "evaluate_every", "ranks", "tp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be >= 1, got {getattr(self, name)}.")
        if self.width % self.heads:
            raise ConfigError(
                f"--width must be a multiple of --heads, got width {self.width} and {self.heads} heads. "
                f"The nearest is --width {max(1, round(self.width / self.heads)) * self.heads}."
            )
        if self.save_step is not None and not Path(self.save_step).parent.is_dir():
            raise ConfigError(f"--save-step must be a file in a directory that exists, got {self.save_step!r}.")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in (None, *allowed):
                names = ", ".join(filter(None, allowed))
                raise ConfigError(f"{_flag(name)} must be one of {names}, got {getattr(self, name)!r}.")
        if self.comm_hook is not None and self.reduce_dtype is not None:
            raise ConfigError("--comm-hook and --reduce-dtype both say in which dtype gradients travel. Give one.")
        self._check_topology()
        self._check_tensor_parallel()
        for name in ("lr", "timeout_s", "bucket_cap_mb"):
            self._check_positive(name)
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"--momentum must be >= 0 and < 1, got {self.momentum:g}.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must be between 0 and 2**63 - 1, got {self.seed}.")

    def _check_topology(self) -> None:
        if self.topology is None:
            return
        said = [each for each in _NOT_MIXED if getattr(self, each) is not None]
        said += ["optimizer"] if self.optimizer != "plain" else []
        said += ["no_ddp_python_hook"] if self.ddp_python_hook is False else []
        if said:
            raise ConfigError(f"with --topology no gradient is reduced. Leave {', '.join(map(_flag, said))} out.")
        topology(self.topology, self.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def _check_tensor_parallel(self) -> None:
        if self.tp == 1:
            return
        for name in ("ranks", "width", "context"):
            if getattr(self, name) % self.tp:
                raise ConfigError(f"{_flag(name)} must be a multiple of --tp {self.tp}, got {getattr(self, name)}.")
        said = {"comm_hook": self.comm_hook, "topology": self.topology}
        said |= {"optimizer": None if self.optimizer == "plain" else self.optimizer}
        for name, value in said.items():
            if value is not None:
                instead = _BESIDE_TENSOR_PARALLEL[name]
                raise ConfigError(f"{_flag(name)} {value} does not work with --tp: {instead}.")
        if self.ddp_python_hook is False:
            raise ConfigError("--no-ddp-python-hook does not work with --tp: torch's C++ reducer knows no DTensors.")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if math.isnan(value) or value <= 0:
            raise ConfigError(f"{_flag(name)} must be a number > 0, got {value:g}.")
        # An infinite cap is meaningful: one bucket behind the first, small one.
        if math.isinf(value) and name != "bucket_cap_mb":
            raise ConfigError(f"{_flag(name)} must be a number > 0 and finite, got {value:g}.")

    @property
    def tolerance(self) -> float:
        """Largest absolute difference of a parameter that passes `--check`."""
        wire = CHECK_TOLERANCES[self.reduce_dtype or COMM_HOOKS[self.comm_hook]]
        return wire if self.mp is None else max(wire, MP_TOLERANCE)

    def replicate_config(self) -> ReplicateConfig:
        """How the model of this run is replicated."""
        policy = None
        if self.reduce_dtype is not None or self.mp is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy  # it loads all of FSDP

            policy = MixedPrecisionPolicy(
                param_dtype=MP_DTYPES[self.mp],
                reduce_dtype=None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype),
                output_dtype=None if self.mp is None else torch.float32,
            )
        return ReplicateConfig(
            ddp_python_hook=self.ddp_python_hook,
            bucket_cap_mb=self.bucket_cap_mb,
            mp_policy=policy,
            timeout_s=self.timeout_s,
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
