"""Architectures of Hugging Face `transformers`, built from small configs with random weights, against torch's DDP.

One capture each: the whole backward, hooks and all, is one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parity import Case, train_both
from torch import nn

from dp_compile.testing.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="the test extra is not installed")

VOCABULARY, LENGTH = 64, 12


@dataclass(frozen=True)
class Architecture:
    """How to build a model and what it takes: token ids, or an image."""

    build: Callable[[], nn.Module]
    inputs: str = "tokens"


def _small(**changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return sizes | {"intermediate_size": 48, "max_position_embeddings": 32} | changes


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=1, n_head=2, **NO_DROP_GPT2
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_small(num_key_value_heads=1)))


def bert() -> nn.Module:
    config = transformers.BertConfig(**_small(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return transformers.T5ForConditionalGeneration(config)


def mixture_of_experts() -> nn.Module:
    config = transformers.MixtralConfig(**_small(num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2))
    return transformers.MixtralForCausalLM(config)


def convnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


NO_DROP_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES = {
    "gpt2": Architecture(gpt2),
    "llama": Architecture(llama),
    "bert": Architecture(bert),
    "t5": Architecture(t5, "both"),
    "mixture of experts": Architecture(mixture_of_experts),
    "convnet": Architecture(convnet, "image"),
}


class Logits(nn.Module):
    """Calls a model of transformers with one kind of input and returns its logits."""

    def __init__(self, model: nn.Module, inputs: str) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inputs == "image":
            return self.model(pixel_values=x).logits
        if self.inputs == "both":
            return self.model(input_ids=x, decoder_input_ids=x.flip(1)).logits
        return self.model(input_ids=x).logits


def train(name: str) -> tuple[set[str], list[tuple[int, int, int]]]:
    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]

    def batch(rank: int, step: int) -> tuple[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        if architecture.inputs == "image":
            return (torch.randn(2, 3, 32, 32, generator=generator),)
        return (torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator),)

    find_unused = name == "mixture of experts"  # an expert may get no token on some rank
    case = Case(
        build=lambda: Logits(architecture.build(), architecture.inputs),
        batch=batch,
        steps=3,
        options={"find_unused_parameters": find_unused},
        rtol=1e-4,
        atol=1e-5,
    )
    report = train_both(case)
    return set(report.backwards), [(r.graphs, r.hooks, r.collectives) for r in report.captures]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "mixture of experts" else pytest.mark.nightly) for name in ARCHITECTURES],
)
def test_same_gradients_as_torch_ddp(ranks2: Ranks, name: str) -> None:
    for ways, captures in ranks2.run(train, name, timeout_s=400):
        assert ways == {"captured"}
        assert len(captures) == 1
        ((graphs, hooks, collectives),) = captures
        assert graphs == 1
        assert hooks > collectives
