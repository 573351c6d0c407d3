"""The GPT of `dp_compile.train.gpt` with its layers spread over ranks by torch's tensor parallel."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dp_compile.train.gpt import GPT


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Spread over a mesh of one dimension; between layers each rank has a part of the sequence.

    Queries, keys and values come from one matrix, of which a rank's rows are no whole heads: its product is gathered.
    """
    time = Shard(1)
    whole: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=time),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=time, output_layouts=Replicate()),
    }
    block: dict[str, ParallelStyle] = {
        "norm_1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=time, desired_input_layouts=Replicate()),
        "attention.qkv": ColwiseParallel(output_layouts=Replicate()),
        "attention.project": RowwiseParallel(input_layouts=Replicate(), output_layouts=time),
        "norm_2": SequenceParallel(),
        "expand": ColwiseParallel(input_layouts=time),
        "project": RowwiseParallel(output_layouts=time),
    }
    parallelize_module(model, mesh, whole)
    for each in model.blocks:
        parallelize_module(each, mesh, block)
    model.head.weight = model.token.weight
