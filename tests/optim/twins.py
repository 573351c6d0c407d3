"""A model whose optimizer updates in the backward, and its twin that trains as usual."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from parity import batch, compile_whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile

SMALL = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=1e-4)
"""Buckets of about one layer."""

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Residual layers; two of them may share their weight."""

    def __init__(self, tied=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.norm(x)


class Last(nn.Module):
    """Memory in the order of channels-last, a scalar, sizes that nothing divides."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.rest, self.scale = nn.Linear(5, 6), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        images = x.repeat(1, 8).view(len(x), 3, 4, 4)
        return self.rest(self.stem(images).mean((2, 3))) * self.scale


def two_groups(kind, **options):
    def make(parameters):
        every = list(parameters)
        flat = [each for each in every if each.dim() == 1]
        matrices = [each for each in every if each.dim() > 1]
        return kind([{"params": matrices}, {"params": flat, "lr": 0.03}], **options)

    return make


SGD = two_groups(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = two_groups(torch.optim.AdamW, lr=0.01)


@dataclass
class Twins:
    """`ours` updates in the backward. `theirs` is torch's DDP, or a replica as it is: then all is bit for bit."""

    ours: nn.Module
    run: Any
    theirs: nn.Module
    run_theirs: Any
    mine: torch.optim.Optimizer
    other: torch.optim.Optimizer
    max_norm: float | None = None
    nearly: bool = False
    """What is compared may differ in the last places."""
    scalers: tuple[torch.amp.GradScaler, torch.amp.GradScaler] | None = None
    """Ours, which its optimizer knows of, and that of `theirs`."""

    def backward(self, number, *, sync=True, broken=False, factor=1.0, **options):
        """In a `broken` one nothing of ours is captured on this rank. `factor`: of what this rank puts in."""
        with warnings.catch_warnings(), nullcontext() if sync else dp_compile.no_sync(self.ours):
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=False) if broken else nullcontext():
                self.scaled(0, self.run(batch(number) * factor)).backward(**options)
        self.backward_of_theirs(number, sync=sync, factor=factor, **options)

    def backward_of_theirs(self, number, *, sync=True, factor=1.0, **options):
        with nullcontext() if sync else self.theirs.no_sync():
            self.scaled(1, self.run_theirs(batch(number) * factor)).backward(**options)

    def scaled(self, whose, outputs):
        loss = outputs.square().mean()
        return loss if self.scalers is None else self.scalers[whose].scale(loss)

    def step(self, *, zero=True):
        self._stepped(0, self.mine)
        if self.scalers is not None:
            self.scalers[1].unscale_(self.other)
        if self.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(
                [each for group in self.other.param_groups for each in group["params"]], self.max_norm
            )
            if self.scalers is None or norm.isfinite():  # else a rank that fell back leaves the step out
                torch.testing.assert_close(self.mine.total_norm, norm)
        self._stepped(1, self.other)
        self.other.zero_grad()
        if zero:
            self.mine.zero_grad()

    def _stepped(self, whose, optimizer):
        if self.scalers is None:
            optimizer.step()
            return
        self.scalers[whose].step(optimizer)
        self.scalers[whose].update()

    def train(self, *numbers):
        for number in numbers:
            self.backward(number)
            self.step()
            self.compare()

    def compare(self):
        exact = not (self.nearly or isinstance(self.theirs, DistributedDataParallel))
        bounds = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        for (name, mine), other in zip(self.ours.named_parameters(), self.theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, **bounds, msg=lambda text, name=name: f"{name}: {text}")
        everything = torch.cat([each.detach().flatten() for each in self.ours.parameters()])
        first = everything.clone()
        dist.broadcast(first, 0)
        assert torch.equal(everything, first), "the ranks differ"
        assert self.scalers is None or self.scalers[0].get_scale() == self.scalers[1].get_scale()

    @property
    def updated(self):
        """How many parameters compiled backwards update, at most."""
        return max((record.updated for record in dp_compile.report(self.ours).captures), default=0)


GIVEN = {
    "whole": {},
    "sharded": {"shard": True},
    "overlapping": {"overlap_forward": True},
    "next forward": {"shard": True, "overlap_forward": True},
}
"""What `in_backward` is given in each way."""


def waiting(module):
    """For `overlap_forward`."""
    return torch.compile(module, backend="dp_compile")


def made(
    way,
    build=Net,
    make=SGD,
    *,
    beside_ddp=False,
    compile_model=None,
    config=SMALL,
    max_norm=None,
    scaled=False,
    prepare=lambda model: None,
    compile_theirs=False,
    **options,
):
    """Twins with an optimizer of that way; `options` go to `replicate`."""
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    ours, theirs = models
    if beside_ddp:
        theirs = DistributedDataParallel(theirs)
    for model in (ours,) if beside_ddp else models:
        dp_compile.replicate(model, config=config, **options)
        prepare(model)
    mine, other = make(models[0].parameters()), make(models[1].parameters())
    scalers = tuple(torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2))
    given = GIVEN[way] | {"max_norm": max_norm, "scaler": scalers[0] if scaled else None}
    assert dp_compile.optim.in_backward(ours, mine, **given) is mine
    compile_model = compile_model or (waiting if "overlap_forward" in given else compile_whole)
    # Not compiled it is cheaper, and eager hooks add up to the same bits. Inductor's kernels round otherwise.
    theirs_compiled = (config.backend == "inductor" or compile_theirs) and not beside_ddp
    run_theirs = (compile_whole if compile_model is waiting else compile_model)(theirs) if theirs_compiled else theirs
    # The norm is added up in another order; of more than two ranks gradients are too.
    nearly = "shard" in given and (max_norm is not None or dist.get_world_size() > 2)
    scalers = scalers if scaled else None
    return Twins(ours, compile_model(ours), theirs, run_theirs, mine, other, max_norm, nearly, scalers)


def id_of(each):
    """Of a scenario, or of what it is given."""
    if isinstance(each, tuple):
        return "-".join(map(id_of, each))
    return str(getattr(each, "__name__", each))


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)
