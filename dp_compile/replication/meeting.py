"""Which ranks a module is replicated with, and where they compare what each of them was given."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import distributed
from dp_compile.engine.agreement import Statement, agree
from dp_compile.engine.group import Group, group_of_mesh
from dp_compile.engine.settling import table_of
from dp_compile.errors import ConfigError, DPCompileError
from dp_compile.plan.reduction import Averaging

_calls: Counter[str] = Counter()


@dataclass(eq=False, slots=True)
class Meeting:
    """Where the ranks of a group compare one call of `replicate`: a topic in the store that no other call has."""

    group: Group
    number: int = 0
    """Which call of `replicate` with this group it is; 0: not called yet."""
    held: int = 0

    @classmethod
    def of_this_call(cls, group: Group) -> Meeting:
        """Counted before anything can go wrong, so that a rank that raises stays in step with the others."""
        meeting = cls(group)
        meeting._count()
        return meeting

    def _count(self) -> None:
        _calls[self.group.name] += 1
        self.number = _calls[self.group.name]

    def compare(self, statement: Statement, *, own_error: Exception | None = None) -> str:
        """Compare with the other ranks; a rank with an error of its own only tells the others and raises nothing.

        Returns the topic.

        Raises:
            DesyncError: ranks differ, one reports an error or is missing.
        """
        if not self.number:
            self._count()
        self.held += 1
        topic = f"dp_compile.replicate/{self.group.name}/{self.number}" + (f"/{self.held}" if self.held > 1 else "")
        table = table_of(self.group)
        if table is None:
            return topic
        try:
            agree(table, topic, statement, call="replicate()")
        except Exception:
            if own_error is None:
                raise
        return topic

    @contextlib.contextmanager
    def telling_the_others(self) -> Iterator[None]:
        """An error inside, of whatever kind, reaches the other ranks too, which wait for this one."""
        try:
            yield
        except Exception as error:
            text = str(error) if isinstance(error, DPCompileError) else f"{type(error).__name__}: {error}"
            self.compare({"error": text}, own_error=error)
            raise


def resolve_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> Group:
    """The group that the user means.

    Raises:
        ConfigError: there is none, this rank is not in it, or what was given is not one.
    """
    levels = None
    if process_group is not None and device_mesh is not None:
        raise ConfigError("give process_group or device_mesh, not both.")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "no process group is initialised. Call torch.distributed.init_process_group() before replicate()."
        )
    if device_mesh is not None:
        process_group, levels = group_of_mesh(device_mesh)
    if not isinstance(process_group, (dist.ProcessGroup, type(None), type(dist.GroupMember.NON_GROUP_MEMBER))):
        raise ConfigError(f"process_group must be a ProcessGroup, got {type(process_group).__name__}.")
    process_group = process_group if process_group is not None else dist.group.WORLD
    if process_group is None or dist.get_rank(process_group) < 0:
        raise ConfigError("this rank is not in the given process group. Only its members call replicate() with it.")
    return replace(group_on(process_group, distributed.working_device(process_group)), levels=levels)


def group_on(process_group: dist.ProcessGroup, device_type: str) -> Group:
    """A group with the facts that hold for tensors on one type of device: each type can have a backend of its own."""
    backend = distributed.backend_of(process_group, device_type)
    world_size = dist.get_world_size(process_group)
    return Group(process_group, distributed.group_name(process_group), backend, world_size, Averaging())
