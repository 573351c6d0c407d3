"""How Dynamo treats functions and modules, and questions to it that have an answer also where it is not loaded."""

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
    """Let a function run as it is, with what it calls, where Dynamo meets its frame; what is traced traces into it.

    For hooks: torch calls those of a compiled module outside of its graph, and Dynamo compiles each of them, in
    0.1 s, to nothing. (`torch._dynamo.skip` also breaks the graphs that call the function.)
    """
    _set_strategy(function.__code__, _LEFT_ALONE)
    return function


def untraced(reason: str) -> Callable[[FunctionT], FunctionT]:
    """`torch.compiler.disable`, which loads Dynamo and wraps this one, to the same end. `reason`: what torch says where
    a function that is compiled as one graph calls this one."""

    def decorate(function: FunctionT) -> FunctionT:
        # What `torch.compiler.disable` sets; Dynamo looks for it before it traces a call (torch 2.11 to 2.15).
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return no_graph_of_its_own(function)

    return decorate


@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` says no, though Dynamo may be at work around it, in this thread.
    Optimizers ask it, and compute with tensors where they otherwise take numbers: the same step rounds otherwise."""
    context = loaded("torch._guards", "CompileContext")
    if context is None or context.try_get() is None:
        yield  # The flag is one for all threads: it may be another one's, which sets it back when it likes.
        return
    compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = compiling


def constant(function: FunctionT) -> FunctionT:
    """Let Dynamo call a function while it traces, as it is, and put what it returns into the code."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `torch.compiler.assume_constant_result`
    return function


def traces_for(backend: str) -> bool:
    """Whether Dynamo, which is at work in this thread, makes code for a backend of this name."""
    translator: Any = loaded("torch._dynamo.symbolic_convert", "InstructionTranslator")
    compiler_fn = translator.current_tx().output.compiler_fn
    while compiler_fn is not None:
        if getattr(compiler_fn, "compiler_name", None) == backend:
            return True
        compiler_fn = getattr(compiler_fn, "_torchdynamo_orig_backend", None)
    return False


def capture_is_running() -> bool:
    """Whether some captured backward is executing in this process; a second capture would be an error then."""
    return bool(loaded("torch._dynamo.compiled_autograd", "in_compiled_autograd_region"))


def is_capture_in_the_way(error: NotImplementedError) -> bool:
    """Whether a backward was turned away at the engine's door because a capture is going on."""
    return "within another compiled autograd call" in str(error)


def captures() -> int:
    """How many backwards compiled autograd has captured in this process so far."""
    counters = loaded("torch._dynamo.utils", "counters")
    return 0 if counters is None else int(counters["compiled_autograd"]["captures"])


def compiled_graphs() -> int:
    """How many graphs, of forwards and backwards, Dynamo has handed to a compiler in this process so far."""
    counters = loaded("torch._dynamo.utils", "counters")
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def forget_compiled() -> None:
    """Let Dynamo compile everything again, also what it has compiled until now."""
    reset = loaded("torch._dynamo", "reset_code_caches")
    if reset is not None:
        reset()


def forget_calls_that_broke() -> None:
    """Let Dynamo compile again what called a module whose hook broke the graph, once that hook is gone.

    Code that torch 2.11 made of the caller has no guard on the hooks, and would leave the module uncompiled for good.
    May go with 2.11.
    """
    if torch.torch_version.TorchVersion(torch.__version__) < "2.12":
        forget_compiled()


def forced_eager() -> bool:
    """Whether the user has switched compilation off (`torch.compiler.set_stance` or TORCHDYNAMO_DISABLE)."""
    is_off = loaded("torch._dynamo.eval_frame", "_stance", "stance") == "force_eager"
    return is_off or bool(loaded("torch._dynamo.config", "disable"))


def replays_cuda_graphs(device: torch.device) -> bool:
    """Whether Inductor has CUDA graphs (`mode="reduce-overhead"`): a replay writes to what the one before returned."""
    manager_of = loaded("torch._inductor.cudagraph_trees", "get_manager") if device.type == "cuda" else None
    return manager_of is not None and manager_of(device.index, create_if_none_exists=False) is not None


def trace_autograd_ops() -> bool:
    """Whether Dynamo traces `backward()` itself; it silently drops every post-accumulate-grad hook then."""
    if torch.compiler.is_dynamo_compiling():
        # Dynamo would go through `sys.modules`, which fails when another thread imports something meanwhile.
        return bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))
    return bool(getattr(loaded("torch._dynamo.config"), "trace_autograd_ops", False))


def python_reducer_mode() -> bool:
    """Whether torch's own experimental `python_reducer` is switched on for the whole process."""
    return str(loaded("torch._dynamo.config", "optimize_ddp")).startswith("python_reducer")


def is_of_compiler(file: str) -> bool:
    """Whether a source file is on the stack while torch compiles, and only then."""
    return file in (loaded(each, "__file__") for each in ("torch._dynamo.convert_frame", "torch._inductor.compile_fx"))


# --- how modules are called


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """As `module.compile(**options)`, for torch's own classes too: Dynamo skips a frame of theirs that it starts with.
    Modules of one class share a function of ours as their first frame, and with it what was compiled."""
    kind = type(module)
    if not kind.forward.__module__.startswith("torch."):
        module.compile(**options)
        return
    if kind not in _first_frames:
        code = _call.__code__.replace(co_name=f"call_{kind.__name__}")  # what was compiled, and its limit, go by code
        _first_frames[kind] = types.FunctionType(code, globals())
    module._compiled_call_impl = functools.partial(torch.compile(_first_frames[kind], **options), module)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


_first_frames: Final[weakref.WeakKeyDictionary[type[nn.Module], Callable[..., Any]]] = weakref.WeakKeyDictionary()


def is_compiled(module: object) -> bool:
    """Whether it is what `torch.compile` returns for a module. Not by the name `_orig_mod`: a child may have it."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__ == "torch._dynamo.eval_frame"
