"""The parity matrix: one small model under every combination of options, trained by this package and by torch.

A cell is equal bits, or the largest difference of a gradient or a parameter. The reference is torch's DDP; FSDP2 for
`MixedPrecisionPolicy`, which DDP does not have.

Cells with unused parameters and uneven inputs differ by a defect of torch 2.13: a rank that has joined contributes the
used-parameter map of its last step (`_match_unused_params_allreduce`), so that a parameter that no rank used gets a
gradient of zeros, by which momentum moves it.
"""

import copy
import itertools
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from meshes import full
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dp_compile

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Cell:
    precision: str
    micro_steps: int
    unused: bool
    static_graph: bool
    uneven: bool
    way: str

    def __str__(self):
        words = ["unused" * self.unused, "static" * self.static_graph, "uneven" * self.uneven]
        return " ".join([self.way, self.precision, f"x{self.micro_steps}", *filter(None, words)])


def cells():
    switches = [(False, True)] * 3
    precisions = ("float32", "autocast", "wire", "policy")
    for cell in itertools.product(precisions, (1, 2), *switches, ("captured", "eager", "graph break")):
        made = Cell(*cell)
        # FSDP2 has neither of the three. Casts of a parameter leave an autograd.Function with another dtype.
        is_plain = not (made.unused or made.static_graph or made.uneven) and made.way != "graph break"
        if made.precision != "policy" or is_plain:
            yield made


class _Scale(torch.autograd.Function):
    """Its backward reads a number, which no graph can hold."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad if grad.sum().item() < float("inf") else grad


class Net(nn.Module):
    def __init__(self, *, breaks):
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.norm.bias.requires_grad_(False)
        self.breaks = breaks

    def forward(self, tokens, goes_left):
        x = self.table(tokens)
        x = torch.tanh(self.left(x) if goes_left else self.right(x))
        if self.breaks:
            x = _Scale.apply(x)
        return self.head(self.norm(x))


def compare(cell):
    """The cell's text, on this rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(breaks=cell.way == "graph break")
    if not cell.unused:
        net.right = nn.Identity()
    twin = copy.deepcopy(net)
    theirs, left_out = _reference(cell, twin)
    expected = _train(cell, theirs, theirs, left_out, theirs.join() if cell.uneven else nullcontext())
    config = dp_compile.ReplicateConfig(
        backend="aot_eager",
        find_unused_parameters=cell.unused and not cell.static_graph,
        static_graph=cell.static_graph,
        mp_policy={"policy": POLICY, "wire": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}.get(cell.precision),
    )
    dp_compile.replicate(net, config=config)
    model = net if cell.way == "eager" else torch.compile(net, backend="aot_eager")
    scope = dp_compile.join(net) if cell.uneven else nullcontext()
    found = _train(cell, model, net, lambda local: dp_compile.no_sync(net) if local else nullcontext(), scope)
    ways = ", ".join(f"{count} {way}" for way, count in sorted(dp_compile.report(net).backwards.items()))
    dp_compile.unreplicate(net)
    return f"{_distance(found, expected)}; {ways}"


def _reference(cell, twin):
    """torch's wrapper, and what is entered around a micro step by whether it is local."""
    if cell.precision == "policy":
        sharded = fully_shard(twin, mp_policy=POLICY)

        def left_out(local):
            sharded.set_requires_gradient_sync(not local)
            return nullcontext()

        return sharded, left_out
    ddp = DistributedDataParallel(
        twin, find_unused_parameters=cell.unused and not cell.static_graph, static_graph=cell.static_graph
    )
    if cell.precision == "wire":
        dist._register_comm_hook(ddp.reducer, None, bf16_compress_hook)
    return ddp, lambda local: ddp.no_sync() if local else nullcontext()


def _train(cell, model, module, left_out, scope):
    """Gradients after each step, and parameters at the end."""
    rank, kept = dist.get_rank(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with scope:
        for step in range(3 - (rank if cell.uneven else 0)):
            optimizer.zero_grad()
            for micro in range(cell.micro_steps):
                draw = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
                tokens = torch.randint(0, 5, (4,), generator=draw)
                goes_left = not cell.unused or cell.static_graph or (rank + step) % 2 == 0
                # torch's DDP fails in the first step of a static graph that accumulates (an internal assertion).
                local = micro + 1 < cell.micro_steps and not (cell.static_graph and step == 0)
                with left_out(local):
                    with torch.autocast("cpu", torch.bfloat16, enabled=cell.precision == "autocast"):
                        loss = model(tokens, goes_left).float().square().mean()
                    loss.backward()
            kept += [None if each.grad is None else full(each.grad).clone() for each in module.parameters()]
            optimizer.step()
    return kept + [full(each).clone() for each in module.parameters()]


def _distance(found, expected):
    worst = 0.0
    for mine, other in zip(found, expected, strict=True):
        if mine is None or other is None:
            if mine is not other:
                return f"a gradient is None for {'us' if mine is None else 'torch'} only"
        elif not torch.equal(mine, other):
            worst = max(worst, (mine - other).abs().max().item())
    return f"differs by {worst:.0e}" if worst else "equal bits"
