"""When gradients are ready: pure numbers, and what a captured graph says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from graphs import Grad
from torch import fx

from dp_compile._torch import distributed
from dp_compile.passes.estimates import Accumulation, ready_shares
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.backends import GLOO
from dp_compile.plan.cost import nominal_cost
from dp_compile.plan.planner import assumed_times

SPECS = [Grad(index=0, shape=(8, 4)).spec, Grad(index=1, shape=(4,)).spec, Grad(index=2, shape=(8, 12)).spec]


def test_assumed_from_elements() -> None:
    assert assumed_times(SPECS).shares == {0: 0.25, 1: 0.25, 2: 1.0}


@pytest.mark.usefixtures("fake_group")
def test_collectives_of_the_model_take_their_time() -> None:
    """What stands behind one is ready later by what a nominal link takes, in bytes that memory moves meanwhile."""
    grads = [Grad(index=0, shape=(64, 64)), Grad(index=1, shape=(64, 64))]

    def backward(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first = grads[0].reduce(x.t() @ y)
        summed = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(y, "sum", GROUP))
        return [first, grads[1].reduce(x.t() @ summed)]

    assert dist.group.WORLD is not None
    GROUP = distributed.group_name(dist.group.WORLD)
    graph = fx.experimental.proxy_tensor.make_fx(backward, tracing_mode="fake")(*torch.randn(2, 64, 64)).graph
    nodes = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    values = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    found = ready_shares([Accumulation(node, node.args[0], False) for node in nodes], values)
    product = max(3 * 64 * 64 * 4, 2 * 64**3 / 8.0)
    sent = nominal_cost(GLOO, dist.get_world_size()).seconds(64 * 64 * 4) * 10e9  # of one core's memory, in bytes
    total = 2 * product + sent
    assert found == pytest.approx([product / total, 1.0])
