"""Weights of well-known models with what their backward costs: shapes only, for predictions without the models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

ACTIVATION_BYTES: Final = 2
"""Activations are bf16 in every model here, gradients as each model says."""


class Weight(NamedTuple):
    """`positions`: how often the forward applies it. `width`: activations read and written a position.

    A lookup touches rows and has no product. A weight without a gradient of its own is one more use of a tied one.
    """

    numel: int
    positions: float
    width: int
    is_lookup: bool = False
    has_gradient: bool = True

    @property
    def backward_flops(self) -> float:
        """Gradients of the input and of the weight: twice the forward's 2 * numel a position."""
        return 0.0 if self.is_lookup else 4.0 * self.numel * self.positions

    def moved_bytes(self, itemsize: int) -> float:
        """Activations and their gradients once, the weight's gradient once."""
        return 2.0 * ACTIVATION_BYTES * self.width * self.positions + float(itemsize) * self.numel


class Model(NamedTuple):
    """Weights in the order of the forward; `itemsize` bytes an element of a gradient."""

    weights: tuple[Weight, ...]
    itemsize: int
    positions: str


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes weights that are applied `positions` times."""

    positions: float

    def linear(self, inputs: int, outputs: int, *, bias: bool = False) -> Iterator[Weight]:
        yield Weight(inputs * outputs, self.positions, inputs + outputs)
        if bias:
            yield Weight(outputs, self.positions, outputs)

    def norm(self, size: int, *, bias: bool = False) -> Iterator[Weight]:
        yield Weight(size, self.positions, 2 * size)
        if bias:
            yield Weight(size, self.positions, size)

    def embedding(self, rows: int, size: int) -> Iterator[Weight]:
        yield Weight(rows * size, self.positions, size, is_lookup=True)

    def tied_head(self, rows: int, size: int) -> Iterator[Weight]:
        yield Weight(rows * size, self.positions, rows + size, has_gradient=False)


def gpt2(size: int, layers: int, tokens: int) -> Iterator[Weight]:
    """Tied head: the largest gradient is ready last, with the embedding's lookup."""
    make = Builder(tokens)
    yield from make.embedding(50257, size)
    yield from make.embedding(1024, size)
    for _ in range(layers):
        yield from make.norm(size, bias=True)
        yield from make.linear(size, 3 * size, bias=True)
        yield from make.linear(size, size, bias=True)
        yield from make.norm(size, bias=True)
        yield from make.linear(size, 4 * size, bias=True)
        yield from make.linear(4 * size, size, bias=True)
    yield from make.norm(size, bias=True)
    yield from make.tied_head(50257, size)


def llama3_8b(tokens: int) -> Iterator[Weight]:
    make = Builder(tokens)
    yield from make.embedding(128256, 4096)
    for _ in range(32):
        for inputs, outputs in ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)):
            yield from make.linear(inputs, outputs)
        for inputs, outputs in ((4096, 14336), (4096, 14336), (14336, 4096)):
            yield from make.linear(inputs, outputs)
        yield from make.norm(4096)
        yield from make.norm(4096)
    yield from make.norm(4096)
    yield from make.linear(4096, 128256)


def bert_large(tokens: int) -> Iterator[Weight]:
    """With the masked-language head, whose decoder is tied."""
    make = Builder(tokens)
    for rows in (30522, 512, 2):
        yield from make.embedding(rows, 1024)
    yield from make.norm(1024, bias=True)
    for _ in range(24):
        for _ in range(4):
            yield from make.linear(1024, 1024, bias=True)
        yield from make.norm(1024, bias=True)
        yield from make.linear(1024, 4096, bias=True)
        yield from make.linear(4096, 1024, bias=True)
        yield from make.norm(1024, bias=True)
    yield Weight(30522, tokens, 30522)
    yield from make.linear(1024, 1024, bias=True)
    yield from make.norm(1024, bias=True)
    yield from make.tied_head(30522, 1024)


def t5_large(tokens: int) -> Iterator[Weight]:
    """Encoder and decoder with `tokens` each; embedding and head are tied."""
    make = Builder(tokens)
    yield from make.embedding(32128, 1024)
    for cross in (False, True):
        for layer in range(24):
            for attention in range(2 if cross else 1):
                for _ in range(4):
                    yield from make.linear(1024, 1024)
                if layer == attention == 0:
                    yield from make.embedding(32, 16)
                yield from make.norm(1024)
            yield from make.linear(1024, 4096)
            yield from make.linear(4096, 1024)
            yield from make.norm(1024)
        yield from make.norm(1024)
    yield from make.tied_head(32128, 1024)


def resnet50(images: int) -> Iterator[Weight]:
    yield from _convolution(3, 64, 7, images * 112**2)
    inputs = 64
    for stage, (blocks, edge) in enumerate(((3, 56), (4, 28), (6, 14), (3, 7))):
        width = 64 * 2**stage
        for block in range(blocks):
            before = edge * 2 if block == 0 and stage else edge
            yield from _convolution(inputs, width, 1, images * before**2)
            yield from _convolution(width, width, 3, images * edge**2)
            yield from _convolution(width, 4 * width, 1, images * edge**2)
            if block == 0:
                yield from _convolution(inputs, 4 * width, 1, images * edge**2)
            inputs = 4 * width
    yield from Builder(images).linear(2048, 1000, bias=True)


def _convolution(inputs: int, outputs: int, edge: int, positions: int) -> Iterator[Weight]:
    yield Weight(inputs * outputs * edge**2, positions, inputs + outputs)
    yield from Builder(positions).norm(outputs, bias=True)


def vit_large(images: int) -> Iterator[Weight]:
    make = Builder(images * 197)
    yield Weight(1024, images, 1024, is_lookup=True)
    yield Weight(197 * 1024, images * 197, 1024, is_lookup=True)
    yield from make.linear(3 * 16**2, 1024, bias=True)
    for _ in range(24):
        yield from make.norm(1024, bias=True)
        yield from make.linear(1024, 3 * 1024, bias=True)
        yield from make.linear(1024, 1024, bias=True)
        yield from make.norm(1024, bias=True)
        yield from make.linear(1024, 4096, bias=True)
        yield from make.linear(4096, 1024, bias=True)
    yield from make.norm(1024, bias=True)
    yield from Builder(images).linear(1024, 1000, bias=True)


def mixture(tokens: int, *, size: int = 1024, inner: int = 3584, experts: int = 8, chosen: int = 2) -> Iterator[Weight]:
    """24 layers; each expert sees its even share of the tokens."""
    make, expert = Builder(tokens), Builder(tokens * chosen / experts)
    yield from make.embedding(32000, size)
    for _ in range(24):
        for _ in range(4):
            yield from make.linear(size, size)
        yield from make.linear(size, experts)
        for _ in range(experts):
            yield from expert.linear(size, inner)
            yield from expert.linear(inner, size)
            yield from expert.linear(size, inner)
        yield from make.norm(size)
        yield from make.norm(size)
    yield from make.norm(size)
    yield from make.linear(size, 32000)


MODELS: Final[Mapping[str, Model]] = {
    "GPT-2 124M": Model(tuple(gpt2(768, 12, 16 * 1024)), 4, "16 x 1024 tokens"),
    "GPT-2 1.5B": Model(tuple(gpt2(1600, 48, 8 * 1024)), 4, "8 x 1024 tokens"),
    "Llama-3-8B": Model(tuple(llama3_8b(8192)), 2, "1 x 8192 tokens"),
    "BERT-large": Model(tuple(bert_large(32 * 512)), 4, "32 x 512 tokens"),
    "T5-large": Model(tuple(t5_large(16 * 512)), 4, "16 x 512 tokens, twice"),
    "ResNet-50": Model(tuple(resnet50(128)), 4, "128 images"),
    "ViT-L/16": Model(tuple(vit_large(64)), 4, "64 images"),
    "MoE 2.3B": Model(tuple(mixture(16 * 1024)), 2, "16 x 1024 tokens, 8 experts, 2 chosen"),
}
