"""Graph dumps: stages, names, files, the command, and that training does not notice. One process, fake group."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import fx, nn

import dp_compile
from dp_compile._torch import inductor
from dp_compile.cli.main import main
from dp_compile.config import DUMP_VARIABLE, ReplicateConfig
from dp_compile.engine import compile as compilation
from dp_compile.errors import InvalidGraphError
from dp_compile.insight import dumps
from dp_compile.insight.dumps import captures_in
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan
from dp_compile.replication.module import replica_of

pytestmark = pytest.mark.usefixtures("fake_group")

TRAINING = Path(__file__).parents[1] / "traced_run.py"
STAGES = ["captured", "analysed", "bucket-reductions", "schedule-collectives", "to-inductor", "code"]


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(dumps, "_given_up", set())


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(
    model: nn.Module, directory: Path | None, *inputs: torch.Tensor, backend: str = "aot_eager", **options: Any
) -> nn.Module:
    """One step; the model, replicated."""
    dp_compile.replicate(model, config=ReplicateConfig(backend=backend, bucket_cap_mb=0.0003), **options)
    x = inputs or (torch.randn(3, 8, generator=torch.Generator().manual_seed(1)),)
    with dumped_to(directory):
        torch.compile(model, backend="aot_eager")(*x).square().sum().backward()
    return model


def dumped_to(directory: Path | None) -> AbstractContextManager[Any]:
    return nullcontext() if directory is None else mock.patch.dict(os.environ, {DUMP_VARIABLE: str(directory)})


def only_capture(directory: Path) -> Path:
    (capture,) = captures_in(directory)
    return capture


def short(path: Path) -> str:
    return path.read_text().partition("\n# As torch prints it\n")[0]


# --- what is written --------------------------------------------------------------------------------------------


def test_the_files_of_a_backward(tmp_path: Path) -> None:
    model = train(mlp(), tmp_path)
    capture = only_capture(tmp_path)
    assert capture == tmp_path / "rank0" / "capture0"
    stages = [f"{number}-{stage}.txt" for number, stage in enumerate(STAGES)]
    assert sorted(path.name for path in capture.iterdir()) == sorted([*stages, "plan.txt", "step.json"])
    assert (capture / "plan.txt").read_text() == f"{dp_compile.report(model).plan}\n"
    _, _, whole = (capture / "1-analysed.txt").read_text().partition("# As torch prints it\n")
    assert "torch.ops.dp_compile.reduce_grad" in whole
    assert "all_reduce" in (capture / "5-code.txt").read_text()


def test_one_dump_for_each_compilation_and_none_for_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    model = mlp()
    dp_compile.replicate(model, config=ReplicateConfig(backend="aot_eager"))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        compiled(torch.randn(3, 8)).square().sum().backward()
        model.zero_grad()
    assert len(captures_in(tmp_path)) == 1
    compiled(torch.randn(3, 8)).square().sum().backward()
    compiled(torch.randn(3, 8)).square().sum().backward()  # into gradients that exist
    assert [path.name for path in captures_in(tmp_path)] == ["capture0", "capture1"]


# --- Inductor ---------------------------------------------------------------------------------------------------


def test_a_second_run_is_dumped_as_the_first(tmp_path: Path) -> None:
    """The compiler has all of it in its caches and makes it again; afterwards it uses them as before."""
    settings = torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache
    with inductor.empty_cache():
        train(mlp(), None, backend="inductor")
        for number in range(2):
            torch._dynamo.reset()
            train(mlp(), tmp_path / str(number), backend="inductor")
        torch._dynamo.reset()
        model = train(mlp(), None, backend="inductor")
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


def test_off_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("made although nobody asked")

    seen = []
    pipeline = compilation.Pipeline
    monkeypatch.setattr(dumps, "Dump", refuse)
    monkeypatch.setattr(compilation, "Pipeline", lambda *args: seen.append(args[-1]) or pipeline(*args))
    model = train(mlp(), None)
    assert seen == [None]
    assert dumps.observer.directory(replica_of(model)) is None


def test_a_directory_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "dp_compile"):
        for _ in range(2):
            torch._dynamo.reset()
            model = train(mlp(), tmp_path / "file")
    (record,) = caplog.records
    assert record.name == "dp_compile.dumps"
    assert "Training goes on" in record.getMessage()
    plain = mlp()
    plain(torch.randn(3, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad / 2)


@dataclass(frozen=True)
class Breaks:
    """A pass that leaves a graph that is refused."""

    name: ClassVar[str] = "breaks"
    realises_plan: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        last = graph.output_node()
        last.args = (tuple(last.args[0])[:1],)  # type: ignore[arg-type]
        return PassResult(changed=True)


def test_a_pass_that_fails_leaves_its_graph_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(InvalidGraphError):
        train(mlp(), tmp_path, passes=(Breaks(),))
    capture = only_capture(tmp_path)
    assert sorted(path.stem for path in capture.glob("[0-9]*.txt")) == ["0-captured", "1-analysed", "2-breaks"]
    assert "return 1 tensor" in (capture / "2-breaks.txt").read_text()
    assert "InvalidGraphError" in (capture / "notes.txt").read_text()


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    train(mlp(), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["dump", "."]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "rank0/capture0"
    names = [f"{number}-{stage}.txt" for number, stage in enumerate(STAGES)]
    assert [line.split()[0] for line in shown[1:]] == [*names, "plan.txt", "step.json"]
    assert shown[4].endswith("2 launches, 2 waits")
    for stage in ("3", "schedule-collectives", "3-schedule-collectives"):
        assert main(["dump", "rank0/capture0", "--stage", stage]) == 0
        assert capsys.readouterr().out == Path("rank0/capture0/3-schedule-collectives.txt").read_text()
    for arguments, message in (
        ([".", "--stage", "none"], "no stage 'none' in rank0/capture0"),
        (["gone"], "no dump in gone"),
    ):
        assert main(["dump", *arguments]) == 2
        assert message in capsys.readouterr().err


# --- tlparse ----------------------------------------------------------------------------------------------------


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, check=False)


def test_tlparse_shows_the_stages_under_our_names(tmp_path: Path) -> None:
    done = run(sys.executable, str(TRAINING), TORCH_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "trace").iterdir()
    tlparse = Path(sys.executable).parent / "tlparse"
    parsed = run(str(tlparse), str(log), "-o", str(tmp_path / "out"), "--no-browser")
    assert parsed.returncode == 0, parsed.stderr
    index = (tmp_path / "out" / "index.html").read_text()
    for number, stage in enumerate(STAGES):
        assert f"dp_compile-{number}-{stage}" in index
    (shown,) = (tmp_path / "out").rglob("dp_compile-3-schedule-collectives*")
    assert ">> launch 0 = all_reduce(bucket 0, sum, 0)" in shown.read_text()
