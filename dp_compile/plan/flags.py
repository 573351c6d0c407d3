"""Status bits of each rank, reduced with the last bucket.

| elements                | a one means                                                                       |
|-------------------------|-----------------------------------------------------------------------------------|
| one for each parameter  | unused on this rank; with `find_unused_parameters`: used                          |
| `2 * NUMBER_BITS`       | each bit of a number for the module, and each bit of its complement               |
| one                     | parameters were changed here that had gradients which were not reduced            |
| two                     | they were changed after a local backward whose gradients were dropped; were not   |

Only zero and not zero are distinguished, so the elements survive averaging over any number of ranks in float64,
float32 and bfloat16, in float16 as far as `Averaging.reduction` allows it (`MOST_IN_FLOAT16`). No lossy codec carries
them. A bit that is not zero together with its complement means that ranks sent different numbers: they reduced
different modules. So for the last two: sharpness-aware minimisation moves parameters on every rank; what only some do
makes them differ. A rank that left out a step, as it raised after the others had the gradients, sends the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

NUMBER_BITS: Final = 24
MORE: Final = 2 * NUMBER_BITS + 3
"""How many elements follow those of the parameters."""

FAILED: Final = (*[1.0] * (2 * NUMBER_BITS), 0.0, 0.0, 0.0)
"""These from a rank whose backward failed. Two modules give that only if their numbers are complements."""


def more_elements(module: str, *, stepped: bool, moved: bool) -> list[float]:
    """The elements that follow those of the parameters.

    `module`: its name on every rank, of no other module of the group. `stepped`, `moved`: whether this rank changed
    parameters, as the table says.
    """
    number = zlib.crc32(module.encode())
    bits = [number >> place & 1 for place in range(NUMBER_BITS)]
    return [*map(float, bits), *(1.0 - bit for bit in bits), float(stepped), float(moved), 1.0 - moved]


def ranks_disagree(more: Sequence[float]) -> bool:
    """Whether some ranks reduced another module than others, from the reduced elements."""
    return any(more[place] and more[NUMBER_BITS + place] for place in range(NUMBER_BITS))


def is_failed(more: Sequence[float]) -> bool:
    """Whether the backward of some rank failed."""
    return all(more[: 2 * NUMBER_BITS])
