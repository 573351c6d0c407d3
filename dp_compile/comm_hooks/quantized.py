"""Gradients sent in eight bits: int8 or float8 with one scale per block, and error feedback.

Gradients of one-dimensional parameters are few elements, of another magnitude than the rest (norm layers). The same
collectives send them in float32, and each rank averages a part of them.

    x = gradient + error           each rank; each gradient begins a block, because magnitudes differ
    q, s = quantised x             s = max |x| / Q of a block, at least 2^-126; q = x / s, rounded to the nearest (even)
    all-to-all                     part r of q and s to rank r
    mean = sum of q s / ranks      in float32, of this rank's part
    q', s' = quantised mean        all-gather; the gradient becomes q' s', from the same bytes on every rank
    error = x - q s                plus ranks (mean - q' s') in this rank's part

Q is the largest number of the dtype: 127, 448, 57344. The rank that averages a part adds the error of the mean to its
own error. Thus some rank keeps each error for an element of a parameter, wherever blocks and parts begin in the next
plan. Summed over all ranks, gradients and old errors equal returned gradients and new errors. A block with a
non-finite element has a non-finite scale, and is non-finite on every rank.

Sources: Dettmers, 8-bit approximations (arXiv 1511.04561); error feedback: Karimireddy et al. (arXiv 1901.09847), of
both quantisations: Tang et al., DoubleSqueeze (arXiv 1905.05957); all-to-all and all-gather of blocks: ZeRO++'s qgZ
(arXiv 2306.10209).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from dp_compile.comm_hooks.functional import FunctionalHook, HookBucket, Reduced, State
from dp_compile.errors import require, require_integer

_LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALLEST_SCALE: Final = 2.0**-126  # its reciprocal is finite in float32


@dataclass(frozen=True)
class QuantizedHook(FunctionalHook):
    """A comm hook that sends gradients in eight bits: `register_comm_hook(HookState(), QuantizedHook())`.

    A rank sends two bytes per element and eight per block; an all-reduce of float32 sends eight per element. All sums
    are in float32, for gradients of any dtype.

    Args:
        dtype: `torch.int8`, `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        block: elements that share a scale. Rows of a matrix differ in magnitude, so small blocks are more exact.
        error_feedback: add the quantisation error to the next gradient; takes four bytes of memory per element.
        min_ndim: gradients with fewer dimensions are sent in float32, not quantised; 0 quantises all.

    Raises:
        ConfigError: another dtype, `block` below 1, or `min_ndim` below 0.
    """

    dtype: torch.dtype = torch.int8
    block: int = 64
    error_feedback: bool = True
    min_ndim: int = 2
    rounds: ClassVar[tuple[str, ...]] = ("all_to_all", "all_gather")

    def __post_init__(self) -> None:
        dtypes = ", ".join(map(str, _LARGEST))
        require(self.dtype in _LARGEST, "QuantizedHook.dtype", f"one of {dtypes}", self.dtype)
        require_integer("QuantizedHook.block", self.block, 1)
        require_integer("QuantizedHook.min_ndim", self.min_ndim, 0)

    def initial_state(self, gradient: torch.Tensor) -> State:
        if not self.error_feedback or gradient.dim() < self.min_ndim:
            return {}
        return {"error": gradient.new_zeros(gradient.shape, dtype=torch.float32)}

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Reduced]:
        ranks = bucket.ranks
        blocks = sum(self._numel(each) for each in bucket.gradients if not self._is_exact(each)) // self.block
        numel = self.block * max(1, -(-blocks // ranks))  # per part
        exact_numel = -(-sum(each.numel() for each in bucket.gradients if self._is_exact(each)) // ranks)
        # Work in two buffers of one size: new memory costs more than the arithmetic.
        whole = bucket.gradients[0].new_zeros(ranks * numel, dtype=torch.float32)
        scratch, exact = torch.empty_like(whole), whole.new_zeros(ranks, exact_numel)
        errors = self._views(whole, exact, bucket)
        for error, gradient, state in zip(errors, bucket.gradients, bucket.state, strict=True):
            if state:
                torch.add(gradient, state["error"], out=error)
            else:
                error.copy_(gradient)
        received = yield self._quantised(whole, exact, scratch)
        mean = self._values(received, exact, scratch).view(ranks, numel).sum(0).div_(ranks)
        received = yield self._quantised(mean, exact.sum(0, keepdim=True).div_(ranks), scratch[:numel])
        whole[bucket.rank * numel : (bucket.rank + 1) * numel].add_(mean, alpha=ranks)
        reduced = self._views(self._values(received, exact, scratch), exact, bucket)
        states = [{"error": error} if state else {} for error, state in zip(errors, bucket.state, strict=True)]
        return [each.to(like.dtype) for each, like in zip(reduced, bucket.gradients, strict=True)], states

    def _is_exact(self, gradient: torch.Tensor) -> bool:
        return gradient.dim() < self.min_ndim

    def _numel(self, gradient: torch.Tensor) -> int:
        """Return the number of elements that a gradient occupies: whole blocks if it is quantised."""
        block = 1 if self._is_exact(gradient) else self.block
        return -(-gradient.numel() // block) * block

    def _views(self, flat: torch.Tensor, exact: torch.Tensor, bucket: HookBucket) -> list[torch.Tensor]:
        """Return a view for each gradient: in `exact` if it is sent in float32, else in the blocks of `flat`."""
        left = {False: flat, True: exact.flatten()}
        found = []
        for gradient in bucket.gradients:
            rest = left[self._is_exact(gradient)]
            found.append(rest[: gradient.numel()].view(gradient.shape))
            left[self._is_exact(gradient)] = rest[self._numel(gradient) :]
        return found

    def _quantised(self, x: torch.Tensor, exact: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Return a row of bytes per part: quantised values, scales, a row of `exact`. Leaves the error in `x`."""
        blocks, rounded, parts = x.view(-1, self.block), scratch.view(-1, self.block), len(exact)
        torch.abs(blocks, out=rounded)
        scales = rounded.amax(1, keepdim=True).div_(_LARGEST[self.dtype]).clamp_(min=_SMALLEST_SCALE)
        torch.mul(blocks, scales.reciprocal(), out=rounded)
        numel = x.numel() // parts
        floats = numel + 4 * numel // self.block
        sent = x.new_empty(parts, floats + 4 * exact.shape[1], dtype=torch.int8)
        if not self.dtype.is_floating_point:
            rounded.round_()
        values = sent[:, :numel].view(self.dtype).copy_(scratch.view(parts, numel))
        if self.dtype.is_floating_point:
            scratch.view(parts, numel).copy_(values)
        sent[:, numel:floats].copy_(scales.view(torch.int8).view(parts, -1))
        sent[:, floats:].copy_(exact.view(torch.int8))
        blocks.addcmul_(rounded, scales, value=-1)
        return sent

    def _values(self, received: torch.Tensor, exact: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Undo `_quantised`: dequantise into `scratch`, copy float32 gradients into `exact`, return `scratch`."""
        parts, numel = len(exact), scratch.numel() // len(exact)
        rows = received.view(parts, -1)
        scratch.view(parts, numel).copy_(rows[:, :numel].view(self.dtype))
        floats = rows[:, numel:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        exact.copy_(floats[:, numel // self.block :])
        scratch.view(-1, self.block).mul_(floats[:, : numel // self.block].reshape(-1, 1))
        return scratch
