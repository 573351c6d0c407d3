"""How Dynamo treats functions and modules, and queries of its state that work without loading it."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import nn

from dp_compile._torch.missing import loaded, named

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

with named():
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
    from torch._C._dynamo.eval_frame import set_code_exec_strategy as _set_strategy

    _LEFT_ALONE: Any = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def no_graph_of_its_own(function: FunctionT) -> FunctionT:
    """Make Dynamo skip a function's frame and all frames below. A graph that calls the function still inlines it.

    Used for hooks. torch calls a compiled module's hooks outside of its graph, and Dynamo would take
    0.1 s to compile each, without benefit. `torch._dynamo.skip` also breaks graphs that call the function.
    """
    _set_strategy(function.__code__, _LEFT_ALONE)
    return function


def untraced(reason: str) -> Callable[[FunctionT], FunctionT]:
    """Disable Dynamo for a function as `torch.compiler.disable` does, without loading Dynamo and without a wrapper.
    torch shows `reason` if a `fullgraph=True` function calls the decorated function."""

    def decorate(function: FunctionT) -> FunctionT:
        # The attributes that `torch.compiler.disable` sets. Dynamo reads them before it traces a call (2.11 to 2.15).
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return no_graph_of_its_own(function)

    return decorate


@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` return False in this block, even if this thread is compiling in Dynamo.
    If it returns True, optimizers compute with tensors in place of numbers, and the step rounds differently."""
    context = loaded("torch._guards", "CompileContext")
    if context is None or context.try_get() is None:
        yield  # The flag is process-wide: if it is set, another compiling thread set it and will reset it.
        return
    compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = compiling


def constant(function: FunctionT) -> FunctionT:
    """Mark a function as constant for Dynamo: it calls the function while tracing and inlines the result."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `torch.compiler.assume_constant_result`
    return function


def traces_for(backend: str) -> bool:
    """Return whether Dynamo is tracing for the named backend. Call it only while this thread is tracing."""
    translator: Any = loaded("torch._dynamo.symbolic_convert", "InstructionTranslator")
    compiler_fn = translator.current_tx().output.compiler_fn
    while compiler_fn is not None:
        if getattr(compiler_fn, "compiler_name", None) == backend:
            return True
        compiler_fn = getattr(compiler_fn, "_torchdynamo_orig_backend", None)
    return False


def capture_is_running() -> bool:
    """Return whether a captured backward is running in this process. A second capture would then raise."""
    return bool(loaded("torch._dynamo.compiled_autograd", "in_compiled_autograd_region"))


def is_capture_in_the_way(error: NotImplementedError) -> bool:
    """Return whether the engine raised `error` because another capture is in progress."""
    return "within another compiled autograd call" in str(error)


def captures() -> int:
    """Return the number of backwards that compiled autograd has captured in this process."""
    counters = loaded("torch._dynamo.utils", "counters")
    return 0 if counters is None else int(counters["compiled_autograd"]["captures"])


def compiled_graphs() -> int:
    """Return the number of forward and backward graphs that Dynamo has passed to a compiler in this process."""
    counters = loaded("torch._dynamo.utils", "counters")
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def forget_compiled() -> None:
    """Reset Dynamo's code caches, so that it recompiles all code."""
    reset = loaded("torch._dynamo", "reset_code_caches")
    if reset is not None:
        reset()


def forget_calls_that_broke() -> None:
    """Recompile callers of a module after the removal of a hook that broke their graph. No-op since torch 2.12.

    The code that torch 2.11 compiles for the caller has no guard on hooks, so the module would stay uncompiled.
    Remove this function together with support for 2.11.
    """
    if torch.torch_version.TorchVersion(torch.__version__) < "2.12":
        forget_compiled()


def forced_eager() -> bool:
    """Return whether the user disabled compilation (`torch.compiler.set_stance` or TORCH_COMPILE_DISABLE)."""
    is_off = loaded("torch._dynamo.eval_frame", "_stance", "stance") == "force_eager"
    return is_off or bool(loaded("torch._dynamo.config", "disable"))


def replays_cuda_graphs(device: torch.device) -> bool:
    """Return whether Inductor uses CUDA graphs on `device`. A replay overwrites the outputs of the previous replay."""
    manager_of = loaded("torch._inductor.cudagraph_trees", "get_manager") if device.type == "cuda" else None
    return manager_of is not None and manager_of(device.index, create_if_none_exists=False) is not None


def trace_autograd_ops() -> bool:
    """Return whether Dynamo traces `backward()` itself. It then drops all post-accumulate-grad hooks silently."""
    if torch.compiler.is_dynamo_compiling():
        # `loaded` makes Dynamo trace `sys.modules`, which fails if another thread imports a module meanwhile.
        return bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))
    return bool(getattr(loaded("torch._dynamo.config"), "trace_autograd_ops", False))


def python_reducer_mode() -> bool:
    """Return whether torch's experimental `python_reducer` is enabled for this process."""
    return str(loaded("torch._dynamo.config", "optimize_ddp")).startswith("python_reducer")


def is_of_compiler(file: str) -> bool:
    """Return whether frames of a source file are on the stack only while torch compiles."""
    return file in (loaded(each, "__file__") for each in ("torch._dynamo.convert_frame", "torch._inductor.compile_fx"))


# --- how modules are called


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compile a module as `module.compile(**options)`, also if its class is torch's own. Dynamo skips a first frame in
    torch's files, so modules of such a class share a first frame defined here, and its compiled code."""
    kind = type(module)
    if not kind.forward.__module__.startswith("torch."):
        module.compile(**options)
        return
    if kind not in _first_frames:
        code = _call.__code__.replace(co_name=f"call_{kind.__name__}")  # Dynamo has a cache and a limit per code object
        _first_frames[kind] = types.FunctionType(code, globals())
    module._compiled_call_impl = functools.partial(torch.compile(_first_frames[kind], **options), module)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


_first_frames: Final[weakref.WeakKeyDictionary[type[nn.Module], Callable[..., Any]]] = weakref.WeakKeyDictionary()


def is_compiled(module: object) -> bool:
    """Return whether `torch.compile` returned `module`. Checks the class: any child may be named `_orig_mod`."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__ == "torch._dynamo.eval_frame"
