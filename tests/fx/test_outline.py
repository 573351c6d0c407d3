"""The short form of a graph: names, marks, folding."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dp_compile.fx.collectives import ALL_REDUCE, GROUPED_ALL_REDUCE, WAIT
from dp_compile.fx.outline import outline


def traced() -> fx.Graph:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        y = (x @ w + b).sin().cos()
        one = WAIT(ALL_REDUCE(y, "sum", "0"))
        first, second = GROUPED_ALL_REDUCE([y * 2, y * 3], "avg", "0")
        return [one, WAIT(first), WAIT(second), x.t(), y]

    return make_fx(function, tracing_mode="fake")(torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)).graph


def test_what_has_a_name_has_a_line() -> None:
    graph = traced()
    nodes = {node.name: node for node in graph.nodes}
    names = {nodes["w_1"]: "head.weight", nodes["cos"]: "activation", nodes["all_reduce"]: "launch 0"}
    assert_expected_inline(
        outline(graph, names),
        """\
   ... 1 input
   head.weight: float32[3, 4]
   ... 1 input
   ... 3 nodes: add 1, mm 1, sin 1
   activation = cos(sin): float32[2, 4]
>> launch 0 = all_reduce(activation, sum, 0): float32[2, 4]
<< wait_tensor = wait_tensor(launch 0): float32[2, 4]
   ... 2 nodes: mul 2
>> all_reduce_coalesced = all_reduce_coalesced([mul, mul], avg, 0): 2 tensors
   ... 2 nodes: getitem 2
<< wait_tensor = wait_tensor(getitem): float32[2, 4]
<< wait_tensor = wait_tensor(getitem): float32[2, 4]
   ... 1 node: t 1
   return 5 tensors: wait_tensor, wait_tensor, .. 2 more .., activation
""",
    )


def test_many_ops_are_counted_and_the_rest_summed_up() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x.sin()
        return x.cos().exp().tanh().sqrt().abs().neg().log()

    graph = make_fx(function, tracing_mode="fake")(torch.randn(2)).graph
    assert_expected_inline(
        outline(graph, {}),
        """\
   ... 1 input
   ... 10 nodes: sin 3, abs 1, cos 1, exp 1, log 1, neg 1, other 2
   return 1 tensor: log
""",
    )
