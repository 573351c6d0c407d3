"""Which optimizers are called around a backward, and which parameters a captured one updates.

Each rank decides alone which parameters a captured backward updates: an update is a function of reduced gradients,
which are the same on every rank. What is left is updated when the backward has ended, with the same kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from dp_compile.engine.replica import Replica
from dp_compile.engine.sinks import UpdateRequest


@dataclass(frozen=True, slots=True)
class InBackward:
    """Parameters that one op of a captured backward updates.

    `replica`, `optimizer`, `bucket`: by position; `bucket` is the last one that holds a gradient of `indices`.
    `hands_over`: it only hands gradients over, and writes to no parameter: this rank's backward does not have them all.
    """

    replica: int
    optimizer: int
    bucket: int
    indices: tuple[int, ...]
    hands_over: bool = False


class OneBackward:
    """Around a backward of these modules: their optimizers are called at its start and at its end. Gives what they
    update."""

    __slots__ = ("_keep_graph", "_replicas", "_wanted")

    def __init__(self, replicas: Sequence[Replica], *, keep_graph: bool) -> None:
        self._replicas, self._keep_graph = replicas, keep_graph

    def __enter__(self) -> dict[Replica, tuple[UpdateRequest, ...]]:
        for replica in self._replicas:
            updates = replica.after.updates
            updates[:] = [each for each in updates if each.is_alive]
            for each in () if replica.state.is_dry_run else updates:
                each.begin()
        self._wanted = {
            replica: tuple(each.update_request(keep_graph=self._keep_graph) for each in replica.after.updates)
            for replica in self._replicas
            if replica.after.updates and replica.state.sync
        }
        return self._wanted

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for replica in self._replicas:
            after = replica.after
            if error is not None:
                for each in after.updates:
                    each.interrupted(error)
            else:
                for each in after.updates if replica in self._wanted and not replica.state.is_dry_run else ():
                    each.ended()


def updates_of(
    replicas: Sequence[Replica],
    requests_of: Sequence[Sequence[UpdateRequest]],
    got: Collection[tuple[int, int] | None],
) -> tuple[InBackward, ...]:
    """What a captured backward updates.

    Args:
        replicas: the modules in it.
        requests_of: what optimizers of each of them update.
        got: by module and index the parameters that get a gradient in it.
    """
    found: list[InBackward] = []
    for ordinal, replica in enumerate(replicas):
        buckets = enumerate(replica.plan.buckets)
        bucket_of = {member.gradient.index: number for number, bucket in buckets for member in bucket.members}
        for number, wanted in enumerate(requests_of[ordinal]):
            of_bucket: dict[int, list[int]] = {}
            for index in sorted(wanted.indices, key=bucket_of.__getitem__):
                if wanted.parts or (ordinal, index) in got:
                    of_bucket.setdefault(bucket_of[index], []).append(index)
            for bucket, indices in of_bucket.items():
                hands_over = any((ordinal, index) not in got for index in indices)
                found.append(InBackward(ordinal, number, bucket, tuple(indices), hands_over))
    return tuple(found)


def memory_of(tensors: Sequence[object], written: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the first of these parameters in whose memory it lies; else -1."""
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(written):
        numbers.setdefault(_key(parameter), number)
    return tuple(numbers.get(_key(each), -1) if isinstance(each, torch.Tensor) else -1 for each in tensors)


def _key(tensor: torch.Tensor) -> int:
    """The same for tensors in one memory; what has no memory has a number for itself."""
    return (tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0) or -id(tensor)
