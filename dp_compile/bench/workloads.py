"""What is trained: models with real shapes and random weights, and a `tiny-` variant of each for tests.

A step of a real one takes seconds on one CPU core, so batches are small and sequences short; parameters, hence
communication, are those of the real models. No model has dropout: the gradients of modes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from dp_compile.bench import models
from dp_compile.bench.contract import ADAMW, Batch, Workload
from dp_compile.bench.resnet import RESNET_50, resnet
from dp_compile.errors import ConfigError
from dp_compile.train.gpt import GPT, GPTConfig

GPT_2: Final = GPTConfig(vocabulary=50257, context=1024, width=768, layers=12, heads=12)
TINY_GPT: Final = GPTConfig(vocabulary=64, context=16, width=16, layers=2, heads=2)
XLM_R_VOCABULARY: Final = 250_002
TINY_BERT: Final = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
TINY_VIT: Final = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 10,
}
TINY_MIXTURE: Final = TINY_BERT | {"num_key_value_heads": 1, "num_local_experts": 4}
MIXTURE: Final = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 768,
    "max_position_embeddings": 128,
}
"""Mixtral with the width and depth of `gpt-6l`; no published one fits a CPU."""


def cross_entropy(call: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Of a batch `(inputs, targets)`: logits have one dimension more than targets, the last."""
    inputs, targets = batch
    return F.cross_entropy(call(inputs).flatten(0, -2), targets.flatten())


def _text(vocabulary: int, sequences: int, length: int, generator: torch.Generator) -> Batch:
    """Random tokens, and for each the next one."""
    tokens = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _documents(vocabulary: int, sequences: int, length: int, classes: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, vocabulary, (sequences, length), generator=generator)
    return tokens, torch.randint(0, classes, (sequences,), generator=generator)


def _vectors(rows: int, width: int, generator: torch.Generator) -> Batch:
    return torch.randn(rows, width, generator=generator), torch.randint(0, width, (rows,), generator=generator)


def _images(
    count: int,
    edge: int,
    classes: int,
    generator: torch.Generator,
    *,
    layout: torch.memory_format = torch.channels_last,
) -> Batch:
    images = torch.randn(count, 3, edge, edge, generator=generator)
    return images.contiguous(memory_format=layout), torch.randint(0, classes, (count,), generator=generator)


def _workload(name: str, build: Callable[[], nn.Module], batch: Callable[..., Batch], *sizes: Any) -> Workload:
    return Workload(name, build, partial(batch, *sizes), cross_entropy)


def _gpt(name: str, config: GPTConfig, sequences: int, length: int) -> Workload:
    return _workload(name, partial(GPT, config), _text, config.vocabulary, sequences, length)


def _many_small(name: str, tensors: int, width: int) -> Workload:
    return _workload(name, partial(models.ManySmall, tensors=tensors, width=width), _vectors, 8, width)


def _lstm(name: str, vocabulary: int, width: int, sequences: int, length: int) -> Workload:
    build = partial(models.LanguageLSTM, vocabulary=vocabulary, width=width, layers=2)
    return _workload(name, build, _text, vocabulary, sequences, length)


def _huge_embedding(name: str, vocabulary: int, width: int, sequences: int, length: int) -> Workload:
    build = partial(models.BagOfWords, vocabulary=vocabulary, width=width, classes=16)
    return _workload(name, build, _documents, vocabulary, sequences, length, 16)


_ALL: Final = (
    # OpenAI's smallest, tied output; a quarter of its context.
    _gpt("gpt2", GPT_2, 1, 256),
    # 52.8 MiB of gradients.
    _gpt("gpt-6l", GPTConfig(vocabulary=8192, context=128, width=384, layers=6, heads=6), 4, 128),
    _gpt("gpt-4l", GPTConfig(), 8, 128),
    # The sequence length of most of BERT's own training.
    _workload("bert", models.bert, _text, 30522, 2, 128),
    _workload("resnet50", partial(resnet, RESNET_50), _images, 4, 224, 1000),
    _workload("vit", models.vit, partial(_images, layout=torch.contiguous_format), 2, 224, 1000),
    _workload("moe", partial(models.mixture, **MIXTURE), _text, 8192, 4, 128),
    # The medium model of Zaremba et al. on the Penn Treebank.
    _lstm("lstm", 10_000, 650, 20, 35),
    _many_small("many-small", 1000, 64),
    _many_small("many-small-600", 600, 64),
    _many_small("many-small-150", 150, 64),
    _huge_embedding("huge-embedding", XLM_R_VOCABULARY, 128, 32, 64),
    _gpt("tiny-gpt2", TINY_GPT, 2, 8),
    _gpt("tiny-gpt-6l", GPTConfig(vocabulary=48, context=16, width=24, layers=3, heads=2), 2, 8),
    _gpt("tiny-gpt-4l", GPTConfig(vocabulary=32, context=16, width=16, layers=1, heads=2), 2, 8),
    _workload("tiny-bert", partial(models.bert, **TINY_BERT), _text, 64, 2, 8),
    _workload("tiny-resnet50", partial(resnet, (1, 1), width=8, classes=10), _images, 2, 32, 10),
    _workload("tiny-vit", partial(models.vit, **TINY_VIT), partial(_images, layout=torch.contiguous_format), 2, 16, 10),
    _workload("tiny-moe", partial(models.mixture, **TINY_MIXTURE), _text, 64, 2, 8),
    _lstm("tiny-lstm", 64, 16, 2, 5),
    _many_small("tiny-many-small", 20, 8),
    _many_small("tiny-many-small-600", 12, 8),
    _many_small("tiny-many-small-150", 6, 8),
    _huge_embedding("tiny-huge-embedding", 500, 16, 4, 8),
)

ADAMW_ARGUMENT: Final = "adamw"
ADAMW_LR: Final = 0.001
"""torch's default."""

WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType({each.name: each for each in _ALL})
"""By name. Building a model of `transformers` needs that package, naming it does not."""


def workload(name: str) -> Workload:
    """The workload of that name; with `:adamw` behind it, trained by fused AdamW.

    Raises:
        ConfigError: there is none.
    """
    base, _, optimizer = name.partition(":")
    if base not in WORKLOADS or optimizer not in ("", ADAMW_ARGUMENT):
        raise ConfigError(
            f"there is no workload '{name}'. Workloads: {', '.join(WORKLOADS)}; each with SGD, and with "
            f"':{ADAMW_ARGUMENT}' behind its name with AdamW."
        )
    return replace(WORKLOADS[base], name=name, lr=ADAMW_LR, rule=ADAMW) if optimizer else WORKLOADS[base]
