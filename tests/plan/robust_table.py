"""How near plans come to the bound, for six models on 30 links: `python tests/plan/robust_table.py [RANKS]`.

Prints the median and the worst ratio of the predicted end to the release-time bound: of the earliest, of the robust
choice, of 25 MiB buckets, and of the first two if the network is 0.5 to 2 times as slow as believed. Nothing is
measured: a gradient is ready when the backward, by roofline, has passed its weight; attention's products are left out.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from dp_compile.plan.buckets import partition_by_size
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import ReadyGradient
from dp_compile.plan.planner import certify, earliest_partition, robust_partition
from dp_compile.plan.words import BYTES_PER_MB

FLOPS_PER_S: Final = 400e12  # about 40 % of an H100's dense bf16 peak (vendor: 989e12)
MEMORY_BYTES_PER_S: Final = 3.35e12  # an H100 SXM's HBM3, vendor's figure
ACTIVATION_BYTES: Final = 2
BUSBW_GB_S: Final = (10, 25, 50, 100, 200, 400)
ALPHA_US: Final = (5, 20, 50, 100, 200)


class Weight(NamedTuple):
    """`positions`: how often the forward applies it. `width`: activations read and written a position. A lookup has no
    product. Without `has_gradient` it is one more use of a tied weight."""

    numel: int
    positions: float
    width: int
    is_lookup: bool = False
    has_gradient: bool = True


def linears(positions: float, *shapes: tuple[int, int], bias: bool = True) -> Iterator[Weight]:
    for inputs, outputs in shapes:
        yield Weight(inputs * outputs, positions, inputs + outputs)
        yield from [Weight(outputs, positions, outputs)] * bias


def norm(positions: float, size: int, *, bias: bool = True) -> Iterator[Weight]:
    yield from (Weight(size, positions, 2 * size), *[Weight(size, positions, size)] * bias)


def blocks(tokens: int, size: int, layers: int) -> Iterator[Weight]:
    for _ in range(layers):
        yield from (*norm(tokens, size), *linears(tokens, (size, 3 * size), (size, size)))
        yield from (*norm(tokens, size), *linears(tokens, (size, 4 * size), (4 * size, size)))
    yield from norm(tokens, size)


def gpt2(size: int, layers: int, tokens: int) -> Iterator[Weight]:
    """Tied head: the largest gradient is ready last, with the embedding's lookup."""
    yield from (Weight(rows * size, tokens, size, is_lookup=True) for rows in (50257, 1024))
    yield from (*blocks(tokens, size, layers), Weight(50257 * size, tokens, 50257 + size, has_gradient=False))


def llama3_8b(tokens: int) -> Iterator[Weight]:
    yield Weight(128256 * 4096, tokens, 4096, is_lookup=True)
    for _ in range(32):
        attention = (4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)
        yield from linears(tokens, *attention, (4096, 14336), (4096, 14336), (14336, 4096), bias=False)
        yield from (*norm(tokens, 4096, bias=False), *norm(tokens, 4096, bias=False))
    yield from (*norm(tokens, 4096, bias=False), *linears(tokens, (4096, 128256), bias=False))


def bert_large(tokens: int) -> Iterator[Weight]:
    """With the masked-language head, whose decoder is tied."""
    yield from (Weight(rows * 1024, tokens, 1024, is_lookup=True) for rows in (30522, 512, 2))
    yield from norm(tokens, 1024)
    for _ in range(24):
        yield from (*linears(tokens, *[(1024, 1024)] * 4), *norm(tokens, 1024))
        yield from (*linears(tokens, (1024, 4096), (4096, 1024)), *norm(tokens, 1024))
    yield from (Weight(30522, tokens, 30522), *linears(tokens, (1024, 1024)), *norm(tokens, 1024))
    yield Weight(30522 * 1024, tokens, 30522 + 1024, has_gradient=False)


def resnet50(images: int) -> Iterator[Weight]:
    def convolution(inputs: int, outputs: int, kernel: int, positions: int) -> Iterator[Weight]:
        yield Weight(inputs * outputs * kernel**2, positions, inputs + outputs)
        yield from norm(positions, outputs)

    yield from convolution(3, 64, 7, images * 112**2)
    inputs = 64
    for stage, (blocks, edge) in enumerate(((3, 56), (4, 28), (6, 14), (3, 7))):
        width = 64 * 2**stage
        for block in range(blocks):
            before = edge * 2 if block == 0 and stage else edge
            yield from convolution(inputs, width, 1, images * before**2)
            yield from convolution(width, width, 3, images * edge**2)
            yield from convolution(width, 4 * width, 1, images * edge**2)
            yield from convolution(inputs, 4 * width, 1, images * edge**2) if block == 0 else ()
            inputs = 4 * width
    yield from linears(images, (2048, 1000))


def vit_large(images: int) -> Iterator[Weight]:
    tokens = images * 197
    yield from (Weight(1024, images, 1024, is_lookup=True), Weight(197 * 1024, tokens, 1024, is_lookup=True))
    yield from linears(tokens, (3 * 16**2, 1024))
    yield from (*blocks(tokens, 1024, 24), *linears(images, (1024, 1000)))


MODELS: Final[Mapping[str, tuple[tuple[Weight, ...], int]]] = {
    "GPT-2 124M": (tuple(gpt2(768, 12, 16 * 1024)), 4),
    "GPT-2 1.5B": (tuple(gpt2(1600, 48, 8 * 1024)), 4),
    "Llama-3-8B": (tuple(llama3_8b(8192)), 2),
    "BERT-large": (tuple(bert_large(32 * 512)), 4),
    "ResNet-50": (tuple(resnet50(128)), 4),
    "ViT-L/16": (tuple(vit_large(64)), 4),
}
"""Weights in the order of the forward, and bytes of an element of a gradient."""


def backward_of(weights: Sequence[Weight], itemsize: int) -> tuple[tuple[ReadyGradient, ...], float]:
    """Gradients in launch order, the flags last, and how long the backward takes."""
    now, gradients = 0.0, []
    for weight in reversed(weights):
        moved = 2.0 * ACTIVATION_BYTES * weight.width * weight.positions + float(itemsize) * weight.numel
        flops = 0.0 if weight.is_lookup else 4.0 * weight.numel * weight.positions
        now += max(flops / FLOPS_PER_S, moved / MEMORY_BYTES_PER_S)
        if weight.has_gradient:
            gradients.append(ReadyGradient(weight.numel * itemsize, now))
    return (*gradients, ReadyGradient(len(gradients) * itemsize, now)), now


def ratios(gradients: tuple[ReadyGradient, ...], seconds: float, cost: AllReduceCost) -> dict[str, float]:
    """Predicted end over the bound, for each kind of plan on one link."""
    sizes = [gradient.nbytes for gradient in gradients]
    fixed = partition_by_size([None] * len(sizes), sizes, 25.0 * BYTES_PER_MB, 1.0 * BYTES_PER_MB)
    earliest, of_fixed = (
        certify(gradients, each, cost=cost, backward_s=seconds)
        for each in (earliest_partition(gradients, cost=cost), fixed)
    )
    _, robust = robust_partition(gradients, cost=cost, backward_s=seconds)
    now = {"earliest": earliest.ratio, "robust": robust.ratio, "25 MiB": of_fixed.ratio}
    return now | {"earliest, speeds off": earliest.worst_ratio, "robust, speeds off": robust.worst_ratio}


def table(ranks: int = 64, busbw_gb_s: Sequence[int] = BUSBW_GB_S, alpha_us: Sequence[int] = ALPHA_US) -> Iterator[str]:
    """Median and worst ratio over the links, a line for each model."""
    for name, (weights, itemsize) in MODELS.items():
        (gradients, seconds), cells = backward_of(weights, itemsize), []
        for busbw, alpha in itertools.product(busbw_gb_s, alpha_us):
            beta_s_per_byte = 2 * (ranks - 1) / ranks / (busbw * 1e9)
            cells.append(ratios(gradients, seconds, AllReduceCost(alpha * 1e-6, beta_s_per_byte)))
        spread = {kind: [cell[kind] for cell in cells] for kind in cells[0]}
        yield f"{name}, {len(cells)} links, {ranks} ranks, median / worst: " + "; ".join(
            f"{kind} {statistics.median(values):.3f} / {max(values):.3f}" for kind, values in spread.items()
        )


if __name__ == "__main__":
    print(*table(*map(int, sys.argv[1:2])), sep="\n")
