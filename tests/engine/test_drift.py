"""Parameters that differ between ranks are found, and what may differ is left alone."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dp_compile
from dp_compile.config import CHECK_VARIABLE
from dp_compile.engine import guards
from dp_compile.engine.guards import fingerprints
from dp_compile.testing.ranks import Ranks

# --- sums over bits -------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128)


def fingerprint(tensor: torch.Tensor) -> int:
    return int(fingerprints([tensor])[0])


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 3000), st.integers(0, 10**6), st.data())
def test_one_bit_is_seen_and_copies_are_equal(dtype: torch.dtype, numel: int, seed: int, data: st.DataObject) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    if numel:
        other, place = tensor.clone(), data.draw(st.integers(0, numel - 1))
        bits = other.view(torch.uint8)
        bits[place * tensor.element_size()] ^= 1 << data.draw(st.integers(0, 7))
        assert fingerprint(tensor) != fingerprint(other)


def test_any_layout_has_bits() -> None:
    """Channels last, a view behind an odd offset, gaps, none at all, a payload of NaN."""
    images = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    flat = torch.randn(11)
    gaps = torch.randn(6, 6)[:, :3]
    tensors = [images, flat[1:], flat[2:9], gaps, torch.empty(0, 3), torch.tensor(1.0), torch.full((3,), float("nan"))]
    assert torch.equal(fingerprints(tensors), fingerprints([tensor.clone() for tensor in tensors]))
    assert len(fingerprints([])) == 0
    assert fingerprint(flat) != fingerprint(flat.flip(0))  # places count
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(quiet) != fingerprint(other)


# --- ranks ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, max_norm=0.5)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.body(self.rows(indices))))
        return result


def load_alone(model: Net) -> None:
    if dist.get_rank() == 1:
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def set_by_hand(model: Net) -> None:
    """Another loss, on this rank's own data, whose gradient is not reduced."""
    loss = model.head(torch.full((1, 4), float(dist.get_rank()))).square().sum()
    (model.head.weight.grad,) = torch.autograd.grad(loss, [model.head.weight])


def train(fault: Any, every: int | None, steps: int, options: dict[str, Any] | None = None) -> list[str]:
    """The error of each step; the fault comes before the first optimizer step."""
    torch.manual_seed(0)
    errors, config = [], dp_compile.ReplicateConfig(backend="aot_eager", **(options or {}))
    with mock.patch.dict(os.environ, {} if every is None else {CHECK_VARIABLE: str(every)}):
        model = dp_compile.replicate(Net(), config=config)
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
    [(load_alone, None, 3, "body.weight"), (load_alone, 1, 2, "body.weight"), (set_by_hand, 2, 2, "head.weight")],
)
def test_parameters_that_differ_are_named_on_every_rank(
    ranks2: Ranks, fault: Any, every: int | None, at: int, name: str
) -> None:
    one, other = ranks2.run(train, fault, every, at + 1)
    assert one == other
    assert not any(one[:at])
    assert f"synchronised backwards: {name} on rank 1 is not what it is on rank 0" in one[at]
    assert "collectives launched" not in one[at]  # nobody is waited for
    assert (", and 3 more" in one[at]) == (fault is load_alone)


@pytest.mark.parametrize("every", [1, None])
def test_equal_parameters_stay_equal(ranks: Ranks, every: int | None) -> None:
    """Also beside an embedding whose rows each rank shortens when it uses them."""
    for errors in ranks.run(train, None, every, 12):
        assert errors == [""] * 12


@pytest.mark.parametrize(("every", "options"), [(0, {}), (None, {"check_reductions": False})])
def test_it_can_be_switched_off(ranks2: Ranks, every: int | None, options: dict[str, Any]) -> None:
    assert ranks2.run(train, load_alone, every, 6, options)[0] == [""] * 6


def local_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Each rank keeps its own gradients, as between two averages of parameters."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def with_local_hook() -> int:
    torch.manual_seed(0)
    model = dp_compile.replicate(nn.Linear(4, 4))
    model.register_comm_hook(None, local_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
    return len(guards._comparisons)


def test_comm_hooks_may_keep_gradients_apart(ranks2: Ranks) -> None:
    ranks2.run(with_local_hook)


@mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"})
def uneven() -> list[torch.Tensor]:
    """Rank 1 has a fourth of the inputs; it does not step on without them."""
    torch.manual_seed(0)
    model = dp_compile.replicate(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for with_join in (True, False, True, False):
        with dp_compile.join(model) if with_join else nullcontext():
            for number in range(2 if dist.get_rank() == 1 else 8) if with_join else range(3):
                optimizer.zero_grad()
                model(torch.full((2, 4), 0.1 * (number + dist.get_rank()))).sum().backward()
                optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_ranks_that_have_run_out_of_inputs_do_not_step(ranks2: Ranks) -> None:
    one, other = ranks2.run(uneven)
    assert all(map(torch.equal, one, other))
