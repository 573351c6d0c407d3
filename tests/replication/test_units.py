"""Units of buckets by torch's own policies: FSDP's wrapping says which modules they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _recursive_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import dp_compile
from dp_compile.replication.module import replica_of
from dp_compile.replication.units import units_of

SIZES = (1, 300, 10**6)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block(width) for width in (8, 16, 8))
        self.again = self.blocks[0]
        self.head = nn.Linear(8, 10)
        self.head.weight = self.embedding.weight


def wrapped_by_torch(policy: Any, ignored: set[nn.Module], model: nn.Module) -> frozenset[str]:
    names = {each: name for name, each in model.named_modules()}
    noted: set[str] = set()

    def note(module: nn.Module) -> nn.Module:
        noted.add(names[module])
        return module

    parameters = {parameter for each in ignored for parameter in each.parameters()}
    _recursive_wrap(model, policy, note, ignored, parameters)
    return frozenset(noted)


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
        *(partial(size_based_auto_wrap_policy, min_num_params=count) for count in SIZES),
        partial(size_based_auto_wrap_policy, min_num_params=200, exclude_wrap_modules={Block}),
        ModuleWrapPolicy({Block, nn.Embedding}),
    ],
    ids=["transformer", "lambda", *(f"size-{count}" for count in SIZES), "size-without-blocks", "classes"],
)
def test_units_are_what_fsdp_wraps(policy: Any, ignores: bool) -> None:
    model = Model()
    ignored: set[nn.Module] = {model.blocks[1]} if ignores else set()
    found = units_of(model, policy, ignored)
    if isinstance(policy, ModuleWrapPolicy):
        chosen = policy._run_policy(model, ignored, {})
        expected = frozenset(name for name, each in model.named_modules() if each in chosen)
    else:
        expected = wrapped_by_torch(policy, ignored, model)
    assert found == expected


def test_a_custom_policy() -> None:
    model = Model()
    found = units_of(model, CustomPolicy(lambda module: isinstance(module, Block)))
    assert found == {"blocks.0", "blocks.1", "blocks.2"}
    with pytest.raises(dp_compile.ConfigError, match=r"bucket_policy gives options to head: it can say True or False"):
        units_of(model, CustomPolicy(lambda module: {"bucket_cap_mb": 4} if module is model.head else False))


@pytest.mark.usefixtures("fake_group")
def test_buckets_end_where_a_policy_of_torch_says() -> None:
    """A `ModuleWrapPolicy` can be called; taken for a function of name and module it says yes to everything."""
    plans = []
    of_functions = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    for policy in ({Block}, ModuleWrapPolicy({Block}), of_functions):
        torch.manual_seed(0)
        plans.append(replica_of(dp_compile.replicate(Model(), bucket_policy=policy)).plan)
    assert len(plans[0].buckets) == 5  # head, three blocks, embedding
    assert plans[1] == plans[0]
    assert plans[2] == plans[0]
