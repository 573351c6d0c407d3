"""Memory of a backward: what the simulation says of small graphs, and what a real backward took."""

import gc
import json
from functools import partial

import pytest
import torch
from graphs import trace
from torch import fx, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.profiler import ProfilerActivity, profile, record_function

import dp_compile
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.fx.memory import footprint, hold

aten = torch.ops.aten
KIB = 1024


def square():
    """1 KiB."""
    return torch.randn(16, 16)


def peak(function, inputs=1, held=(), **options):
    """Of a graph of so many inputs. Options are made of the node of `cat`, else of the last one."""
    graph = trace(function, *(square() for _ in range(inputs))).graph
    hold(graph, held)
    (node,) = graph.find_nodes(op="call_function", target=aten.cat.default) or [[*graph.nodes][-2]]
    return footprint(graph, **{name: value(node) for name, value in options.items()}).peak(graph.nodes)


def products(a):
    b = a @ a
    return (b @ b) @ b


def write(a, b):
    b.copy_(a @ a)
    return (a @ a) @ (a + 1)


def parts(a, b):
    first, second = a @ a, b @ b
    return torch.cat([first, second]), b.sin()


def sums(a):
    return torch.cat([a, a, a]).cumsum(0).sum(), a @ a


def waves(a):
    return torch.cat([a.sin(), a.cos()])


@pytest.mark.parametrize(
    ("function", "inputs", "nbytes"),
    [
        (products, 1, 3 * KIB),  # mm, mm_1 and their product: inputs are freed after their last use
        (lambda a: a.t().reshape(4, 64).view(64, 4) @ a[:4], 1, 2 * KIB + 64 * 16 * 4),  # only the reshape copies
        (lambda a: (a.sin() + 1).cos().sum(), 1, KIB + 4),  # one kernel
        (lambda a: (a.sin() + 1).cos().t().sum(0), 1, KIB + 64),
        (lambda a: (a.sin() + 1) @ a, 1, 3 * KIB),  # a product reads from memory
        (lambda a: a.sin(), 1, 2 * KIB),
        (lambda a: WAIT(ALL_REDUCE(a @ a, "sum", "0")), 1, 2 * KIB),  # in place
        (write, 2, 4 * KIB),  # a, b, which is written to and stays, and two products; then the result
    ],
)
def test_what_has_memory_of_its_own(function, inputs, nbytes):
    assert peak(function, inputs) == nbytes


def test_what_is_held_kept_and_stored_by_others():
    assert peak(products, held=[True]) == 4 * KIB
    for held in ([False], [True, True]):  # the second is not of this graph's inputs
        assert peak(products, held=held) == 3 * KIB
    assert peak(sums) == 7 * KIB
    products_of = partial(fx.Graph.find_nodes, op="call_function", target=aten.mm.default)
    assert peak(sums, kept=lambda cat: products_of(cat.graph)) == 8 * KIB
    alone, in_the_whole = (peak(parts, 2, **each) for each in ({}, {"lives_in": lives_in}))
    assert (alone, in_the_whole) == (5 * KIB, 4 * KIB)
    assert peak(waves) == 4 * KIB
    assert peak(waves, stores=lambda cat: [cat]) == 3 * KIB
    assert peak(waves, without=lambda cat: [cat]) == 2 * KIB  # sin is freed before cos is made


def lives_in(cat):
    """Parts live in the whole from when the first is made."""
    return dict.fromkeys(cat.all_input_nodes, cat)


BUCKET_NBYTES = 256 * KIB
MEASURED = "the measured backward"


def peak_of_backward(wrap, path):
    """The most bytes allocated during a backward after warm-up, over those from before: 4 layers, each of a bucket.

    The profiler knows only allocations that it saw, in this thread: gloo's threads would free what stays in its totals.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
        model, x = nn.Sequential(*layers), torch.randn(512, 256)
        run = wrap(model)
        for name in ("first", "second", "third", MEASURED):
            model.zero_grad()
            loss = run(x).square().mean()
            with record_function(name):
                loss.backward()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    (backward,) = (event for event in events if event.get("name") == MEASURED and event.get("ph") == "X")
    memory = sorted(
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
    )
    _, total, nbytes = memory[0]
    end = backward["ts"] + backward["dur"]
    return max(now for time, now, _ in memory if backward["ts"] <= time <= end) - (total - nbytes)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.nightly
def test_a_backward_takes_no_more_than_torchs_ddp_and_what_was_simulated(tmp_path):
    replicated = []

    def ours(model):
        replicated.append(dp_compile.replicate(model, bucket_cap_mb=BUCKET_NBYTES / 2**20))
        return torch.compile(model)

    def ddp(model):
        reference = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        # torch's C++ reducer asks works for their result, and those of the fake group have none.
        reference.register_comm_hook(None, noop_hook)
        return torch.compile(reference)

    with torch._inductor.config.patch(fx_graph_cache=False):
        ours_nbytes = peak_of_backward(ours, tmp_path / "ours.json")
    report = dp_compile.report(replicated[0])
    replicated.clear()
    torch._dynamo.reset()
    ddp_nbytes, memory = peak_of_backward(ddp, tmp_path / "ddp.json"), report.captures[0].memory
    assert str(memory) in str(report)
    assert ours_nbytes <= ddp_nbytes
    assert memory.nbytes <= memory.ddp_nbytes
    assert abs(ours_nbytes - memory.nbytes) <= BUCKET_NBYTES // 2, (ours_nbytes, memory)
    assert memory.ddp_nbytes <= ddp_nbytes + 2**20, (ddp_nbytes, memory)
