"""Updates that are left for the next forward: the same bits as without, for every reader; and what is refused.

All of it runs with parameters that are NaN as long as their update is in flight: who reads one too early sees it.
"""

import copy
import gc
import pickle
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import batch, poisoned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from twins import ADAMW, SGD, SMALL, Net, id_of, made, two_groups

import dp_compile
import dp_compile.plan.crossing
from dp_compile._torch import inductor
from dp_compile.averaging import PeriodicModelAverager
from dp_compile.optim.deferred import PendingUpdate
from dp_compile.passes.crossing import in_flight

OPTIMIZERS = {
    "sgd": SGD,
    "adamw": ADAMW,
    "adamw with a tensor for its rate": two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True),
}
LEFT = 4
"""Buckets of `Tied`, without that of the flags."""


IN_PLACE = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 compiles nothing of a module of torch.nn that is compiled in place (pytorch#132923)",
)


class Tied(Net):
    """The first weight and the scale are read once more at the very end."""

    def __init__(self):
        super().__init__(tied=True)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = super().forward(x * self.scale) @ self.layers[0].weight.t()
        return x * self.scale


def crossing(build=Tied, make=SGD, *, shard=False, **options):
    return made("next forward" if shard else "overlapping", build, make, **options)


def left():
    """How many buckets are in flight in this process."""
    return len({id(each) for each in in_flight.values()})


def go(both, number):
    """A step; the ranks are late in turns."""
    if dist.get_rank() == number % dist.get_world_size():
        time.sleep(0.02)
    both.backward(number)
    both.step()


def train(build, name, config, **options):
    what = "all-gather" if options.get("shard") else "update"
    with poisoned():
        both = crossing(build, OPTIMIZERS[name], config=config, **options)
        both.nearly |= config.backend == "inductor"  # other buckets, other kernels, other rounding
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (both.mine, both.other)]
        counts = set()
        for number in range(6):
            go(both, number)
            counts.add(left())
            assert f"left {left()} {what}" in dp_compile.report(both.ours).updates
            for scheduler in schedulers:
                scheduler.step()  # the update that is in flight is one of the rate before
        both.compare()
        assert not in_flight
    assert len(dp_compile.report(both.ours).captures) == 1
    return counts


HALF = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
CELLS = {
    "adamw with a tensor for its rate": ("adamw with a tensor for its rate", SMALL, {}, LEFT),
    "generated code": ("adamw", replace(SMALL, backend="inductor"), {}, LEFT),
    "sharded and clipped": ("adamw", SMALL, {"shard": True, "max_norm": 0.05}, LEFT),
    "bf16 on the wire, unused are found": ("sgd", replace(SMALL, mp_policy=HALF), {"find_unused_parameters": True}, 1),
}
"""The optimizer, options, and at least how many buckets are in flight after each step."""


@pytest.mark.parametrize(
    "cell", [pytest.param(each, marks=[pytest.mark.nightly] * (each == "generated code")) for each in CELLS]
)
def test_the_same_bits_as_without(ranks, cell):
    """Two groups and a scheduler; every bucket but that of the flags is in flight after each step."""
    name, config, options, least = CELLS[cell]
    for counts in ranks.run(partial(train, Tied, name, config, **options)):
        assert min(counts) == LEFT if least == LEFT else min(counts) >= least


@on_ranks("ranks2")
def test_what_is_read_first_goes_round_first():
    """The last layers are in the first bucket, the scale of the input in the last one."""
    both = crossing(make=ADAMW, shard=True)
    go(both, 0)
    found = [each.buckets for each in dict.fromkeys(in_flight.values())]
    dp_compile.optim.synchronize(both.ours)
    assert found == [(3,), (2,), (1,), (0,)]


def visited(model):
    found = []

    def visit(part):
        found.extend(each.detach().clone() for each in part._parameters.values() if each is not None)

    model.apply(visit)
    return found


def in_double(model):
    found = [each.detach().clone() for each in model.double().parameters()]
    model.float()
    return found


READERS = {
    "parameters": lambda model, run: [each.detach().clone() for each in model.parameters()],
    "synchronize": lambda model, run: (dp_compile.optim.synchronize(model), model.layers[1].weight.detach().clone())[1],
    "state dict of a part": lambda model, run: model.layers[2].state_dict(),
    "a pickle": lambda model, run: list(pickle.loads(pickle.dumps(model)).state_dict().values()),
    "one by its name": lambda model, run: model.get_parameter("layers.1.weight").detach().clone(),
    "every part": lambda model, run: visited(model),
    "another dtype": lambda model, run: in_double(model),
    "a call that is not compiled": lambda model, run: model(batch(77)),
    "a call of a part": lambda model, run: model.layers[1](batch(77)),
    "evaluation": lambda model, run: evaluated(model, run),
    "inference mode": lambda model, run: evaluated(model, run, torch.inference_mode),
    "an averager": lambda model, run: averaged_in_place(model),
    "fake tensors": lambda model, run: beside_fake_tensors(model),
    # It refuses writes to tensors from outside of it; vmap does not.
    "torch.func.grad": lambda model, run: torch.func.grad(lambda x: model(x).square().sum())(batch(77)),
    "code of another backend": lambda model, run: torch.compile(penalty, backend="aot_eager")(model),
    "a graph that breaks": lambda model, run: torch.compile(Broken(model), backend="dp_compile")(batch(77)),
}


def averaged_in_place(model):
    PeriodicModelAverager(1).average_parameters([model.layers[1].weight])
    return model.get_parameter("layers.1.weight").detach().clone()


def beside_fake_tensors(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        list(model.parameters())
    return model.layers[1].weight.detach().clone()


def penalty(model):
    return sum(each.square().sum() for each in model.parameters())


class Broken(nn.Module):
    """What is between the two graphs reads a parameter past its module."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        x = self.model.layers[3](x)
        torch._dynamo.graph_break()
        return x + self.model.layers[1].bias


def evaluated(model, run, mode=torch.no_grad):
    model.eval()
    with mode():
        result = run(batch(77)).clone()
    model.train()
    return result


IN_PIECES = "a graph that breaks"  # compiled by Inductor, theirs too
WHOLE = tuple(name for name in READERS if name != IN_PIECES)
EAGER = tuple(name for name in WHOLE if name not in ("evaluation", "inference mode", "another dtype"))


@pytest.mark.parametrize(
    ("names", "shard"),
    [(WHOLE, False), (EAGER, True), pytest.param((IN_PIECES,), False, marks=pytest.mark.nightly)],
    ids=["whole", "sharded", "in pieces"],
)
@on_ranks("ranks2")
def test_readers_wait(names, shard):
    """Each after a step, in turns: what comes first may leave something for the next one."""
    with poisoned():
        both = crossing(make=ADAMW, shard=shard, compile_theirs=not shard)
        for number, name in enumerate((*names, *names)):
            go(both, number)
            assert left() == LEFT, name
            found, expected = READERS[name](both.ours, both.run), READERS[name](both.theirs, both.run_theirs)
            bounds = {} if name == IN_PIECES else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found, expected, **bounds, msg=lambda text, n=name: f"{n}: {text}")
        go(both, 2 * len(names))
        both.compare()


@torch._dynamo.disable
def bias_of(model):
    """Read past the module."""
    return model.layers[1].bias.detach().clone()


class Reads(Net):
    """In the middle of its forward something reads a parameter that Dynamo does not see."""

    breaks = True

    def forward(self, x):
        if self.breaks:
            x = x * 2 + bias_of(self)  # after a graph without parameters
        return super().forward(x)


class ReadsFirst(Reads):
    """Before anything is computed: there is no graph in front of it."""

    def forward(self, x):
        return Net.forward(self, x + bias_of(self) if self.breaks else x)


@pytest.mark.parametrize(
    ("build", "breaks"), [(Reads, [False, True, True, False]), (ReadsFirst, [False, True, False, True])]
)
@on_ranks("ranks2")
def test_what_is_read_between_the_pieces_of_a_forward(build, breaks):
    """Only a forward that is one graph lets updates stay; one that breaks waits at its start, as all after it."""
    # Its pieces are run as they are, and not by Inductor.
    with poisoned(), mock.patch.object(inductor, "compile_forward_with_inductor", lambda piece, *_: piece):
        both, counts = crossing(build), []
        both.nearly = True
        for number, each in enumerate(breaks):
            both.ours.breaks = both.theirs.breaks = each
            go(both, number)
            counts.append(left())
        both.compare()
    assert [count == 0 for count in counts] == [True in breaks[: number + 1] for number in range(len(breaks))]


def compiled_by_itself(part, how):
    if how == "by another backend":
        return torch.compile(lambda x: part(x) + 0, backend="aot_eager")
    if how == "in place":  # Dynamo leaves the forwards of torch's own modules alone then
        part.compile(backend="dp_compile")
        return part
    return torch.compile(lambda x: part(x), backend="dp_compile")  # code that is not the module's


@pytest.mark.parametrize(
    ("how", "before"),
    [
        ("in place", True),
        ("in other code", True),
        ("by another backend", True),
        pytest.param("in place", False, marks=IN_PLACE),
    ],
)
@on_ranks("ranks2")
def test_parts_that_are_compiled_by_themselves(how, before):
    """Code of parts from before `in_backward`, which does not wait, or from after a copy, which takes hooks off."""
    with poisoned():
        calls = []

        def compile_parts(model):
            calls.append(compiled_by_itself(model.layers[1], how))
            calls[-1](batch(77))

        both = crossing(prepare=compile_parts if before else lambda model: None)
        if not before:
            copy.deepcopy(both.ours)
            both.run = both.ours
            for model in (both.ours, both.theirs):
                both.run(batch(1))
                compile_parts(model)
        for number in range(2):
            go(both, number)
            assert left() == LEFT
            if how == "by another backend":
                with pytest.raises(Exception, match=r"torch.compile\(model, backend='dp_compile'\)"):
                    calls[0](batch(77))
            else:
                torch.testing.assert_close(calls[0](batch(77)), calls[1](batch(77)))
            both.compare()


def of_other_sizes(dynamic, sizes, expected):
    """Compiled again too often Dynamo leaves the forward alone: it read its own parameter before any hook of a part."""
    with poisoned(), torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both, counts = crossing(), []
        both.run, both.nearly = torch.compile(both.ours, backend="dp_compile", dynamic=dynamic), True
        for number, rows in enumerate(sizes):
            x = torch.cat([batch(number)] * rows)
            both.run(x).square().mean().backward()
            both.run_theirs(x).square().mean().backward()
            both.step()
            counts.append(left())
        both.compare()
    assert counts == expected


class Body(Net):
    """The loss reads its head, the forward does not."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5)


def head_outside():
    with poisoned():
        both = crossing(Body)
        both.nearly = True
        for number in range(3):
            for model, run in ((both.ours, both.run), (both.theirs, both.run_theirs)):
                nn.functional.linear(run(batch(number)), model.head.weight, model.head.bias).square().mean().backward()
            both.step()
            assert left() > 0
        both.compare()


@pytest.mark.parametrize(
    ("way", "expected"),
    [("not compiled", [0, 0, 0]), pytest.param("in parts", [LEFT] * 3, marks=IN_PLACE), ("in turns", [0, LEFT, 0])],
)
@on_ranks("ranks2")
def test_behind_other_forwards_the_step_or_their_start_waits(way, expected):
    with poisoned(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both = crossing()
        both.nearly = True
        if way == "in parts":
            for layer in both.ours.layers:
                layer.compile(backend="dp_compile")
        counts = []
        for number in range(3):
            mine = both.ours if number != 1 or way != "in turns" else both.run
            loss = mine(batch(number)).square().mean()
            loss.backward()
            both.backward_of_theirs(number)
            both.step()
            counts.append(left())
            both.compare()
    assert counts == expected


def other_backends():
    """Another one is refused, and so are CUDA graphs."""
    both = crossing()
    with pytest.raises(Exception, match=r"CUDA graphs.*overlap_forward=True"):
        torch.compile(both.ours, backend="dp_compile", mode="reduce-overhead")(batch(0))
    go(both, 0)
    with pytest.raises(Exception, match=r"overlap_forward=True.*torch.compile\(model, backend='dp_compile'\)"):
        torch.compile(both.ours, backend="aot_eager")(batch(0))
    go(both, 1)
    both.compare()


def written(way):
    """The update would be of what was there before, or what was written lost, or missing on one rank."""
    both = crossing(shard=way == "written to, sharded")
    go(both, 0)
    state = copy.deepcopy((both.ours.state_dict(), dp_compile.optim.full_state_dict(both.mine)))
    go(both, 1)
    weight = both.ours.layers[1].weight
    if way.startswith("written to"):
        with torch.no_grad():
            weight.zero_()
    elif way == "elsewhere":
        weight.data = weight.data.clone()
    else:
        both.mine.state[weight]["momentum_buffer"] = torch.zeros(5)
    with pytest.raises(Exception) as error:  # noqa: PT011
        both.run(batch(2))
    assert ("synchronize(model)" in str(error.value)) is (way != "its update fails")
    for attempt in (lambda: both.run(batch(2)).sum().backward(), both.mine.step):
        with pytest.raises(Exception, match="load_state_dict"):
            attempt()
    for model, optimizer in ((both.ours, both.mine), (both.theirs, both.other)):
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))
    go(both, 3)
    both.compare()


def dropped(shard):
    """A module that goes takes what is in flight with it."""
    with poisoned():
        both = crossing(shard=shard)
        go(both, 0)
        assert left() == LEFT
        dp_compile.unreplicate(both.ours)
        assert left() == 0
        assert b"dp_compile" not in pickle.dumps(both.ours.layers[0])
        assert all(map(torch.equal, both.ours.parameters(), both.theirs.parameters()))
        again = crossing(shard=shard)
        go(again, 0)
        assert left() == LEFT
        del both, again
        gc.collect()
        assert left() == 0


def one_of_two_removed():
    """State dicts still wait for the updates of the other optimizer."""
    with poisoned():
        model = dp_compile.replicate(Net(), config=SMALL)
        first, *others = model.parameters()
        optimizers = SGD([first]), SGD(others)
        for each in optimizers:
            dp_compile.optim.in_backward(model, each, overlap_forward=True)
        torch.compile(model, backend="dp_compile")(batch(0)).square().mean().backward()
        for each in optimizers:
            each.step()
        dp_compile.optim.remove_in_backward(optimizers[0])
        assert left() > 0
        assert not any(each.isnan().any() for each in model.state_dict().values())


def lost():
    """Of a lost rank what the first wait raises is raised, though the others raise too; nothing stays in flight."""
    both = crossing()
    go(both, 0)
    assert left() > 1
    wait = PendingUpdate.wait

    def again(self):
        wait(self)
        raise RuntimeError("Operation timed out! again")

    failed = mock.Mock(side_effect=RuntimeError("Operation timed out!"))  # gloo's
    with mock.patch.object(PendingUpdate, "finish", failed), mock.patch.object(PendingUpdate, "wait", again):
        with pytest.raises(RuntimeError) as error:
            dp_compile.optim.synchronize(both.ours)
    assert "again" not in str(error.value)
    assert left() == 0


@pytest.mark.parametrize(
    ("scenario", "args"),
    [
        (lost, ()),
        (one_of_two_removed, ()),
        (of_other_sizes, (False, (1, 1, 2, 1), [LEFT, LEFT, 0, LEFT])),
        pytest.param(of_other_sizes, (True, (1, 2, 3, 1), [LEFT] * 4), marks=pytest.mark.nightly),
        (head_outside, ()),
        (other_backends, ()),
        (written, ("written to, sharded",)),
        (written, ("elsewhere",)),
        (written, ("its update fails",)),
        (dropped, (False,)),
        pytest.param(dropped, (True,), marks=pytest.mark.nightly),
    ],
    ids=id_of,
)
def test_one_by_one(ranks2, scenario, args):
    ranks2.run(scenario, *args)


def one_of_two(shard):
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = dp_compile.replicate(Net(), process_group=group, config=SMALL)
    text, overlaps = "", dist.get_rank() == 0
    if overlaps or shard:
        with pytest.raises(dp_compile.DPCompileError) as error:
            dp_compile.optim.in_backward(model, SGD(model.parameters()), overlap_forward=overlaps, shard=shard)
        text = str(error.value)
    dist.barrier()
    return text


def test_all_ranks_overlap_or_none(ranks2):
    assert "in_backward(overlap_forward=True): rank 1 has not called" in ranks2.run(one_of_two, False)[0]
    assert all("overlap_forward" in text for text in ranks2.run(one_of_two, True))
