"""Data parallel beside tensor parallel: parameters stay DTensors, and all is as in one process on the joint batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dp_compile
from dp_compile.testing.ranks import Ranks

AOT = dp_compile.ReplicateConfig(backend="aot_eager")
NAMES = ("dp", "tp")
TOKENS, STEPS = 12, 4


class Net(nn.Module):
    """Sizes that two ranks do not share evenly: a vocabulary of eleven, seven features inside."""

    def __init__(self, hidden: int = 7, spare: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.spare = nn.Linear(8, 8, bias=False) if spare else None

    def forward(self, tokens: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        if use_spare and self.spare is not None:
            x = x + self.spare(x)
        factor: Any = self.scale.sum()
        if isinstance(factor, DTensor):  # used for a part of the sequence: its gradient is partial over `tp`
            factor = factor.to_local(grad_placements=[Partial()])
        result: torch.Tensor = self.head(x * factor)
        return result


def colwise(model: nn.Module, mesh: DeviceMesh) -> None:
    """Some layers only; the others are plain, and the same on all ranks of `tp`."""
    layers = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, mesh, layers)


def everything(model: Any, mesh: DeviceMesh) -> None:
    """Sequence parallel: gradients of the norm are partial over `tp`. Embedding and head share their weight."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    model.head.weight = model.embedding.weight
    model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()]))


PLANS: dict[str, Callable[[Any, DeviceMesh], None]] = {"colwise": colwise, "everything": everything}


def batch(step: int, rank: int) -> torch.Tensor:
    """Of rank `rank` of `dp`."""
    return torch.randint(11, (3, TOKENS), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    logits = model(tokens, **options)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def full(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return result.detach()


def models(plan: str, shape: tuple[int, int], *, tied: bool, **options: Any) -> tuple[Any, Any, DeviceMesh]:
    """One that is parallel, and what it is when it is not. All ranks but the first of `dp` begin with wrong values."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    torch.manual_seed(0)
    alone = Net(**options)
    model = copy.deepcopy(alone)
    if tied:
        alone.head.weight = alone.embedding.weight
    PLANS[plan](model, mesh["tp"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(mesh["dp"].get_local_rank())  # replicate() has to undo this
    return model, alone, mesh


def facts_of(model: nn.Module) -> dict[str, Any]:
    """What no step may change."""
    named = dict(model.named_parameters())
    return {
        "objects": {name: id(each) for name, each in named.items()},
        "layouts": {name: getattr(each, "placements", None) for name, each in named.items()},
        "keys": list(model.state_dict()),
    }


def compare(model: nn.Module, alone: nn.Module, when: str, *, tolerance: float = 1e-5) -> None:
    """Parameters and gradients, and how gradients are laid out."""
    reference = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        other = reference[name]
        assert (parameter.grad is None) == (other.grad is None), f"{when}: gradient of {name}"
        for what, mine, theirs in (("parameter", parameter, other), ("gradient", parameter.grad, other.grad)):
            if mine is None:
                continue
            assert getattr(mine, "placements", None) == getattr(parameter, "placements", None), f"{when}: {what} {name}"
            torch.testing.assert_close(
                full(mine),
                theirs.detach(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, what=what, name=name: f"{when}: {what} {name}: {text}",
            )


def train(
    plan: str,
    way: str,
    shape: tuple[int, int] = (2, 2),
    config: dp_compile.ReplicateConfig = AOT,
    *,
    set_to_none: bool = True,
    accumulate: bool = True,
    tolerance: float = 1e-5,
) -> dict[str, int]:
    """Some steps beside one process with the joint batch. Returns which way the backwards went."""
    model, alone, mesh = models(plan, shape, tied=plan == "everything")
    dp_compile.replicate(model, device_mesh=mesh["dp"], config=config)
    before = facts_of(model)
    run = model if way == "eager" else torch.compile(model, backend=config.backend)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, alone)]
    ranks, here = mesh["dp"].size(), mesh["dp"].get_local_rank()
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        if accumulate and step % 2:
            # A partial gradient, or what is to become one, stays from a backward without synchronisation.
            with dp_compile.no_sync(model):
                loss_of(run, batch(step, 50 + here)).backward()
            (sum(loss_of(alone, batch(step, 50 + rank)) for rank in range(ranks)) / ranks).backward()
        with torch.autograd.set_detect_anomaly(way == "hooks", check_nan=False):
            loss = loss_of(run, batch(step, here))
            loss.backward()
        (sum(loss_of(alone, batch(step, rank)) for rank in range(ranks)) / ranks).backward()
        compare(model, alone, f"step {step}", tolerance=tolerance)
        for optimizer in optimizers:
            optimizer.step()
    compare(model, alone, "the end", tolerance=tolerance)
    assert facts_of(model) == before
    if plan == "everything":
        assert model.head.weight is model.embedding.weight
    found = dict(dp_compile.report(model).backwards)
    dp_compile.unreplicate(model)
    return found


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("plan", "way", "shape", "set_to_none", "found"),
    [
        ("colwise", "eager", (2, 2), True, "eager hooks"),
        ("everything", "eager", (2, 2), False, "eager hooks"),
        ("everything", "captured", (2, 2), True, "captured"),
        pytest.param("everything", "captured", (2, 2), False, "captured", marks=NIGHTLY),
        pytest.param("colwise", "captured", (2, 2), True, "captured", marks=NIGHTLY),
        pytest.param("everything", "hooks", (2, 2), True, "eager hooks", marks=NIGHTLY),
        pytest.param("everything", "captured", (1, 4), True, "captured", marks=NIGHTLY),
        pytest.param("everything", "captured", (4, 1), True, "captured", marks=NIGHTLY),
        pytest.param("everything", "eager", (4, 1), True, "eager hooks", marks=NIGHTLY),
    ],
)
def test_equals_one_process(
    ranks4: Ranks, plan: str, way: str, shape: tuple[int, int], set_to_none: bool, found: str
) -> None:
    with warnings.catch_warnings():
        for backwards in ranks4.run(_train, plan, way, shape, set_to_none):
            without = {"eager hooks": "without sync", "captured": "captured without sync"}[found]
            assert backwards == {found: STEPS, without: STEPS // 2}


def _train(plan: str, way: str, shape: tuple[int, int], set_to_none: bool) -> dict[str, int]:
    warnings.simplefilter("ignore")  # anomaly mode says that it is on
    return train(plan, way, shape, set_to_none=set_to_none)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", list(PLANS))
def test_equals_one_process_with_inductor(ranks4: Ranks, plan: str) -> None:
    for backwards in ranks4.run(train, plan, "captured", (2, 2), dp_compile.ReplicateConfig()):
        assert backwards == {"captured": STEPS, "captured without sync": STEPS // 2}


# --- what is refused -------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """What is said of each combination that is not supported."""
    said: dict[str, str] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)

    def parallel() -> Any:
        torch.manual_seed(0)
        model = Net()
        colwise(model, mesh["tp"])
        return model

    def note(name: str, attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except dp_compile.DPCompileError as error:
            said[name] = str(error)
        else:
            said[name] = "no error"

    note("whole group", lambda: dp_compile.replicate(parallel()))
    note("same dimension", lambda: dp_compile.replicate(parallel(), device_mesh=mesh["tp"]))
    note("torch's reducer", lambda: dp_compile.replicate(parallel(), device_mesh=mesh["dp"], ddp_python_hook=False))
    model = parallel()
    dp_compile.replicate(model, device_mesh=mesh["dp"], config=AOT)
    note("in_backward", lambda: dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    note(
        "shard",
        lambda: dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1), shard=True),
    )
    note("comm hook", lambda: dp_compile.register_comm_hook(model, None, lambda state, bucket: None))
    note(
        "decentralize",
        lambda: dp_compile.decentralize(
            parallel(), topology="complete", optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
        ),
    )
    return said


def test_refusals(ranks4: Ranks) -> None:
    expected = {
        "whole group": "device_mesh=mesh['dp']",
        "same dimension": "device_mesh=mesh['dp']",
        "torch's reducer": "knows no DTensors",
        "in_backward": "does not know DTensor parameters",
        "shard": "does not know DTensor parameters",
        "comm hook": "would see parts of gradients",
        "decentralize": "does not know DTensor parameters",
    }
    for said in ranks4.run(refusals):
        assert {name: words in said[name] for name, words in expected.items()} == dict.fromkeys(expected, True), said
