"""The autograd engine, what is on while it runs, and who holds the memory of tensors. Loads no compiler."""

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
    """The number of the backward that this thread is in, `NO_GRAPH_TASK` outside of any."""
    _interpreters: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
    _dispatch_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
    _engine_at_import = _Variable._execution_engine  # the names have to be there
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
"""How often a tensor has been changed in place. Asked for every parameter twice in a backward: no call of Python."""


def counting_versions() -> contextlib.AbstractContextManager[object]:
    """Inside, `version_of` counts in ops that compiled code calls, too, which run below autograd."""
    guard: contextlib.AbstractContextManager[object] = _SetExcluded(torch._C.DispatchKey.ADInplaceOrView, False)
    return guard


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a device, sizes and strides, and no values."""
    return isinstance(tensor, _FakeTensor)


def made_like(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, new tensors are fake if this one is: a device that only fake tensors are on takes no other."""
    return tensor.fake_mode if isinstance(tensor, _FakeTensor) else contextlib.nullcontext()


class _Door(_Engine):  # type: ignore[misc]
    """The engine, with a function that is called before it. A subclass: Dynamo knows the engine by its class, and other
    attributes are the engine's."""

    def __init__(self, enter: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        self.enter = enter

    @no_graph_of_its_own
    def run_backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return self.enter(*args, **kwargs)


def watch_engine(enter: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Let every backward that Python starts go through `enter`, also one that does not come from `torch.autograd`.

    `torch.autograd`, and code that bypasses it as Megatron does, take the engine from the same place. Does nothing if
    `enter` is there already, also where other code has wrapped it in turn.
    """
    if not engine_is_watched():
        _Variable._execution_engine = _Door(enter)


def unwatch_engine() -> None:
    """Take `enter` away again, unless other code has wrapped it in turn."""
    if engine_is_watched():
        _Variable._execution_engine = _engine_at_import


def engine_is_watched() -> bool:
    return isinstance(_Variable._execution_engine, _Door)


run_engine: Final[Callable[..., tuple[torch.Tensor, ...]]] = _engine_at_import.run_backward
"""The engine itself.

Its arguments: tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad.
"""


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now ends. Only valid inside a backward."""
    _Variable._execution_engine.queue_callback(callback)


def leaf_behind(node: object) -> torch.Tensor | None:
    """The leaf whose gradient an autograd node accumulates, if that is what it does. By the node's class: functions of
    users may have an attribute `variable` too."""
    return node.variable if type(node) is _AccumulateGrad else None  # type: ignore[attr-defined]


def hooks_behind(leaf: torch.Tensor) -> dict[int, Any]:
    """What is called after the accumulation of a leaf's gradient, by torch's numbers; torch sees what is changed."""
    found: dict[int, Any] | None = leaf._post_accumulate_grad_hooks
    return {} if found is None else found


def accumulates(leaf: torch.Tensor) -> object:
    """The node that accumulates the gradient of a leaf that requires one: the same object while it is alive. Where
    gradients are computed; a microsecond, which is less than torch's own `get_gradient_edge`."""
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def is_aot_backward(node: object) -> bool:
    """Whether an autograd node is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


def aliasing() -> contextlib.AbstractContextManager[object]:
    """Inside, a tensor in the memory of another is no view of it for autograd: `detach_()` works, and Dynamo takes a
    `.grad` whose dtype `Module.to` changes in place. The engine's own kernels make tensors so."""
    guard: contextlib.AbstractContextManager[object] = torch._C._AutoDispatchBelowADInplaceOrView()
    return guard


def has_aot_backwards() -> bool:
    """Whether AOTAutograd has compiled a forward that can have a backward, anywhere in the process."""
    return any(each.__name__ == "CompiledFunction" for each in torch.autograd.Function.__subclasses__())


def leaves_dtensors(node: object) -> bool:
    """Whether an autograd node is that of `DTensor.to_local`."""
    return type(node).__name__ == "_ToTorchTensorBackward"


def dispatch_mode_is_active() -> bool:
    """Whether a TorchDispatchMode is on: capture then fails or records the wrong thing."""
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
    """Whether `torch.profiler` records in this process at the moment; its waiting phases do not count."""
    return _profiler._is_profiler_enabled


def recorded_events(
    recorded: torch.profiler.profile, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, str, int, int, int, int]]:
    """What a profiler has recorded: name, category, begin and end in nanoseconds, thread, and correlation.

    Of the host's events only those whose name is `wanted`, and all calls of a device's runtime. The category is that of
    an exported trace, whose 100 MB for five steps of 1,000 small layers take 4 s to write and read; this takes 0.3 s.
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


# --- memory: who has a part of a block


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Two numbers that are the same again once no more holds a tensor's memory than when they were asked for.

    How many tensors, arrays and so on lie in it; and how many hold its storage as an object of Python, of which there
    is one that everybody gets, so that the first number does not show them (torch 2.13).
    """
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)
