"""`--check`: the same training with torch's DistributedDataParallel, and how far the parameters end up apart.

Both sides use SGD with momentum, whose update is linear in the gradient: a difference in a gradient appears in the
parameter scaled by the learning rate and by nothing else. AdamW divides each gradient by its own size, so where the
true gradient is zero (the key bias of attention: softmax ignores it) the rounding noise of two correct programs is
blown up to steps in different directions: 2e-4 after 25 steps, in exactly that bias.
"""

from __future__ import annotations

import copy
import os
import textwrap
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dp_compile._torch import distributed
from dp_compile.engine.hook_state import HookState
from dp_compile.engine.quantized_hook import QuantizedHook
from dp_compile.plan.topologies import topology
from dp_compile.train.options import CHECK_TOLERANCE, COMM_HOOKS, MP_DTYPES, TrainOptions
from dp_compile.train.tensor_parallel import whole

HOOKS: Final = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}
"""torch's own, by the dtype in which gradients travel."""


def register_hook(model: Any, name: str) -> None:
    """Let a replicated model's gradients be reduced by the hook that `--comm-hook` calls so."""
    wire = COMM_HOOKS[name]
    assert wire is not None
    if wire in HOOKS:
        model.register_comm_hook(None, HOOKS[wire])
    else:
        model.register_comm_hook(HookState(), QuantizedHook(getattr(torch, wire)))


WHY_TOLERANCE = (
    "compiled float32 code sums in another order than eager code. Measured with the defaults: that makes a difference "
    "of 3e-7 after 25 steps and, growing with training, 7e-6 after 200; one bias whose gradient is not averaged makes "
    "one of 1e-2 after 25. The optimizer is SGD with momentum, because AdamW blows rounding noise up where a gradient "
    "is zero."
)
WHY_WITH_DTYPES = (
    "gradients that are rounded before they are added step by their last bit. Measured after 25 steps: 1e-3 where they "
    "travel in bfloat16, 4e-3 with --mp bf16; 1e-3 with --comm-hook int8 and 4e-3 with fp8, beside torch's average in "
    "float32; one bias whose gradient is not averaged makes a difference of 1e-2."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The largest absolute difference of any parameter over all ranks, and how far training moved the parameters."""

    name: str
    difference: float
    moved: float
    steps: int
    tolerance: float
    beside: str = "torch's DistributedDataParallel (eager)"
    """What the other side was."""

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        why = WHY_TOLERANCE if self.tolerance == CHECK_TOLERANCE else WHY_WITH_DTYPES
        return (
            f"check {'passed' if self.passed else 'FAILED'}: parameters after {self.steps} steps, "
            f"beside {self.beside}, same seed and batches\n"
            f"  largest difference  {self.difference:.1e}  in {self.name}\n"
            f"  tolerance           {self.tolerance:.1e}\n"
            f"  largest movement    {self.moved:.1e}  of a parameter from its start\n"
            f"{textwrap.fill('Why this tolerance: ' + why, 118, initial_indent='  ', subsequent_indent='  ')}"
        )


class Twin:
    """A copy of `model` under torch's DDP, trained by the same loop. Make it before the model is replicated, or spread.

    `group`: the ranks whose batches differ, all if none is given.

    Where gradients travel in another dtype torch's hook for it reduces; in eight bits torch has none like ours, and its
    DDP averages in float32. Where the model computes in one, the copy is called with casts of its parameters, and
    compiled. With a topology it is no DDP: `mix` stands in front of its updates.
    """

    def __init__(self, model: nn.Module, options: TrainOptions, group: dist.ProcessGroup | None = None) -> None:
        self.module, self.options = copy.deepcopy(model), options
        self._start = {name: value.detach().clone() for name, value in model.named_parameters()}
        ran = "eager" if options.mp is None else "compiled, with casts of its parameters"
        self.beside = f"torch's DistributedDataParallel ({ran})"
        config = options.replicate_config()
        param_dtype = MP_DTYPES[options.mp]
        casting: Any = _WithCasts(self.module, param_dtype)
        # Eager code rounds between any two operators: in bfloat16 that alone is 4e-2 after 25 steps.
        running: Any = casting if param_dtype is None else torch.compile(casting)
        self._topology, self._mixed = None, 0
        if options.topology is not None:
            self.ddp, self.beside = running, f"D-PSGD by all-gathers and a mixing matrix ({ran})"
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self._topology = topology(options.topology, dist.get_world_size(), local)
            return
        self.ddp = DistributedDataParallel(running, process_group=group)
        wire = str(config.wire_dtype(self.module.parameters()) or COMM_HOOKS[options.comm_hook]).removeprefix("torch.")
        if wire in HOOKS:
            distributed.register_comm_hook(self.ddp, HOOKS[wire])

    @torch.no_grad()
    def mix(self, *_: Any) -> None:
        """Before an update: parameters of this rank become its row of the mixing matrix times those of all ranks."""
        assert self._topology is not None
        own = torch.nn.utils.parameters_to_vector(self.module.parameters())
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        row = torch.tensor(self._topology.mixing_matrix(self._mixed)[dist.get_rank()], dtype=own.dtype)
        mixed = row.to(own.device) @ torch.stack(everyone)
        torch.nn.utils.vector_to_parameters(mixed, self.module.parameters())
        self._mixed += 1

    def compare(self, model: nn.Module, steps: int) -> Verdict:
        """Compare with `model`; the same answer on every rank."""
        theirs = dict(self.module.named_parameters())
        mine = {name: whole(value) for name, value in model.named_parameters()}
        differences = torch.stack([_distance(mine[name], theirs[name]) for name in mine])
        moved = torch.stack([_distance(mine[name], self._start[name]) for name in mine]).max()
        # Ranks can disagree only if a reduction was wrong; then the worst one counts. Gloo's maximum drops NaN.
        for value in (differences, moved):
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        worst = int(differences.argmax())
        return Verdict(
            list(mine)[worst], float(differences[worst]), float(moved), steps, self.options.tolerance, self.beside
        )


class _WithCasts(nn.Module):
    """A module that is called with casts of its parameters, by torch's own `functional_call`; float32 comes out."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        if self.dtype is None:
            result = self.module(tokens)
            return result
        casts = {name: each.to(self.dtype) for name, each in self.module.named_parameters()}
        result = torch.func.functional_call(self.module, casts, (tokens,))
        return result.float()


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.detach() - other.detach()).abs().max().nan_to_num(nan=torch.inf)
