"""Devices with public figures, to predict how long a model computes before it runs anywhere. Nominal, not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dp_compile.errors import ConfigError
from dp_compile.plan.cost import check_number

EFFICIENCY: Final = 0.4
"""An assumption: the share of the peak that large matrix products of a training step reach."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device: peak FLOP/s by dtype, dense, and bytes per second of its memory.

    A dtype that is not listed counts as `float32`. `type` is torch's name of such devices.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    source: str
    type: str = "cuda"

    def seconds(self, flops: float, nbytes: float, dtype: str, *, efficiency: float = EFFICIENCY) -> float:
        """How long a kernel takes: the longer of its FLOPs at a share of the peak and its bytes at full bandwidth.

        Source: roofline (Williams, Waterman, Patterson, CACM 2009).

        Raises:
            ConfigError: a number is negative or not finite, or `efficiency` is not in (0, 1].
        """
        check_efficiency(efficiency)
        peak = self.flops_per_s.get(dtype, self.flops_per_s["float32"])
        return max(flops / (peak * efficiency), nbytes / self.memory_bytes_per_s)


def check_efficiency(efficiency: float) -> None:
    """Raises:
    ConfigError: not in (0, 1].
    """
    check_number("efficiency", efficiency, zero_allowed=False)
    if efficiency > 1:
        raise ConfigError(f"efficiency must be a share of the peak, > 0 and <= 1, got {efficiency!r}.")


def _rates(half: float, single: float, double: float) -> Mapping[str, float]:
    return MappingProxyType({"bfloat16": half, "float16": half, "float32": single, "float64": double})


_VENDOR: Final = (
    "vendor's figures, dense, as others repeat them (2026-11); float32 without TF32, torch's default; not measured"
)
DEVICES: Final[tuple[Device, ...]] = (
    Device("h200-sxm", _rates(989e12, 67e12, 67e12), 4.8e12, f"NVIDIA H200 SXM, {_VENDOR}"),
    Device("h100-sxm", _rates(989e12, 67e12, 67e12), 3.35e12, f"NVIDIA H100 SXM, {_VENDOR}"),
    Device("a100-sxm", _rates(312e12, 19.5e12, 19.5e12), 2.039e12, f"NVIDIA A100 SXM 80 GB, {_VENDOR}"),
    Device("l40s", _rates(362e12, 91.6e12, 1.4e12), 0.864e12, f"NVIDIA L40S, {_VENDOR}"),
    Device("cpu-core", _rates(50e9, 100e9, 50e9), 10e9, "one core with AVX2 at 3 GHz; an order of magnitude", "cpu"),
)
"""Presets. Figures of other devices: make a `Device`."""


def device(name: str) -> Device:
    """A preset by its name.

    Raises:
        ConfigError: there is no such preset.
    """
    for preset in DEVICES:
        if preset.name == name:
            return preset
    raise ConfigError(f"device must be one of {', '.join(preset.name for preset in DEVICES)}, got {name!r}.")
