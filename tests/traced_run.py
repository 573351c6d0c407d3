"""A training step in a separate process, for tests that look at what torch traces of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import dp_compile

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
torch.compile(model, backend="aot_eager")(torch.randn(3, 8)).square().sum().backward()
dist.destroy_process_group()
