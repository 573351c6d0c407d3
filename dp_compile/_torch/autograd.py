"""The autograd engine, and what is on while it runs. Costs nothing to load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import torch

from dp_compile._torch.missing import named

with named():
    from torch.autograd import graph as _graph
    from torch.autograd import profiler as _profiler
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_map_only as tree_map_only

    _current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
    _dispatch_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
    _entry_at_import = _graph._engine_run_backward  # the names have to be there
    _profiled_at_import = _profiler._is_profiler_enabled

BackwardEntry = Callable[..., tuple[torch.Tensor, ...]]
NO_GRAPH_TASK: Final = -1


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place."""
    return tensor._version


def backward_entry() -> BackwardEntry:
    """The function through which `torch.autograd.backward` and `grad` enter the C++ engine."""
    return cast(BackwardEntry, _graph._engine_run_backward)


def set_backward_entry(entry: BackwardEntry) -> None:
    """Replace that function in both modules that hold it. torch's own non-strict tracing patches the same two."""
    _graph._engine_run_backward = entry
    torch.autograd._engine_run_backward = entry  # type: ignore[attr-defined]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now ends. Only valid inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def graph_task() -> int:
    """The number of the backward that this thread is in, `NO_GRAPH_TASK` outside of any."""
    return _current_graph_task()


def is_reentrant_checkpoint(hook: object) -> bool:
    """Whether this, among the functions that a captured backward calls, runs a backward of its own for a checkpoint."""
    return type(hook).__name__ == "CheckpointFunctionBackward"


def is_aot_backward(node: object) -> bool:
    """Whether an autograd node is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


def dispatch_mode_is_active() -> bool:
    """Whether a TorchDispatchMode is on: capture then fails or records the wrong thing."""
    return _dispatch_modes_active() > 0


def profiler_is_on() -> bool:
    """Whether `torch.profiler` records in this process at the moment; its waiting phases do not count."""
    return _profiler._is_profiler_enabled
