"""Models of the workloads that are neither GPT nor ResNet: own small ones, and those of `transformers`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from dp_compile.errors import ConfigError


class LanguageLSTM(nn.Module):
    """Tokens `int64[batch, time]` to logits, through LSTM layers. Source: Zaremba et al. 2014 (arXiv 1409.2329)."""

    def __init__(self, *, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.token(tokens))
        logits: torch.Tensor = self.head(states)
        return logits


class ManySmall(nn.Module):
    """Linear layers with bias around residuals, `[batch, width]` to the same: `tensors` parameters, little compute."""

    def __init__(self, *, tensors: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class BagOfWords(nn.Module):
    """Tokens `int64[batch, time]` to logits: mean of embeddings, two layers. Nearly all bytes are one parameter."""

    def __init__(self, *, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.hidden(self.token(tokens).mean(1)).relu())
        return logits


class Logits(nn.Module):
    """A model of `transformers` that takes one tensor and returns its logits."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model, self.argument = model, argument

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**{self.argument: x}).logits
        return logits


def bert(**sizes: Any) -> nn.Module:
    """A masked language model; without `sizes` that of BERT base, uncased. No dropout: gradients are compared."""
    library = _transformers("bert")
    config = library.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    return Logits(library.BertForMaskedLM(config), "input_ids")


def vit(**sizes: Any) -> nn.Module:
    """An image classifier; without `sizes` ViT-B/16 on images of 224 x 224, 1,000 classes."""
    library = _transformers("vit")
    config = library.ViTConfig(**{"num_labels": 1000} | sizes)
    return Logits(library.ViTForImageClassification(config), "pixel_values")


def mixture(**sizes: Any) -> nn.Module:
    """Mixtral's architecture: 8 experts in each block, 2 for each token, unless `sizes` say otherwise."""
    library = _transformers("moe")
    return Logits(library.MixtralForCausalLM(library.MixtralConfig(**sizes)), "input_ids")


def _transformers(workload: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"workload '{workload}' takes its model from transformers, which cannot be imported ({error}). "
            "Install it: pip install 'dp_compile[bench]'."
        ) from error
