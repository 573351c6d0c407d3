"""Graph dumps: stages, names, files, the repro, and that training does not notice. One process, fake group."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Grad, plan_for, trace
from torch import fx, nn

import dp_compile
from dp_compile._torch import inductor
from dp_compile.config import DUMP_VARIABLE, ReplicateConfig
from dp_compile.engine import compilation
from dp_compile.errors import ConfigError, InvalidGraphError
from dp_compile.insight import dumps
from dp_compile.insight.dump_files import DumpedCapture, captures_in, read_capture
from dp_compile.insight.repro import repro_source
from dp_compile.insight.step import Step
from dp_compile.modules.replicate import _compared_options
from dp_compile.modules.replicated_module import replica_of
from dp_compile.passes import DEFAULT_PASSES, ScheduleCollectives
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan

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
    dump_dir = None if directory is None else str(directory)
    config = ReplicateConfig(backend=backend, dump_dir=dump_dir, bucket_cap_mb=0.0003)
    dp_compile.replicate(model, config=config, **options)
    x = inputs or (torch.randn(3, 8, generator=torch.Generator().manual_seed(1)),)
    torch.compile(model, backend="aot_eager")(*x).square().sum().backward()
    return model


def only_capture(directory: Path) -> tuple[Path, DumpedCapture]:
    (capture,) = captures_in(directory)
    return capture, read_capture(capture)


# --- what is written --------------------------------------------------------------------------------------------


def test_the_stages_of_a_backward(tmp_path: Path) -> None:
    train(mlp(), tmp_path)
    capture, dump = only_capture(tmp_path)
    assert capture == tmp_path / "rank0" / "capture0"
    assert [stage.name for stage in dump.stages] == STAGES
    assert [stage.number for stage in dump.stages] == list(range(6))
    assert dump.world_size == 2
    assert dump.notes == ("aot_eager generates no code: the stage 'code' is the final graph as Python.",)
    for stage in dump.stages:
        assert (capture / stage.full_file).read_text()
        assert (capture / stage.short_file).exists() == stage.has_outline
    assert "reduce_grad" in (capture / "1-analysed.full.txt").read_text()
    assert "all_reduce" in (capture / "5-code.full.txt").read_text()


def test_the_graph_that_the_pipeline_gets_as_a_person_reads_it(tmp_path: Path) -> None:
    train(mlp(), tmp_path)
    assert_expected_inline(
        (tmp_path / "rank0/capture0/1-analysed.txt").read_text(),
        """\
   ... 3 inputs
   2.weight: float32[4, 16]
   ... 2 inputs
   2.bias: float32[4]
   0.bias: float32[16]
   0.weight: float32[16, 8]
   flags: float32[55]
   ... 13 nodes: t 4, mm 2, mul 2, expand 1, new_empty_strided 1, pow 1, other 2
   grad 2.bias = copy(new_empty_strided, view): float32[4]
   reduced 2.bias = reduce_grad(grad 2.bias): float32[4]
   ... 2 nodes: new_empty_strided 1, t 1
   grad 2.weight = copy(new_empty_strided, t): float32[4, 16]
   reduced 2.weight = reduce_grad(grad 2.weight): float32[4, 16]
   ... 7 nodes: t 2, gelu_backward 1, mm 1, new_empty_strided 1, sum 1, view 1
   grad 0.bias = copy(new_empty_strided, view): float32[16]
   reduced 0.bias = reduce_grad(grad 0.bias): float32[16]
   ... 2 nodes: new_empty_strided 1, t 1
   grad 0.weight = copy(new_empty_strided, t): float32[16, 8]
   reduced 0.weight = reduce_grad(grad 0.weight): float32[16, 8]
   reduced flags = reduce_grad(flags): float32[55]
   return 5 tensors: reduced flags, reduced 2.weight, .. 2 more .., reduced 0.weight
   5 reductions found
""",
    )


def test_the_final_graph_as_a_person_reads_it(tmp_path: Path) -> None:
    train(mlp(), tmp_path)
    assert_expected_inline(
        (tmp_path / "rank0/capture0/3-schedule-collectives.txt").read_text(),
        """\
   ... 3 inputs
   2.weight: float32[4, 16]
   ... 2 inputs
   2.bias: float32[4]
   0.bias: float32[16]
   0.weight: float32[16, 8]
   flags: float32[55]
   ... 13 nodes: t 4, mm 2, mul 2, expand 1, new_empty_strided 1, pow 1, other 2
   grad 2.bias = copy(new_empty_strided, view): float32[4]
   ... 2 nodes: new_empty_strided 1, t 1
   grad 2.weight = copy(new_empty_strided, t): float32[4, 16]
   ... 4 nodes: gelu_backward 1, new_empty_strided 1, sum 1, view 1
   grad 0.bias = copy(new_empty_strided, view): float32[16]
   bucket 0 = flat_bucket([grad 2.bias, grad 2.weight, grad 0.bias]): float32[96]
>> launch 0 = all_reduce(bucket 0, sum, 0): float32[96]
   ... 5 nodes: t 3, mm 1, new_empty_strided 1
   grad 0.weight = copy(new_empty_strided, t): float32[16, 8]
   bucket 1 = flat_bucket([grad 0.weight, flags]): float32[183]
>> launch 1 = all_reduce(bucket 1, sum, 0): float32[183]
<< wait 0 = wait_tensor(launch 0): float32[96]
<< wait 1 = wait_tensor(launch 1): float32[183]
   reduced 2.bias = as_strided(wait 0): float32[4]
   reduced 2.weight = as_strided(wait 0): float32[4, 16]
   reduced 0.bias = as_strided(wait 0): float32[16]
   reduced 0.weight = as_strided(wait 1): float32[16, 8]
   reduced flags = as_strided(wait 1): float32[55]
   return 5 tensors: reduced flags, reduced 2.weight, .. 2 more .., reduced 0.weight
""",
    )


def test_what_a_pass_changed_as_a_person_reads_it(tmp_path: Path) -> None:
    train(mlp(), tmp_path)
    assert_expected_inline(
        (tmp_path / "rank0/capture0/3-schedule-collectives.diff.txt").read_text(),
        """\
--- 2-bucket-reductions
+++ 3-schedule-collectives
@@ -10,17 +10,17 @@
    ... 2 nodes: new_empty_strided 1, t 1
    grad 2.weight = copy(new_empty_strided, t): float32[4, 16]
-   ... 7 nodes: t 2, gelu_backward 1, mm 1, new_empty_strided 1, sum 1, view 1
+   ... 4 nodes: gelu_backward 1, new_empty_strided 1, sum 1, view 1
    grad 0.bias = copy(new_empty_strided, view): float32[16]
    bucket 0 = flat_bucket([grad 2.bias, grad 2.weight, grad 0.bias]): float32[96]
 >> launch 0 = all_reduce(bucket 0, sum, 0): float32[96]
+   ... 5 nodes: t 3, mm 1, new_empty_strided 1
+   grad 0.weight = copy(new_empty_strided, t): float32[16, 8]
+   bucket 1 = flat_bucket([grad 0.weight, flags]): float32[183]
+>> launch 1 = all_reduce(bucket 1, sum, 0): float32[183]
 << wait 0 = wait_tensor(launch 0): float32[96]
+<< wait 1 = wait_tensor(launch 1): float32[183]
    reduced 2.bias = as_strided(wait 0): float32[4]
    reduced 2.weight = as_strided(wait 0): float32[4, 16]
    reduced 0.bias = as_strided(wait 0): float32[16]
-   ... 2 nodes: new_empty_strided 1, t 1
-   grad 0.weight = copy(new_empty_strided, t): float32[16, 8]
-   bucket 1 = flat_bucket([grad 0.weight, flags]): float32[183]
->> launch 1 = all_reduce(bucket 1, sum, 0): float32[183]
-<< wait 1 = wait_tensor(launch 1): float32[183]
    reduced 0.weight = as_strided(wait 1): float32[16, 8]
    reduced flags = as_strided(wait 1): float32[55]
""",
    )


def test_the_captured_graph_has_the_same_names(tmp_path: Path) -> None:
    train(mlp(), tmp_path)
    text = (tmp_path / "rank0/capture0/0-captured.txt").read_text()
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert re.search(rf"^   {name} = getitem\(input\): ", text, re.MULTILINE)
        assert f"   reduced {name} = reduce_grad(grad {name}): " in text


def test_members_apart_and_pieces_have_names(tmp_path: Path) -> None:
    """The weight in two pieces, its bias apart in a bucket with one of them."""
    torch.manual_seed(0)
    model = nn.Linear(8, 16)
    gradients = [{"name": "weight"}, {"name": "weight"}, {"name": "bias"}, {"name": "<unused-parameter flags>"}]
    rows: Sequence[list[int] | None] = ([0, 8], [8, 16], None, None)
    offsets = (0, 0, None, None)
    members = [
        {"gradient": gradient, "offset": offset, "rows": row}
        for gradient, offset, row in zip(gradients, offsets, rows, strict=True)
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 2, "buckets": [{"members": members[:1]}, {"members": members[1:]}]}))
    config = ReplicateConfig(backend="aot_eager", dump_dir=str(tmp_path / "dump"))
    dp_compile.replicate(model, config=config, plan=plan)
    torch.compile(model, backend="aot_eager")(torch.randn(3, 8)).square().sum().backward()
    capture, dump = only_capture(tmp_path / "dump")
    text = (capture / "3-schedule-collectives.txt").read_text()
    assert_expected_inline(
        text,
        """\
   ... 3 inputs
   bias: float32[16]
   weight: float32[16, 8]
   flags: float32[53]
   ... 10 nodes: t 3, mul 2, copy 1, expand 1, mm 1, new_empty_strided 1, other 1
   grad weight[0:8] = slice(copy): float32[8, 8]
   bucket 0 = flat_bucket([grad weight[0:8]]): float32[64]
>> launch 0 = all_reduce(bucket 0, sum, 0): float32[64]
   grad weight[8:16] = slice(copy): float32[8, 8]
   bucket 1/0 = flat_bucket([grad weight[8:16]]): float32[64]
   bucket 1/2 = flat_bucket([flags]): float32[53]
   ... 3 nodes: new_empty_strided 1, sum 1, view 1
   grad bias = copy(new_empty_strided, view): float32[16]
   bucket 1/1 = flat_bucket([grad bias]): float32[16]
>> launch 1 = all_reduce_coalesced([bucket 1/0, bucket 1/1, bucket 1/2], sum, 0): 3 tensors
   launch 1/0 = getitem(launch 1): float32[64]
   launch 1/1 = getitem(launch 1): float32[16]
   launch 1/2 = getitem(launch 1): float32[53]
<< wait 0 = wait_tensor(launch 0): float32[64]
<< wait 1/0 = wait_tensor(launch 1/0): float32[64]
<< wait 1/1 = wait_tensor(launch 1/1): float32[16]
<< wait 1/2 = wait_tensor(launch 1/2): float32[53]
   assembled weight = assemble([wait 0, wait 1/0]): float32[128]
   reduced weight = as_strided(assembled weight): float32[16, 8]
   reduced bias = as_strided(wait 1/1): float32[16]
   reduced flags = as_strided(wait 1/2): float32[53]
   return 3 tensors: reduced flags, reduced bias, reduced weight
""",
    )
    assert_expected_inline(
        "\n".join(dump.collectives),
        """\
all_reduce sum float32[64] bucket 0: weight[0:8]
all_reduce_coalesced sum 3 tensors bucket 1: weight[8:16], bias, flags""",
    )


def test_the_same_text_each_time(tmp_path: Path) -> None:
    for number in range(2):
        torch._dynamo.reset()
        train(mlp(), tmp_path / str(number))
    one, other = (
        {path.name: path.read_text() for path in (tmp_path / str(number) / "rank0/capture0").iterdir()}
        for number in range(2)
    )
    short = [name for name in one if re.fullmatch(r"\d-[a-z-]+(\.diff)?\.txt", name)]
    assert len(short) > 5
    assert {name: one[name] for name in short} == {name: other[name] for name in short}


def test_several_modules_do_not_mix(tmp_path: Path) -> None:
    first, second = mlp(), nn.Linear(8, 2)
    train(first, tmp_path)
    train(second, tmp_path)
    one, other = captures_in(tmp_path)
    assert (dumps.observer.directory(replica_of(first)), dumps.observer.directory(replica_of(second))) == (one, other)
    for model, path in ((first, one), (second, other)):
        assert (
            Step.from_json((path / "step.json").read_text()).plan.signature()
            == dp_compile.report(model).plan.signature()
        )
    assert "0.weight" in (one / "1-analysed.txt").read_text()
    assert "0.weight" not in (other / "1-analysed.txt").read_text()


def test_two_modules_in_one_backward_keep_their_names_apart(tmp_path: Path) -> None:
    config = ReplicateConfig(backend="aot_eager", dump_dir=str(tmp_path))
    models = [dp_compile.replicate(mlp(), config=config) for _ in range(2)]
    x = torch.randn(3, 8)
    sum(torch.compile(model, backend="aot_eager")(x).square().sum() for model in models).backward()  # type: ignore[union-attr]
    capture, dump = only_capture(tmp_path)
    text = (capture / "3-schedule-collectives.txt").read_text()
    assert "launch 0.0" in text
    assert "launch 1.0" in text
    assert "reduced 1:0.weight" in text
    assert "   0:0.weight: float32[16, 8]" in text
    assert len(dump.collectives) == 2


def test_one_dump_for_each_compilation_and_none_for_a_later_step(tmp_path: Path) -> None:
    model = mlp()
    dp_compile.replicate(model, config=ReplicateConfig(backend="aot_eager", dump_dir=str(tmp_path)))
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
    """The compiler finds all of it in its caches, and is told to make it again; afterwards it uses them as before."""
    settings = torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache
    with inductor.empty_cache():
        train(mlp(), None, backend="inductor")
        for number in range(2):
            torch._dynamo.reset()
            train(mlp(), tmp_path / str(number), backend="inductor")
        torch._dynamo.reset()
        model = train(mlp(), None, backend="inductor")
    for number in range(2):
        capture, dump = only_capture(tmp_path / str(number))
        assert [stage.name for stage in dump.stages] == STAGES
        assert dump.find("schedule-collectives").counts["all_reduce"] == 2
        assert dump.find("to-inductor").counts["all_reduce_"] == 2  # Inductor's own last change
        assert not dump.notes
        assert (capture / "repro.py").exists()
        code = (capture / "5-code.full.txt").read_text()
        assert "async_compile" in code
        assert code.count("all_reduce_.default(") == 2
    assert (torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache) == settings
    (record,) = dp_compile.report(model).captures
    assert record.kept.startswith("hit"), record.kept
    assert record.collectives == 2


PROGRAM = """
import torch, dp_compile, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = torch.nn.Linear(4, 4)
dp_compile.replicate(model, config=dp_compile.ReplicateConfig(check_reductions=False))
torch.compile(model)(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.nightly
def test_a_second_process_dumps_as_the_first(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "DP_COMPILE_DUMP_DIR": str(tmp_path / "dump")}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
    first, second = ({path.name for path in capture.iterdir()} for capture in captures_in(tmp_path / "dump"))
    assert first == second
    assert "repro.py" in second


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
    capture, dump = only_capture(tmp_path)
    assert [stage.label for stage in dump.stages] == ["0-captured", "1-analysed", "2-breaks"]
    assert "return 1 tensor" in (capture / "2-breaks.txt").read_text()
    assert "InvalidGraphError" in dump.notes[0]
    assert (capture / "repro.py").exists()


# --- the option -------------------------------------------------------------------------------------------------


def test_who_says_where() -> None:
    assert ReplicateConfig().dump_directory({}) is None
    assert ReplicateConfig().dump_directory({DUMP_VARIABLE: ""}) is None
    assert ReplicateConfig().dump_directory({DUMP_VARIABLE: "here"}) == "here"
    assert ReplicateConfig(dump_dir="there").dump_directory({DUMP_VARIABLE: "here"}) == "there"


def test_the_environment_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    train(mlp(), None)
    assert len(captures_in(tmp_path)) == 1


@pytest.mark.parametrize("value", ["", 3, Path("dumps"), True])
def test_a_directory_is_given_as_text(value: Any) -> None:
    with pytest.raises(ConfigError, match="dump_dir must be the path of a directory as text, got"):
        ReplicateConfig(dump_dir=value)


def test_ranks_may_dump_into_different_places() -> None:
    assert _compared_options(ReplicateConfig(dump_dir="here")) == _compared_options(ReplicateConfig())
    assert _compared_options(ReplicateConfig(backend="aot_eager")) != _compared_options(ReplicateConfig())


# --- the repro --------------------------------------------------------------------------------------------------


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, check=False)


def test_the_repro_gives_the_same_collectives_in_a_fresh_process(tmp_path: Path) -> None:
    train(mlp(), tmp_path)
    capture, dump = only_capture(tmp_path)
    done = run(sys.executable, str(capture / "repro.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*dump.collectives, "the same collectives as in the dump"]
    assert_expected_inline(
        "\n".join(dump.collectives),
        """\
all_reduce sum float32[96] bucket 0: 2.bias, 2.weight, 0.bias
all_reduce sum float32[183] bucket 1: 0.weight, flags""",
    )


class Mixed(nn.Module):
    """Convolution, norm, embedding, attention, dropout, a product with a head that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.conv, self.query = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q = self.query(x).unsqueeze(1)
        x = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        return self.drop(x) @ self.embedding.weight.t()


def status_of_repro(capture: Path) -> int:
    """Run a repro in this process."""
    scope = {"__name__": "__main__", "__file__": str(capture / "repro.py")}
    with pytest.raises(SystemExit) as ended:
        exec(compile((capture / "repro.py").read_text(), "repro.py", "exec"), scope)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_repro_of_many_kinds_of_ops(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with inductor.empty_cache():
        train(Mixed(), tmp_path, torch.randint(0, 11, (2, 5)), backend=backend)
    capture, dump = only_capture(tmp_path)
    capsys.readouterr()
    assert status_of_repro(capture) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == list(dump.collectives)


def test_a_repro_of_dynamic_shapes(tmp_path: Path) -> None:
    model = mlp()
    dp_compile.replicate(model, config=ReplicateConfig(backend="aot_eager", dump_dir=str(tmp_path)))
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 7):
        compiled(torch.randn(rows, 8)).square().sum().backward()
        model.zero_grad()
    latest = captures_in(tmp_path)[-1]
    assert re.search(r"\[s\d+, ", (latest / "1-analysed.full.txt").read_text())
    assert status_of_repro(latest) == 0


def test_a_repro_of_a_gpus_graph_needs_no_gpu() -> None:
    grad = Grad(index=0, shape=(4, 4))
    module = trace(lambda x, w: grad.reduce(x @ w + torch.ones(4, 4, device="cpu")), grad.values(), grad.values())
    (ones,) = (node for node in module.graph.nodes if "device" in node.kwargs)
    ones.update_kwarg("device", torch.device("cuda:0"))
    data = plan_for([grad]).to_dict()
    data["buckets"][0]["key"] |= {"group": "0", "device": "cuda"}
    plan = BucketPlan.from_dict(data)
    source = repro_source(module.graph, [plan], DEFAULT_PASSES, world_size=2, about="A test.")
    assert "cuda" not in source
    scope: dict[str, Any] = {"__name__": "repro"}
    exec(source, scope)
    plans = [BucketPlan.from_dict(plan) for plan in scope["PLANS"]]
    found = scope["recorded"].collectives(scope["PASSES"], plans)
    assert found == ("all_reduce sum float32[16] bucket 0: p0",)


def test_a_pass_of_nobody_else_has_no_repro(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Local(ScheduleCollectives):
        pass

    train(mlp(), tmp_path, passes=(Local(),))
    capture, dump = only_capture(tmp_path)
    assert not (capture / "repro.py").exists()
    assert "There is no repro: pass" in dump.notes[0]
    assert "cannot be imported by another process" in dump.notes[0]


def test_a_repro_notices_other_collectives(tmp_path: Path) -> None:
    train(mlp(), tmp_path)
    repro = only_capture(tmp_path)[0] / "repro.py"
    repro.write_text(re.sub(r"PASSES = .*", "PASSES = ()", repro.read_text()))
    done = run(sys.executable, str(repro))
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "NOT the collectives of the dump"
    assert done.stdout.startswith("reduce_grad ")


# --- tlparse ----------------------------------------------------------------------------------------------------


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
