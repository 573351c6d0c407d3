"""Measure when compiled code launches its collectives and when its compute is done, without changing the code."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dp_compile import _torch
from dp_compile.fx.collectives import is_launch, is_wait_op
from dp_compile.ready_times import Launches


class LaunchClock(_torch.TorchDispatchMode):
    """Notes the time of each launch and of the first wait after the last launch, on the device's own clock.

    Code that waits before it has launched everything looks slower than it is: what it waits for counts as compute.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._launches: list[_Stamp] = []
        self._done: _Stamp | None = None
        self._start = _Stamp(device)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_launch(func):
            self._launches.append(_Stamp(self._device))
            self._done = None
        elif self._done is None and is_wait_op(func):
            self._done = _Stamp(self._device)
        return func(*args, **(kwargs or {}))

    def result(self) -> Launches | None:
        """What was seen; `None` if nothing was launched and waited for. Stops the host until a GPU has come so far."""
        if self._done is None or not self._launches:
            return None
        return Launches(
            tuple(stamp.seconds_after(self._start) for stamp in self._launches), self._done.seconds_after(self._start)
        )


class _Stamp:
    """A moment on the host's clock, or on a GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        self._time_s = time.perf_counter()
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    def seconds_after(self, start: _Stamp) -> float:
        if self._event is None or start._event is None:
            return self._time_s - start._time_s
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3
