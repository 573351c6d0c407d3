"""The replicated modules of this process, found by their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn

from dp_compile.engine.replica import Replica
from dp_compile.errors import UnsupportedModuleError


class Owners:
    """Which replica a parameter belongs to. Holds no module alive, and a replica as long as one of its modules."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Replica], int]] = {}
        self._forget: weakref.WeakKeyDictionary[Replica, weakref.finalize[..., Replica]] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
        """By each module that owns a parameter: a part of what was replicated may train on when the whole is gone."""
        self._in_order: tuple[weakref.ref[Replica], ...] = ()
        """Sorted once: every backward of the process goes through them."""

    def add(self, replica: Replica) -> None:
        """Register a replica.

        Raises:
            UnsupportedModuleError: one of its parameters is replicated already.
        """
        for name, parameter in zip(replica.names, replica.parameters, strict=True):
            if self.find(parameter) is not None:
                raise UnsupportedModuleError(
                    f"parameter {name} is replicated already. Call replicate() once, on the outermost module."
                )
        for index, parameter in enumerate(replica.parameters):
            self._of[id(parameter)] = (weakref.ref(replica), index)
        for owner in replica.owning_modules():
            self._kept[owner] = replica
        # Entries go with their replica, so that a later tensor at the same address is not taken for a parameter.
        self._forget[replica] = weakref.finalize(replica, self._drop, [id(p) for p in replica.parameters])
        self._sort()

    def remove(self, replica: Replica) -> None:
        self._forget.pop(replica)()
        for owner in replica.owning_modules():
            self._kept.pop(owner, None)

    def _drop(self, identities: Sequence[int]) -> None:
        for identity in identities:
            self._of.pop(identity, None)
        self._sort()

    def _sort(self) -> None:
        self._in_order = tuple(map(weakref.ref, sorted(self._forget, key=lambda replica: replica.module.number)))

    def find(self, parameter: torch.Tensor) -> tuple[Replica, int] | None:
        """The replica of a parameter and its index there."""
        entry = self._of.get(id(parameter))
        replica = entry[0]() if entry else None
        return (replica, entry[1]) if entry and replica is not None else None

    def __iter__(self) -> Iterator[Replica]:
        return (replica for ref in self._in_order if (replica := ref()) is not None)

    def __len__(self) -> int:
        return len(self._in_order)


owners: Final = Owners()
"""Every replica in this process."""
