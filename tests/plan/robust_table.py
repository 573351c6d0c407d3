"""How near plans come to the bound, for three models on 30 links: `python tests/plan/robust_table.py [RANKS]`.

Prints the median and the worst ratio of the predicted end to the release-time bound: of the earliest, of the robust
choice, of 25 MiB buckets, and of the first two if the network is 0.5 to 2 times as slow as believed. Nothing is
measured: a gradient is ready when the backward, by roofline, has passed its weight; attention's products are left out.
"""

import itertools
import statistics
import sys
from typing import NamedTuple

from dp_compile.plan.buckets import partition_by_size
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import ReadyGradient
from dp_compile.plan.planner import certify, earliest_partition, robust_partition
from dp_compile.plan.words import BYTES_PER_MB

FLOPS_PER_S = 400e12  # about 40 % of an H100's dense bf16 peak (vendor: 989e12)
MEMORY_BYTES_PER_S = 3.35e12  # an H100 SXM's HBM3, vendor's figure
ACTIVATION_BYTES = 2
BUSBW_GB_S = (10, 25, 50, 100, 200, 400)
ALPHA_US = (5, 20, 50, 100, 200)


class Weight(NamedTuple):
    """`positions`: how often it is applied. `width`: activations read and written each time. Tied: no gradient."""

    numel: int
    positions: float
    width: int
    is_lookup: bool = False
    has_gradient: bool = True


def linears(positions, *shapes, bias=True):
    for inputs, outputs in shapes:
        yield Weight(inputs * outputs, positions, inputs + outputs)
        yield from [Weight(outputs, positions, outputs)] * bias


def norm(positions, size, *, bias=True):
    yield from (Weight(size, positions, 2 * size), *[Weight(size, positions, size)] * bias)


def blocks(tokens, size, layers):
    for _ in range(layers):
        yield from (*norm(tokens, size), *linears(tokens, (size, 3 * size), (size, size)))
        yield from (*norm(tokens, size), *linears(tokens, (size, 4 * size), (4 * size, size)))
    yield from norm(tokens, size)


def gpt2(size, layers, tokens):
    """Tied head: the largest gradient is ready last, with the embedding's lookup."""
    yield from (Weight(rows * size, tokens, size, is_lookup=True) for rows in (50257, 1024))
    yield from (*blocks(tokens, size, layers), Weight(50257 * size, tokens, 50257 + size, has_gradient=False))


def llama3_8b(tokens):
    yield Weight(128256 * 4096, tokens, 4096, is_lookup=True)
    for _ in range(32):
        attention = (4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)
        yield from linears(tokens, *attention, (4096, 14336), (4096, 14336), (14336, 4096), bias=False)
        yield from (*norm(tokens, 4096, bias=False), *norm(tokens, 4096, bias=False))
    yield from (*norm(tokens, 4096, bias=False), *linears(tokens, (4096, 128256), bias=False))


def resnet50(images):
    def convolution(inputs, outputs, kernel, positions):
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


MODELS = {
    "GPT-2 124M": (tuple(gpt2(768, 12, 16 * 1024)), 4),
    "Llama-3-8B": (tuple(llama3_8b(8192)), 2),
    "ResNet-50": (tuple(resnet50(128)), 4),
}
"""Weights in the order of the forward, and bytes of an element of a gradient."""


def backward_of(weights, itemsize):
    """Gradients in launch order, the flags last, and how long the backward takes."""
    now, gradients = 0.0, []
    for weight in reversed(weights):
        moved = 2.0 * ACTIVATION_BYTES * weight.width * weight.positions + float(itemsize) * weight.numel
        flops = 0.0 if weight.is_lookup else 4.0 * weight.numel * weight.positions
        now += max(flops / FLOPS_PER_S, moved / MEMORY_BYTES_PER_S)
        if weight.has_gradient:
            gradients.append(ReadyGradient(weight.numel * itemsize, now))
    return (*gradients, ReadyGradient(len(gradients) * itemsize, now)), now


def ratios(gradients, seconds, cost):
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


def table(ranks=64, busbw_gb_s=BUSBW_GB_S, alpha_us=ALPHA_US):
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
