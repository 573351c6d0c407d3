"""Code for a GPU that one process keeps and another finds: it is the same, runs the same, and is what the key says.

Both processes are played, `docs/gpu.md` says how.
"""

from __future__ import annotations

import re

import cases
import pytest
from generated_code import read_code, triton_sources

Kept = tuple[cases.Results, cases.Results]


@pytest.mark.parametrize("name", cases.KEPT)
def test_a_second_process_runs_what_the_first_has_kept(kept: Kept, name: str) -> None:
    """On another GPU of the same kind, too. The text comes out of the entry: nothing is generated, no graph there."""
    first, second = (results[name] for results in kept)
    assert [said.split("; ")[-1] for said in first["kept"]] == ["kept now"]
    assert [said.split(", ")[0] for said in second["kept"]] == ["hit"]
    assert len(first["generated"]) == 1
    assert not second["generated"]
    assert second["codes"] == first["codes"] == first["generated"]
    assert triton_sources(second["codes"][0])
    assert second["gradients"] == first["gradients"]
    assert max(second["differences"].values()) < (0.05 if "bf16" in name else 1e-5)
    assert second["orders"] == first["orders"]
    assert "".join(letter for letter in read_code(second["codes"][0]).order if letter in "AW") in second["orders"]
    assert not read_code(second["codes"][0]).faults


@pytest.mark.parametrize(
    ("field", "text"), [("cuda:0", r"DeviceProperties\(.*?\)"), ("Triton", r"'backend_hash': '\w+'")]
)
def test_what_changes_the_code_for_a_gpu_changes_the_key(kept: Kept, field: str, text: str) -> None:
    """By a field of its own: torch's key, which is a part of ours, knows no more of a GPU than its name."""
    before, now = kept[0][cases.KEPT[0]], kept[1]["another"]
    (said,) = now["kept"]
    assert said.startswith("miss: ")
    assert f"{field} changed" in said
    found = [set(re.findall(text, code)) for code in (*before["codes"], *now["generated"])]
    assert [len(each) for each in found] == [1, 1]
    assert found[0] != found[1]
