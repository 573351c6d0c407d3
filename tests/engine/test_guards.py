"""Guards: a module that changed, parameters that differ between ranks; and what is left alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import compile_whole, not_compiled, same_on_all_ranks
from torch import nn

import dp_compile
from dp_compile.config import CHECK_VARIABLE
from dp_compile.engine import guards
from dp_compile.engine.guards import fingerprints
from dp_compile.testing.ranks import Ranks

# --- a module that changes ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_replicas_of_other_tests() -> None:
    """They look at each backward of the process until they are collected."""
    torch._dynamo.reset()
    gc.collect()
    guards._checked.clear()


AOT = dp_compile.ReplicateConfig(backend="aot_eager", find_unused_parameters=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.bias.requires_grad_(False)
        self.adapter: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x.to(self.first.weight)).to(self.last.weight))
        return result + self.adapter(x).to(result)


def replaced(model: Net) -> None:
    model.last.weight = nn.Parameter(torch.ones(4, 4))


def adapted(model: Net) -> None:
    model.adapter = nn.Linear(4, 4, bias=False)


def silently_adapted(model: Net) -> None:
    """Past `Module.__setattr__`, as some libraries do."""
    model._modules["adapter"] = nn.Linear(4, 4, bias=False)


def adapted_and_trained_later(model: Net) -> None:
    """What was added frozen is left alone until it is trained."""
    model.adapter = nn.Linear(4, 4, bias=False).requires_grad_(False)
    uncompiled(model)
    model.zero_grad()
    model.adapter.requires_grad_(True)


def unfrozen(model: Net) -> None:
    model.first.bias.requires_grad_(True)


def wider(model: Net) -> None:
    model.first.double()


def loaded(model: Net) -> None:
    model.load_state_dict({name: p.detach() + 1 for name, p in model.named_parameters()}, assign=True)


CHANGES: dict[Callable[[Net], None], str] = {
    replaced: r"not reduced: last\.weight\. The parameter was replaced",
    adapted: r"not reduced: adapter\.weight\. The parameter was added",
    silently_adapted: r"not reduced: adapter\.weight\. The parameter was added",
    adapted_and_trained_later: r"not reduced: adapter\.weight\. The parameter was added",
    unfrozen: r"not reduced: first\.bias\. It was frozen",
    wider: r"first\.weight is float64, it was float32",
    loaded: r"not reduced: first\.weight, last\.weight, last\.bias\. The parameter was replaced",
}


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each walk through a module."""
    seen: list[str] = []
    walk = guards._without_hook

    def counted(replica: Any) -> Any:
        seen.append(replica.names[0])
        return walk(replica)

    monkeypatch.setattr(guards, "_without_hook", counted)
    return seen


GUARDED = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 does not compile a forward again whose parameter changed in place (pytorch#139476, #177158)",
)


def eagerly(model: nn.Module) -> Any:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # whose backward is not captured
        return compile_whole(model)(torch.ones(2, 4)).sum().backward()


def captured(model: nn.Module) -> Any:
    return compile_whole(model)(torch.ones(2, 4)).sum().backward()


def uncompiled(model: nn.Module) -> Any:
    return model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("change", [pytest.param(each, marks=GUARDED if each is wider else ()) for each in CHANGES])
@pytest.mark.parametrize("step", [pytest.param(captured, marks=GUARDED), eagerly, uncompiled])
def test_a_change_between_two_backwards(
    fake_group: dist.ProcessGroup, walks: list[str], change: Callable[[Net], None], step: Callable[[nn.Module], Any]
) -> None:
    torch._dynamo.reset()
    model = dp_compile.replicate(Net(), config=AOT)
    for _ in range(4):
        step(model)
    assert len(walks) == 1 or step is captured
    model.zero_grad()  # Dynamo refuses a parameter whose gradient is a view of memory with another dtype
    change(model)
    for _ in range(2):  # also after the first error was caught
        with pytest.raises(dp_compile.ReductionError, match=CHANGES[change]):
            step(model)


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
def test_another_dtype_for_a_while(fake_group: dist.ProcessGroup, compile_model: Callable[[nn.Module], Any]) -> None:
    """torch's DDP loses all parameters without a word."""
    torch._dynamo.reset()
    model, found = dp_compile.replicate(Net(), config=AOT), []
    run = compile_model(model)
    for _ in range(2):
        model.zero_grad()
        run(torch.ones(2, 4)).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.double().float()
    assert found[0]
    assert all(map(torch.equal, *found))
    assert sum(dp_compile.report(model).backwards.values()) == 2


# --- sums over bits -------------------------------------------------------------------------------------------------


def fingerprint(tensor: torch.Tensor) -> int:
    return int(fingerprints([tensor])[0])


def test_any_layout_has_bits() -> None:
    """Channels last, a view at an odd offset, gaps, none at all, a payload of NaN."""
    images = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    flat = torch.randn(11)
    gaps = torch.randn(6, 6)[:, :3]
    tensors = [images, flat[1:], flat[2:9], gaps, torch.empty(0, 3), torch.tensor(1.0), torch.full((3,), float("nan"))]
    assert torch.equal(fingerprints(tensors), fingerprints([tensor.clone() for tensor in tensors]))
    assert len(fingerprints([])) == 0
    assert fingerprint(flat) != fingerprint(flat.flip(0))  # places count
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(quiet) != fingerprint(other)
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.complex128):
        tensor = torch.randn(3000).to(dtype)
        changed = tensor.clone()
        changed.view(torch.uint8)[-1] ^= 1
        assert fingerprint(changed) != fingerprint(tensor)


# --- ranks ----------------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, max_norm=0.5)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.body(self.rows(indices))))
        return result


def load_alone(model: Rows) -> None:
    if dist.get_rank() == 1:
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def set_by_hand(model: Rows) -> None:
    """Another loss, on this rank's own data, whose gradient is not reduced."""
    loss = model.head(torch.full((1, 4), float(dist.get_rank()))).square().sum()
    (model.head.weight.grad,) = torch.autograd.grad(loss, [model.head.weight])


def train(fault: Any, every: int | None, steps: int, options: dict[str, Any] | None = None) -> list[str]:
    """The error of each step; the fault comes before the first optimizer step."""
    torch.manual_seed(0)
    errors, config = [], dp_compile.ReplicateConfig(backend="aot_eager", **(options or {}))
    with mock.patch.dict(os.environ, {} if every is None else {CHECK_VARIABLE: str(every)}):
        model = dp_compile.replicate(Rows(), config=config)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for number in range(steps):
            optimizer.zero_grad()
            indices = torch.randint(6, (5,), generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
            try:
                model(indices).square().sum().backward()
                errors.append("")
            except dp_compile.DesyncError as error:
                errors.append(str(error))
            if number == 0 and fault is not None:
                fault(model)
            optimizer.step()
    return errors


@pytest.mark.parametrize(
    ("fault", "every", "at", "name"),
    [(load_alone, None, 2, "body.weight"), (set_by_hand, 2, 2, "head.weight")],
)
def test_parameters_that_differ_are_named_on_every_rank(
    ranks2: Ranks, fault: Any, every: int | None, at: int, name: str
) -> None:
    one, other = ranks2.run(train, fault, every, at + 1)
    assert one == other
    assert not any(one[:at])
    assert f"synchronised backwards: {name} on rank 1 has other values than on rank 0" in one[at]
    assert "collectives launched" not in one[at]  # no rank is waited for
    assert (", and 3 more" in one[at]) == (fault is load_alone)


def test_equal_parameters_stay_equal(ranks: Ranks) -> None:
    """Also with an embedding whose rows each rank shortens when it uses them."""
    for errors in ranks.run(train, None, None, 12):
        assert errors == [""] * 12


def test_it_can_be_switched_off(ranks2: Ranks) -> None:
    for every, options in ((0, {}), (None, {"check_reductions": False})):
        assert ranks2.run(train, load_alone, every, 6, options)[0] == [""] * 6


def local_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Each rank keeps its own gradients, as between two averages of parameters."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@on_ranks("ranks2")
def test_comm_hooks_may_keep_gradients_apart() -> None:
    torch.manual_seed(0)
    model = dp_compile.replicate(nn.Linear(4, 4))
    model.register_comm_hook(None, local_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()


@on_ranks("ranks2")
def test_ranks_that_have_run_out_of_inputs_do_not_step() -> None:
    """Rank 1 has a fourth of the inputs."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"}):
        model = dp_compile.replicate(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for with_join in (True, False, True, False):
            with dp_compile.join(model) if with_join else nullcontext():
                for number in range(2 if dist.get_rank() == 1 else 8) if with_join else range(3):
                    optimizer.zero_grad()
                    model(torch.full((2, 4), 0.1 * (number + dist.get_rank()))).sum().backward()
                    optimizer.step()
    same_on_all_ranks(model)
