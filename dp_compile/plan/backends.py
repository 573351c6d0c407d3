"""What the backend of a process group can do: one value, made once for each group. Nothing decides by a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Backend:
    """What a backend can do with tensors on one type of device. The defaults are what any backend of torch can do.

    A backend written in Python states it by an attribute `dp_compile_backend` of its process group; those of torch are
    known by their class (`_torch.distributed.backend_of`).
    """

    name: str  # for messages and records
    device: str = "cpu"  # the type of device on which it reduces
    averages: bool = False  # reduces with `ReduceOp.AVG`
    scatters: bool = False  # its reduce-scatter sends half of what its all-reduce sends
    lanes: int = 1  # how many collectives of a group it carries at a time, which share the network
    equal_bits: bool = False  # every rank gets the same bits of a sum
    on_stream: bool = False  # on a stream of the device: the host does not wait, and events time collectives
    bf16_compress: bool = False  # torch's DDP takes its `bf16_compress_hook` on it
    simulated: bool = False  # one process stands for one rank of many; no other rank exists
    inside: str = "loopback"  # preset of `plan.cost.LINKS` for ranks of a node, before anything is measured
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

FABRIC: Final = replace(NCCL, name="fabric", simulated=True)
"""`dp_compile.bench.simulated_group`: GPUs joined by NCCL, with times from a formula."""

COLLECTIVE_KERNELS: Final = ("nccl", "spin_kernel")
"""Parts of lower-case names of kernels in a trace that communicate: NCCL's, and those of `FABRIC` on a GPU."""

CLASSES: Final[Mapping[str, Backend]] = {
    "ProcessGroupGloo": GLOO,
    "ProcessGroupNCCL": NCCL,  # torch 2.14 and later call it `nccl-legacy`
    "ProcessGroupNCCL2": replace(NCCL, name="nccl2"),  # `nccl2` in torch 2.14, `nccl` in 2.15
    "ProcessGroupNCCLLazy": replace(NCCL, name="nccl-lazy"),
    "FakeProcessGroup": Backend("fake", simulated=True),  # reduces nothing
    "ProcessGroupXCCL": Backend("xccl", "xpu", on_stream=True, bf16_compress=True),  # not tested: no more is assumed
}
"""torch's backends, by the names of their classes."""
