"""Graph dumps: stages, names, files, and that training does not notice. One process, fake group."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import fresh_cache

import dp_compile
from dp_compile.config import DUMP_VARIABLE, ReplicateConfig
from dp_compile.engine import compile as compilation
from dp_compile.engine import dumps
from dp_compile.errors import InvalidGraphError
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan

pytestmark = pytest.mark.usefixtures("fake_group")

TRAINING = Path(__file__).parents[1] / "traced_run.py"
STAGES = ["captured", "analysed", "bucket-reductions", "schedule-collectives", "to-inductor", "code"]


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(dumps, "_given_up", set())


def train(directory: Path | None, backend: str = "aot_eager", **options: Any) -> nn.Module:
    """One step of a small model; replicated."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    dp_compile.replicate(model, config=ReplicateConfig(backend=backend, bucket_cap_mb=0.0003), **options)
    environment = {} if directory is None else {DUMP_VARIABLE: str(directory)}
    with mock.patch.dict(os.environ, environment):
        torch.compile(model, backend="aot_eager")(torch.ones(3, 8)).square().sum().backward()
    return model


def only_capture(directory: Path) -> Path:
    (capture,) = (path.parent for path in directory.rglob("plan.txt"))
    return capture


def short(path: Path) -> str:
    return path.read_text().partition("\n# As torch prints it\n")[0]


# --- what is written --------------------------------------------------------------------------------------------


def test_the_files_of_a_backward(tmp_path: Path) -> None:
    model = train(tmp_path)
    capture = only_capture(tmp_path)
    assert capture == tmp_path / "rank0" / "capture0"
    stages = [f"{number}-{stage}.txt" for number, stage in enumerate(STAGES)]
    assert sorted(path.name for path in capture.iterdir()) == sorted([*stages, "plan.txt"])
    assert (capture / "plan.txt").read_text() == f"{dp_compile.report(model).plan}\n"
    _, _, whole = (capture / "1-analysed.txt").read_text().partition("# As torch prints it\n")
    assert "torch.ops.dp_compile.reduce_grad" in whole
    assert "all_reduce" in (capture / "5-code.txt").read_text()


# --- Inductor ---------------------------------------------------------------------------------------------------


def test_a_second_run_is_dumped_as_the_first(tmp_path: Path) -> None:
    """The compiler has all of it in its caches and makes it again; afterwards it uses them as before."""
    settings = torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache
    with fresh_cache():
        for directory in (None, tmp_path / "0", tmp_path / "1", None):
            model = train(directory, "inductor")
    for number in range(2):
        capture = only_capture(tmp_path / str(number))
        assert [path.stem.partition("-")[2] for path in sorted(capture.glob("[0-9]*.txt"))] == STAGES
        assert short(capture / "3-schedule-collectives.txt").count("all_reduce(") == 2
        assert short(capture / "4-to-inductor.txt").count("all_reduce_(") == 2  # Inductor's own last change
        assert not (capture / "notes.txt").exists()
        code = (capture / "5-code.txt").read_text()
        assert "async_compile" in code
        assert code.count("all_reduce_.default(") == 2
    assert (torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache) == settings
    (record,) = dp_compile.report(model).captures
    assert record.collectives == 2


# --- off, and trouble -------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "dp_compile"):
        models = [train(directory) for directory in (tmp_path / "file", tmp_path / "file", None)]
    (record,) = caplog.records
    assert record.name == "dp_compile.dumps"
    assert "Training goes on" in record.getMessage()
    assert not dumps.are_wanted()
    for first, second, plain in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first.grad, plain.grad)
        assert torch.equal(second.grad, plain.grad)


@dataclass(frozen=True)
class Breaks:
    """A pass that leaves a graph that is refused."""

    name: ClassVar[str] = "breaks"

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        last = graph.output_node()
        last.args = (tuple(last.args[0])[:1],)
        return PassResult()


def test_a_pass_that_fails_leaves_its_graph_to_look_at(tmp_path: Path) -> None:
    with mock.patch.object(compilation, "DEFAULT_PASSES", (Breaks(),)), pytest.raises(InvalidGraphError):
        train(tmp_path)
    capture = only_capture(tmp_path)
    assert sorted(path.stem for path in capture.glob("[0-9]*.txt")) == ["0-captured", "1-analysed", "2-breaks"]
    assert "return 1 tensor" in (capture / "2-breaks.txt").read_text()
    assert "InvalidGraphError" in (capture / "notes.txt").read_text()


# --- tlparse ----------------------------------------------------------------------------------------------------


def test_tlparse_shows_the_stages_under_our_names(tmp_path: Path) -> None:
    environment = os.environ | {"TORCH_TRACE": str(tmp_path / "trace")}
    subprocess.run([sys.executable, str(TRAINING)], env=environment, check=True, capture_output=True)
    (log,) = (tmp_path / "trace").iterdir()
    tlparse = Path(sys.executable).parent / "tlparse"
    command = [str(tlparse), str(log), "-o", str(tmp_path / "out"), "--no-browser"]
    subprocess.run(command, check=True, capture_output=True)
    index = (tmp_path / "out" / "index.html").read_text()
    for number, stage in enumerate(STAGES):
        assert f"dp_compile-{number}-{stage}" in index
    (shown,) = (tmp_path / "out").rglob("dp_compile-3-schedule-collectives*")
    assert ">> launch 0 = all_reduce(bucket 0, sum, 0)" in shown.read_text()
