"""Models of Hugging Face's transformers, as under torch's DDP: whole models as others write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import train_both
from torch import nn

from dp_compile.testing.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="the test extra is not installed")

VOCABULARY = 64
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 32}
NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", SMALL | {"num_key_value_heads": 1}),
    "BertForMaskedLM": ("BertConfig", SMALL | NO_DROP),
    "T5ForConditionalGeneration": ("T5Config", T5 | {"dropout_rate": 0.0}),
    "MixtralForCausalLM": (
        "MixtralConfig",
        SMALL | {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


class Logits(nn.Module):
    """Calls a model of transformers and returns its logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        config, options = KINDS[kind]
        self.model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        self.decodes = kind.startswith("T5")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x, **{"decoder_input_ids": x.flip(1)} if self.decodes else {}).logits
        return result


def tokens(rank: int, step: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1000 * rank + step)),)


def train(kind: str) -> tuple[set[str], list[tuple[int, bool]]]:
    torch._dynamo.reset()
    options = {"find_unused_parameters": kind == "MixtralForCausalLM"}  # an expert may get no token on some rank
    report = train_both(lambda: Logits(kind), tokens, steps=3, options=options, rtol=1e-4, atol=1e-5)
    return set(report.backwards), [(record.graphs, record.hooks > record.collectives) for record in report.captures]


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.nightly) for kind in [*KINDS][:3]), "MixtralForCausalLM"]
)
def test_same_gradients_as_torch_ddp(ranks2: Ranks, kind: str) -> None:
    assert ranks2.run(train, kind, timeout_s=400) == [({"captured"}, [(1, True)])] * 2
