"""Status bits of each rank, reduced as one more gradient: in the last bucket, or the first for deferred updates.

| elements                | a one means                                                                       |
|-------------------------|-----------------------------------------------------------------------------------|
| one for each parameter  | unused on this rank; with `find_unused_parameters`: used                          |
| `2 * NUMBER_BITS`       | each bit of a number for the module, and each bit of its complement               |
| one                     | this rank changed parameters whose gradients were not reduced                     |
| two                     | it changed them after a local backward with dropped gradients; the opposite bit   |

Readers only distinguish zero from nonzero. So the elements survive averaging over any number of ranks in float64,
float32 and bfloat16, and in float16 within the limit of `Averaging.reduction` (`MOST_IN_FLOAT16`). Lossy codecs never
carry them. If a bit and its complement are both nonzero, ranks sent different numbers: they reduced different modules.
If the last two are both nonzero, only some ranks changed parameters, so ranks differ; sharpness-aware minimisation
changes them on all. A rank that skipped a step, because it raised after the others had the gradients, reports a change.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

NUMBER_BITS: Final = 24
MORE: Final = 2 * NUMBER_BITS + 3  # number of elements after those of the parameters

FAILED: Final = (*[1.0] * (2 * NUMBER_BITS), 0.0, 0.0, 0.0)
"""Elements of a rank whose backward failed. Two modules reduce to such bits only if their numbers are complements."""


def more_elements(module: str, *, stepped: bool, moved: bool) -> list[float]:
    """Return this rank's elements that follow those of the parameters.

    `module`: a name equal on all ranks and unique in the group. `stepped`, `moved`: the last two rows of the table.
    """
    number = zlib.crc32(module.encode())
    bits = [number >> place & 1 for place in range(NUMBER_BITS)]
    return [*map(float, bits), *(1.0 - bit for bit in bits), float(stepped), float(moved), 1.0 - moved]


def ranks_disagree(more: Sequence[float]) -> bool:
    """Return whether ranks reduced different modules, as the reduced elements show."""
    return any(more[place] and more[NUMBER_BITS + place] for place in range(NUMBER_BITS))


def is_failed(more: Sequence[float]) -> bool:
    """Return whether the backward failed on any rank, as the reduced elements show."""
    return all(more[: 2 * NUMBER_BITS])
