"""`torch.compile(model, backend="dp_compile")` where nothing crosses the step: Inductor, its options and its cache."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dp_compile._torch import inductor


def test_torch_lists_it() -> None:
    assert "dp_compile" in torch.compiler.list_backends()


@pytest.mark.nightly
def test_options_are_passed_on_and_the_cache_is_kept() -> None:
    seen: list[Any] = []
    compile_forward = inductor.compile_forward_with_inductor

    def noting(*arguments: Any) -> Any:
        seen.append(arguments[-1])
        return compile_forward(*arguments)

    model, x = nn.Linear(5, 7), torch.randn(3, 5)
    with mock.patch.object(inductor, "compile_forward_with_inductor", noting):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            run = torch.compile(model, backend="dp_compile", options={"max_fusion_size": 13})
            torch.testing.assert_close(run(x), model(x))
    assert seen == [{"max_fusion_size": 13}] * 2
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(nn.Linear(5, 6), backend="dp_compile", options={"no_such_option": 1})(x)
