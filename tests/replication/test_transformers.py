"""Models of Hugging Face's transformers, as under torch's DDP: whole models as others write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from parity import train_both
from torch import nn

transformers = pytest.importorskip("transformers", reason="the test extra is not installed")

VOCABULARY = 64
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 32}
NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 1},
    "BertForMaskedLM": SMALL | NO_DROP,
    "T5ForConditionalGeneration": T5 | {"dropout_rate": 0.0},
    "MixtralForCausalLM": SMALL | {"num_key_value_heads": 1} | EXPERTS,
}


class Logits(nn.Module):
    """Calls a model of transformers and returns its logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        model: Any = getattr(transformers, kind)
        self.model = model(model.config_class(**KINDS[kind]))
        self.decodes = kind.startswith("T5")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x, **{"decoder_input_ids": x.flip(1)} if self.decodes else {}).logits
        return result


def tokens(rank: int, step: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1000 * rank + step)),)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.nightly) for kind in [*KINDS][:3]), "MixtralForCausalLM"]
)
@on_ranks("ranks2")
def test_same_gradients_as_torch_ddp(kind: str) -> None:
    torch._dynamo.reset()
    options = {"find_unused_parameters": kind == "MixtralForCausalLM"}  # an expert may get no token on some rank
    report = train_both(lambda: Logits(kind), tokens, steps=3, options=options, rtol=1e-4, atol=1e-5)
    assert set(report.backwards) == {"captured"}
    assert [(record.graphs, record.hooks > record.collectives) for record in report.captures] == [(1, True)]
