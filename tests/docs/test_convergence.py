"""How well decentralized training converges: the table and the picture are those of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from docs_scripts import script

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def convergence() -> ModuleType:
    return script("make_convergence")


def test_the_document_shows_what_was_measured(convergence: ModuleType) -> None:
    panels = json.loads(convergence.DATA.read_text())["panels"]
    assert convergence.DATA.with_suffix(".svg").read_text() == convergence.picture(panels)
    text = (DOCS / "decentralized.md").read_text()
    assert convergence.table(panels) in text
    assert "decentralized/convergence.svg" in text


def test_what_was_measured_is_what_the_script_runs(convergence: ModuleType) -> None:
    panels = json.loads(convergence.DATA.read_text())["panels"]
    assert {panel["title"] for panel in panels} == set(convergence.PANELS)
    for panel in panels:
        for way in (convergence.SYNCHRONOUS, convergence.TOPOLOGY):
            assert panel[way]["command"] == convergence.command_of(convergence.PANELS[panel["title"]], way)
            assert [step for step, _ in panel[way]["losses"]] == list(range(0, 301, 25))
    one, other = (panels[0][way]["command"] for way in (convergence.SYNCHRONOUS, convergence.TOPOLOGY))
    assert other == f"{one} --topology one-peer-exp"


def test_losses_are_read_from_what_is_said(convergence: ModuleType) -> None:
    said = (
        "step     0  held-out loss 5.371\n   compiling ...\nstep    25  held-out loss 3.207  460.7 ms/step\nIn 25 steps"
    )
    assert convergence.losses_in(said) == [[0, 5.371], [25, 3.207]]
