"""Capabilities of a process group's backend: one `Backend` per group. No code branches on a backend's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Backend:
    """Capabilities of a backend for tensors on one device type. All defaults but `device` hold for any torch backend.

    A backend written in Python declares capabilities by an attribute `dp_compile_backend` of its process group.
    Backends of torch are recognised by their class (`_torch.distributed.backend_of`).
    """

    name: str  # for messages and records
    device: str = "cpu"  # device type of the tensors that it reduces
    averages: bool = False  # supports `ReduceOp.AVG`
    scatters: bool = False  # its reduce-scatter sends half of what its all-reduce sends
    lanes: int = 1  # number of concurrent collectives of a group, which share the network
    equal_bits: bool = False  # a sum is bitwise equal on all ranks
    on_stream: bool = False  # runs on a device stream: the host does not wait, and events time collectives
    bf16_compress: bool = False  # torch's DDP supports its `bf16_compress_hook` on it
    simulated: bool = False  # one process simulates one rank of many; no other rank exists
    inside: str = "loopback"  # preset of `plan.cost.LINKS` for ranks of one node, before measurements
    between: str = "loopback"  # the same for a group of several nodes

    def __str__(self) -> str:
        return self.name


# Two lanes: the threads of a group (`ProcessGroupGloo::Options::threads`). Its reduce-scatter sends as much as an
# all-reduce (both with torch 2.13, the bytes measured).
GLOO: Final = Backend("gloo", lanes=2, equal_bits=True)

NCCL: Final = Backend(
    "nccl", "cuda", averages=True, scatters=True, equal_bits=True, on_stream=True, bf16_compress=True,
    inside="nvlink4", between="infiniband-ndr",
)  # fmt: skip

# `dp_compile.bench.simulated_group`: GPUs with NCCL, with times from a formula.
FABRIC: Final = replace(NCCL, name="fabric", simulated=True)

# Substrings of the lower-case names of communication kernels in a trace: NCCL's, and those of `FABRIC` on a GPU.
COLLECTIVE_KERNELS: Final = ("nccl", "spin_kernel")

CLASSES: Final[Mapping[str, Backend]] = {  # torch's backends, by class name
    "ProcessGroupGloo": GLOO,
    "ProcessGroupNCCL": NCCL,  # torch 2.14 and later call it `nccl-legacy`
    "ProcessGroupNCCL2": replace(NCCL, name="nccl2"),  # `nccl2` in torch 2.14, `nccl` in 2.15
    "ProcessGroupNCCLLazy": replace(NCCL, name="nccl-lazy"),
    "FakeProcessGroup": Backend("fake", simulated=True),  # reduces nothing
    "ProcessGroupXCCL": Backend("xccl", "xpu", on_stream=True, bf16_compress=True),  # not tested: no more is assumed
}
