"""Random training runs, described as values: what the fuzzer draws, and how a rank runs one next to torch's DDP."""

import copy
import math
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from parity import compare, eagerly
from reference_hooks import Rounded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile.errors import VoidBackwardError
from dp_compile.replication.gradient_averaging import set_gradient_divide_factor
from dp_compile.replication.module import replica_of

VOCABULARY = 7
# Newer torches warn of the name that older ones have alone.
SYNC_BUFFERS = next(
    each for each in ("forward_sync_buffers", "broadcast_buffers") if each in signature(TorchDDP).parameters
)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block of a model, from `(batch, width)` to the same."""

    kind: str
    hidden: int = 3
    dtype: str = "float32"
    frozen: str = "nothing"  # `nothing`, `first` (its first parameter) or `all`


@dataclass(frozen=True, slots=True)
class Micro:
    """One forward and backward. Pairs are for even and odd ranks."""

    batch: tuple[int, int]
    way: tuple[int, int] = (0, 0)  # an index into `FuzzCase.ways`
    eager: tuple[bool, bool] = (False, False)  # the rank cannot capture this one
    other: tuple[bool, bool] = (False, False)
    """A backward of an unreplicated module runs between this forward and its backward."""
    depth: int = 1  # how often each block is called
    loss: str = ""  # of `LOSSES`
    edit: str = ""  # what the loop does to `.grad` after the backward, of `EDITS`


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the user's code, raised once and caught. The loop then runs the whole step again."""

    where: str  # of `FAILS`
    ranks: tuple[bool, bool] = (True, True)  # whether even and odd ranks raise it
    micro: int = 0
    parameter: int = 0
    """Which of the parameters that all ranks use has the hook; the gradient of the first is complete last."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step; all micro steps but the last run without synchronisation."""

    micros: tuple[Micro, ...]
    set_to_none: bool = True
    failure: Failure | None = None
    transform: str = ""  # a functional transform before the step, of `TRANSFORMS`


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzCase:
    """A training run. `ways` are the sets of blocks that a forward may leave out; the first is empty."""

    blocks: tuple[BlockSpec, ...]
    width: int
    steps: tuple[Step, ...]
    ways: tuple[tuple[int, ...], ...] = ((),)
    compiled: str = "model"  # what is compiled, of `COMPILED`
    dynamic: bool | None = None
    buckets: str = "optimal"
    wrapper: bool = False
    find_unused: bool = False
    broadcast_buffers: bool = True
    check_reductions: bool = True
    autocast: bool = False
    hook: str = ""  # a post-accumulate hook on every second parameter, of `HOOKS`: none is linear
    hooks_late: bool = False  # it is set after `replicate`
    wire: str = ""  # the dtype in which gradients travel, of `WIRES`
    compute: str = ""  # the dtype to which a policy casts the parameters
    divides: tuple[float, ...] = ()  # what sums are divided by, one step after the other, in turns
    comm_hook: str = ""  # `rounded`, `int8` (functional hooks with error feedback), or one of torch's, of `TORCH_HOOKS`
    per_scale: int = 4  # how many elements share a scale in eight bits
    part: str = ""  # a submodule, by name, that is replicated by itself, before the whole
    part_by: str = ""  # how its gradients are reduced: as all others, in a dtype, or by the `rounded` hook
    update: str = ""  # `in_backward`, `shard`, or the optimizer's `step()` updates the parameters
    adamw: bool = False
    max_norm: float | None = None  # for `in_backward(max_norm=...)`
    levels: bool = False  # two nodes with two ranks each: buckets are reduced on both levels of network
    seed: int = 0

    @property
    def tolerance(self):
        """By the coarsest dtype in which a run computes or sends; what eight bits lose is bounded by `EightBits`."""
        hook = self.comm_hook not in ("", "int8")
        if self.autocast or self.wire or self.compute or hook or self.part_by or "bfloat16" in str(self.blocks):
            # Eight bits: 4e-3 in each operation, and autocast rounds where the compiler fuses casts away.
            return {"rtol": 5e-2, "atol": 2e-2}
        # Some 1e-7 in each operation, carried through a handful of layers and four steps. The head and the data are
        # float32: float64 blocks are not more accurate than their input.
        return {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank saw: the first difference to torch's DDP, what reduced at the end, and the way of its backwards."""

    difference: str
    mode: str
    backwards: dict[str, int]


# --- blocks -----------------------------------------------------------------------------------------------------

KINDS = {}


class Block(nn.Module):
    """Takes and returns float32; computes in the dtype of its parameters, or in that to which a policy casts them."""

    def __init_subclass__(cls, kind=""):
        if kind:  # else `replicate` makes a class of a class
            KINDS[kind] = cls

    def __init__(self, width, spec):
        super().__init__()
        self.build(width, spec.hidden)
        self.to(getattr(torch, spec.dtype))
        parameters = list(self.parameters())
        for parameter in parameters[: {"nothing": 0, "first": 1, "all": len(parameters)}[spec.frozen]]:
            parameter.requires_grad_(False)

    def forward(self, x, tokens):
        return self.compute(x.to(next(self.parameters()).dtype), tokens).float()


class Linear(Block, kind="linear"):
    def build(self, width, hidden):
        self.layer = nn.Linear(width, width, bias=hidden % 2 == 0)

    def compute(self, x, tokens):
        return self.layer(x)


class MLP(Block, kind="mlp"):
    def build(self, width, hidden):
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, width)
        )

    def compute(self, x, tokens):
        return x + self.layers(x)


class Checkpointed(MLP, kind="checkpointed"):
    def compute(self, x, tokens):
        return checkpoint(self.layers, x, use_reentrant=False)


class GraphBreak(MLP, kind="graph break"):
    def compute(self, x, tokens):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1:](x)


class BatchNorm(Block, kind="batch norm"):
    def build(self, width, hidden):
        self.norm = nn.BatchNorm1d(width, momentum=None if hidden % 2 else 0.1)

    def compute(self, x, tokens):
        return self.norm(x)


class RunningScale(Block, kind="running scale"):
    """A buffer that the forward reads and changes: where it is copied to the other ranks shows in gradients."""

    def build(self, width, hidden):
        self.weight = nn.Parameter(torch.randn(width))
        self.register_buffer("scale", torch.ones(1))  # torch 2.13 miscompiles the update of one without dimensions
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def compute(self, x, tokens):
        # Not in place: with aot_eager, torch 2.13 then computes other gradients.
        self.scale = 0.5 * self.scale + x.detach().abs().sum() / 64
        self.count.add_(1)
        return x * self.weight * self.scale


class Embedding(Block, kind="embedding"):
    def build(self, width, hidden):
        self.table = nn.Embedding(VOCABULARY, width, padding_idx=0 if hidden % 2 else None)

    def compute(self, x, tokens):
        return x + self.table(tokens)


class Conv(Block, kind="conv"):
    def build(self, width, hidden):
        self.first = nn.Conv2d(1, hidden, (1, 3), padding=(0, 1))
        self.second = nn.Conv2d(hidden, 2, (1, 3), padding=(0, 1))
        if hidden > 3:
            self.to(memory_format=torch.channels_last)

    def compute(self, x, tokens):
        return self.second(self.first(x[:, None, None, :]).relu()).mean((1, 2))


class Tied(Block, kind="tied"):
    def build(self, width, hidden):
        self.there, self.back = nn.Linear(width, width), nn.Linear(width, width)
        self.back.weight = self.there.weight

    def compute(self, x, tokens):
        return self.back(torch.relu(self.there(x)))


class Layouts(Block, kind="layouts"):
    """Parameters that are transposed, have gaps in memory, or no dimension or no element at all."""

    def build(self, width, hidden):
        self.turned = nn.Parameter(torch.randn(hidden, width).t())
        self.gaps = nn.Parameter(torch.randn(hidden, 2 * width)[:, ::2])
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, width))

    def compute(self, x, tokens):
        return (x @ self.turned) @ self.gaps * self.scalar + self.nothing.sum()


class SameGradient(Block, kind="same gradient"):
    """Parameters that share one gradient tensor, and one whose gradient is a broadcast number."""

    def build(self, width, hidden):
        self.one, self.two = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.mean = nn.Parameter(torch.randn(hidden, width))

    def compute(self, x, tokens):
        return x + (self.one + self.two) + self.mean.mean()


class Attention(Block, kind="attention"):
    """The batch is the sequence."""

    def build(self, width, hidden):
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def compute(self, x, tokens):
        query, key, value = self.project(x)[None, None].chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value)[0, 0])


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class _OpaqueScale(_Scale):
    """A backward that asks for a number, which breaks a captured graph."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        sign = 1.0 if math.isfinite(grad.sum().item()) else -1.0
        return grad * weight * sign, (grad * x).sum(0)


class CustomFunction(Block, kind="custom function"):
    function: type[torch.autograd.Function] = _Scale

    def build(self, width, hidden):
        self.weight = nn.Parameter(torch.randn(width))

    def compute(self, x, tokens):
        return self.function.apply(x, self.weight.to(x.dtype))


class OpaqueFunction(CustomFunction, kind="opaque function"):
    function = _OpaqueScale


class RecomputedFunction(torch.autograd.Function):
    """A user's own checkpoint: its backward runs a backward."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Recomputed(MLP, kind="recomputed"):
    def build(self, width, hidden):
        super().build(width, hidden)
        self.scale = nn.Parameter(torch.ones(width))

    def compute(self, x, tokens):
        return x + RecomputedFunction.apply(self.layers, x * self.scale)


class Stack(nn.Module):
    """Blocks, called as often as `calls` has elements for them: torch 2.13 miscompiles code with numbers of calls."""

    def __init__(self, case):
        super().__init__()
        self.blocks = nn.ModuleList(KINDS[spec.kind](case.width, spec) for spec in case.blocks)
        self.head = Linear(case.width, BlockSpec("linear"))

    def forward(self, x, tokens, calls):
        for block, times in zip(self.blocks, calls, strict=True):
            for _ in times:
                x = torch.tanh(block(x, tokens))  # bounded: runs that diverge say nothing
        return self.head(x, tokens)


# --- what users do ------------------------------------------------------------------------------------------------


def _clip(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def _squash(parameter):
    parameter.grad = parameter.grad / (1 + parameter.grad.abs())  # slope at most 1: rounding is not amplified


def _drop(parameter):
    parameter.grad = None


HOOKS = {"clip": _clip, "squash": _squash, "drop": _drop}
# Sums, not means: a rank may have no rows at all.
LOSSES = {
    "": lambda output: [output.square().sum() / 8],
    "a term for each row": lambda output: [sum((row.square().sum() / 8 for row in output), output.sum() / 16)],
    "two backwards": lambda output: [output.square().sum() / 8, output.sum() / 16],
}
"""Losses of one forward. Of several, each has a backward, but in a synchronised one: torch's DDP reduces only the first
backward after a forward."""


EDITS = ("scale", "replace", "remove", "clip the norm")


def _edit(kind, parameters):
    """What loops do to `.grad` before `step()`."""
    if kind == "clip the norm":
        nn.utils.clip_grad_norm_(parameters, max_norm=0.05)
    for number, each in enumerate(parameters):
        if each.grad is not None and kind == "scale":
            each.grad.mul_(0.5)
        elif each.grad is not None and kind == "replace":
            each.grad = 0.5 * each.grad
        elif kind == "remove" and number % 2 == 0:
            each.grad = None


class UserError(Exception):
    """What code of the user raises."""


def _fail(*_):
    raise UserError


FAILS = ("loss", "tensor hook", "hook", "before the step", "after the step")


def _functional_loss(model, batch, given):
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    return LOSSES[""](torch.func.functional_call(model, {**buffers, **given}, batch))[0]


def _func_grad(model, batch):
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    return [*torch.func.grad(partial(_functional_loss, model, batch))(parameters).values()]


def _gradients_of_rows(model, batch):
    def of_row(given, x, tokens):
        return _functional_loss(model, (x[None], tokens[None], batch[2]), given)

    parameters = {name: each.detach() for name, each in model.named_parameters()}
    return [*torch.func.vmap(torch.func.grad(of_row), (None, 0, 0))(parameters, *batch[:2]).values()]


def _functional_call(model, batch):
    """With other parameters, and gradients of the module's through them."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    loss = _functional_loss(model, batch, {name: 0.5 * each for name, each in parameters.items()})
    return torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True)


def _autograd_grad(model, batch):
    parameters = [each for each in model.parameters() if each.requires_grad]
    return torch.autograd.grad(LOSSES[""](model(*batch))[0], parameters, materialize_grads=True)


TRANSFORMS = {
    "func.grad": _func_grad,
    "vmap": _gradients_of_rows,
    "functional_call": _functional_call,
    "autograd.grad": _autograd_grad,
}


def _transformed(kind, model, batch):
    """The values, or which error torch raises: vmap does not know all that the blocks do."""
    with nullcontext() if kind == "autograd.grad" else torch.compiler.set_stance("force_eager"):
        try:
            return TRANSFORMS[kind](model, batch)
        except (RuntimeError, ValueError, IndexError) as error:  # the last: of no rows
            return type(error)


# `backward`: `compiled_backward()` around an eager forward. `late`: the model, from the second step on.
COMPILED = ("model", "in place", "blocks", "head", "backward", "late", "nothing")
BUCKETS = {
    "optimal": {},
    "each its own": {"bucket_cap_mb": 1e-6},
    "small": {"bucket_cap_mb": 0.0003},
    "one": {"bucket_cap_mb": math.inf},
    "per module": {"bucket_policy": {Block}},
    "each alone": {"bucket_cap_mb": 1e-9},
}
WIRES = ("bfloat16", "float16")
TORCH_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


def _compiled(case, model, stack):
    options = {"backend": "aot_eager", "dynamic": case.dynamic}
    if case.compiled in ("model", "late"):
        return torch.compile(model, **options)
    for part in {"in place": [model], "blocks": [*stack.blocks, stack.head], "head": [stack.head]}.get(
        case.compiled, []
    ):
        part.compile(**options)
    return model


# --- reductions -------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    """What a policy says, as plain torch: a model that computes with its parameters cast."""

    def __init__(self, inner, dtype):
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x, *rest):
        cast = {name: each.to(self.dtype) for name, each in self.inner.named_parameters(remove_duplicate=False)}
        return torch.func.functional_call(self.inner, cast, (x.to(self.dtype), *rest), tie_weights=False)


class Reference:
    """How a case reduces gradients, as a hook of torch's DDP: one parameter after the other."""

    def __init__(self, case, twin):
        self.case, self.divisor = case, float(dist.get_world_size())
        part = twin.get_submodule(case.part).parameters() if case.part_by else ()
        self.ids_of_part = {id(parameter) for parameter in part}
        self.errors = {}

    def reduce(self, bucket):
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.reduce_one(parameter, gradient)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def reduce_one(self, parameter, gradient):
        key, by = id(parameter), self.case.part_by if id(parameter) in self.ids_of_part else self.case.comm_hook
        if by in ("rounded", "hook"):
            gradient += self.errors.get(key, torch.zeros_like(gradient))
            sent, divisor = gradient.to(torch.bfloat16), dist.get_world_size()
            self.errors[key] = gradient - sent.to(gradient.dtype)
            dist.all_reduce(sent)
            gradient.copy_(sent.to(gradient.dtype) / divisor)
            return
        wire = getattr(torch, by or self.case.wire) if by or self.case.wire else gradient.dtype
        sent = (gradient.to(torch.promote_types(gradient.dtype, wire)) / self.divisor).to(wire)
        dist.all_reduce(sent)
        gradient.copy_(sent.to(gradient.dtype))

    def handed_out(self, ours, theirs):
        return ""


class EightBits(Reference):
    """How near to the averages of torch's DDP `QuantizedHook(torch.int8)` has to be.

    A gradient that differs by 1e-7 may be rounded to the other neighbour, so not numbers are compared, but what all
    ranks have lost together. Of each element

        mean of the gradients + what was lost before - what is handed out = what is lost by now

    is at most half a step of each of the two roundings, and does not grow as if errors were forgotten or sent twice.
    """

    def __init__(self, case, twin):
        super().__init__(case, twin)
        self.lost = self.errors
        """By parameter what was lost, the mean of the ranks' errors."""
        self.most = {}
        """The most that it can be, by block. So is the mean of the errors' magnitudes: one rank has the second loss."""
        self.expected = {}

    def reduce_one(self, parameter, gradient):
        """To the mean, and what was lost before."""
        # In memory it lies as the parameter does; torch says that it is in row order.
        strides, key = torch.empty_like(parameter).stride(), id(parameter)
        gradient = gradient.as_strided(parameter.shape, strides, gradient.storage_offset())
        local = gradient.float().flatten()
        means = torch.cat([local, self._peaks(local)])
        dist.all_reduce(means)
        mean, peaks = (means / dist.get_world_size()).split([local.numel(), means.numel() - local.numel()])
        expected = mean + self.lost.get(key, 0.0)
        first = (peaks + self.most.get(key, 0.0)) / 127  # the mean of the ranks' steps is no more
        second = (self._peaks(expected) + first / 2) / 127
        self.most[key], self.expected[key] = (first + second) / 2, expected
        gradient.copy_(expected.view(gradient.shape))

    def _peaks(self, flat):
        padded = nn.functional.pad(flat, (0, -flat.numel() % self.case.per_scale))
        return padded.view(-1, self.case.per_scale).abs().amax(1)

    def handed_out(self, ours, theirs):
        """The first gradient of ours that is too far away. The twin goes on with those of the first rank."""
        rtol, atol = self.case.tolerance.values()
        differences = []
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if not other.requires_grad:
                continue
            handed = torch.zeros(other.shape, dtype=other.dtype)
            if mine.grad is not None:
                handed.copy_(mine.grad)
            dist.broadcast(handed, 0)
            if other.grad is None or not other.grad.any():  # no rank has used it: all of it is still to be sent
                continue
            expected, most = self.expected[id(other)], self.most[id(other)].repeat_interleave(self.case.per_scale)
            lost = self.lost[id(other)] = expected - handed.float().flatten()
            excess = lost.abs() - most[: lost.numel()] - rtol * expected.abs() - atol
            if not bool((excess <= 0).all()):
                differences.append(f"gradient of {name}: {excess.max():.3g} more was lost than eight bits lose")
            other.grad.copy_(handed)
        return differences[0] if differences else ""


# --- running a case ---------------------------------------------------------------------------------------------


def run_case(case):
    """Run a case on this rank. It goes on after a difference: the other rank waits in a collective otherwise."""
    torch._dynamo.reset()
    torch.manual_seed(case.seed)
    run = Run(case)
    # For several backwards torch asks for this: compiled code reuses the memory of what a forward has saved.
    several = any(micro.loss == "two backwards" for step in case.steps for micro in step.micros)
    with torch._functorch.config.patch(donated_buffer=not several):
        run.replicate()
        run.train()
        report = dp_compile.report(run.stack)
        for part in reversed(run.parts):
            dp_compile.unreplicate(part)
    return Outcome(next(iter(run.differences), ""), report.mode, dict(report.backwards))


class Run:
    """A case's two models and what trains them, and the differences that this rank saw."""

    def __init__(self, case):
        self.case = case
        self.differences = []
        self.odd = dist.get_rank() % 2
        self.stack = Stack(case)
        self.twin = copy.deepcopy(self.stack)
        for model in (self.twin,) if case.hooks_late else (self.twin, self.stack):
            _set_hooks(case, model)
        wrapped = Cast(self.twin, getattr(torch, case.compute)) if case.compute else self.twin
        options = {"find_unused_parameters": case.find_unused, SYNC_BUFFERS: case.broadcast_buffers}
        self.theirs = TorchDDP(wrapped, **options)
        self.reference = (EightBits if case.comm_hook == "int8" else Reference)(case, self.twin)
        # Not by DDP itself, which does not read annotations that are text.
        if case.comm_hook in TORCH_HOOKS:
            dist._register_comm_hook(self.theirs.reducer, None, getattr(default_hooks, case.comm_hook))
        elif case.comm_hook or case.part_by or case.wire or case.divides:
            dist._register_comm_hook(self.theirs.reducer, self.reference, type(self.reference).reduce)

    def replicate(self):
        case = self.case
        config = dp_compile.ReplicateConfig(
            backend="aot_eager",
            find_unused_parameters=case.find_unused,
            broadcast_buffers=case.broadcast_buffers,
            init_sync_buffers=True,
            check_reductions=case.check_reductions,
            mp_policy=_policy(case, case.wire),
        )
        options = {"config": config, **BUCKETS[case.buckets]}
        if case.levels:
            options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
        self.parts = [self.stack]
        if case.part:
            self.parts += [self.stack.get_submodule(case.part)]
            policy = _policy(case, case.part_by or case.wire, cast_forward_inputs=not case.part_by)
            dp_compile.replicate(self.parts[1], **options | {"config": replace(config, mp_policy=policy)})
        if case.wrapper:
            self.ours = dp_compile.DistributedDataParallel(self.stack, **options)
        else:
            self.ours = dp_compile.replicate(self.stack, **options)
        for part in (self.ours, *self.parts[1:]):
            hook = case.part_by if part is not self.ours and case.part_by == "hook" else case.comm_hook
            if hook in TORCH_HOOKS:
                part.register_comm_hook(None, getattr(default_hooks, hook))
            elif hook:
                made = dp_compile.QuantizedHook(torch.int8, case.per_scale) if hook == "int8" else Rounded()
                part.register_comm_hook(dp_compile.HookState(), made)
        if case.hooks_late:
            _set_hooks(case, self.stack)

    def train(self):
        case = self.case
        compiled = _compiled(case, self.ours, self.stack)
        optimizers = [_optimizer(case, model) for model in (self.stack, self.twin)]
        if case.update:
            options = {"max_norm": case.max_norm, "shard": case.update == "shard"}
            dp_compile.optim.in_backward(self.ours, optimizers[0], **options)
        for number, step in enumerate(case.steps):
            run = self.ours if case.compiled == "late" and number == 0 else compiled
            if case.divides:
                self.reference.divisor = case.divides[number % len(case.divides)]
                for part in self.parts[: 1 if case.part_by == "hook" else None]:
                    set_gradient_divide_factor(replica_of(part), "a part", self.reference.divisor)
            if step.transform:
                self.transform(number, step, run)
            self.step(number, step, run, optimizers)
        self.compare("the end")

    def compare(self, when):
        try:
            compare(self.stack, self.twin, when, **self.case.tolerance)
        except AssertionError as error:
            self.differences.append(str(error))

    def step(self, number, step, run, optimizers):
        case, failure = self.case, step.failure
        in_backward = failure is not None and "step" not in failure.where
        for tried in (failure, None) if in_backward else (None,):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step.set_to_none)
            self.backwards(number, step, run, tried)
        # On all ranks, also on one that has seen a difference: they talk to each other.
        if not case.update:
            if found := self.reference.handed_out(self.stack, self.twin):
                self.differences.append(f"step {number}: {found}")
            self.compare(f"step {number}")
            self.edit(step.micros[-1])
        elif case.max_norm is not None:
            nn.utils.clip_grad_norm_(self.twin.parameters(), case.max_norm)
        for optimizer in optimizers:
            _step(optimizer, failure if failure is not None and not in_backward and failure.ranks[self.odd] else None)
        if case.update:
            optimizers[1].zero_grad()  # as `in_backward` does
            self.compare(f"after step {number}")

    def backwards(self, number, step, run, failure):
        """The micro steps of a step, up to the one that fails."""
        if failure is not None and failure.micro + 1 < len(step.micros) and not failure.ranks[self.odd]:
            return  # what fails without synchronisation on other ranks is not noticed on this one
        for position, micro in enumerate(step.micros):
            local = position + 1 < len(step.micros)
            failing = failure if failure is not None and failure.micro == position else None
            batch = _batch(self.case, micro, 10 * number + position, dist.get_rank())
            with dp_compile.no_sync(self.ours) if local else nullcontext(), ExitStack() as scopes:
                losses = self.forward(run, batch, micro)
                if self.case.compiled == "backward":
                    scopes.enter_context(dp_compile.compiled_backward())
                if micro.eager[self.odd]:
                    scopes.enter_context(eagerly())
                self.backward(losses, micro, self.stack, failing, local=local)
            # After an exception in a synchronised backward torch's DDP raises in the next forward, for its reducer
            # waits for the rest of it; and after a forward without one it reduces in the next `no_sync()`. So the
            # reference of a backward that fails is a forward that DDP does not see.
            if failing is not None and not local:
                self.forward(self.theirs.module, batch, micro)
                return
            with self.theirs.no_sync() if local else nullcontext():
                self.backward(self.forward(self.theirs, batch, micro), micro, self.twin, failing, local=local)
            if failing is not None:
                return
            if local:
                self.edit(micro)

    def forward(self, model, batch, micro):
        with torch.autocast("cpu", torch.bfloat16) if self.case.autocast else nullcontext():
            losses = LOSSES[micro.loss](model(*batch))
        if micro.other[self.odd]:
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        return losses

    def backward(self, losses, micro, stack, failing, *, local):
        """One for each loss, or one for all together if it is synchronised."""
        with nullcontext() if failing is None else self.failing(failing, micro, stack):
            if failing is not None and failing.where == "loss":
                _fail()
            for number, loss in enumerate(losses if local else [sum(losses[1:], losses[0])], 1):
                loss.backward(retain_graph=local and number < len(losses))

    @contextmanager
    def failing(self, failure, micro, stack):
        """Make the backward inside raise, and see that it does."""
        fails = failure.ranks[self.odd]
        wanted = UserError if fails else VoidBackwardError
        calls = [_calls(self.case, micro, rank) for rank in range(2)]
        used = [block for block, *times in zip(stack.blocks, *calls, strict=True) if all(times)]
        parameters = [each for part in (*used, stack.head) for each in part.parameters() if each.requires_grad]
        chosen = parameters[failure.parameter % len(parameters)]
        register = chosen.register_hook if failure.where == "tensor hook" else chosen.register_post_accumulate_grad_hook
        handle = register(_fail) if fails else None
        try:
            yield
            self.differences.append(f"no {wanted.__name__}")
        except (UserError, VoidBackwardError) as error:
            if type(error) is not wanted:
                self.differences.append(f"{error!r} in place of {wanted.__name__}")
        finally:
            if handle is not None:
                handle.remove()

    def edit(self, micro):
        for stack in (self.stack, self.twin):
            _edit(micro.edit, list(stack.parameters()))

    def transform(self, number, step, run):
        """The same data on all ranks: buffers that a forward changes stay the same on all."""
        batch = _batch(self.case, step.micros[0], 10 * number, 0)
        mine = _transformed(step.transform, run if step.transform == "autograd.grad" else self.stack, batch)
        other = _transformed(step.transform, self.theirs.module, batch)
        try:
            torch.testing.assert_close(mine, other, **self.case.tolerance)
        except (AssertionError, TypeError) as error:
            if mine is not other:
                self.differences.append(f"before step {number}: {step.transform}: {error}")


def _set_hooks(case, model):
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable[::2] if case.hook else ():
        parameter.register_post_accumulate_grad_hook(HOOKS[case.hook])


def _policy(case, wire, **options):
    """`wire`: a dtype, "" (that of the parameters), or `hook`, which says itself how gradients travel."""
    sent = "" if wire == "hook" else wire or ("float32" if case.compute and not case.comm_hook else "")
    dtypes = [getattr(torch, each) if each else None for each in (case.compute, sent)]
    return MixedPrecisionPolicy(*dtypes, **options)


def _optimizer(case, stack):
    if not case.adamw:
        return torch.optim.SGD(stack.parameters(), lr=0.05, momentum=0.9)
    groups = [{"params": [*stack.blocks.parameters()]}, {"params": [*stack.head.parameters()], "lr": 0.02}]
    # With a small eps AdamW would make steps of rounding errors, where a gradient is zero but for those.
    return torch.optim.AdamW(groups, lr=0.05, eps=0.1)


def _step(optimizer, failure):
    if failure is None:
        optimizer.step()
        return
    before = failure.where == "before the step"
    handle = (optimizer.register_step_pre_hook if before else optimizer.register_step_post_hook)(_fail)
    with suppress(UserError):
        optimizer.step()
    handle.remove()
    if before:
        optimizer.step()


def _calls(case, micro, rank):
    left_out = case.ways[micro.way[rank % 2]]
    return tuple((None,) * micro.depth * (position not in left_out) for position in range(len(case.blocks)))


def _batch(case, micro, number, rank):
    generator = torch.Generator().manual_seed(1000 * case.seed + 100 * rank + number)
    rows = micro.batch[rank % 2]
    x = torch.randn(rows, case.width, generator=generator)
    return x, torch.randint(0, VOCABULARY, (rows,), generator=generator), _calls(case, micro, rank)
