"""Memory of large buckets is that of the backward before, unless it is still read; gradients in their own memory."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from graphs import trace
from parity import expect_average
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code

import dp_compile
from dp_compile._torch import autograd
from dp_compile.passes import memory as bucket_memory
from dp_compile.passes.memory import BucketMemory
from dp_compile.passes.pipeline import copy_what_is_returned_twice
from dp_compile.replication.module import replica_of

CPU = torch.device("cpu")
ROWS, WIDTH = 300, 16


class Words(nn.Module):
    """An embedding, whose gradient is scattered, and two products."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.head(self.hidden(self.words(x)).tanh())


def batch(seed):
    return torch.randint(0, ROWS, (4, 7), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def code_of_kept():
    """Code for memory that is used again, made once for all tests: no key of Inductor's cache knows of the limit."""
    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        patch.setattr(bucket_memory, "KEPT_FROM_NBYTES", 0)
        yield


@pytest.fixture
def all_are_kept(code_of_kept):
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["untyped_storage", "storage", "numpy", "detach", "__dlpack__"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_whatever_looks_at_the_memory_keeps_it(kind):
    memory = BucketMemory()
    gradient = memory.take(0, 8, torch.float32, CPU).fill_(1.0)
    where, held = gradient.data_ptr(), getattr(gradient, kind)()
    del gradient
    now = memory.take(0, 8, torch.float32, CPU).data_ptr()
    assert now != where
    assert memory.take(0, 8, torch.float32, CPU).data_ptr() == now
    assert memory.take(1, 8, torch.float32, CPU).data_ptr() not in (where, now)
    del held


def test_who_lets_go_in_a_moment_is_waited_for(monkeypatch):
    """A thread of gloo's does, after it has said that it is done."""
    memory = BucketMemory()
    held = [memory.take(0, 8, torch.float32, CPU)]
    where = held[0].data_ptr()
    monkeypatch.setattr(bucket_memory.time, "sleep", lambda _: held.clear())
    assert memory.take(0, 8, torch.float32, CPU).data_ptr() == where


def test_what_another_process_may_look_at_is_not_used_again(monkeypatch):
    """Asked last: a thread that sends a gradient away may let go of it between two questions."""
    memory = BucketMemory()
    assert memory.take(0, 8, torch.float32, CPU).share_memory_().is_shared()
    assert not memory.take(0, 8, torch.float32, CPU).is_shared()
    (kept,) = memory.kept.values()

    def shared_meanwhile(tensor):
        if tensor is kept.memory:
            tensor.share_memory_()
        return kept.alone

    monkeypatch.setattr(autograd, "holders", shared_meanwhile)
    assert not memory.take(0, 8, torch.float32, CPU).is_shared()


def grads(model):
    return [parameter.grad for parameter in model.parameters()]


class Training:
    """A replicated model beside a plain one; on the fake group its gradients are half of the plain one's."""

    def __init__(self, **options):
        self.model = Words()
        self.plain = copy.deepcopy(self.model)
        dp_compile.replicate(self.model, **options)
        self.run = torch.compile(self.model)

    def step(self, seed, *, to_none=True):
        """The gradients of a step."""
        self.model.zero_grad(set_to_none=to_none)
        self.plain.zero_grad()
        self.run(batch(seed)).square().mean().backward()
        self.plain(batch(seed)).square().mean().backward()
        expect_average(self.model, self.plain)
        return grads(self.model)

    @property
    def plan(self):
        return dp_compile.report(self.model).plan.buckets

    @property
    def kept(self):
        """Where the memory lies that is kept."""
        return [each.memory.data_ptr() for each in replica_of(self.model).state.bucket_memory.kept.values()]


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_the_same_memory_in_each_step():
    training = Training(bucket_cap_mb=0.002)
    where = [each.data_ptr() for each in training.step(0)]
    assert len(training.kept) == len(training.plan) > 1
    for seed in range(1, 5):
        assert [each.data_ptr() for each in training.step(seed)] == where
    said = str(dp_compile.report(training.model))
    assert "memory that backwards use again: 21.4 KiB of 2 buckets" in said
    assert "computed in their buckets: 100.0%" in said  # rows of the embedding are added there, too


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_a_gradient_that_somebody_kept_stays_what_it_was():
    training = Training()
    training.step(0)
    kept = training.step(1)
    values = [each.clone() for each in kept]
    for seed in (2, 3):
        training.step(seed)
    assert all(map(torch.equal, kept, values))
    where = training.kept
    del kept
    training.step(4)
    assert training.kept == where
    other = Training(gradient_as_bucket_view=False)
    other.step(0)
    assert not other.kept


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("captured", [True, False])
def test_no_bucket_is_allocated_in_a_step_if_all_are_to_live_on(captured, monkeypatch):
    monkeypatch.setattr(bucket_memory, "KEPT_FROM_NBYTES", 32 * 2**20)
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
        assert said.notes == ("memory that backwards use again: 21.4 KiB of 3 buckets",)
        assert set(said.backwards) == {"captured" if captured else "eager hooks"}
        kept = training.step(4)
        values = [each.clone() for each in kept]
        training.step(5)
    assert all(map(torch.equal, kept, values))


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_two_modules_in_one_backward():
    one, other = Training(), Training(bucket_cap_mb=0.002)
    for seed in range(3):
        for each in (one, other):
            each.model.zero_grad()
        (one.run(batch(seed)).square().mean() + other.run(batch(seed)).square().mean()).backward()
        torch.testing.assert_close(grads(one.model), grads(other.model), rtol=0, atol=0)
    assert len(one.kept) == 1
    assert len(other.kept) == len(other.plan)


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_memory_goes_with_the_module_and_with_the_plan():
    training = Training()
    training.step(0)
    model = weakref.ref(training.model)
    (kept,) = replica_of(training.model).state.bucket_memory.kept.values()
    assert autograd.holders(kept.memory) != kept.alone
    training.model.zero_grad()
    assert autograd.holders(kept.memory) == kept.alone
    memory = weakref.ref(kept.memory)
    del training, kept
    gc.collect()
    assert model() is None
    assert memory() is None


@pytest.mark.usefixtures("fake_group", "all_are_kept")
def test_the_memory_is_there_before_anything_is_written_to_it():
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


@pytest.mark.parametrize("function", [lambda x: [x.sum(0)] * 2, lambda x: [(double := x * 2)[:2], double[1:]]])
def test_what_is_returned_in_one_memory_is_copied_once(function):
    x = torch.randn(4, 3)
    module = trace(function, x)
    copy_what_is_returned_twice(module.graph)
    module.graph.lint()
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == 1
    found = module(x)
    torch.testing.assert_close(found, function(x), rtol=0, atol=0)
    for each in found:
        each.fill_(7.0)  # of no other
        assert sum(bool((one == 7.0).any()) for one in found) == 1
        each.fill_(0.0)


class Twice(nn.Module):
    """A weight and what is added to it have one gradient; that of `whole` is what theirs is computed from."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.more = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        self.whole, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.zeros(6))
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        x = nn.functional.linear(x, self.weight + self.more) + self.whole + self.bias
        return self.last(torch.tanh(x))


def loss_of(model, number):
    return model(0.01 * torch.randn(4, 6, generator=torch.Generator().manual_seed(number))).square().sum()


def test_gradients_that_are_clipped(fake_group):
    """Of parameters beside the replicated module, in the same captured backward."""
    models = [nn.Sequential(Twice(), nn.Linear(6, 6)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    replicated = dp_compile.replicate(models[0][1])
    for run, model in ((torch.compile(models[0]), models[0]), (models[1], models[1])):
        loss_of(run, 0).backward()
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
    torch.testing.assert_close(grads(models[0][0]), grads(models[1][0]))
    assert dict(dp_compile.report(replicated).backwards) == {"captured": 1}


class Viewed(nn.Module):
    """The gradient of one weight is a view of the other's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.square, self.flat = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(36))

    def forward(self, x):
        return torch.sin(x @ (self.square + self.flat.view(6, 6)))


def test_gradients_that_are_added_to(fake_group):
    """`torch.compile` alone is wrong here."""
    model, plain = Viewed(), Viewed()
    run = torch.compile(dp_compile.replicate(model))
    for number in range(2):
        with dp_compile.no_sync(model):
            loss_of(run, number).backward()
        loss_of(plain, number).backward()
    torch.testing.assert_close(grads(model), grads(plain))
