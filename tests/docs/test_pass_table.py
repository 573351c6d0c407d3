"""The measured tables: the one command writes them all, and what it writes can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pass_table
import pytest
import tables
import torch
from torch import nn

from dp_compile._torch import inductor
from dp_compile.bench.resnet import RESNET_50, resnet
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.result import PassRecord
from dp_compile.train.gpt import GPTConfig

DOCS = Path(__file__).parents[2] / "docs"


def tables_of(text: str) -> Iterator[list[dict[str, str]]]:
    """Each table of a document, a row as its cells by the name of their column."""
    for part in text.split("\n\n"):
        if part.startswith("|"):
            head, line, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in part.splitlines())
            assert set(line) == {"---"}
            yield [dict(zip(head, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    return float(cell.split()[0].replace(",", "").rstrip("%"))


def check_document(text: str) -> tuple[list[dict[str, str]], ...]:
    assert f"torch {torch.__version__.split('.')[0]}." in text
    assert "cores" in text
    assert "commit" in text
    planning, passes, share, copies = tables_of(text)
    for row in planning:
        assert number(row["fixed"]) <= number(row["robust"])
    for row in passes:
        assert number(row["nodes"]) > number(row["gradients"])
    assert number(share[0]["share"]) < 10
    for row in copies:
        assert number(row["kernels"]) <= number(row["without reductions"]) + 10 * number(row["buckets"])
        assert row["stores to copy out"] == "0"
    return planning, passes, share, copies


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_group")
def test_the_command_writes_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_table, "COUNTS", (10, 60))
    monkeypatch.setattr(pass_table, "SHARE_OF_GPT", GPTConfig(layers=1, width=16, heads=1))
    monkeypatch.setattr(pass_table, "models", lambda: {"small": (nn.Linear(40, 30), torch.randn(7, 40))})
    monkeypatch.setattr(inductor, "empty_cache", contextlib.nullcontext)
    monkeypatch.setitem(tables.DOCUMENTS, "plan_table.md", lambda: "predicted")
    tables.main([str(tmp_path / "new")])
    assert (tmp_path / "new" / "plan_table.md").read_text() == "predicted"
    planning, passes, share, copies = check_document((tmp_path / "new" / "pass_table.md").read_text())
    assert [(row["gradients"], row["keys"]) for row in planning] == [("10", "1"), ("60", "1"), ("10", "2"), ("60", "2")]
    assert [(row["gradients"], row["buckets"]) for row in passes] == [("10", "1"), ("60", "3")]
    assert share[0]["model"] == "GPT, 1 layers, width 16"
    assert [(row["model"], row["gradients"]) for row in copies] == [("small", "2")]


def test_without_a_directory() -> None:
    with pytest.raises(SystemExit, match="usage"):
        tables.main([])


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_the_readme_links_every_table(name: str) -> None:
    assert f"(docs/{name})" in (DOCS.parent / "README.md").read_text()


def test_the_kept_table_can_be_read() -> None:
    planning, passes, _, copies = check_document((DOCS / "pass_table.md").read_text())
    assert {row["gradients"] for row in planning} == {row["gradients"] for row in passes} == {"100", "1,000", "10,000"}
    assert len(copies) == 2


@pytest.mark.usefixtures("fake_group")
def test_the_synthetic_graph_is_one_that_the_passes_take() -> None:
    graph, plan = pass_table.captured_mlp(60)
    records: list[PassRecord] = []
    Pipeline(DEFAULT_PASSES, [plan], records.extend)(graph)
    assert records[0].before["reduce_grad"] == 60
    assert "reduce_grad" not in records[-1].after


def test_resnet_50_has_its_known_number_of_parameters() -> None:
    with torch.device("meta"):
        model = resnet(RESNET_50)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
