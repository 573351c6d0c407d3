"""Compiled autograd and Dynamo. Loading this loads Dynamo: only for what runs once something is compiled."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import torch
from torch import fx

from dp_compile._torch.missing import named

with named():
    import torch._dynamo.compiled_autograd as _compiled_autograd
    import torch._dynamo.eval_frame as _eval_frame
    import torch._dynamo.guards as _guards
    from torch._dynamo import config as config
    from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
    from torch._dynamo.exc import RecompileError as _RecompileError
    from torch._dynamo.external_utils import FakeCompiledAutogradEngine as _Engine
    from torch._dynamo.external_utils import call_accumulate_grad as call_accumulate_grad
    from torch._dynamo.external_utils import call_hook as call_hook
    from torch._dynamo.external_utils import unwrap_maybe_dynamic_int as _unwrap_size
    from torch._dynamo.utils import set_locals_to_steal as set_locals_to_steal
    from torch._logging._internal import LazyTraceHandler as _TraceFile
    from torch._logging._internal import trace_log as _trace_log
    from torch._logging._internal import trace_structured as _trace_structured
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

    at_end: Any = _Engine._exec_final_callbacks_stub
    """The last call of a captured graph, which does nothing."""
    without_autocast: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._DisableAutocast
    """Inside, no device's autocast is on. AOTAutograd runs its compiled backwards in this context too."""
    _set_compiler: Callable[..., Any] = torch._C._dynamo.compiled_autograd.set_autograd_compiler
    _set_verbose_logger: Callable[..., Any] = torch._C._dynamo.compiled_autograd.set_verbose_logger
    _is_verbose: Callable[[], bool] = _compiled_autograd.snapshot_verbose_logging_enabled
    _on_at_import: bool = _compiled_autograd.compiled_autograd_enabled  # the name has to be there
    _Capture: Any = _compiled_autograd.AutogradCompilerInstance
    _tracing_is_off = _compiled_autograd.disable_proxy_modes_tracing  # type: ignore[attr-defined]

if torch.cuda.is_available():
    # As `_enable` does: a backward under CUDA graphs looks for it where it may not be imported (torch 2.13).
    from torch._inductor import cudagraph_trees as cudagraph_trees

# c10::ScalarType, in its order: a part of torch's file format, so it does not change.
_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32),
    torch.bfloat16,
)


TAKES_EXISTING: Final = "variable_grad" in inspect.signature(call_accumulate_grad).parameters
"""Whether a captured graph takes the gradients that it adds to: since torch 2.13."""


class CaptureBackward:
    """Backwards inside this context are captured and handed to `compiler_fn`. Shapes start out static.

    What torch's `_enable` does (2.11 to 2.15), also under a stance of "force_eager". Torch's is a generator around
    others: in a step that has emptied the processor's caches before, it takes as long as a small kernel.
    """

    __slots__ = ("_before", "_captures", "_compiler_fn", "_threads", "_was_on")

    def __init__(self, compiler_fn: Callable[[fx.GraphModule], Any]) -> None:
        self._compiler_fn = compiler_fn
        self._captures: list[_QuickCapture] = []

    def _make(self) -> _QuickCapture:
        self._captures.append(_QuickCapture(self._compiler_fn))
        return self._captures[-1]

    @property
    def has_spoilt_graph(self) -> bool:
        """Whether a capture ended while autograd's nodes held stand-ins in the place of saved tensors (torch 2.13)."""
        return any(capture.is_tracing for capture in self._captures)

    def __enter__(self) -> CaptureBackward:
        if _is_verbose():
            _set_verbose_logger(_compiled_autograd.verbose_log)
        self._before = _set_compiler(self._make, False)
        self._was_on = _compiled_autograd.compiled_autograd_enabled
        _compiled_autograd.compiled_autograd_enabled = True
        self._threads = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        return self

    def __exit__(self, *error: object) -> None:
        for capture in self._captures:
            capture.leave()
        torch._C._set_multithreading_enabled(self._threads)
        _compiled_autograd.in_compiled_autograd_region = False
        _compiled_autograd.compiled_autograd_enabled = self._was_on
        _set_compiler(*self._before)


class _QuickCapture(_Capture):  # type: ignore[misc]
    """torch's, without what it does for nothing, which is half of the time: some 5 ms for each parameter.

    torch makes a symbol of every size, and each question to such a tensor one for a solver. But it puts calls into the
    graph as they are, and empty tensors of any shape stand for their results: no shape matters. Numbers that do are the
    graph's inputs `sizes`, or decide whether the graph is found again. With anything else the capture fails.
    """

    is_tracing = False
    _error: Exception | None = None

    def begin_capture(self, *arguments: Any) -> Any:
        begun = super().begin_capture(*arguments)
        self.is_tracing = True
        return begun

    def proxy_call_backward(self, inputs: Any, output_metadatas: Any, *others: Any) -> Any:
        """An error waits for the end: here it would leave the node without the tensors that it has saved."""
        try:
            return super().proxy_call_backward(inputs, output_metadatas, *others)
        except Exception as error:
            self._error = self._error or error
            return (None,) * len(output_metadatas)

    def leave(self) -> None:
        """Leave the modes that a capture is made in. torch does so only where none fails (2.13); twice is no harm."""
        self.stack.close()
        if hasattr(self, "compile_context"):
            self.compile_context.__exit__(None, None, None)

    def wrap_fake(self, x: torch.Tensor, source: Any) -> Any:
        return self.fake_tensor_mode.from_tensor(x, source=source, static_shapes=True)

    def post_acc_grad_hook(self, input: torch.Tensor, hook_id: int) -> list[torch.Tensor]:
        """torch copies the parameter, with `as_strided`, which a DTensor lacks."""
        proxy = self.proxy_call_hook(self.hooks_proxy[hook_id], input, hook_type="post_acc_grad_hook")
        with _tracing_is_off():
            stand_ins = [torch.empty_like(input)]
            self.bind_objects_to_proxies(stand_ins, [proxy])
        return stand_ins

    def end_capture(self, outputs: Any) -> Any:
        """The graph; or an error of any class, of a function that cannot be captured. Nothing has run."""
        self.is_tracing = False
        if self._error is not None:
            raise self._error
        found = [node.name for node in self.fx_tracer.graph.nodes if _is_computed(node)]
        if found:
            raise RuntimeError(f"a capture computed {', '.join(found)}, whose sizes may be those of one batch")
        return super().end_capture(outputs)


def _is_computed(node: fx.Node) -> bool:
    """Whether a graph being captured has what followed from an operation on stand-ins, and is read.

    What is pasted is not computed, and has other names. Zeros for unused outputs have the sizes that
    these had in the forward: compiled autograd has them in the key of a graph, or among its inputs.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.name.startswith("aot"):
        return False
    return (bool(node.users) or node.is_impure()) and node.target is not torch.ops.aten.zeros.default


def refill_constants(graph_module: fx.GraphModule) -> None:
    """In a captured graph, replace each constant that holds a single value by a call that makes it in each backward.

    AOTAutograd's cache holds the backward of a forward as a pickle. Loading it traces the backward with torch.fx, which
    evaluates calls without tensors (torch 2.13). The zeros that the gradient of an embedding is added to would stay in
    memory as long as the code, and are as large as the table.
    """
    graph, replaced = graph_module.graph, set[str]()
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(graph_module, name, None)
        if not isinstance(value, torch.Tensor) or not value.numel() or not value.is_contiguous():
            continue
        first = value.flatten()[0]
        if bool((value == first).all()):
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            with graph.inserting_before(node):
                full = graph.call_function(torch.ops.aten.full.default, ([*value.shape], first.item()), options)
            node.replace_all_uses_with(full)
            graph.erase_node(node)
            replaced.add(name)
    for name in replaced:  # several nodes may read one
        delattr(graph_module, name)
    if replaced:
        graph_module.recompile()


def validated_outputs(node: fx.Node) -> list[tuple[Any, GradientLike | None]]:
    """What a captured graph's check of an autograd function's outputs is given, each with what it has to be like.
    Nothing for a node that is no such check; `None` for an output that is not asked for."""
    if getattr(node.target, "__name__", "") != "validate_outputs" or len(node.args) < 2:
        return []
    outputs, wanted = cast(tuple[Any, Any], node.args[:2])
    # As `IValue`s come from C++: ((_, _, device, dtype, layout, _), shape, is_nested, dtype).
    likes = (None if each is None else GradientLike(tuple(each[1]), _DTYPES[each[3]], each[0][2]) for each in wanted)
    return list(zip(outputs, likes, strict=True))


class GradientLike(NamedTuple):
    """The shape, dtype and device that a gradient has to have."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        """One, with any values."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Accumulated(NamedTuple):
    """The gradient from before, if there is one and the graph takes it, and what is added to it."""

    old: fx.Node | None
    new: fx.Node


def accumulated(node: fx.Node) -> Accumulated:
    """Of a captured graph's `call_accumulate_grad`."""
    # (parameter, gradient, flag); since torch 2.13 (parameter, old gradient, gradient, flag).
    _, *old, new = (each for each in node.args if isinstance(each, fx.Node))
    return Accumulated(old[0] if old else None, new)


def computes_only(target: object) -> bool:
    """Whether the target of a captured graph's call computes tensors from tensors, and runs no code of the user's."""
    if isinstance(target, _compiled_autograd.Op):  # a function of autograd's own, or one that was written in C++
        return not target.is_custom_function
    is_op = isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    # Of dynamic shapes: arithmetic of Python on sizes.
    on_sizes = target is _unwrap_size or getattr(target, "__module__", "") in ("_operator", "math")
    return is_op or on_sizes or sorts_only(target)


def sorts_only(target: object) -> bool:
    """Whether a captured graph's call sorts inputs or outputs of AOTAutograd's backward, or makes DTensors of them."""
    return getattr(target, "__name__", "") in ("call_aot_bwd_prologue", "call_aot_bwd_epilogue", "make_subclass")


def parts_of_subclass(node: fx.Node) -> list[fx.Node]:
    """What a captured graph's node makes a DTensor of; nothing if it makes none, or does not tell.

    Compiled autograd gives each such node everything that AOTAutograd's backward computes, of which it takes a few
    (torch 2.13, `proxy_subclass_constructor`): by its inputs alone each would depend on the whole backward.
    """
    if getattr(node.target, "__name__", "") != "make_subclass" or not inspect.isfunction(node.target):
        return []
    meta = inspect.getclosurevars(node.target).nonlocals.get("subclass_meta")
    first, count = (getattr(meta, name, None) for name in ("flat_tensor_start_idx", "arg_count"))
    if not isinstance(first, int) or not isinstance(count, int):
        return []
    return [each for each in node.args[first : first + count] if isinstance(each, fx.Node)]


def accumulate_op() -> Any:
    """The function of autograd that adds to a gradient, as graphs call it; there once something was captured."""
    return _compiled_autograd.ops.AccumulateGrad  # type: ignore[attr-defined]


def asks_for_errors(error: Exception) -> bool:
    """Whether `error` is, or may be, one that `error_on_recompile` or `set_stance("fail_on_recompile")` asks for."""
    return isinstance(error, _RecompileError) or stance() == "fail_on_recompile"


def stance() -> str:
    """What `torch.compiler.set_stance` has set, "default" without it."""
    return str(_eval_frame._stance.stance)


def measure_no_guards() -> None:
    """From now on Dynamo does not time the guards of what it compiles, for its log alone.

    It empties the processor's caches for that, with 32 MiB, in 20 ms: a seventh of what a small model takes to
    compile. There is no setting for it (torch 2.13).
    """
    _guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]


def let_go_of_nodes(graph_module: fx.GraphModule) -> None:
    """For a graph that Dynamo has traced, once it is compiled.

    AOTAutograd's callable keeps the module, of which only names are needed, and the nodes would stay as long as
    the code, with all that they know: 34 MiB for 600 parameters (torch 2.13).
    """
    graph_module._graph = fx.Graph()  # `graph = ` would compile the empty one


def structured_trace_is_on() -> bool:
    """Whether torch's structured trace is recorded (`TORCH_TRACE`). For sure only after something was traced."""
    return any(isinstance(handler, _TraceFile) for handler in _trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Put a text into torch's structured trace, where `tlparse` shows it under this name."""
    metadata = {"name": name, "encoding": "string"}
    _trace_structured("artifact", lambda: metadata, payload_fn=lambda: text, expect_trace_id=False)
