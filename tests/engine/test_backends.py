"""What the backend of a group can do is read from the backend itself, not from the name the group was made with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dp_compile
from dp_compile._torch import distributed
from dp_compile.engine import calibration
from dp_compile.engine.group import resolve_group
from dp_compile.plan.backends import GLOO, NCCL, Backend
from dp_compile.plan.cost import AllReduceCost, CostFit


class Stated:
    dp_compile_backend = NCCL


def of_class(kind: str, base: type = object) -> Any:
    return type(kind, (base,), {"name": lambda self: "as it calls itself"})()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (of_class("ProcessGroupGloo"), "gloo"),
        (of_class("ProcessGroupNCCL"), "nccl"),
        (of_class("ProcessGroupNCCL2"), "nccl2"),
        (of_class("ProcessGroupNCCLLazy"), "nccl-lazy"),
        (of_class("FakeProcessGroup"), "fake"),
        (of_class("ProcessGroupXCCL"), "xccl"),
        (of_class("OfAUser", type(of_class("ProcessGroupNCCL"))), "nccl"),
        (of_class("ProcessGroupUCC"), "as it calls itself"),
        (Stated(), "nccl"),
    ],
)
def test_classes(found: Any, expected: str) -> None:
    assert distributed.backend_of(found, "cuda").name == expected


@contextlib.contextmanager
def group(backend: str | None) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", [None, "gloo", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_gloo_by_any_name(name: str | None, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dist.get_debug_level()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    dist.set_debug_level_from_env()
    try:
        with group(name) as default:
            assert resolve_group(None, None).backend == GLOO
            assert distributed.backend_of(default, "cuda") == GLOO  # the only backend, or one for GPUs
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize(("works_on", "expected"), [("cuda", "cuda"), ("cpu", "cpu")])
def test_calibration_is_on_the_device_of_the_group(
    works_on: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`get_backend()` of a group made by `init_process_group()` is `undefined`, for which gloo was measured."""
    devices = []

    def fitted(sweep: Any) -> CostFit:
        devices.append(sweep.device.type)
        return CostFit(AllReduceCost(1e-4, 1e-9), 0.0)

    of = {"cpu": GLOO, "cuda": Backend("x", works_on)}
    with group(None):  # before there seems to be a GPU: since torch 2.14 it would be asked for
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
        monkeypatch.setattr(distributed, "backend_of", lambda _, kind: of[kind])
        monkeypatch.setattr(calibration._Sweep, "fit", fitted)
        monkeypatch.setattr(calibration, "check_consistent_in_call", lambda *_, **__: None)
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        assert dist.get_backend() == "undefined"
        dp_compile.calibrate()
        monkeypatch.undo()
    assert devices == [expected]
