"""The autograd engine, the modes active while it runs, and references to tensor memory. Loads no compiler."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from dp_compile._torch.compiler import no_graph_of_its_own
from dp_compile._torch.missing import named

with named():
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as _clear_interpreters
    from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
    from torch.autograd import profiler as _profiler
    from torch.autograd.variable import Variable as _Variable
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

    graph_task: Callable[[], int] = torch._C._current_graph_task_id
    """Return the id of the backward that this thread runs, `NO_GRAPH_TASK` outside of a backward."""
    _interpreters: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
    _dispatch_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
    _engine_at_import = _Variable._execution_engine  # raises here if torch lacks the name
    _Engine: Any = type(_engine_at_import)
    _run_at_import = _Engine.run_backward
    copy_all: Callable[..., None] = torch._foreach_copy_
    multiply_all: Callable[..., None] = torch._foreach_mul_
    _SetExcluded: Callable[..., Any] = torch._C._SetExcludeDispatchKeyGuard
    _use_count: Callable[[int], int] = torch._C._storage_Use_Count
    _AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
    _profiled_at_import = _profiler._is_profiler_enabled

NO_GRAPH_TASK: Final = -1

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Return how often a tensor was modified in place. Runs no Python: each backward calls it twice per parameter."""


def counting_versions() -> contextlib.AbstractContextManager[object]:
    """Increment tensor versions in this block also for ops that run below autograd, as in compiled code."""
    return _SetExcluded(torch._C.DispatchKey.ADInplaceOrView, False)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a FakeTensor: it has a device, sizes and strides, but no values."""
    return isinstance(tensor, _FakeTensor)


def made_like(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Create fake tensors in this block if `tensor` is fake, because its device may exist for fake tensors only."""
    return tensor.fake_mode if isinstance(tensor, _FakeTensor) else contextlib.nullcontext()


class _Door(_Engine):  # type: ignore[misc]
    """The autograd engine, with `run_backward` replaced by `enter`. It subclasses torch's engine because Dynamo
    recognizes the engine by its class, and to inherit all other attributes."""

    def __init__(self, enter: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        self.enter = enter

    @no_graph_of_its_own
    def run_backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return self.enter(*args, **kwargs)


def watch_engine(enter: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Route every backward that Python starts through `enter`, including those that bypass `torch.autograd`.

    `torch.autograd` and code that bypasses it, such as Megatron, read the engine from the same attribute. Does nothing
    if the engine is watched already.
    """
    if not engine_is_watched():
        _Variable._execution_engine = _Door(enter)


def unwatch_engine() -> None:
    """Restore torch's engine, unless other code has replaced the watched engine."""
    if engine_is_watched():
        _Variable._execution_engine = _engine_at_import


def engine_is_watched() -> bool:
    return isinstance(_Variable._execution_engine, _Door)


run_engine: Final[Callable[..., tuple[torch.Tensor, ...]]] = _engine_at_import.run_backward
"""Run torch's own engine, not `enter`.

Arguments: tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad.
"""


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the current backward. Only valid inside a backward."""
    _Variable._execution_engine.queue_callback(callback)


def leaf_behind(node: object) -> torch.Tensor | None:
    """Return the leaf of an AccumulateGrad node, `None` for any other node. Checks the class, because autograd
    functions of users may also have an attribute `variable`."""
    return node.variable if type(node) is _AccumulateGrad else None  # type: ignore[attr-defined]


def hooks_behind(leaf: torch.Tensor) -> dict[int, Any]:
    """Return a leaf's post-accumulate-grad hooks by torch's hook id. A non-empty dict is torch's own, not a copy."""
    found: dict[int, Any] | None = leaf._post_accumulate_grad_hooks
    return {} if found is None else found


def is_aot_backward(node: object) -> bool:
    """Return whether an autograd node is the backward of a graph compiled by AOTAutograd."""
    return type(node).__name__ == "CompiledFunctionBackward"


def aliasing() -> contextlib.AbstractContextManager[object]:
    """In this block, tensors that alias another tensor are not autograd views of it, as in the engine's own kernels.
    `detach_()` works on them, and Dynamo accepts such a `.grad` after `Module.to` changes its dtype in place."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def has_aot_backwards() -> bool:
    """Return whether AOTAutograd has compiled a differentiable forward anywhere in this process."""
    return any(each.__name__ == "CompiledFunction" for each in torch.autograd.Function.__subclasses__())


def leaves_dtensors(node: object) -> bool:
    """Return whether an autograd node is the backward of `DTensor.to_local`."""
    return type(node).__name__ == "_ToTorchTensorBackward"


def dispatch_mode_is_active() -> bool:
    """Return whether a TorchDispatchMode is active. Capture then fails or records wrong ops."""
    return _dispatch_modes_active() > 0


@contextlib.contextmanager
def as_outermost_code() -> Iterator[None]:
    """Disable all TorchDispatchModes and torch.func transforms in this block.

    `FakeTensorMode` would compute no values, and a counting mode would count these ops. A transform (`grad`, `jacrev`)
    raises on writes to tensors created outside of it.
    """
    with _clear_interpreters() if _interpreters() is not None else contextlib.nullcontext():
        with _disable_current_modes() if dispatch_mode_is_active() else contextlib.nullcontext():
            yield


def profiler_is_on() -> bool:
    """Return whether `torch.profiler` is recording in this process: false in the phase `wait` of its schedule."""
    return _profiler._is_profiler_enabled


def recorded_events(
    recorded: torch.profiler.profile, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, str, int, int, int, int]]:
    """Yield a profiler's events: name, category, start and end in nanoseconds, thread id, correlation id.

    Yields all device events and CUDA runtime calls, and other host events only if `wanted(name)`. Categories are those
    of an exported trace. For five steps of 1,000 small layers the trace has 100 MB and takes 4 s; this takes 0.3 s.
    """
    results: Any = recorded.profiler
    for each in results.kineto_results.events():
        name, category = each.name(), ""
        if each.device_type().name != "CPU":
            category = "gpu_user_annotation" if each.is_user_annotation() else "kernel"
        elif name.startswith(("cuda", "cuLaunch", "cuMem")):
            category = "cuda_runtime"
        elif not wanted(name):
            continue
        yield name, category, each.start_ns(), each.end_ns(), each.start_thread_id(), each.correlation_id()


# --- memory: references to a storage


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two reference counts of a tensor's memory: of its storage, and of the storage's Python object.

    Tensors and arrays count in the first. Python references to the storage share one object, so only the second counts
    them (torch 2.13). Equal counts before and after a block mean that the block left no new reference.
    """
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)
