"""Small workloads and modes for the tests of the benchmark, named in suites as `bench_standins:function`."""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from dp_compile.bench.contract import Mode, Trainer, Workload


def tiny():
    return Workload(
        name="tiny",
        build=lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)),
        batch=lambda generator: (torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )


class Averaged(Trainer):
    """Eager, one all-reduce a parameter."""

    averages = True

    def __init__(self, workload):
        self.model = workload.build()
        self.loss = workload.loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=workload.lr, momentum=0.9)

    def step(self, batch):
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, batch):
        self.backward(batch)
        found = {name: each.grad.clone() for name, each in self.model.named_parameters() if each.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def backward(self, batch):
        self.loss(self.model, batch).backward()
        for parameter in self.model.parameters() if self.averages else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Unaveraged(Averaged):
    averages = False


class HangsInAStep(Averaged):
    def step(self, batch):
        if dist.get_rank() == 1:
            time.sleep(1000)


oracle = partial(Mode, "oracle", Unaveraged, is_bound=True)
averaged = partial(Mode, "averaged", Averaged)
unaveraged = partial(Mode, "unaveraged", Unaveraged)
hangs = partial(Mode, "hangs", HangsInAStep)
