"""Decent-DP: decentralised data parallelism, which averages parameters among neighbours instead of gradients."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import distributed
from dp_compile.bench.contract import PROBE_LR, Batch, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import build, place, trainable
from dp_compile.bench.modes.packages import load, why_not_there
from dp_compile.errors import ConfigError

NODES_AND_RING: Final = "alternating-exp-ring"
TOPOLOGIES: Final = ("complete", "ring", "one-peer-exp", NODES_AND_RING)


@dataclass(frozen=True, slots=True)
class DecentDP:
    """`decent_dp` (arXiv 2410.11998), eager and with 25 MB buckets, as its README and documentation have it.

    Each rank takes a step of its own and averages parameters with its neighbours of `topology` while the next step
    runs. That is another algorithm: only the average over all ranks after the first step is that of DDP. So its
    `gradients` are read off that average, after one plain step of a copy of the model.
    """

    name: str = "decent_dp"
    topology: str = "complete"
    is_bound: bool = False

    def why_not(self) -> str | None:
        return why_not_there("decent-dp", "loguru")

    def prepare(self, workload: Workload) -> Trainer:
        if dist.get_world_size() < 2:
            raise ConfigError(f"mode '{self.name}' needs 2 ranks or more: it averages with neighbours. Here is 1.")
        if distributed.backend_of(None, "cpu").simulated:
            raise ConfigError(f"mode '{self.name}' exchanges parameters with neighbours, which a fabric does not play.")
        if self.topology == NODES_AND_RING and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2:
            raise ConfigError(
                f"mode '{self.name}' averages inside nodes and among them in turns, and needs 2 ranks or more in each "
                "node: torchrun's LOCAL_WORLD_SIZE says how many there are."
            )
        load("loguru").logger.disable("decent_dp")  # Its debug lines go to stderr by default.
        return _Neighbours(workload, self.topology)


class _Neighbours:
    """The trainer: the optimizer runs in hooks of the backward, a bucket at a time."""

    def __init__(self, workload: Workload, topology: str) -> None:
        self._workload, self._topology = workload, topology
        self._model = build(workload)
        self._wrapped = self._wrap(self._model, partial(workload.rule.optimizer, lr=workload.lr))

    def step(self, batch: Batch) -> None:
        self._loss(self._wrapped, batch).backward()

    def arrive(self) -> None:
        for work in self._wrapped._comm_ops:
            if work is not None:
                work.wait()

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        probe = copy.deepcopy(self._model)
        parameters = trainable(probe)
        before = {name: each.detach().clone() for name, each in parameters.items()}
        wrapped = self._wrap(probe, partial(self._workload.rule.optimizer, **self._workload.rule.plain))
        self._loss(wrapped, batch).backward()
        with torch.no_grad():
            self._loss(wrapped, batch)  # The first step is taken when the second forward starts.
            wrapped.global_avg(will_revert=False)
        return {name: (before[name] - each.detach()) / PROBE_LR for name, each in parameters.items()}

    def _wrap(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> Any:
        def optimizer(parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
            return make([each for _, each in parameters])

        return load("decent_dp.ddp").DecentralizedDataParallel(model, optim_fn=optimizer, topology=self._topology)

    def _loss(self, call: Any, batch: Batch) -> torch.Tensor:
        return self._workload.loss(call, tuple(each.to(place(), non_blocking=True) for each in batch))


KINDS: Final = (DecentDP(),)


def with_topology(kind: DecentDP, argument: str) -> Mode:
    """The same over other neighbours.

    Raises:
        ConfigError: Decent-DP has no such topology.
    """
    if argument not in TOPOLOGIES:
        raise ConfigError(f"mode '{kind.name}:{argument}': a topology is one of {', '.join(TOPOLOGIES)}.")
    return replace(kind, name=f"{kind.name}:{argument}", topology=argument)
