"""torch's experimental `python_reducer`: hooks that compiled autograd traces, fused by Inductor's `ddp_fusion`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from dp_compile._torch import dynamo, inductor
from dp_compile.bench.contract import Mode, Trainer, Workload
from dp_compile.bench.modes.loop import cap_mb_of, loop_around
from dp_compile.bench.modes.torch_ddp import wrap
from dp_compile.config import DEFAULT_CAP_MB

FUSIONS: Final = {"concat": "fuse_ddp_with_concat_op", "coalesced": "fuse_ddp_with_coalesced_op"}


@dataclass(frozen=True, slots=True)
class PythonReducer:
    """`torch.compile(DDP(model))` with `optimize_ddp="python_reducer"`, its backward under compiled autograd.

    `fusion` says how gradients are fused: by concatenation, torch's default, or as one coalesced collective; in both
    cases torch's pass that delays waits follows. Source: torch/_dynamo/config.py, torch/_inductor/config.py
    (`_fuse_ddp_communication_passes`). Sets all of this for the process.
    """

    name: str
    fusion: str = "concat"
    cap_mb: float = DEFAULT_CAP_MB
    is_bound: bool = False
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        passes = [FUSIONS[self.fusion], "schedule_comm_wait"]
        dynamo.configure_process({"optimize_ddp": "python_reducer"})
        inductor.configure_process({"_fuse_ddp_communication_passes": passes})
        return loop_around(
            workload, lambda model: torch.compile(wrap(model, self.cap_mb), backend=self.backend), self._backward
        )

    def _backward(self, loss: torch.Tensor) -> None:
        with dynamo.CaptureBackward(partial(torch.compile, backend=self.backend)):
            loss.backward()


KINDS: Final = (PythonReducer("python_reducer"), PythonReducer("python_reducer_coalesced", "coalesced"))


def with_cap(kind: PythonReducer, argument: str) -> Mode:
    """The same with another bucket cap, in MiB; the first bucket is closed at 1 MiB in any case."""
    return replace(kind, name=f"{kind.name}:{argument}", cap_mb=cap_mb_of(argument, kind.name))
