"""Memory of a backward: what the simulation says of small graphs, and what a real backward took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocations import Step, peak_of_backward
from graphs import trace
from torch import fx, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import dp_compile
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.fx.memory import Footprint, footprint, hold

aten = torch.ops.aten
KIB = 1024


def square() -> torch.Tensor:
    """1 KiB."""
    return torch.randn(16, 16)


def peak(graph: fx.Graph, found: Footprint | None = None) -> int:
    return (footprint(graph) if found is None else found).peak(graph.nodes)


def products(a: torch.Tensor) -> torch.Tensor:
    b = a @ a
    return (b @ b) @ b


# --- the simulation ---------------------------------------------------------------------------------------------------


def test_inputs_are_freed_after_their_last_use_unless_they_are_held() -> None:
    graph = trace(products, square()).graph
    assert peak(graph) == 3 * KIB  # mm, mm_1 and their product
    hold(graph, [True])
    assert peak(graph) == 4 * KIB
    for held in ([False], [True, True]):  # the second is not of this graph's inputs
        hold(graph, held)
        assert peak(graph) == 3 * KIB


@pytest.mark.parametrize(
    ("function", "nbytes"),
    [
        (lambda a: a.t().reshape(4, 64).view(64, 4) @ a[:4], 2 * KIB + 64 * 16 * 4),  # only the reshape copies
        (lambda a: (a.sin() + 1).cos().sum(), KIB + 4),  # one kernel
        (lambda a: (a.sin() + 1).cos().t().sum(0), KIB + 64),
        (lambda a: (a.sin() + 1) @ a, 3 * KIB),  # a product reads from memory
        (lambda a: a.sin(), 2 * KIB),
        (lambda a: WAIT(ALL_REDUCE(a @ a, "sum", "0")), 2 * KIB),  # in place
    ],
)
def test_what_has_memory_of_its_own(function: Callable[..., Any], nbytes: int) -> None:
    assert peak(trace(function, square()).graph) == nbytes


def test_what_is_written_to_stays() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.copy_(a @ a)
        return (a @ a) @ (a + 1)

    # a, b and two products; then b, a product, a + 1 and the result.
    assert peak(trace(function, square(), square()).graph) == 4 * KIB


def test_parts_live_in_the_whole_from_when_the_first_is_made() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = a @ a, b @ b
        return torch.cat([first, second]), b @ b

    graph = trace(function, square(), square()).graph
    (cat,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert peak(graph) == 5 * KIB
    found = footprint(graph, lives_in={node: cat for node in cat.all_input_nodes})
    assert peak(graph, found) == 4 * KIB
    assert found.nbytes_of([cat, *cat.all_input_nodes]) == 2 * KIB


def test_what_is_stored_by_others_and_what_is_left_out() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.cat([a.sin(), a.cos()])

    graph = trace(function, square()).graph
    (cat,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert peak(graph) == 4 * KIB
    assert peak(graph, footprint(graph, stores=[cat])) == 3 * KIB
    assert peak(graph, footprint(graph, without=[cat])) == 2 * KIB  # sin is freed before cos is made


def test_what_is_kept_is_there_all_the_time() -> None:
    graph = trace(lambda a: (torch.cat([a, a, a]).cumsum(0).sum(), a @ a), square()).graph
    (product,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert peak(graph) == 7 * KIB
    assert peak(graph, footprint(graph, kept=[product])) == 8 * KIB


# --- a real backward --------------------------------------------------------------------------------------------------


BUCKET_NBYTES = 256 * KIB


def stepping(wrap: Callable[[nn.Module], Callable[..., torch.Tensor]]) -> Callable[[], Step]:
    """Steps of 4 layers with 256 KiB of weights each, which is a bucket each."""

    def make() -> Step:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
        model, x = nn.Sequential(*layers), torch.randn(512, 256)
        run = wrap(model)

        def step() -> torch.Tensor:
            model.zero_grad()
            return run(x).square().mean()

        return step

    return make


@pytest.mark.usefixtures("fake_group")
@pytest.mark.nightly
def test_a_backward_takes_no_more_than_torchs_ddp_and_what_was_simulated() -> None:
    replicated: list[nn.Module] = []

    def ours(model: nn.Module) -> Callable[..., torch.Tensor]:
        replicated.append(dp_compile.replicate(model, bucket_cap_mb=BUCKET_NBYTES / 2**20))
        return torch.compile(model)

    def ddp(model: nn.Module) -> Callable[..., torch.Tensor]:
        reference = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        # torch's C++ reducer asks works for their result, and those of the fake group have none.
        reference.register_comm_hook(None, noop_hook)
        return torch.compile(reference)

    with torch._inductor.config.patch(fx_graph_cache=False):
        ours_nbytes = peak_of_backward(stepping(ours))
    report = dp_compile.report(replicated[0])
    replicated.clear()
    torch._dynamo.reset()
    ddp_nbytes, memory = peak_of_backward(stepping(ddp)), report.captures[0].memory
    assert memory is not None
    assert str(memory) in str(report)
    assert ours_nbytes <= ddp_nbytes
    assert memory.nbytes <= memory.ddp_nbytes
    assert abs(ours_nbytes - memory.nbytes) <= BUCKET_NBYTES // 2, (ours_nbytes, memory)
    assert memory.ddp_nbytes <= ddp_nbytes + 2**20, (ddp_nbytes, memory)
