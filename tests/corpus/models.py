"""The modules of the cases. All are small: what goes wrong does not depend on size."""

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """Parts by name, and a forward that is given them. No `nn.Sequential`: under DDP Dynamo skips its forward."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def three_layers():
    layers = {"first": nn.Linear(6, 8), "middle": nn.Linear(8, 8), "last": nn.Linear(8, 6)}
    return Model(lambda own, x: own.last(torch.tanh(own.middle(torch.tanh(own.first(x))))), **layers)


def wide(width):
    """Six square weights."""

    def run(own, x):
        for weight in own.weights:
            x = x @ weight
        return x

    return Model(run, weights=nn.ParameterList(torch.randn(width, width) / width for _ in range(6)))


def halves(frozen=False):
    """A trunk and a head; one of them may be frozen."""
    trunk, head = nn.Linear(6, 8).requires_grad_(not frozen), nn.Linear(8, 6)
    return Model(lambda own, x: own.head(torch.tanh(own.trunk(x))), trunk=trunk, head=head)


def halves_and_norm():
    """Of the halves tensor parallel makes DTensors, not of the norm."""
    parts = {"trunk": nn.Linear(6, 8), "head": nn.Linear(8, 6), "norm": nn.LayerNorm(6)}
    return Model(lambda own, x: own.norm(own.head(torch.tanh(own.trunk(x)))), **parts)


def normed(norm=nn.BatchNorm1d, width=8):
    """By default it has buffers that a forward changes."""
    parts = {"first": nn.Linear(6, width), "norm": norm(width), "last": nn.Linear(width, 6)}
    return Model(lambda own, x: own.last(torch.tanh(own.norm(own.first(x)))), **parts)


def critic():
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
    return Model(lambda own, x: own.layers(x), layers=layers)


def with_complex():
    """A complex weight between real ones, as in a Fourier neural operator."""

    def run(own, x):
        hidden = torch.complex(own.first(x), torch.ones_like(x[:, :1]).expand(-1, 8)) @ own.spectral
        return own.last(torch.cat([hidden.real, hidden.imag], 1))

    first, last = nn.Linear(6, 8), nn.Linear(16, 6)
    return Model(run, first=first, last=last, spectral=nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3))


def with_words():
    """An embedding with sparse gradients, which a batch without words does not use."""

    def run(own, x, words=None):
        return own.head(x if words is None else x + own.words(words))

    return Model(run, words=nn.Embedding(20, 6, sparse=True), head=nn.Linear(6, 6))


def towers():
    """Text always, images sometimes."""

    def run(own, text, image=None):
        hidden = own.text(text)
        if image is not None:
            hidden = hidden + own.vision(image)
        return own.head(torch.tanh(hidden))

    return Model(run, text=nn.Linear(6, 8), vision=nn.Linear(6, 8), head=nn.Linear(8, 6))


def resnet():
    """Two blocks, and more than one bucket of 1 MiB."""
    channels = 128

    def run(own, x):
        x = torch.relu(own.norms[0](own.stem(x)))
        for norm, convolution in zip(list(own.norms)[1:], own.convolutions, strict=True):
            x = torch.relu(x + norm(convolution(x)))
        return own.head(x.mean((2, 3)))

    return Model(
        run,
        stem=nn.Conv2d(3, channels, 3, padding=1, bias=False),
        norms=nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3)),
        convolutions=nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)),
        head=nn.Linear(channels, 5),
    )


def tiled():
    stem, head = nn.Linear(6, 6), nn.Linear(6, 6)
    mlp = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    return Model(lambda own, x: own.head(InTiles.apply(own.stem(x), own.mlp)), stem=stem, head=head, mlp=mlp)


def checkpointed_lora():
    return Model(lambda own, x: checkpoint(own.lora, x, use_reentrant=False), lora=Lora(dropout=0.1))


def stochastic_depth():
    """More than two buckets of 1 MiB; each block is skipped in half of the steps."""

    def run(own, x, scale):
        rows, x = x.shape[0], own.stem(x)
        if random.random() >= 0.5:
            x = x + scale * torch.tanh(own.first(x))
        x = torch.tanh(own.middle(x))
        if random.random() >= 0.5:
            x = x + scale * torch.tanh(own.second(x))
        return own.head(x) / rows

    wide = {name: nn.Linear(400, 400) for name in ("first", "middle", "second")}
    return Model(run, stem=nn.Linear(6, 400), head=nn.Linear(400, 6), **wide)


class Lora(nn.Module):
    """A frozen weight and a trainable update of low rank, with dropout before it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 6, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """The result, and what `up` was given."""
        hidden = self.down(self.dropout(x))
        return self.base(x) + self.up(hidden), hidden.detach()


def shared_lora():
    """The same adapter in two checkpointed segments: each of them runs another backward."""

    def run(own, x):
        for _ in range(2):
            x = checkpoint(lambda each: torch.tanh(own.lora(each)[0]), x, use_reentrant=True)
        return own.head(x)

    return Model(run, lora=Lora(), head=nn.Linear(6, 6))


class InTiles(torch.autograd.Function):
    """An MLP over slices of the batch; its backward computes each slice once more and runs its backward."""

    TILES = 3

    @staticmethod
    def forward(ctx, x, mlp):
        ctx.mlp = mlp
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([mlp(tile) for tile in x.chunk(InTiles.TILES)])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grads = []
        for tile, of_tile in zip(x.chunk(InTiles.TILES), grad.chunk(InTiles.TILES), strict=True):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                result = ctx.mlp(tile)
            torch.autograd.backward(result, of_tile)
            grads.append(tile.grad)
        return torch.cat(grads), None


class Fault(torch.autograd.Function):
    """The identity. Its backward raises where it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fault.armed:
            raise MemoryError("out of memory in the backward")
        return grad


class Scaled(torch.Tensor):
    """`inner * scale`, as quantised weights are kept: operations see the product."""

    inner: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, inner, scale):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=torch.float32, device=inner.device
        )
        made.inner, made.scale = inner, scale
        return made

    def __init__(self, inner, scale):
        pass

    def __tensor_flatten__(self):
        return ["inner"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner, scale, size, stride):
        return Scaled(inner["inner"], scale)

    def __repr__(self, *, tensor_contents=None):
        return f"Scaled({self.inner!r}, {self.scale})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        aten, kwargs = torch.ops.aten, kwargs or {}
        if function in (aten.detach.default, aten.alias.default, aten.clone.default):
            return Scaled(function(args[0].inner), args[0].scale)
        if function is aten.copy_.default and isinstance(args[0], Scaled) and isinstance(args[1], Scaled):
            args[0].inner.copy_(args[1].inner)
            return args[0]
        if function is aten.add_.Tensor and isinstance(args[0], Scaled):
            args[0].inner.add_(args[1] / args[0].scale, **kwargs)
            return args[0]
        plain = [each.inner.float() * each.scale if isinstance(each, Scaled) else each for each in args]
        return function(*plain, **kwargs)


def on_scaled(frozen):
    """A weight that is a `Scaled`: frozen and of eight bits with a trainable update, or trainable."""
    weight, down, up = torch.randn(6, 6), nn.Linear(6, 3, bias=False), nn.Linear(3, 6, bias=False)
    inner = (weight * 20).round().to(torch.int8) if frozen else weight * 2
    scaled = nn.Parameter(Scaled(inner, 0.05 if frozen else 0.5), requires_grad=not frozen)
    return Model(lambda own, x: torch.mm(x, own.weight) + own.up(own.down(x)), weight=scaled, down=down, up=up)
