"""What travels beside the gradients: a few elements by which the ranks tell each other what each of them did.

| elements                | a one says                                                                        |
|-------------------------|-----------------------------------------------------------------------------------|
| one for each parameter  | unused here; with `find_unused_parameters`: used here                             |
| `2 * NUMBER_BITS`       | each bit of a number for the module, and each bit of its complement               |
| one                     | parameters were changed here that had gradients which were not reduced            |
| two                     | they were changed behind a local backward whose gradients were dropped; were not  |

Only zero and not zero are told apart, so the elements survive averaging over any number of ranks in float64, float32
and bfloat16, in float16 as far as `Averaging.reduction` allows it (`MOST_IN_FLOAT16`). No lossy codec carries them.
A bit that is not zero together with its complement means that two ranks sent different numbers: they reduced different
modules, and what they got is no gradient of anything. So for the last two: sharpness-aware
minimisation moves parameters so on every rank, and what only some ranks do takes them apart. A rank that left out a
step, as it raised after the other ranks had the gradients, says the same.

A rank whose backward failed sends ones for all bits and their complements. Two modules give that only if their numbers
are complements of each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

NUMBER_BITS: Final = 24
MORE: Final = 2 * NUMBER_BITS + 3
"""The elements behind those of the parameters."""


def more_elements(module: str, *, stepped: bool, moved: bool) -> list[float]:
    """The elements behind those of the parameters.

    Args:
        module: a name of the module that is the same on every rank, and that no other module of the group has.
        stepped: whether this rank changed parameters that had gradients which were not reduced.
        moved: whether it changed parameters behind a local backward whose gradients were dropped.
    """
    number = zlib.crc32(module.encode())
    bits = [number >> place & 1 for place in range(NUMBER_BITS)]
    return [*map(float, bits), *(1.0 - bit for bit in bits), float(stepped), float(moved), 1.0 - moved]


def ranks_disagree(more: Sequence[float]) -> bool:
    """Whether some ranks reduced another module than others, from the reduced elements."""
    return any(more[place] and more[NUMBER_BITS + place] for place in range(NUMBER_BITS))


FAILED: Final = (*[1.0] * (2 * NUMBER_BITS), 0.0, 0.0, 0.0)
"""The elements behind those of the parameters from a rank whose backward failed."""


def is_failed(more: Sequence[float]) -> bool:
    """Whether the backward of some rank failed, from the reduced elements."""
    return all(more[: 2 * NUMBER_BITS])


def is_stepped(more: Sequence[float]) -> bool:
    """Whether some rank changed parameters that had gradients which were not reduced, from the reduced elements."""
    return bool(more[2 * NUMBER_BITS])


def is_moved_by_some(more: Sequence[float]) -> bool:
    """Whether some ranks moved parameters behind a local backward and others did not, from the reduced elements."""
    return bool(more[-2] and more[-1])
