"""A Triton kernel that only copies, in a given number of blocks, as a collective's kernel occupies them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096


@triton.jit
def _copy(source, target, elements, turns, CHUNK: tl.constexpr):
    """Block b copies chunks b, b + blocks, ...; `turns` times."""
    blocks = tl.num_programs(0)
    for _ in range(turns):
        for chunk in range(tl.program_id(0), tl.cdiv(elements, CHUNK), blocks):
            offsets = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = offsets < elements
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def copy(source: torch.Tensor, target: torch.Tensor, blocks: int, turns: int) -> None:
    """Copy `source` to `target`, contiguous and of one size, on the current stream; `turns` times over."""
    _copy[(blocks,)](source, target, source.numel(), turns, CHUNK=CHUNK, num_warps=16)
