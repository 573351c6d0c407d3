"""The table that guards the planner: its models are the known ones, and on a few links plans are near the bound."""

from __future__ import annotations

import re

import pytest
from robust_table import MODELS, backward_of, table


@pytest.mark.parametrize(
    ("name", "millions"),
    [("GPT-2 124M", 124.44), ("GPT-2 1.5B", 1557.61), ("Llama-3-8B", 8030.26), ("BERT-large", 335.17),
     ("ResNet-50", 25.56), ("ViT-L/16", 304.33)],
)  # fmt: skip
def test_models_have_their_known_number_of_parameters(name: str, millions: float) -> None:
    """As published with the checkpoints (BERT with its masked-language head, without the pooler)."""
    weights, itemsize = MODELS[name]
    assert sum(weight.numel for weight in weights if weight.has_gradient) / 1e6 == pytest.approx(millions, abs=0.01)
    (*_, first, flags), seconds = backward_of(weights, itemsize)
    assert first.ready_s == flags.ready_s == seconds


def test_plans_are_near_the_bound() -> None:
    """Two of the thirty links; over all of them: median at most 1.015, worst at most 1.12 with speeds off."""
    for line in table(busbw_gb_s=(25, 100), alpha_us=(20,)):
        found = {
            kind: float(worst)
            for kind, worst in re.findall(r"(\w[^;:/]*?) [\d.]+ / ([\d.]+)", line.partition("worst: ")[2])
        }
        assert 1.0 <= found["optimal"] <= found["robust"] <= 1.05
        assert found["robust, speeds off"] <= min(1.08, found["optimal, speeds off"])
