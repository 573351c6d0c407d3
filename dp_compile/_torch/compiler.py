"""Questions about Dynamo and Inductor that have an answer also where they are not loaded. Loads neither."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from dp_compile._torch.missing import named

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
    """`torch.compiler.disable`, which loads Dynamo and wraps this one, to the same end.

    Args:
        reason: what torch says where a function that is compiled as one graph calls this one.
    """

    def decorate(function: FunctionT) -> FunctionT:
        # What `torch.compiler.disable` sets; Dynamo looks for it before it traces a call (torch 2.11 to 2.15).
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return no_graph_of_its_own(function)

    return decorate


@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` says no, though Dynamo may be at work around it, in this thread.

    Optimizers ask it, and compute with tensors where they otherwise take numbers: the same step rounds otherwise.
    """
    context = _attribute("torch._guards", "CompileContext")
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
    compiler_fn = _output().compiler_fn
    while compiler_fn is not None:
        if getattr(compiler_fn, "compiler_name", None) == backend:
            return True
        compiler_fn = getattr(compiler_fn, "_torchdynamo_orig_backend", None)
    return False


def _output() -> Any:
    translator = _attribute("torch._dynamo.symbolic_convert", "InstructionTranslator")
    return translator.current_tx().output


def _attribute(module: str, *names: str) -> Any:
    """An attribute of a module of torch, `None` if nothing has imported that module yet.

    Raises:
        AttributeError: the module is there and has no such attribute.
    """
    found: Any = sys.modules.get(module)
    for name in names if found is not None else ():
        found = getattr(found, name)
    return found


def capture_is_running() -> bool:
    """Whether some captured backward is executing in this process; a second capture would be an error then."""
    return bool(_attribute("torch._dynamo.compiled_autograd", "in_compiled_autograd_region"))


def is_capture_in_the_way(error: NotImplementedError) -> bool:
    """Whether a backward was turned away at the engine's door because a capture is going on."""
    return "within another compiled autograd call" in str(error)


def captures() -> int:
    """How many backwards compiled autograd has captured in this process so far."""
    counters = _attribute("torch._dynamo.utils", "counters")
    return 0 if counters is None else int(counters["compiled_autograd"]["captures"])


def compiled_graphs() -> int:
    """How many graphs, of forwards and backwards, Dynamo has handed to a compiler in this process so far."""
    counters = _attribute("torch._dynamo.utils", "counters")
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def forget_compiled() -> None:
    """Let Dynamo compile everything again, also what it has compiled until now."""
    reset = _attribute("torch._dynamo", "reset_code_caches")
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
    eval_frame, config = sys.modules.get("torch._dynamo.eval_frame"), sys.modules.get("torch._dynamo.config")
    if eval_frame is not None and eval_frame._stance.stance == "force_eager":
        return True
    return config is not None and bool(config.disable)


def replays_cuda_graphs(device: torch.device) -> bool:
    """Whether Inductor has CUDA graphs (`mode="reduce-overhead"`): a replay writes to what the one before returned."""
    manager_of = _attribute("torch._inductor.cudagraph_trees", "get_manager") if device.type == "cuda" else None
    return manager_of is not None and manager_of(device.index, create_if_none_exists=False) is not None


def trace_autograd_ops() -> bool:
    """Whether Dynamo traces `backward()` itself; it silently drops every post-accumulate-grad hook then."""
    if torch.compiler.is_dynamo_compiling():
        # Dynamo would go through `sys.modules`, which fails when another thread imports something meanwhile.
        return bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "trace_autograd_ops", False))


def python_reducer_mode() -> bool:
    """Whether torch's own experimental `python_reducer` is switched on for the whole process."""
    return str(_attribute("torch._dynamo.config", "optimize_ddp")).startswith("python_reducer")


def is_of_compiler(file: str) -> bool:
    """Whether a source file is on the stack while torch compiles, and only then."""
    modules = (sys.modules.get(name) for name in ("torch._dynamo.convert_frame", "torch._inductor.compile_fx"))
    return any(module is not None and module.__file__ == file for module in modules)
