"""The table of predicted ends: the models are the known ones, and the document says what it should."""

from __future__ import annotations

from pathlib import Path

import plan_table
import pytest
from model_shapes import MODELS
from plan_table import backward_of, cell


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("GPT-2 124M", 124.44),
        ("GPT-2 1.5B", 1557.61),
        ("Llama-3-8B", 8030.26),
        ("BERT-large", 335.17),
        ("T5-large", 737.67),
        ("ResNet-50", 25.56),
        ("ViT-L/16", 304.33),
    ],
)
def test_models_have_their_known_number_of_parameters(name: str, millions: float) -> None:
    """As published with the checkpoints (BERT with its masked-language head, without the pooler)."""
    assert sum(weight.numel for weight in MODELS[name].weights if weight.has_gradient) / 1e6 == pytest.approx(
        millions, abs=0.01
    )


@pytest.mark.parametrize("name", MODELS)
def test_flags_come_last_with_the_first_weight(name: str) -> None:
    backward = backward_of(MODELS[name].weights, MODELS[name].itemsize)
    *_, first, flags = backward.gradients
    assert flags.nbytes == (len(backward.gradients) - 1) * MODELS[name].itemsize
    assert first.ready_s == flags.ready_s == backward.seconds


@pytest.mark.parametrize("name", ["GPT-2 124M", "ResNet-50"])
def test_nothing_is_below_the_bound_or_the_optimum(name: str) -> None:
    backward = backward_of(MODELS[name].weights, MODELS[name].itemsize)
    for busbw, alpha in ((10, 200), (50, 50), (400, 5)):
        found = cell(name, backward, n_ranks=64, busbw_gb_s=busbw, alpha_us=alpha)
        assert found.ratios["optimal"] >= 1 - 1e-9
        assert min(found.ratios.values()) >= found.ratios["optimal"] * (1 - 1e-9)
        assert found.robust_worst <= found.optimal_worst * (1 + 1e-9)


def test_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan_table, "RANKS", (64,))
    monkeypatch.setattr(plan_table, "BUSBW_GB_S", (50,))
    monkeypatch.setattr(plan_table, "ALPHA_US", (200,))
    plan_table.main([str(tmp_path / "docs" / "table.md")])
    written = (tmp_path / "docs" / "table.md").read_text()
    assert all(f"| {name} | 64 |" in written for name in MODELS)
    plan_table.main([])
    assert capsys.readouterr().out == written
