"""`dp_compile.decentralize` under `torch.compile`: ranks mix parameters with few neighbours and reduce no gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from dp_compile._torch import distributed
from dp_compile.bench.contract import PROBE_LR, Batch, Facts, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, as_plain, build, trainable
from dp_compile.config import ReplicateConfig
from dp_compile.decentralized import decentralize
from dp_compile.decentralized.module import mixing_of
from dp_compile.errors import ConfigError
from dp_compile.insight.observe import report
from dp_compile.plan import topologies


@dataclass(frozen=True, slots=True)
class Decentralized:
    """`torch.compile(dp_compile.decentralize(model, ...))`, as docs/decentralized.md has it.

    Another training than that of gradients which are averaged, as Decent-DP's: only the average over all ranks after
    one step from equal parameters is that of DDP, so its `gradients` are read off such averages.
    """

    name: str = "ours:decentralized"
    topology: str = "complete"
    is_bound: bool = False
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        if distributed.backend_of(None, "cpu").simulated:
            raise ConfigError(f"mode '{self.name}' exchanges parameters with neighbours, which a fabric does not play.")
        model: Any = build(workload)
        optimizer = workload.rule.optimizer(model.parameters(), lr=workload.lr)
        decentralize(model, topology=self.topology, optimizer=optimizer, config=ReplicateConfig(backend=self.backend))
        return _MixingLoop(workload, model, optimizer, torch.compile(model, backend=self.backend))


class _MixingLoop:
    """The trainer: a backward is a step."""

    def __init__(
        self, workload: Workload, model: Any, optimizer: torch.optim.Optimizer, call: Callable[..., torch.Tensor]
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._loop = Loop(workload, trainable(model), call)

    def step(self, batch: Batch) -> None:
        self._loop.forward_backward(batch)

    def arrive(self) -> None:
        mixing_of(self._model).mixer.arrive()

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        own = {name: each.detach().clone() for name, each in trainable(self._model).items()}
        before = self._averages()
        with as_plain(self._optimizer, self._loop.workload.rule):
            self._loop.forward_backward(batch)
        after = self._averages()
        self._model.load_state_dict(own, strict=False)  # and what was sent is forgotten
        return {name: (before[name] - after[name]) / PROBE_LR for name in before}

    def facts(self) -> Facts:
        """A step has one exchange for each bucket of parameters, whose bytes are counted with what aligns them."""
        seen = report(self._model)
        return replace(
            self._loop.facts(),
            collectives=len(seen.plan.buckets),
            reduced_nbytes=sum(bucket.nbytes + bucket.padding_nbytes for bucket in seen.plan.buckets),
            captures=sum(each.synced for each in seen.captures),
        )

    def _averages(self) -> dict[str, torch.Tensor]:
        with self._model.global_average():
            return {name: each.detach().clone() for name, each in trainable(self._model).items()}


KINDS: Final = (Decentralized(),)


def with_topology(kind: Decentralized, argument: str) -> Mode:
    """The same over other neighbours.

    Raises:
        ConfigError: nobody has registered such a topology.
    """
    if argument not in topologies.names():
        raise ConfigError(f"mode '{kind.name}:{argument}': a topology is one of {', '.join(topologies.names())}.")
    return replace(kind, name=f"{kind.name}:{argument}", topology=argument)
