"""What a launcher would have set up, in a rank of the tests' pools: frameworks read it from the environment."""

import contextlib
import os
import warnings
from unittest import mock

import torch
import torch.distributed as dist


@contextlib.contextmanager
def as_launched():
    """Inside, `torchrun` seems to have started this rank; nothing warns."""
    torch._dynamo.reset()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "tests"}
    launched |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with mock.patch.dict(os.environ, launched), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_same_steps(ours, theirs):
    """Losses, parameters and the like are equal."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(other), rtol=1e-5, atol=1e-5)
