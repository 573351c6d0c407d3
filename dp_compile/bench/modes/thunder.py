"""Lightning Thunder's `ddp`: a source-to-source compiler that puts bucketed all-reduces into the backward's trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from dp_compile.bench.contract import Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, build, cap_mb_of
from dp_compile.bench.modes.packages import load, why_not_there
from dp_compile.config import DEFAULT_CAP_MB

DROPPED: Final = ("align_as", "align_to", "has_names", "names", "refine_names", "rename", "rename_")
"""Methods of named tensors that torch 2.13 no longer has and Thunder 0.2.6 names in its tables; it calls none."""

NEEDED: Final = ("looseversion", "lightning-utilities", "optree", "opt_einsum", "dill")


@dataclass(frozen=True, slots=True)
class Thunder:
    """`thunder.distributed.ddp(thunder.jit(model))` with the executors that Thunder chooses, as its documentation does.

    Thunder 0.2.6 is not made for torch 2.13: it looks up methods that are gone. They are put back, for the process,
    as methods that raise.
    """

    name: str = "thunder"
    cap_mb: float = DEFAULT_CAP_MB
    is_bound: bool = False

    def why_not(self) -> str | None:
        return why_not_there("lightning-thunder", *NEEDED)

    def prepare(self, workload: Workload) -> Trainer:
        _put_back()
        compiled = load("thunder").jit(build(workload))
        replicated = load("thunder.distributed").ddp(compiled, bucket_size_in_mb=self.cap_mb)
        return Loop(workload, dict(replicated.named_parameters()), replicated)


def _put_back() -> None:
    for name in DROPPED:
        if not hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, _gone(name))


def _gone(name: str) -> Any:
    def method(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"torch {torch.__version__} has no Tensor.{name}")

    method.__name__ = method.__qualname__ = name
    return method


KINDS: Final = (Thunder(),)


def with_cap(kind: Thunder, argument: str) -> Mode:
    """The same with another bucket cap, in MiB."""
    return replace(kind, name=f"{kind.name}:{argument}", cap_mb=cap_mb_of(argument, kind.name))
