"""The guard against steps on gradients that are not reduced: what a rank knows of those, and of changed parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from dp_compile._torch import autograd
from dp_compile._torch.dtensors import local_tensor


@dataclass(eq=False, slots=True)
class StepGuard:
    """Of one module.

    Args:
        parameters: its parameters, in its order.
        exempt: those that a forward changes itself: weights of an embedding with `max_norm`.
        checks: whether anybody wants to know of changes.
    """

    parameters: Sequence[nn.Parameter]
    exempt: frozenset[int]
    checks: bool
    used: set[int] = field(default_factory=set)
    """Parameters that got a gradient in a backward without synchronisation since the last one with it."""
    versions: dict[int, int] = field(default_factory=dict)
    """Of the parameters with a gradient that is not reduced yet: how often each had been changed by then."""
    stepped: set[int] = field(default_factory=set)
    """Parameters that were changed although they had a gradient that was not reduced."""
    moved: bool = False
    """Parameters were changed after a backward without synchronisation, whose gradients were then dropped."""
    was_moved: bool = False
    """The same of the latest synchronised backward."""
    reduced: bool | None = None
    """Of the latest synchronised backward: whether every rank has its gradients; `False`: no rank uses them; `None`:
    this rank's part in its collectives is not over."""
    missed: str = ""
    """The error with which this rank raised after the other ranks had the gradients: it leaves out their step."""
    _at_start: tuple[int, ...] = ()
    """How often the parameters had been changed when the synchronised backward began; empty if that is not checked."""

    def backward_ended(self) -> None:
        """A backward without synchronisation has ended."""
        self._note_changes()
        if self.checks:
            self.versions = {
                index: autograd.version_of(parameter)
                for index, parameter in enumerate(self.parameters)
                if parameter.grad is not None and index not in self.exempt
            }

    def begin(self) -> None:
        """A synchronised backward begins."""
        self._note_changes()
        self.reduced = None
        self.versions.clear()
        self._at_start = self._versions_now() if self.checks else ()

    def start_again(self) -> None:
        """All gradients were dropped, and every rank has the same parameters."""
        self.used.clear()
        self.versions.clear()
        self.stepped.clear()
        self.moved = self.was_moved = False
        self.reduced, self.missed, self._at_start = None, "", ()

    def forget_start(self) -> None:
        """What changed before the backward and what changed in it look the same from now on."""
        self._at_start = ()

    def note_steps(self) -> None:
        """Parameters must not have changed since the backward began, as an optimizer in a hook changes them."""
        if self._at_start:
            now = self._versions_now()
            if now != self._at_start:  # seldom, and quick to see
                versions = zip(self._at_start, now, strict=True)
                self.stepped |= {index for index, (one, other) in enumerate(versions) if one != other} - self.exempt
            self._at_start = ()

    def made_equal(self, indices: Collection[int]) -> None:
        """These parameters were averaged over all ranks: they are equal again."""
        self.stepped.difference_update(indices)
        self.versions |= {
            index: autograd.version_of(self.parameters[index]) for index in indices if index in self.versions
        }
        if self.exempt.union(indices).issuperset(range(len(self.parameters))):
            self.moved = False

    @contextlib.contextmanager
    def updating(self, indices: Sequence[int]) -> Iterator[None]:
        """Inside, these parameters are changed with reduced gradients."""
        if self._at_start:
            self.stepped |= {
                index for index in indices if self._at_start[index] != autograd.version_of(self.parameters[index])
            } - self.exempt
        try:
            yield
        finally:
            if self._at_start:
                now = list(self._at_start)
                for index in indices:
                    now[index] = autograd.version_of(self.parameters[index])
                self._at_start = tuple(now)

    def _note_changes(self) -> None:
        """Which parameters changed since a local backward.

        It is an error if the local gradient is still there. If it was dropped or zeroed the local backward may only
        have been there to find a direction, as the first one of SAM is; then every rank has to have moved.
        """
        for index, version in self.versions.items():
            if version != autograd.version_of(self.parameters[index]):
                grad = self.parameters[index].grad
                if grad is not None and bool(local_tensor(grad).any()):
                    self.stepped.add(index)
                else:
                    self.moved = True

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(map(autograd.version_of, self.parameters))
