"""Gradients in eight bits on the wire: int8 or float8, a scale for each block, and what that loses sent later.

    x = gradient + error           each rank; each gradient begins a block, as they differ in size
    q, s = quantised x             s = max |x| / Q of a block, at least 2^-126; q = x / s, rounded to the nearest (even)
    all-to-all                     part r of q and s to rank r
    mean = sum of q s / ranks      in float32, of this rank's part
    q', s' = quantised mean        all-gather; the gradient becomes q' s', from the same bytes on every rank
    error = x - q s                and in this rank's part ranks (mean - q' s') more

Q is the largest number of the dtype: 127, 448, 57344. The second loss becomes part of the error of the rank that owns
the part, as if its own gradient had lost it: so all that was lost lies with a parameter's elements, on one rank or the
other, wherever blocks and parts begin in the next plan. Gradients and errors add up to what is handed out plus the
errors that remain. A block with something that is not finite has a scale that is not, and is not finite on any rank.

Sources: Dettmers, 8-bit approximations (arXiv 1511.04561); error feedback: Karimireddy et al. (arXiv 1901.09847), of
both steps: Tang et al., DoubleSqueeze (arXiv 1905.05957); all-to-all and all-gather of blocks: ZeRO++'s qgZ (arXiv
2306.10209).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from dp_compile.errors import ConfigError
from dp_compile.passes.functional_hook import FunctionalHook, HookBucket, Reduced, State

_LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST_SCALE: Final = 2.0**-126
"""One divided by it is finite in float32."""


@dataclass(frozen=True)
class QuantizedHook(FunctionalHook):
    """A comm hook that sends gradients in eight bits: `register_comm_hook(HookState(), QuantizedHook())`.

    A rank sends two bytes for each element, and eight for each block, where an all-reduce of float32 sends eight for
    each element. All sums are of float32, whatever the gradients' dtype.

    Args:
        dtype: `torch.int8`, `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        block: how many elements share a scale: few, as rows of one matrix differ in size, those of embeddings most.
        error_feedback: send later what quantising loses; takes four bytes of memory for each element.

    Raises:
        ConfigError: another dtype, or no block.
    """

    dtype: torch.dtype = torch.int8
    block: int = 64
    error_feedback: bool = True
    rounds: ClassVar[tuple[str, ...]] = ("all_to_all", "all_gather")

    def __post_init__(self) -> None:
        if self.dtype not in _LARGEST:
            raise ConfigError(f"QuantizedHook.dtype must be one of {', '.join(map(str, _LARGEST))}, got {self.dtype}.")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ConfigError(f"QuantizedHook.block must be a number of elements >= 1, got {self.block!r}.")

    def initial_state(self, gradient: torch.Tensor) -> State:
        return {"error": gradient.new_zeros(gradient.shape, dtype=torch.float32)} if self.error_feedback else {}

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Reduced]:
        blocks = sum(self._blocks(gradient) for gradient in bucket.gradients)
        numel = self.block * max(1, -(-blocks // bucket.ranks))  # of a part
        # In one place and its copy: memory that is new costs more than what is done to it.
        whole = bucket.gradients[0].new_zeros(bucket.ranks * numel, dtype=torch.float32)
        scratch = torch.empty_like(whole)
        errors = self._views(whole, bucket)
        for error, gradient, state in zip(errors, bucket.gradients, bucket.state, strict=True):
            if state:
                torch.add(gradient, state["error"], out=error)
            else:
                error.copy_(gradient)
        received = yield self._quantised(whole, bucket.ranks, scratch)
        mean = self._values(received, bucket.ranks, scratch).view(bucket.ranks, numel).sum(0).div_(bucket.ranks)
        received = yield self._quantised(mean, 1, scratch[:numel])
        whole[bucket.rank * numel : (bucket.rank + 1) * numel].add_(mean, alpha=bucket.ranks)
        reduced = self._views(self._values(received, bucket.ranks, scratch), bucket)
        states = [{"error": error} if state else {} for error, state in zip(errors, bucket.state, strict=True)]
        return [each.to(like.dtype) for each, like in zip(reduced, bucket.gradients, strict=True)], states

    def _views(self, flat: torch.Tensor, bucket: HookBucket) -> list[torch.Tensor]:
        """The gradients' places among the blocks."""
        sizes = [self.block * self._blocks(gradient) for gradient in bucket.gradients]
        parts = flat[: sum(sizes)].split(sizes)
        return [part[: each.numel()].view(each.shape) for part, each in zip(parts, bucket.gradients, strict=True)]

    def _blocks(self, gradient: torch.Tensor) -> int:
        return -(-gradient.numel() // self.block)

    def _quantised(self, x: torch.Tensor, parts: int, scratch: torch.Tensor) -> torch.Tensor:
        """Bytes of each part of `x`: its elements, then its scales. What they lose is left in `x`."""
        blocks, rounded = x.view(-1, self.block), scratch.view(-1, self.block)
        torch.abs(blocks, out=rounded)
        scales = rounded.amax(1, keepdim=True).div_(_LARGEST[self.dtype]).clamp_(min=_SMALLEST_SCALE)
        torch.mul(blocks, scales.reciprocal(), out=rounded)
        numel = x.numel() // parts
        sent = x.new_empty(parts, numel + 4 * numel // self.block, dtype=torch.int8)
        if not self.dtype.is_floating_point:
            rounded.round_()
        values = sent[:, :numel].view(self.dtype).copy_(scratch.view(parts, numel))
        if self.dtype.is_floating_point:
            scratch.view(parts, numel).copy_(values)
        sent[:, numel:].copy_(scales.view(torch.int8).view(parts, -1))
        blocks.addcmul_(rounded, scales, value=-1)
        return sent

    def _values(self, received: torch.Tensor, parts: int, scratch: torch.Tensor) -> torch.Tensor:
        """What bytes of `_quantised` stand for, put into `scratch`."""
        numel = scratch.numel() // parts
        rows = received.view(parts, -1)
        scratch.view(parts, numel).copy_(rows[:, :numel].view(self.dtype))
        scales = rows[:, numel:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        scratch.view(-1, self.block).mul_(scales.view(-1, 1))
        return scratch
