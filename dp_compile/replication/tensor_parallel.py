"""Modules with DTensor parameters, as `parallelize_module` leaves them: what may be replicated.

A parameter stays the DTensor that it is. Each rank reduces the part of a gradient that it holds, with the ranks that
hold the same part: the group of `replicate` has to be the other dimension of the mesh.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from dp_compile._torch import dtensors
from dp_compile.engine.group import Group
from dp_compile.engine.module_names import fully_qualified
from dp_compile.errors import ConfigError, UnsupportedModuleError
from dp_compile.replication.selection import Selection


def check_dtensors(target: Selection, group: Group) -> None:
    """Refuse DTensors that lie on ranks the module is replicated over, or that are sums of their parts, or complex."""
    replicated = set(dist.get_process_group_ranks(group.process_group))
    for name, tensor in (target.parameters | target.buffers).items():
        if not dtensors.is_dtensor(tensor):
            continue
        shared = sorted(dtensors.ranks_of(tensor) & replicated)
        if len(shared) > 1:
            raise ConfigError(
                f"{name} is a DTensor sharded over ranks {shared}, but the module would be replicated over ranks "
                f"{sorted(replicated)}, which include them. Ranks with different shards cannot be averaged. Replicate "
                "over the mesh dimension that tensor parallel does not use: replicate(model, device_mesh=mesh['dp'])."
            )
        if name in target.trainable and dtensors.is_partial(tensor):
            raise UnsupportedModuleError(
                f"{name} is a DTensor with a Partial placement: no rank has its value. Call redistribute() on it with "
                "Replicate() or Shard(dim) before it becomes a parameter."
            )
        if name in target.trainable and tensor.is_complex():
            raise UnsupportedModuleError(f"{name} is a complex DTensor; real ones are supported.")


def refuse_dtensors(module: nn.Module, what: str) -> None:
    """Refuse a module with DTensor parameters, naming the first, with what does not support them."""
    for name, parameter in module.named_parameters():
        if dtensors.is_dtensor(parameter):
            raise ConfigError(
                f"{what} does not know DTensor parameters, and {fully_qualified(name)} is one. Use replicate() and a "
                "plain optimizer for a tensor-parallel module."
            )
