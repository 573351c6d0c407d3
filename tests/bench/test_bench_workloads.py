"""The benchmark's workloads: real sizes as published, and tiny ones that train."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from dp_compile.bench.contract import ADAMW, PROBE_LR, SGD, Rule
from dp_compile.bench.modes.loop import as_plain
from dp_compile.bench.workloads import WORKLOADS, workload
from dp_compile.errors import ConfigError

TINY = [name for name in WORKLOADS if name.startswith("tiny-")]
REAL = [name for name in WORKLOADS if not name.startswith("tiny-")]
FROM_TRANSFORMERS = ("bert", "vit", "moe")

# Parameters and tensors: `gpt2` and `bert` as the checkpoints of those names, `resnet50` and `vit` as torchvision's,
# the others by their definition.
SIZES = {
    "gpt2": (124_439_808, 148),
    "gpt-6l": (8192 * 384 + 128 * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384, 76),
    "gpt-4l": (256 * 128 + 128 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128, 52),
    "bert": (109_514_298, 202),
    "resnet50": (25_557_032, 161),
    "vit": (86_567_656, 200),
    "moe": (2 * 8192 * 384 + 6 * (4 * 384**2 + 8 * 384 + 8 * 3 * 384 * 768 + 2 * 384) + 384, 57),
    "lstm": (2 * 10_000 * 650 + 10_000 + 2 * (8 * 650**2 + 8 * 650), 11),
    "many-small": (500 * (64 * 64 + 64), 1000),
    "many-small-600": (300 * (64 * 64 + 64), 600),
    "many-small-150": (75 * (64 * 64 + 64), 150),
    "huge-embedding": (250_002 * 128 + 128 * 512 + 512 + 512 * 16 + 16, 5),
}


def skip_without_transformers(name: str) -> None:
    if name.removeprefix("tiny-") in FROM_TRANSFORMERS:
        pytest.importorskip("transformers", reason="the bench extra is not installed")


def test_every_workload_has_a_tiny_variant() -> None:
    assert [f"tiny-{name}" for name in REAL] == TINY
    assert set(SIZES) == set(REAL)


@pytest.mark.parametrize("name", REAL)
def test_real_models_have_their_known_number_of_parameters(name: str) -> None:
    skip_without_transformers(name)
    with torch.device("meta"):
        model = WORKLOADS[name].build()
    parameters = list(model.parameters())
    assert (sum(each.numel() for each in parameters), len(parameters)) == SIZES[name]
    assert all(each.dtype == torch.float32 for each in parameters)


@pytest.mark.parametrize("name", TINY)
def test_tiny_variants_are_the_same_every_time_and_train(name: str) -> None:
    skip_without_transformers(name)
    one, two = trained(name, seed=0), trained(name, seed=0)
    assert one["losses"] == two["losses"]
    assert all(torch.equal(mine, other) for mine, other in zip(one["weights"], two["weights"], strict=True))
    assert one["losses"][-1] < one["losses"][0]
    other_batch = trained(name, seed=1)
    assert other_batch["losses"] != one["losses"]


def trained(name: str, seed: int) -> dict[str, Any]:
    """Some steps on one batch: what the loss was, and the weights that the model had before."""
    chosen = workload(name)
    torch.manual_seed(0)
    model = chosen.build()
    weights = [each.detach().clone() for each in model.parameters()]
    batch = chosen.batch(torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=0.9)
    losses = []
    for _ in range(5):
        loss = chosen.loss(model, batch)
        loss.backward()
        assert all(each.grad is not None for each in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights}


def test_an_optimizer_behind_the_name() -> None:
    chosen = workload("tiny-gpt2:adamw")
    assert chosen.name == "tiny-gpt2:adamw"
    assert chosen.build is workload("tiny-gpt2").build
    parameter = torch.nn.Parameter(torch.ones(3))
    made = chosen.rule.optimizer([parameter], lr=chosen.lr)
    assert isinstance(made, torch.optim.AdamW)
    assert made.param_groups[0]["fused"]
    with pytest.raises(ConfigError, match=r"no workload 'gpt2:lion'.*':adamw' behind its name"):
        workload("gpt2:lion")


@pytest.mark.parametrize("rule", [SGD, ADAMW])
@pytest.mark.parametrize("remembers", [False, True])
def test_a_plain_step_tells_the_gradient(rule: Rule, remembers: bool) -> None:
    """What modes are compared by that keep no gradients."""
    given = torch.randn(64, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = rule.optimizer([parameter], lr=0.0)
    options = dict(optimizer.param_groups[0])
    parameter.grad = given.flip(0)
    if remembers:
        optimizer.step()
    parameter.grad = given
    with as_plain(optimizer, rule):
        optimizer.step()
    torch.testing.assert_close(-parameter.detach() / PROBE_LR, given, rtol=5e-4, atol=0.0)
    assert optimizer.param_groups[0] == options
    other = torch.nn.Parameter(torch.zeros(64))
    other.grad = given
    rule.optimizer([other], **rule.plain).step()
    torch.testing.assert_close(-other.detach() / PROBE_LR, given, rtol=5e-4, atol=0.0)


def test_an_unknown_workload_is_named_beside_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"there is no workload 'gpt3'. Workloads: gpt2, gpt-6l, .*huge-embedding"):
        workload("gpt3")


def test_a_workload_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        ConfigError, match=r"'bert' takes its model from transformers.*pip install 'dp_compile\[bench\]'"
    ):
        workload("bert").build()
