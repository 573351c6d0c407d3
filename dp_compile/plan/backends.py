"""What follows from the name of a process group's backend."""

from __future__ import annotations

from typing import Final

FABRIC: Final = "fabric"
"""A network that is played for one process, by `dp_compile.bench.fabric`. It stands for GPUs joined by NCCL."""
LIKE_NCCL: Final = ("nccl", FABRIC)
"""They average inside a collective, and reduce several tensors in one without copying them."""
PLAYED: Final = ("fake", FABRIC)
"""One process plays one rank of many: no other rank exists. `fake` is torch's, which reduces nothing."""
GROUPED: Final = ("nccl", "gloo", *PLAYED)
"""Backends that reduce several tensors in one collective."""
LANES: Final = {"gloo": 2}
"""How many collectives a backend carries at a time, which share the network; others carry one.

gloo: the threads of a group (`ProcessGroupGloo::Options::threads`, torch 2.13).
"""
