"""What a backend can do is read from the backend itself, not from its name; its link is measured once and remembered.

How could a link be wrong without a word? By ranks that take different figures, and so make different plans; by figures
of another link, or of a busy machine; by a new plan in each run.
"""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile._torch import distributed
from dp_compile.plan.backends import GLOO, NCCL, Backend
from dp_compile.plan.cost import AllReduceCost, CostFit
from dp_compile.replica.group import resolve_group
from dp_compile.replication import calibration


def of_class(kind, base=object):
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
        (SimpleNamespace(dp_compile_backend=NCCL), "nccl"),
    ],
)
def test_classes(found, expected):
    assert distributed.backend_of(found, "cuda").name == expected


@contextlib.contextmanager
def group(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", [None, "gloo", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_gloo_by_any_name(name, debug, monkeypatch):
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
def test_calibration_is_on_the_device_of_the_group(works_on, expected, monkeypatch):
    """`get_backend()` of a group made by `init_process_group()` is `undefined`, for which gloo was measured."""
    devices = []

    def fitted(sweep):
        devices.append(sweep.device.type)
        return CostFit(AllReduceCost(1e-4, 1e-9), 0.0)

    of = {"cpu": GLOO, "cuda": Backend("x", works_on)}
    with group(None):  # before there seems to be a GPU: since torch 2.14 it would be asked for
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
        monkeypatch.setattr(distributed, "backend_of", lambda _, kind: of[kind])
        monkeypatch.setattr(calibration._Sweep, "fit", fitted)
        monkeypatch.setattr(calibration.store_channel, "check_consistent_in_call", lambda *_, **__: None)
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        assert dist.get_backend() == "undefined"
        dp_compile.calibrate()
        monkeypatch.undo()
    assert devices == [expected]


def replicated():
    """The cost that a module's plan rests on, in a new group of all ranks, where it is from, and its buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = dp_compile.replicate(model, process_group=dist.new_group())
    model(torch.ones(2, 64)).sum().backward()
    step = dp_compile.step_of(model)
    return step.cost, step.cost_source, len(step.plan.buckets)


def train_on_links(directory):
    file, found = Path(directory, "dp_compile_links.json"), []
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": directory, "DP_COMPILE_LINK": "remembered"}):
        sizes = []
        with mock.patch.object(
            calibration._Sweep, "_times_s", lambda _, nbytes, stages: sizes.append(nbytes) or [0.05]
        ):
            found.append(replicated())  # each message takes as long: a busy machine, no network
        assert max(sizes) == 2**18
        noise = CostFit(AllReduceCost(1e-6, 1e-9), residual=0.1, spread=1.5)
        with mock.patch.object(calibration._Sweep, "fit", return_value=noise):
            found.append(replicated())
        assert not file.exists()
        dist.barrier()
        measured = CostFit(AllReduceCost(80e-6, 1.1e-9), residual=2.0)
        with mock.patch.object(calibration._Sweep, "fit", return_value=measured):
            if dist.get_rank() == 0:
                file.write_text("[not a file of ours")
            found.append(replicated())
        dist.barrier()
        if dist.get_rank() == 0:
            remembered = json.loads(file.read_text())
            (key,) = remembered
            assert "gloo" in key
            remembered[key] |= {"alpha_s": 2.0**-6, "beta_s_per_byte": 2.0**-30}
            file.write_text(json.dumps(remembered))
        found.append(replicated())
        with mock.patch.dict("os.environ", DP_COMPILE_LINK="nominal"):
            found.append(replicated())
    return found


def test_the_link_is_measured_once_and_remembered(ranks2, tmp_path):
    one, other = ranks2.run(train_on_links, str(tmp_path))
    assert one == other
    busy, noisy, binned, remembered, off = one
    assert busy == noisy == off
    assert "not measured" in off[1]
    assert binned[0] == AllReduceCost(64e-6, 1e-9)
    assert "rounded to powers of two" in binned[1]
    assert remembered[0] == AllReduceCost(2.0**-6, 2.0**-30)
    assert remembered[2] < binned[2]
