"""`DecentralizedDataParallel`: the wrapper class, for code that was written for decent-dp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.amp import GradScaler

from dp_compile.config import ReplicateConfig
from dp_compile.decentralized.module import DecentralizedModule, OptimizerFn, SchedulerFn, decentralize
from dp_compile.decentralized.topologies import Topology
from dp_compile.replication.module import no_sync, unwrap, wrap


class DecentralizedDataParallel(DecentralizedModule):
    """Wraps a module as decent-dp's class of this name does, on `decentralize`, whose options and errors it has.

    `state_dict` keys have the prefix `module.`. `docs/algorithms.md` says what is different on purpose.

    Args:
        model: the module to wrap, on its device already; also found as `.module`.
        optim_fn: makes the optimizer from a list of names and parameters; called once, with all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_fn: OptimizerFn,
        lr_scheduler_fn: SchedulerFn | None = None,
        topology: str | Topology = "complete",
        scaler: GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        _local_world_size: int | None = None,
        *,
        config: ReplicateConfig | None = None,
    ) -> None:
        super().__init__()
        self.module = decentralize(
            model,
            topology=topology,
            optimizer=optim_fn,
            lr_scheduler_fn=lr_scheduler_fn,
            scaler=scaler,
            grad_clip_norm=grad_clip_norm,
            param_as_bucket_view=param_as_bucket_view,
            bucket_size_in_mb=bucket_size_in_mb,
            sync_buffer_in_global_avg=sync_buffer_in_global_avg,
            local_world_size=_local_world_size,
            config=config,
        )
        wrap(self, unwrap(self.module))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside; the first backward after it is a step."""
        with no_sync(self.module):
            yield
