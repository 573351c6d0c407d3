"""Memory of large buckets is that of the backward before, and never what somebody still looks at."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code

import dp_compile
from dp_compile._torch import storages
from dp_compile.passes import memory as bucket_memory
from dp_compile.passes.memory import BucketMemory
from dp_compile.plan.buckets import Bucket
from dp_compile.replication.module import replica_of

CPU = torch.device("cpu")
ROWS, WIDTH = 300, 16


class Words(nn.Module):
    """An embedding, whose gradient is scattered, and two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.hidden(self.words(x)).tanh())
        return out


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4, 7), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def code_of_kept() -> Iterator[None]:
    """Code for memory that is used again, made once for all tests: no key of Inductor's cache knows of the limit."""
    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        patch.setattr(bucket_memory, "KEPT_FROM_NBYTES", 0)
        yield


@pytest.fixture
def all_are_kept(code_of_kept: None) -> None:
    torch._dynamo.reset()


# --- the memory by itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["untyped_storage", "storage", "numpy", "detach"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_whatever_looks_at_the_memory_keeps_it(kind: str) -> None:
    memory = BucketMemory()
    gradient = memory.take(0, 8, torch.float32, CPU).fill_(1.0)
    where, held = gradient.data_ptr(), getattr(gradient, kind)()
    del gradient
    now = memory.take(0, 8, torch.float32, CPU).data_ptr()
    assert now != where
    assert memory.take(0, 8, torch.float32, CPU).data_ptr() == now
    assert memory.take(1, 8, torch.float32, CPU).data_ptr() not in (where, now)
    del held


def test_who_lets_go_in_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of gloo's does, after it has said that it is done."""
    memory = BucketMemory()
    held = [memory.take(0, 8, torch.float32, CPU)]
    where = held[0].data_ptr()
    monkeypatch.setattr(bucket_memory.time, "sleep", lambda _: held.clear())
    assert memory.take(0, 8, torch.float32, CPU).data_ptr() == where


def test_who_shares_memory_with_a_process_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sends a gradient away may let go of it between two questions."""
    memory = BucketMemory()
    memory.take(0, 8, torch.float32, CPU)
    (kept,) = memory.kept.values()

    def shared_meanwhile(tensor: torch.Tensor) -> tuple[int, int]:
        if tensor is kept.memory:
            tensor.share_memory_()
        return kept.alone

    monkeypatch.setattr(storages, "holders", shared_meanwhile)
    assert not memory.take(0, 8, torch.float32, CPU).is_shared()


def test_what_another_process_may_look_at_is_not_used_again() -> None:
    memory = BucketMemory()
    assert memory.take(0, 8, torch.float32, CPU).share_memory_().is_shared()
    assert not memory.take(0, 8, torch.float32, CPU).is_shared()


# --- in a backward ----------------------------------------------------------------------------------------------------


class Training:
    """A replicated model beside a plain one; on the fake group its gradients are half of the plain one's."""

    def __init__(self, **options: Any) -> None:
        self.model = Words()
        self.plain = copy.deepcopy(self.model)
        dp_compile.replicate(self.model, **options)
        self.run: Callable[..., torch.Tensor] = torch.compile(self.model)

    def step(self, seed: int, *, to_none: bool = True) -> list[torch.Tensor]:
        """The gradients of a step."""
        self.model.zero_grad(set_to_none=to_none)
        self.plain.zero_grad()
        self.run(batch(seed)).square().mean().backward()
        self.plain(batch(seed)).square().mean().backward()
        found = []
        for parameter, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, other.grad / 2)  # type: ignore[operator]
            found.append(parameter.grad)
        return found

    @property
    def plan(self) -> tuple[Bucket, ...]:
        return dp_compile.report(self.model).plan.buckets

    @property
    def kept(self) -> list[int]:
        """Where the memory lies that is kept."""
        return [each.memory.data_ptr() for each in replica_of(self.model).state.bucket_memory.kept.values()]


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_the_same_memory_in_each_step() -> None:
    training = Training(bucket_cap_mb=0.002)
    where = [each.data_ptr() for each in training.step(0)]
    assert len(training.kept) == len(training.plan) > 1
    for seed in range(1, 5):
        assert [each.data_ptr() for each in training.step(seed)] == where
    said = str(dp_compile.report(training.model))
    assert "memory that backwards use again: 21.4 KiB of 2 buckets" in said
    assert "computed in their buckets: 100.0%" in said  # rows of the embedding are added there, too


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_a_gradient_that_somebody_kept_stays_what_it_was() -> None:
    training = Training()
    training.step(0)
    kept = training.step(1)
    values = [each.clone() for each in kept]
    for seed in (2, 3):
        training.step(seed)
    for gradient, value in zip(kept, values, strict=True):
        assert torch.equal(gradient, value)
    where = training.kept
    del kept
    training.step(4)
    assert training.kept == where


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("captured", [True, False])
def test_no_bucket_is_allocated_in_a_step_if_all_are_to_live_on(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_memory, "KEPT_FROM_NBYTES", 32 * 2**20)
    torch._dynamo.reset()
    training = Training(bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    with nullcontext() if captured else torch.compiler.set_stance("force_eager"):  # then hooks reduce
        gradients = [each.data_ptr() for each in training.step(0)]
        where, memory = training.kept, replica_of(training.model).state.bucket_memory
        assert memory.nbytes == sum(bucket.numel * 4 for bucket in training.plan)
        assert len(memory.kept) == len(training.plan) > 2
        for seed in range(1, 4):
            now = [each.data_ptr() for each in training.step(seed)]
            assert training.kept == where
            assert now == gradients or not captured  # else the average is copied to what autograd allocates
        said = dp_compile.report(training.model)
        assert said.memory == "memory that backwards use again: 21.4 KiB of 3 buckets"
        assert set(said.backwards) == {"captured" if captured else "eager hooks"}
        kept = training.step(4)
        values = [each.clone() for each in kept]
        training.step(5)
    for gradient, value in zip(kept, values, strict=True):
        assert torch.equal(gradient, value)


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_no_bucket_lives_on_if_none_is_to() -> None:
    training = Training(gradient_as_bucket_view=False)
    training.step(0)
    assert not training.kept


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_two_modules_in_one_backward() -> None:
    one, other = Training(), Training(bucket_cap_mb=0.002)
    for seed in range(3):
        for each in (one, other):
            each.model.zero_grad()
        (one.run(batch(seed)).square().mean() + other.run(batch(seed)).square().mean()).backward()
        for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]
    assert len(one.kept) == 1
    assert len(other.kept) == len(other.plan)


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_memory_goes_with_the_module_and_with_the_plan() -> None:
    training = Training()
    training.step(0)
    model = weakref.ref(training.model)
    (kept,) = replica_of(training.model).state.bucket_memory.kept.values()
    assert storages.holders(kept.memory) != kept.alone
    training.model.zero_grad()
    assert storages.holders(kept.memory) == kept.alone
    memory = weakref.ref(kept.memory)
    del training, kept
    gc.collect()
    assert model() is None
    assert memory() is None


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_the_memory_is_there_before_anything_is_written_to_it() -> None:
    """Also where Inductor moves collectives and what they need."""
    with inductor_config.patch(reorder_for_compute_comm_overlap=True, fx_graph_cache=False):
        _, codes = run_and_get_code(lambda: Training(bucket_cap_mb=0.002).step(0))
    (code,) = (each for each in codes if "bucket_memory" in each)
    body = code.split("def call(self, args):")[1].splitlines()
    calls = [number for number, line in enumerate(body) if "bucket_memory" in line]
    writes = [number for number, line in enumerate(body) if "reinterpret_tensor(" in line and "alias" in line]
    assert len(calls) > 1
    assert max(calls) < min(writes)
    assert "empty_strided_cpu((5" not in code  # the larger bucket is allocated nowhere else
