"""What it takes to try a tiny backward out. Loading this loads Dynamo: only for `engine/probe.py`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils import checkpoint as _checkpoint

from dp_compile._torch.missing import named

with named():
    from torch._dynamo.utils import counters as _counters
    from torch._functorch.aot_autograd import aot_function as _aot_function
    from torch._inductor.runtime.cache_dir_utils import cache_dir as _cache_dir
    from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode


def cache_directory() -> str:
    """Where Inductor keeps what it compiled for this user."""
    return str(_cache_dir())


def compiled_ahead_of_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as AOTAutograd makes it, the backward included. Dynamo has no part in it."""
    made: Callable[..., Any] = _aot_function(function, fw_compiler=lambda graph_module, _: graph_module)
    return made


def traced(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced by Dynamo as one graph that goes to `backend`."""
    made: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return made


def own_device_guard() -> None:
    """Let the calling thread own the device guard of fake CUDA tensors. Call it before another thread traces.

    Without a GPU, torch 2.11's build for CUDA keeps that guard in the thread that enters a `FakeTensorMode` first, and
    a pointer to it for all threads: once that thread has ended, the next trace of any thread is a segmentation fault
    (pytorch#163187, cured by #178950). May go with torch 2.11.
    """
    with _FakeTensorMode():
        pass


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Dynamo's counters are afterwards what they were."""
    before = copy.deepcopy(_counters)
    try:
        yield
    finally:
        for name, counter in _counters.items():  # in place: others may hold one of them
            counter.clear()
            counter.update(before.get(name, {}))


def checkpoint_backward() -> str:
    """The class name of the autograd node of reentrant checkpointing."""
    return str(_checkpoint.CheckpointFunction._backward_cls.__name__)


def lowering_lacks(names: tuple[str, ...]) -> list[str]:
    """Which of these names Inductor's graphs and `ir` do not have; `Class.name` also for what is set on instances.

    `GraphLowering.name` is looked for in the class of graphs, everything else in `ir`.
    """
    from torch._inductor import ir as _ir
    from torch._inductor.graph import GraphLowering as _GraphLowering

    def has(dotted: str) -> bool:
        owner, _, name = dotted.partition(".")
        found = _GraphLowering if owner == "GraphLowering" else getattr(_ir, owner, None)
        return found is not None and (not name or _class_has(found, name))

    return [name for name in names if not has(name)]


def _class_has(found: type, name: str) -> bool:
    if hasattr(found, name):
        return True
    bases = [vars(base) for base in found.__mro__]
    code = [value.__code__ for each in bases for value in each.values() if isinstance(value, FunctionType)]
    annotated = any(name in each.get("__annotations__", {}) for each in bases)
    return annotated or any(_mentions(each, name) for each in code)


def _mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names
