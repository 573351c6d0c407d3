"""The layers of the GPT spread over N ranks, of which each group trains on one batch."""

from __future__ import annotations

from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dp_compile.train.gpt import GPT

_TIME: Final = Shard(1)
"""Between the layers each rank has a part of the sequence."""


def mesh_of(ranks: int, tp: int, device: torch.device) -> DeviceMesh:
    """`tp` neighbours each hold one copy of the model. Every rank calls it."""
    return init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Spread a GPT over a mesh of one dimension; names, and the shared weight, stay.

    Queries, keys and values come from one matrix, of which a rank's rows are no whole heads: its product is gathered,
    and each rank mixes all heads. What is multiplied is spread everywhere.
    """
    parallelize_module(
        model,
        mesh,
        {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=_TIME),
            "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=_TIME, output_layouts=Replicate()),
        },
    )
    of_a_block: dict[str, ParallelStyle] = {
        "norm_1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=_TIME, desired_input_layouts=Replicate()),
        "attention.qkv": ColwiseParallel(output_layouts=Replicate()),
        "attention.project": RowwiseParallel(input_layouts=Replicate(), output_layouts=_TIME),
        "norm_2": SequenceParallel(),
        "expand": ColwiseParallel(input_layouts=_TIME),
        "project": RowwiseParallel(output_layouts=_TIME),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, of_a_block)
    model.head.weight = model.token.weight


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter that may lie on several ranks; they all have to call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
