"""A process group with its properties, and the way in which gradients are averaged over the group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import distributed
from dp_compile.errors import ConfigError, require
from dp_compile.plan.backends import Backend
from dp_compile.plan.cost import AllReduceCost, nominal_cost
from dp_compile.plan.reduction import Averaging, Levels, Reduction


@dataclass(frozen=True, slots=True)
class Group:
    """A process group with those of its properties that every backward needs."""

    process_group: dist.ProcessGroup
    name: str
    backend: Backend  # for the device type of the gradients
    world_size: int
    averaging: Averaging
    levels: Levels | None = None  # of the network, with a `device_mesh` of two dimensions
    scattered: frozenset[str] = frozenset()  # names of parameters with reduce-scattered gradients
    measured: AllReduceCost | None = None  # cost of a collective, if measured (`replication/calibration.py`)

    def reduction(self, dtype: torch.dtype, parameter: str = "") -> Reduction:
        """Return the reduction for gradients of this dtype. Complex ones, as real views, have no wire dtype or hook."""
        averaging = replace(self.averaging, scattered=parameter in self.scattered)
        if dtype.is_complex:
            averaging = replace(averaging, wire=None, hook=None)
        name = str(dtype.to_real()).removeprefix("torch.")
        return averaging.reduction(self.name, self.backend, self.world_size, name, self.levels)

    @property
    def cost(self) -> AllReduceCost:
        """The cost of a collective: the measured one, otherwise that of the backend's nominal links."""
        ranks_inside = None if self.levels is None else self.levels.ranks_inside
        return self.measured or nominal_cost(self.backend, self.world_size, ranks_inside)

    @property
    def has_others(self) -> bool:
        """Whether the group has other ranks, not counting simulated ones."""
        return self.world_size > 1 and not self.backend.simulated


def group_of_mesh(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, Levels | None]:
    """Return the group of all ranks of a mesh, and the levels of a mesh with two dimensions of several ranks each."""
    require(isinstance(mesh, DeviceMesh), "device_mesh", "a DeviceMesh", type(mesh))
    if mesh.ndim > 2:
        names = "" if mesh.mesh_dim_names is None else f" ({', '.join(mesh.mesh_dim_names)})"
        raise ConfigError(
            f"device_mesh must have one dimension, or two (between nodes, inside a node), got {mesh.ndim}{names}. "
            "Take a slice: mesh['name'], or mesh['between', 'inside']."
        )
    if mesh.get_coordinate() is None:
        raise ConfigError("this rank is not in the given device_mesh. Only its members may pass it.")
    wide = [dimension for dimension in range(mesh.ndim) if mesh.size(dimension) > 1]
    if len(wide) < 2:
        return mesh.get_group(wide[0] if wide else 0), None
    between, inside = (distributed.group_name(mesh.get_group(dimension)) for dimension in wide)
    ranks = tuple(tuple(map(int, row)) for row in mesh.mesh.tolist())
    return distributed.group_of_mesh(mesh), Levels(inside, between, ranks)


def resolve_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> Group:
    """Return the group that the arguments select. Raises `ConfigError` if there is none or this rank is not in it."""
    levels = None
    if process_group is not None and device_mesh is not None:
        raise ConfigError("give process_group or device_mesh, not both.")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("no process group is initialised. Call torch.distributed.init_process_group() first.")
    if device_mesh is not None:
        process_group, levels = group_of_mesh(device_mesh)
    kinds = dist.ProcessGroup, type(None), type(dist.GroupMember.NON_GROUP_MEMBER)
    require(isinstance(process_group, kinds), "process_group", "a ProcessGroup", type(process_group))
    process_group = dist.group.WORLD if process_group is None else process_group
    if process_group is None or dist.get_rank(process_group) < 0:
        raise ConfigError("this rank is not in the given process group. Only its members may pass it.")
    return replace(group_on(process_group, distributed.working_device(process_group)), levels=levels)


def group_on(process_group: dist.ProcessGroup, device_type: str) -> Group:
    """Return the group with its properties for one device type: each type can have its own backend."""
    backend = distributed.backend_of(process_group, device_type)
    world_size = dist.get_world_size(process_group)
    return Group(process_group, distributed.group_name(process_group), backend, world_size, Averaging())
