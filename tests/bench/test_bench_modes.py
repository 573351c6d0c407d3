"""The benchmark's modes on two gloo ranks: the gradients of torch's DDP, before and after some steps; the bounds run.

Every mode has processes of its own: Dynamo, Inductor and DDP keep too much state for two in one. Where the compiler
does not matter to what is tested, nothing generates code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import math
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import compare_gradients
from torch import nn
from torch._dynamo.utils import counters

from dp_compile._torch import inductor
from dp_compile.bench.contract import Explained, Facts
from dp_compile.bench.modes import MODES, mode, packages
from dp_compile.bench.modes.bounds import dummies
from dp_compile.bench.modes.unavailable import Unavailable
from dp_compile.bench.workloads import workload
from dp_compile.errors import ConfigError
from dp_compile.insight.observe import report
from dp_compile.plan.flags import MORE
from dp_compile.testing.ranks import Ranks

STEPS = 5
BOUNDS = ("compute", "comm", "oracle")
# Which all of them run, with caps that make several buckets of a tiny workload.
WITHOUT_CODE = (
    "ours:coalesced",
    "ours:two_levels",
    # Each takes two new processes. What others do, and what is tested without processes too, can wait.
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in (
            "ddp:0.01",
            "ours",
            "ours:fixed:0.01",
            "ours:ddp:0.01",
            "ddp_tuned",
            "ddp_compiled",
            "ddp_compiled_whole:0.01",
            "replicate:0.01",
            "replicate_compiled",
            "functional",
            "ours:per_module",
            "ours:replan",
            "ours:dtensors",
        )
    ),
)
Gradients = dict[str, Any]


@contextlib.contextmanager
def fresh_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, "forkserver")
    try:
        yield ranks
    finally:
        ranks.stop()


def train(name: str, workload_name: str, backend: str | None) -> dict[str, Any]:
    """On a rank: the gradients of a batch before and after `STEPS` steps."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    chosen, trained = mode(name), workload(workload_name)
    if backend is not None and hasattr(chosen, "backend"):
        chosen = dataclasses.replace(chosen, backend=backend)  # type: ignore[type-var]
    trainer = chosen.prepare(trained)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = trained.batch(generator)
    before: list[Gradients] = []
    with inductor.generated_anew():
        code = inductor.code_of(lambda: before.append(as_arrays(trainer.gradients(batch))))
    again = as_arrays(trainer.gradients(batch))
    for _ in range(STEPS):
        trainer.step(trained.batch(generator))
    return {
        "before": before[0],
        "again": again,
        "after": as_arrays(trainer.gradients(batch)),
        "parts": counters["aot_autograd"]["total"],
        "launches": sum(each.count("ops._c10d_functional.all_reduce") for each in code),
        "fused": counters["inductor"]["ddp_buckets"],
        "facts": trainer.facts() if isinstance(trainer, Explained) else Facts(),
        "mixing": report(trainer._model).mixing if name.startswith("ours:decentralized") else "",  # type: ignore
    }


def as_arrays(gradients: Any) -> Gradients:
    return {name: each.numpy() for name, each in gradients.items()}


def run(name: str, workload_name: str, backend: str | None = "aot_eager") -> list[dict[str, Any]]:
    with fresh_ranks() as ranks:
        return ranks.run(train, name, workload_name, backend)


@cache
def torch_ddp(workload_name: str) -> list[dict[str, Any]]:
    return run("ddp", workload_name)


def check(
    found: list[dict[str, Any]], workload_name: str, whens: tuple[str, ...] = ("before", "again", "after")
) -> None:
    for rank, expected in enumerate(torch_ddp(workload_name)):
        for when in whens:
            mine, theirs = (
                {name: torch.from_numpy(each) for name, each in side[when].items()} for side in (found[rank], expected)
            )
            equality = compare_gradients(mine, theirs)
            assert equality.is_equal, f"rank {rank}, {when} training: {equality}"


@pytest.mark.parametrize("name", WITHOUT_CODE)
def test_same_gradients_as_torch_ddp(name: str) -> None:
    check(run(name, "tiny-gpt-4l"), "tiny-gpt-4l")


@pytest.mark.usefixtures("fake_group")
def test_layers_that_cannot_be_spread() -> None:
    with pytest.raises(ConfigError, match="mode 'ours:dtensors' spreads the layers of a GPT, which 'tiny-lstm' is not"):
        mode("ours:dtensors").prepare(workload("tiny-lstm"))


@pytest.mark.parametrize(
    ("name", "collectives"), [pytest.param("ours:fixed:0.01", 2, marks=pytest.mark.nightly), ("ours:replan", None)]
)
def test_ours_says_what_became_of_its_reductions(name: str, collectives: int | None) -> None:
    """A plan that hangs on measured times is not the same in every run: nothing of it is counted."""
    found = [each["facts"] for each in run(name, "tiny-gpt-4l", "inductor" if collectives else "aot_eager")]
    gradients = torch_ddp("tiny-gpt-4l")[0]["before"].values()
    nbytes = sum(each.nbytes + 4 for each in gradients) + 4 * MORE  # and a flag for each, whether it was used
    for facts in found:
        assert facts.backward_s > 0
        assert sum(size for _, size in facts.ready) == nbytes
        assert all(0 < share <= 1 for share, _ in facts.ready)
        if collectives is None:
            assert facts.counts() == {}
        else:
            assert facts.collectives == collectives
            assert facts.reduced_nbytes == nbytes
            assert facts.captures == 1
            assert 0 <= facts.copied_nbytes < 0.1 * nbytes
    assert found[0].counts() == found[1].counts()


def test_the_reference_reduces() -> None:
    """Else two modes that do nothing would be equal."""
    one, two = torch_ddp("tiny-gpt-4l")
    alone = run("compute", "tiny-gpt-4l")
    for name, gradient in one["before"].items():
        mean = (alone[0]["before"][name] + alone[1]["before"][name]) / 2
        assert abs(gradient - mean).max() <= 1e-5 * abs(mean).max()
        assert (gradient == two["before"][name]).all()
        assert abs(gradient - alone[0]["before"][name]).max() > 0.01 * abs(mean).max()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("functional", (6, 6)),
        ("functional_bucketed", (1, 1)),
        ("functional_bucketed:0.0003", (2, 5)),
    ],
)
def test_collectives_in_the_graph_with_the_passes_of_inductor(name: str, launches: tuple[int, int]) -> None:
    found = run(name, "tiny-many-small-150", None)
    check(found, "tiny-many-small-150")
    assert launches[0] <= found[0]["launches"] <= launches[1]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["python_reducer", "python_reducer_coalesced"])
def test_the_python_reducer_fuses(name: str) -> None:
    found = run(name, "tiny-many-small-150", None)
    check(found, "tiny-many-small-150")
    assert found[0]["fused"] == 1


@pytest.mark.nightly
def test_ddp_optimizer_splits_at_its_cap() -> None:
    """1.2 MiB of parameters, buckets of 1 MiB: two parts."""
    found = run("ddp_compiled:1", "many-small-150")
    check(found, "many-small-150")
    assert found[0]["parts"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_run_and_reduce_nothing(name: str) -> None:
    one, two = run(f"{name}:0.01" if name != "compute" else name, "tiny-gpt-4l")
    assert mode(name).is_bound
    assert bool(one["before"]) == (name != "comm")
    for parameter, gradient in one["before"].items():
        assert (gradient != two["before"][parameter]).any(), f"{parameter} is the same on both ranks"


@pytest.mark.nightly
def test_the_calibrated_mode_measures_the_link() -> None:
    with fresh_ranks() as ranks:
        check(ranks.run(train, "ours:calibrated", "tiny-gpt-4l", "aot_eager"), "tiny-gpt-4l")


def test_ours_decentralized() -> None:
    """The average of parameters moves by the average of gradients."""
    both = run("ours:decentralized:ring", "tiny-gpt-4l")
    check(both, "tiny-gpt-4l", ("before", "again"))
    nbytes = sum(each.nbytes for each in both[0]["before"].values())
    for found in both:
        facts = found["facts"]
        assert facts.backward_s > 0
        assert facts.counts() == {"collectives": 1, "captures": 1, "reduced_nbytes": facts.reduced_nbytes}
        assert nbytes <= facts.reduced_nbytes < 1.1 * nbytes
        assert found["mixing"].startswith("topology ring, ")


@pytest.mark.parametrize("name", ["decent_dp", "thunder:0.01"])
def test_peers_from_pypi(name: str) -> None:
    """Thunder is not in the test extra: it is run by hand, in an environment of its own."""
    reason = mode(name).why_not()
    if reason is not None:
        pytest.skip(reason)
    # After its first step a decentralised algorithm goes its own way.
    check(run(name, "tiny-gpt-4l"), "tiny-gpt-4l", ("before", "again") if name == "decent_dp" else ("before", "after"))


def test_dummies_have_the_bytes_of_the_parameters() -> None:
    parameters = [torch.empty(300), torch.empty(5, dtype=torch.float64), torch.empty(10, 20)]
    buffers = dummies(parameters, 1 / 1024)
    assert sum(each.nbytes for each in buffers) == sum(each.nbytes for each in parameters)
    assert [(each.dtype, each.numel()) for each in buffers] == [
        (torch.float32, 256),
        (torch.float32, 244),
        (torch.float64, 5),
    ]


def test_a_peer_that_is_missing_says_how_to_get_it() -> None:
    assert packages.why_not_there("no-such-package", "torch", "other") == (
        "no-such-package, other are not installed: pip install --no-deps no-such-package torch other "
        "(without --no-deps it may replace torch)."
    )
    assert packages.why_not_there("torch", "numpy") is None


def test_asking_whether_a_peer_can_run_imports_nothing_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    before = set(dir(torch.Tensor))
    for each in MODES.values():
        each.why_not()
    assert set(dir(torch.Tensor)) == before


def test_a_peer_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(name: str) -> object:
        raise AttributeError("type object 'Tensor'\nhas no attribute 'align_as'")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ConfigError) as refused:
        packages.load("json")
    assert str(refused.value) == (
        f"importing json with torch {torch.__version__} fails: AttributeError: type object 'Tensor' has no attribute "
        "'align_as'"
    )


def test_a_peer_that_cannot_run_says_why_and_refuses() -> None:
    unavailable = [each for each in MODES.values() if isinstance(each, Unavailable)]
    assert [each.name for each in unavailable] == ["horovod"]
    for each in unavailable:
        assert each.why_not()
        with pytest.raises(ConfigError, match=f"mode '{each.name}' cannot run: "):
            each.prepare(workload("tiny-gpt2"))


def test_every_mode_that_needs_nothing_else_can_run() -> None:
    others = {"decent_dp", "thunder", "horovod", "functional_overlap"}
    if "batched_grad_copy" not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        others.add("ddp_tuned")  # before torch 2.13
    assert {name: each.why_not() for name, each in MODES.items() if name not in others} == dict.fromkeys(
        name for name in MODES if name not in others
    )


def test_overlap_scheduling_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "estimates times from what Triton knows of a GPU" in str(mode("functional_overlap").why_not())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert mode("functional_overlap").why_not() is None


def test_names_and_arguments() -> None:
    assert all(mode(name).name == name for name in MODES)
    assert {name for name, each in MODES.items() if each.is_bound} == set(BOUNDS)
    for name in (
        "ddp:5",
        "ours:fixed:2.5",
        "oracle:1",
        "decent_dp:ring",
        "ours:decentralized:ring",
        "functional_bucketed:10",
    ):
        assert mode(name).name == name
    assert mode("ddp:5") == dataclasses.replace(MODES["ddp"], name="ddp:5", cap_mb=5.0)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dpp",
            r"there is no mode 'dpp'. Modes: ours, ours:fixed\[:MIB\], .*ddp\[:MIB\].*decent_dp\[:TOPOLOGY\].*compute",
        ),
        ("compute:5", "there is no mode 'compute:5'"),
        ("ours:best", "there is no mode 'ours:best'"),
        ("ddp:many", "'ddp:many': what follows 'ddp:' must be a number of MiB > 0, as in 'ddp:5'"),
        ("ddp:", "what follows 'ddp:' must be a number"),
        ("ddp:-1", "must be a number of MiB > 0"),
        ("ddp:nan", "must be a number of MiB > 0"),
        ("ddp:inf", "must be a number of MiB > 0"),
        ("ddp_compiled:0.5", "DDPOptimizer takes no cap below its first bucket's, 1 MiB"),
        ("decent_dp:star", "a topology is one of complete, ring, one-peer-exp, alternating-exp-ring"),
        ("ours:decentralized:star", "a topology is one of complete, ring, one-peer-exp, alternating-exp-ring"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mode(name)


def test_a_cap_is_a_number_of_mib() -> None:
    assert math.isclose(mode("comm:0.5").cap_mb, 0.5)  # type: ignore[attr-defined]
