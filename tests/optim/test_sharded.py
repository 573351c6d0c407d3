"""A sharded optimizer: where its parts lie and go, checkpoints, and what is refused. `test_ways.py` has the numbers."""

import copy
import itertools
import pickle
import time
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from parity import batch, poisoned
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from twins import ADAMW, SGD, SMALL, Last, Net, assert_same, made

import dp_compile
from dp_compile.optim import full_state_dict
from dp_compile.optim import shard as sharded_optimizer
from dp_compile.optim.shard import Shard
from dp_compile.optim.shards import pieces_of
from dp_compile.passes.memory import BucketMemory
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, GradientSpec, plan_buckets
from dp_compile.plan.reduction import Averaging
from dp_compile.replication.module import replica_of

sharded, one_group = partial(made, "sharded"), partial(torch.optim.AdamW, lr=0.01)


def refuse(attempts):
    for text, attempt in attempts:
        with pytest.raises(dp_compile.DPCompileError, match=text):
            attempt()


@pytest.mark.parametrize(
    ("max_norm", "wish"),
    [(0.05, None), *(pytest.param(None, wish, marks=pytest.mark.nightly) for wish in (None, False))],
)
@on_ranks("ranks")
def test_generated_code(max_norm, wish):
    """Through Inductor, in its own memory, or in that of the step before."""
    config = dp_compile.ReplicateConfig(bucket_cap_mb=1e-4, gradient_as_bucket_view=wish)
    both = sharded(make=ADAMW, config=config, max_norm=max_norm)
    memory, where = replica_of(both.ours).state.bucket_memory, list[dict[Any, int]]()
    for number in range(6):
        both.train(number)
        where.append({key: kept.memory.data_ptr() for key, kept in memory.kept.items()})
    expected = set[tuple[int, int]]()
    for number, bucket in enumerate(dp_compile.report(both.ours).plan.buckets if wish is not False else ()):
        expected.add((number, bucket.numel))
    assert {key[:2] for key in where[-1]} == expected
    for key in where[-1]:  # a thread of gloo's may have it for longer now and then
        addresses = [each[key] for each in where]
        assert any(one == other for one, other in itertools.pairwise(addresses)), (key, addresses)
    assert both.updated == 10


@on_ranks("ranks2")
def test_no_gap_is_sent_where_somebody_looks_for_nan():
    """What lies in gaps is not defined; where NCCL looks for NaN in all that it sends, zeros."""
    launched = []
    launch = sharded_optimizer.launch_gather

    def seen(stage, gathered):
        launched.append(gathered.clone())
        return launch(stage, gathered)

    def garbage(self, number, numel, dtype, device):
        return torch.full((numel,), torch.nan, dtype=dtype, device=device)

    with (
        mock.patch.dict("os.environ", TORCH_NCCL_NAN_CHECK="1"),
        mock.patch.object(sharded_optimizer, "launch_gather", seen),
        mock.patch.object(BucketMemory, "take", garbage),
    ):
        both = sharded(make=ADAMW)
        both.train(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert all(each.view(ranks, -1)[rank].isfinite().all() for each in launched)
    assert len(launched) > 1


def one_small_part():
    """Ranks without a piece take part in all, with a scaler too."""
    sharded(lambda: nn.Linear(6, 1, bias=False), one_group, scaled=True, max_norm=0.05).train(0, 1)


class HalfFirst(nn.Module):
    """Its first parameter is narrower than the norm of all gradients is large."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Parameter(torch.zeros(6).half()), nn.Linear(6, 6)

    def forward(self, x):
        return self.rest(x) * 1e3 + self.first.float()


def norm_of_two_dtypes():
    both = sharded(HalfFirst, make=lambda each: torch.optim.SGD(each, lr=0.1), max_norm=1.0)
    both.train(0, 1)
    assert both.mine.total_norm > 1e5


@pytest.mark.parametrize("scenario", [one_small_part, norm_of_two_dtypes])
def test_a_module_smaller_than_its_padding_and_one_of_two_dtypes(ranks2, scenario):
    ranks2.run(scenario)


@on_ranks("ranks")
def test_what_is_not_there_is_said():
    """Never a norm of 0, a state without its other parts, a step of a rank's own."""
    both = sharded(make=ADAMW)
    both.train(0)
    both.backward(1)
    parameters = [*both.ours.parameters()]
    attempts = [
        ("max_norm=", lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)),
        ("max_norm=", lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0)),
        ("max_norm=", lambda: [each.grad.norm() for each in parameters if each.grad is not None]),
        ("full_state_dict", lambda: both.mine.state_dict()),
        ("full_state_dict", lambda: copy.deepcopy(both.mine)),
        ("full_state_dict", lambda: pickle.dumps(both.mine)),
        (r"before optimizer.step\(\)", lambda: both.backward(2)),
    ]
    refuse(attempts)
    for keep in (True, False):
        both.mine.zero_grad(set_to_none=keep is False)
    both.mine.step()
    both.other.step()
    both.other.zero_grad()
    both.compare()
    parameters[0].grad = torch.ones_like(parameters[0])
    with pytest.raises(dp_compile.ReductionError, match="not the result of a synchronised backward"):
        both.mine.step()
    parameters[0].grad = None
    both.train(2)


OTHERS = (("sharded", 0.05), ("next forward", None))


@pytest.mark.parametrize(
    ("way", "max_norm"), [("sharded", None), *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHERS)]
)
@on_ranks("ranks")
def test_parameters_in_other_memory(way, max_norm):
    config = dp_compile.ReplicateConfig(backend="aot_eager")
    both = made(way, make=ADAMW, config=config, max_norm=max_norm)
    both.train(*range(6))
    both.ours.to(torch.float32)
    for each in both.ours.parameters():
        each.data = each.data.clone()  # other memory
    both.train(6)
    fixed = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=25)
    other = made(way, make=ADAMW, config=fixed, max_norm=max_norm)
    other.train(*range(7))
    if max_norm is None:
        assert_same(full_state_dict(both.mine), full_state_dict(other.mine))


@pytest.mark.parametrize("way", ["sharded", "next forward"])
@on_ranks("ranks")
def test_parameters_are_waited_for(way):
    """The other ranks are there long before the last one sends what it has updated."""
    gather = Shard._gather

    def late(self, *args):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.3)
        gather(self, *args)

    with poisoned(), mock.patch.object(Shard, "_gather", late):
        both = made(way, make=ADAMW)
        both.run(batch(0)).square().mean().backward()
        found = [each.detach().clone() for each in both.ours.parameters()]
    both.backward_of_theirs(0)
    both.other.step()
    torch.testing.assert_close(found, list(both.theirs.parameters()))


@on_ranks("ranks")
def test_a_state_of_a_plain_optimizer_and_back():
    both = sharded(make=ADAMW)
    both.train(0, 1)
    assert_same(full_state_dict(both.mine), both.other.state_dict())
    assert (full_state_dict(both.mine, to=0) == {}) is (dist.get_rank() != 0)
    both.train(2)
    again = sharded(make=ADAMW)
    for model in (again.ours, again.theirs):
        model.load_state_dict(both.ours.state_dict())
    # From sharded to plain, from plain to sharded.
    again.other.load_state_dict(full_state_dict(both.mine))
    again.mine.load_state_dict(both.other.state_dict())
    for number in (3, 4):
        both.train(number)
        again.train(number)
    assert all(map(torch.equal, both.ours.parameters(), again.ours.parameters()))
    state = copy.deepcopy(both.other.state_dict())
    moments = next(each for each in state["state"].values() if each["exp_avg"].numel() > 1)
    moments["exp_avg"] = moments["exp_avg"].flatten()[:1].view([1] * moments["exp_avg"].dim())
    with pytest.raises(dp_compile.ConfigError, match=r"exp_avg of shape \[1"):
        both.mine.load_state_dict(state)
    with pytest.raises(dp_compile.ConfigError, match="must be a rank"):
        full_state_dict(both.mine, to=9)


STATES = {"sgd": (Net, SGD), "channels last": (Last, ADAMW)}


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.nightly), "channels last"])
@on_ranks("ranks4")
def test_saved_on_four_ranks_and_loaded_on_two_and_on_one(tmp_path, name):
    """As a whole, through torch's distributed checkpoint; fewer ranks go on from it, whose buckets are others."""
    torch.manual_seed(1)
    build, make = STATES[name]
    both = sharded(build, make)
    both.train(0, 1)
    state = full_state_dict(both.mine)
    plain = make(both.ours.parameters())
    plain.load_state_dict(copy.deepcopy(state))
    dcp.save({"by number": state, "by name": get_optimizer_state_dict(both.ours, plain)}, checkpoint_id=str(tmp_path))
    for group in [dist.new_group([0, 1]), dist.new_group([2])]:
        if dist.get_rank() not in dist.get_process_group_ranks(group):
            continue
        for way in ("by number", "by name"):
            torch._dynamo.reset()
            model = build()
            dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"), process_group=group)
            optimizer, plain = make(model.parameters()), make(model.parameters())
            dp_compile.optim.in_backward(model, optimizer, shard=True)
            for each in optimizer.param_groups:
                each["lr"] = 7.0
            by_name = get_optimizer_state_dict(model, plain)  # gives `plain` a state, to be loaded into
            loaded = {way: plain.state_dict() if way == "by number" else by_name}
            dcp.load(loaded, checkpoint_id=str(tmp_path), process_group=group)
            if way == "by name":
                set_optimizer_state_dict(model, plain, loaded[way])
                loaded[way] = plain.state_dict()
            optimizer.load_state_dict(loaded[way])
            assert_same(full_state_dict(optimizer), state)
            model(batch(0)).square().mean().backward()  # another plan: the state moves
            optimizer.step()
            assert len(full_state_dict(optimizer)["state"]) == len(state["state"])


def turn(model):
    return model.to(memory_format=torch.channels_last if model.stem.weight.is_contiguous() else torch.contiguous_format)


@on_ranks("ranks2")
def test_another_memory_format():
    """Parameters whose elements lie otherwise than their gradients."""
    both = sharded(Last, make=one_group)
    both.train(0)
    turn(both.ours)
    late = dp_compile.replicate(Last(), config=SMALL)
    turn(late)
    in_late = partial(dp_compile.optim.in_backward, late, one_group(late.parameters()), shard=True)
    refuse([("the strides of stem.weight are", lambda: both.backward(1)), ("the strides of stem.weight are", in_late)])
    turn(both.ours)
    both.other.zero_grad()
    both.train(1)


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.usefixtures("fake_group")
def test_what_is_refused():
    def ready(build=Net, **options):
        return dp_compile.replicate(build(), **{"config": SMALL} | options)

    def shard(model, kind=torch.optim.AdamW):
        return dp_compile.optim.in_backward(model, kind(model.parameters(), lr=0.1), shard=True)

    def foreign():
        model = ready()
        everything = [*model.parameters(), nn.Parameter(torch.ones(2))]
        dp_compile.optim.in_backward(model, torch.optim.SGD(everything, lr=0.1), shard=True)

    hooked, twice, joined = ready(), ready(), ready()
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    parameters = [*twice.parameters()]
    dp_compile.optim.in_backward(twice, torch.optim.SGD(parameters[:4], lr=0.1), shard=True)
    shard(joined)
    attempts = [
        ("comm hook", lambda: shard(hooked)),
        ("factor is complex", lambda: shard(ready(Complex))),
        ("is not in the module", foreign),
        (
            "has a sharded optimizer already",
            lambda: dp_compile.optim.in_backward(twice, torch.optim.SGD(parameters[4:], lr=0.1), shard=True),
        ),
        ("needs whole gradients", lambda: joined.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    ]
    refuse(attempts)


def plan_of(numels, ranks, alignment_bytes, backend=GLOO):
    keys = [
        BucketKey(Averaging(scattered=scattered).reduction("g", backend, ranks, "float32"), "float32", "cpu")
        for scattered in (True, False)
    ]
    specs = [GradientSpec(index, f"p{index}", (numel,), (1,), 4, keys[0]) for index, numel in enumerate(numels)]
    flags = GradientSpec(len(specs), UNUSED_FLAGS, (9,), (1,), 4, keys[1])
    caps = {"bucket_cap_mb": 2e-4, "first_bucket_cap_mb": 1e-4}
    return plan_buckets([*specs, flags], **caps, alignment_bytes=alignment_bytes)


@given(st.lists(st.integers(0, 150), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([1, 16, 64]))
def test_every_element_is_one_rank_s(numels, ranks, alignment_bytes):
    plan = plan_of(numels, ranks, alignment_bytes)
    met = Counter[tuple[int, int]]()
    for rank in range(ranks):
        for number, piece in ((number, each) for number, (own, _) in pieces_of(plan, rank).items() for each in own):
            met.update((piece.index, element) for element in range(piece.start, piece.stop))
            bucket = plan.buckets[number]
            (member,) = [each for each in bucket.members if each.gradient.index == piece.index]
            # Where the reduce-scatter puts it: parts follow each other.
            assert piece.offset == member.offset + piece.start
            assert rank * bucket.numel // ranks <= piece.offset
            assert piece.offset + piece.numel <= (rank + 1) * bucket.numel // ranks
    assert met == Counter((index, element) for index, numel in enumerate(numels) for element in range(numel))
