"""What torch calls things is tried out before it is relied on, once for each torch, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
from torch._dynamo.utils import counters
from torch._inductor.ir import ConcatKernel

import dp_compile
from dp_compile._torch import autograd, compiler, trial
from dp_compile.engine import graph as engine_graph
from dp_compile.engine import probe

Rename = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a process that has not probed yet, with an empty cache."""
    monkeypatch.setattr(probe, "_is_known", False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    return tmp_path


def test_this_torch_is_right_and_that_is_remembered(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = torch._dynamo.config.save_config(), torch._inductor.config.save_config()
    counters["stats"]["ours"] = 7
    before = {name: dict(counter) for name, counter in counters.items() if counter}
    random_state = torch.get_rng_state()
    probe.check()
    assert {name: dict(counter) for name, counter in counters.items() if counter} == before
    assert (torch._dynamo.config.save_config(), torch._inductor.config.save_config()) == settings
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not compiled_autograd.compiled_autograd_enabled
    del counters["stats"]["ours"]
    (file,) = anew.joinpath("dp_compile").iterdir()
    assert file.name.startswith("probed-")
    monkeypatch.setattr(probe, "_find_out", lambda: pytest.fail("probed again"))
    probe.check()
    monkeypatch.setattr(probe, "_is_known", False)  # as in another process
    probe.check()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(probe, "_is_known", False)
    with pytest.raises(pytest.fail.Exception, match="probed again"):
        probe.check()


def other_hook_type(patch: pytest.MonkeyPatch) -> None:
    create = compiled_autograd.AutogradCompilerInstance.proxy_call_hook

    def renamed(self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        return create(self, hook, *args, **{**kwargs, "hook_type": "post_accumulate"})

    patch.setattr(compiled_autograd.AutogradCompilerInstance, "proxy_call_hook", renamed)


def other_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(autograd, "is_aot_backward", lambda node: type(node).__name__ == "AnotherName")


RENAMED: dict[str, Rename] = {
    "calls of hooks, of the type post_acc_grad_hook, are not found": other_hook_type,
    "a compiled backward, CompiledFunctionBackward, is a CompiledFunctionBackward": other_node,
    "compiled forwards, CompiledFunction, are no subclass of Function": lambda patch: patch.setattr(
        autograd, "has_aot_backwards", lambda: False
    ),
    "not that it is 'within another compiled autograd call'": lambda patch: patch.setattr(
        compiler, "is_capture_in_the_way", lambda error: "another text" in str(error)
    ),
    "accumulations of gradients, call_accumulate_grad, are not found": lambda patch: patch.setattr(
        engine_graph.dynamo, "call_accumulate_grad", len
    ),
    "a reentrant checkpoint, CheckpointFunctionBackward, is a Renamed": lambda patch: patch.setattr(
        trial, "checkpoint_backward", lambda: "Renamed"
    ),
    "Inductor has no ConcatKernel.realize_into": lambda patch: patch.delattr(ConcatKernel, "realize_into"),
    "Dynamo's counters captures and unique_graphs stand still": lambda patch: patch.setattr(
        compiler, "captures", lambda: 0
    ),
    "TypeError: 'NoneType' object is not callable": lambda patch: patch.setattr(trial, "_aot_function", None),
}


@pytest.mark.parametrize("text", RENAMED)
def test_a_name_that_torch_changed_is_named(text: str, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RENAMED[text](monkeypatch)
    with pytest.raises(dp_compile.errors.UnsupportedTorchError) as error:
        probe.check()
    assert str(error.value).startswith(f"torch {torch.__version__} has changed what dp_compile relies on: ")
    assert text in str(error.value)
    assert "pip install 'torch>=2.11,<2.16'" in str(error.value)
    assert not anew.joinpath("dp_compile").exists()


@pytest.mark.usefixtures("fake_group")
def test_it_comes_before_the_first_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the user's model is blamed for a forward that looks as if it were not compiled."""
    other_node(monkeypatch)
    model = dp_compile.replicate(torch.nn.Linear(2, 2), config=dp_compile.ReplicateConfig(backend="aot_eager"))
    output = torch.compile(model, backend="aot_eager")(torch.ones(1, 2))
    with pytest.raises(dp_compile.errors.UnsupportedTorchError, match="CompiledFunctionBackward"):
        output.sum().backward()
