"""Meshes of two and three dimensions for the tests with tensor parallel, over the ranks of `meshed`."""

import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dp_compile._torch import distributed
from dp_compile.fx.collectives import is_collective
from dp_compile.passes.result import PassResult

NAMES = ("dp", "tp")
LEVELS = ("between", "inside", "tp")


@functools.cache
def mesh_of(shape, names=None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names or (NAMES if len(shape) == 2 else LEVELS))


def dp_of(mesh):
    """What to replicate over, how many ranks that are, and the place of this one among them."""
    dp = mesh["dp"] if mesh.ndim == 2 else mesh["between", "inside"]
    places = list(itertools.product(*map(range, dp.shape)))
    coordinate = dp.get_coordinate()
    return dp, dp.size(), places.index(tuple(coordinate))


def keep_groups():
    """torch keeps what it learns of DTensors by mesh, with groups that a rank of the tests would end (torch 2.13)."""
    distributed.end_other_groups = lambda: None


def full(tensor):
    """All of a tensor on this rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


Orders = dict[tuple[int, ...], list[str]]
"""What is launched, by the ranks of a group."""


@dataclass(frozen=True)
class Reads:
    """A pass that changes nothing and reads the order of collectives, by the ranks of their group."""

    last: bool = False
    name: ClassVar[str] = "reads"
    found: ClassVar[list[Orders]] = []

    def __call__(self, graph, plans):
        orders = {}
        for node in filter(is_collective, graph.nodes):
            group = tuple(dist.get_process_group_ranks(distributed.group_of_name(str(node.args[-1]))))
            text = f"{node.target} of {list(node.args[0].meta['val'].shape)}"
            orders.setdefault(group, []).append(text)
        if self.last:
            before = self.found.pop()
            for group, order in before.items():  # no bucket is there yet: all of tensor parallel
                assert orders[group] == order
        self.found.append(orders)
        return PassResult()


def unordered(orders):
    """Of one backward, by rank: the groups of which not all ranks have the collectives in the same order."""
    return [
        group
        for order in orders
        for group, own in order.items()
        if any(orders[other].get(group) != own for other in group)
    ]
