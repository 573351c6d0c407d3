"""`dp-compile dump`, and what is read from a directory that somebody else wrote."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from dp_compile.cli.main import main
from dp_compile.errors import ConfigError
from dp_compile.insight.dump_files import DUMP_VERSION, DumpedCapture, DumpedStage, captures_in, read_capture
from dp_compile.passes.result import Refusal

DUMP = DumpedCapture(
    rank=0,
    world_size=2,
    backend="aot_eager",
    versions="dp_compile 1, torch 2",
    all_stages=("captured", "analysed", "fuse", "to-inductor", "code"),
    stages=(
        DumpedStage(0, "captured", {"nodes": 9, "reduce_grad": 2, "mm": 1}),
        DumpedStage(1, "analysed", {"nodes": 7, "reduce_grad": 2, "mm": 1}, (Refusal("reduce_grad_2", "why <not>"),)),
        DumpedStage(2, "fuse", {"nodes": 8, "all_reduce": 1, "flat_bucket": 1, "wait_tensor": 1, "mm": 1}),
        DumpedStage(3, "to-inductor", {"nodes": 8, "all_reduce_": 1, "flat_bucket": 1, "wait_tensor": 1, "mm": 1}),
        DumpedStage(4, "code", {}),
    ),
    collectives=("all_reduce sum float32[4] bucket 0: a, b",),
    notes=("A note.",),
)
SHORT = {"captured": "a\nb\n", "analysed": "a\nc\n", "fuse": "c\n", "to-inductor": "c\n"}


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    """A dump of one capture on rank 0."""
    capture = tmp_path / "rank0" / "capture0"
    capture.mkdir(parents=True)
    (capture / "stages.json").write_text(DUMP.to_json())
    for stage in DUMP.stages:
        (capture / stage.full_file).write_text(f"all of {stage.name}\n")
        if stage.has_outline:
            (capture / stage.short_file).write_text(SHORT[stage.name])
    return tmp_path


def test_to_a_file_and_back(dumped: Path) -> None:
    assert read_capture(dumped / "rank0" / "capture0") == DUMP


def test_what_is_in_a_dump(dumped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dumped)
    assert main(["dump", "."]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
rank0/capture0: aot_eager, 2 ranks, dp_compile 1, torch 2
A note.
  stage          nodes  gradients reduced alone  buckets filled  all-reduces  waits
  0-captured         9                        2               0            0      0
  1-analysed         7                        2               0            0      0
    refused reduce_grad_2: why <not>
  2-fuse             8                        0               1            1      1
  3-to-inductor      8                        0               1            1      1
  4-code
2-fuse: all_reduce 0 -> 1, flat_bucket 0 -> 1, reduce_grad 2 -> 0, wait_tensor 0 -> 1, nodes 7 -> 8
3-to-inductor: all_reduce 1 -> 0, all_reduce_ 0 -> 1
collectives of the final graph, in their order:
  all_reduce sum float32[4] bucket 0: a, b
""",
    )


def test_a_stage_by_its_name_or_number(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fuse", "2", "2-fuse"):
        assert main(["dump", str(dumped), "--stage", name]) == 0
        assert capsys.readouterr().out == "c\n"
    assert main(["dump", str(dumped), "--stage", "fuse", "--full"]) == 0
    assert capsys.readouterr().out == "all of fuse\n"
    assert main(["dump", str(dumped), "--stage", "code"]) == 0
    assert capsys.readouterr().out == "all of code\n"


def test_the_difference_of_two_stages(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(dumped), "--diff", "captured", "fuse"]) == 0
    assert capsys.readouterr().out == "--- 0-captured\n+++ 2-fuse\n@@ -1,2 +1 @@\n-a\n-b\n+c\n"
    assert main(["dump", str(dumped), "--diff", "2", "3"]) == 0
    assert capsys.readouterr().out == ""


def test_as_json(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(dumped), "--json"]) == 0
    (capture,) = json.loads(capsys.readouterr().out)
    assert capture["stages"][2]["label"] == "2-fuse"
    assert capture["version"] == DUMP_VERSION
    assert main(["dump", str(dumped), "--json", "--stage", "fuse"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "c\n"


def test_all_ranks_and_captures_in_the_order_of_their_numbers(dumped: Path) -> None:
    for place in ("rank0/capture10", "rank0/capture2", "rank11/capture0", "rank2/capture0"):
        shutil.copytree(dumped / "rank0/capture0", dumped / place)
    (dumped / "rank0" / "capture3").mkdir()  # not finished
    found = [str(path.relative_to(dumped)) for path in captures_in(dumped)]
    assert found == ["rank0/capture0", "rank0/capture2", "rank0/capture10", "rank2/capture0", "rank11/capture0"]
    assert captures_in(dumped / "rank11") == [dumped / "rank11" / "capture0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "bucket"], "no stage 'bucket' in this dump. It has 0-captured, 1-analysed, 2-fuse, 3-to-inductor"),
        (["--diff", "fuse", "9"], "no stage '9'"),
        (["--diff", "fuse", "code"], "4-code is generated code and has no short text"),
        (["--full"], "--full goes with --stage"),
        (["--stage", "fuse", "--diff", "1", "2"], "not allowed with"),
    ],
)
def test_wrong_requests(arguments: list[str], message: str, dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["dump", str(dumped), *arguments])
    except SystemExit as ended:  # argparse
        status = int(ended.code or 0)
    shown = capsys.readouterr()
    assert status == 2
    assert message in shown.err
    assert shown.out == ""


def test_one_of_several_captures_has_to_be_named(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(dumped / "rank0/capture0", dumped / "rank0/capture1")
    assert main(["dump", str(dumped), "--stage", "fuse"]) == 2
    assert f"there are 2 captures. Give one of them: {dumped}/rank0/capture0, " in capsys.readouterr().err


def test_no_dump_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        assert main(["dump", str(place)]) == 2
        assert f"no graph dump in {place}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a file of a graph dump"),
        ("[]", "is not a file of a graph dump"),
        ("{}", "is not a file of a graph dump"),
        ('{"version": 1}', "is not a file of a graph dump"),
        ('{"version": 99}', "is of version 99, readable is 1. Dump the graphs anew"),
        (DUMP.to_json().replace('"rank"', '"tank"'), "is not a file of a graph dump"),
        (DUMP.to_json().replace('"counts"', '"count"'), "is not a file of a graph dump"),
    ],
)
def test_files_that_are_not_ours(text: str, message: str, dumped: Path) -> None:
    (dumped / "rank0/capture0/stages.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_capture(dumped / "rank0" / "capture0")


def test_a_missing_file(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dumped / "rank0/capture0/2-fuse.txt").unlink()
    assert main(["dump", str(dumped), "--stage", "fuse"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"dp-compile {version('dp_compile')}, torch ")
