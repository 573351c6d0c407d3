"""What a launcher would have set up, in a rank of the tests' pools: frameworks read it from the environment."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def as_launched() -> Iterator[list[str]]:
    """Inside, `torchrun` seems to have started this rank. Yields what integrations say in the log."""
    torch._dynamo.reset()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "tests"}
    launched |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with mock.patch.dict(os.environ, launched), said() as lines:
        yield lines


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """The lines of the integrations' logger, from INFO on."""
    logger, lines = logging.getLogger("dp_compile.integrations"), []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keeper, before = Keeper(), logger.level
    logger.addHandler(keeper)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(keeper)
        logger.setLevel(before)
