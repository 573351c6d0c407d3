"""Compiled autograd and Dynamo. Importing this loads Dynamo: import it only in code that captures or compiles."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, cast

import torch
from torch import fx

from dp_compile._torch import captured_ops
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
    """The target of a captured graph's last call, which is a no-op."""
    without_autocast: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._DisableAutocast
    """Disable autocast on all devices in this block, as AOTAutograd does around its compiled backwards."""
    _set_compiler: Callable[..., Any] = torch._C._dynamo.compiled_autograd.set_autograd_compiler
    _set_verbose_logger: Callable[..., Any] = torch._C._dynamo.compiled_autograd.set_verbose_logger
    _is_verbose: Callable[[], bool] = _compiled_autograd.snapshot_verbose_logging_enabled
    _on_at_import: bool = _compiled_autograd.compiled_autograd_enabled  # raises here if torch lacks the name
    _Capture: Any = _compiled_autograd.AutogradCompilerInstance
    _tracing_is_off = _compiled_autograd.disable_proxy_modes_tracing  # type: ignore[attr-defined]

if torch.cuda.is_available():
    # As `_enable` does: a backward under CUDA graphs reads this module where importing it may fail (torch 2.13).
    from torch._inductor import cudagraph_trees as cudagraph_trees

# The order of c10::ScalarType. It is part of torch's file format and therefore stable.
_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32),
    torch.bfloat16,
)


TAKES_EXISTING: Final = "variable_grad" in inspect.signature(call_accumulate_grad).parameters
"""Whether existing gradients are inputs of a captured graph: true since torch 2.13."""


class CaptureBackward:
    """A context that captures backwards and passes their graphs to `compiler_fn`. Shapes are static at first.

    It does what torch's `_enable` does (2.11 to 2.15), also under the stance "force_eager". It is a class because
    `_enable` nests generators: with cold CPU caches they take as long as a small kernel.
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
        """Whether a capture aborted while autograd nodes held placeholders instead of saved tensors (torch 2.13)."""
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
    """torch's capture without symbolic shapes, which take half of its time: about 5 ms per parameter.

    torch makes every size a symbol, and each query of such a size runs a solver. No shape matters here: calls enter the
    graph unevaluated, and empty tensors of any shape stand for their results. Sizes that matter are the graph's inputs
    `sizes` or part of its cache key. If a capture computes anything else from a size, it fails.
    """

    is_tracing = False
    _error: Exception | None = None

    def begin_capture(self, *arguments: Any) -> Any:
        begun = super().begin_capture(*arguments)
        self.is_tracing = True
        return begun

    def proxy_call_backward(self, inputs: Any, output_metadatas: Any, *others: Any) -> Any:
        """Defer errors to `end_capture`: raised here, they would leave the node without its saved tensors."""
        try:
            return super().proxy_call_backward(inputs, output_metadatas, *others)
        except Exception as error:
            self._error = self._error or error
            return (None,) * len(output_metadatas)

    def leave(self) -> None:
        """Exit the capture's contexts. torch exits them only if the capture succeeds (2.13). Safe to call twice."""
        self.stack.close()
        if hasattr(self, "compile_context"):
            self.compile_context.__exit__(None, None, None)

    def wrap_fake(self, x: torch.Tensor, source: Any) -> Any:
        return self.fake_tensor_mode.from_tensor(x, source=source, static_shapes=True)

    def post_acc_grad_hook(self, input: torch.Tensor, hook_id: int) -> list[torch.Tensor]:
        """Record a hook call. torch's version copies the parameter with `as_strided`, which DTensors lack."""
        proxy = self.proxy_call_hook(self.hooks_proxy[hook_id], input, hook_type="post_acc_grad_hook")
        with _tracing_is_off():
            stand_ins = [torch.empty_like(input)]
            self.bind_objects_to_proxies(stand_ins, [proxy])
        return stand_ins

    def end_capture(self, outputs: Any) -> Any:
        """Return the compiled graph; nothing has run yet. Raises any error of a function that cannot be captured."""
        self.is_tracing = False
        if self._error is not None:
            raise self._error
        found = [node.name for node in self.fx_tracer.graph.nodes if _is_computed(node)]
        if found:
            raise RuntimeError(f"a capture computed {', '.join(found)}, whose sizes may be those of one batch")
        return super().end_capture(outputs)


def _is_computed(node: fx.Node) -> bool:
    """Return whether a node of a captured graph is an op that ran on placeholders, and its result is used.

    The nodes of an inlined AOTAutograd backward did not run; their names start with "aot". Zeros for unused outputs
    are allowed: compiled autograd has their sizes in the graph's cache key or among its inputs.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.name.startswith("aot"):
        return False
    return (bool(node.users) or node.is_impure()) and node.target is not torch.ops.aten.zeros.default


def refill_constants(graph_module: fx.GraphModule) -> None:
    """Replace each constant of a captured graph whose elements are all equal by an `aten.full` that runs in the graph.

    AOTAutograd caches backwards as pickles. Loading one traces it with torch.fx, which evaluates calls without tensor
    arguments to constants (torch 2.13). A constant lives as long as the code. The zeros for an embedding's gradient
    are as large as the table.
    """
    graph, names, fulls = graph_module.graph, set[str](), dict[torch.Tensor, fx.Node]()
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(graph_module, name, None)
        if not isinstance(value, torch.Tensor) or not value.numel() or not value.is_contiguous():
            continue
        first = value.flatten()[0]
        if bool((value == first).all()):
            if value not in fulls:  # compiled autograd reads one constant by many names
                args = [*value.shape], first.item()
                with graph.inserting_before(node):
                    fulls[value] = graph.call_function(torch.ops.aten.full.default, args)
                fulls[value].kwargs = {"dtype": value.dtype, "device": value.device}
            node.replace_all_uses_with(fulls[value])
            graph.erase_node(node)
            names.add(name)
    for name in names:
        delattr(graph_module, name)
    if names:
        graph_module.recompile()


def validated_outputs(node: fx.Node) -> list[tuple[Any, GradientLike | None]]:
    """Return the outputs that a captured graph's `validate_outputs` call checks, each with its expected metadata.
    Returns [] for any other node; the metadata is `None` if the output is not needed."""
    if getattr(node.target, "__name__", "") != "validate_outputs" or len(node.args) < 2:
        return []
    outputs, wanted = cast(tuple[Any, Any], node.args[:2])
    # C++ packs `IValue`s as ((_, _, device, dtype, layout, _), shape, is_nested, dtype).
    likes = (None if each is None else GradientLike(tuple(each[1]), _DTYPES[each[3]], each[0][2]) for each in wanted)
    return list(zip(outputs, likes, strict=True))


class GradientLike(NamedTuple):
    """The expected shape, dtype and device of a gradient."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        """Return an uninitialized tensor with this metadata."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Accumulated(NamedTuple):
    """Gradients of one accumulation: the existing one, `None` if absent or no graph input, and the one to be added."""

    old: fx.Node | None
    new: fx.Node


def accumulated(node: fx.Node) -> Accumulated:
    """Return the gradients of a `call_accumulate_grad` node of a captured graph."""
    # Arguments: (parameter, gradient, flag); since torch 2.13 (parameter, old gradient, gradient, flag).
    _, *old, new = (each for each in node.args if isinstance(each, fx.Node))
    return Accumulated(old[0] if old else None, new)


def computes_only(target: object) -> bool:
    """Return whether a call target in a captured graph only computes tensors from tensors and runs no user code."""
    if isinstance(target, captured_ops.Op):  # a built-in autograd function, or a custom one written in C++
        return not target.is_custom_function
    is_op = isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    # Graphs with dynamic shapes contain Python arithmetic on sizes.
    on_sizes = target is _unwrap_size or getattr(target, "__module__", "") in ("_operator", "math")
    return is_op or on_sizes or sorts_only(target)


def sorts_only(target: object) -> bool:
    """Return whether a call only reorders AOTAutograd's backward inputs or outputs, or builds DTensors from them."""
    return getattr(target, "__name__", "") in ("call_aot_bwd_prologue", "call_aot_bwd_epilogue", "make_subclass")


def parts_of_subclass(node: fx.Node) -> list[fx.Node]:
    """Return the inner tensors from which a `make_subclass` node builds its DTensor, [] if unknown or another node.

    Compiled autograd passes every output of AOTAutograd's backward to each such node, which reads only a few (torch
    2.13, `proxy_subclass_constructor`). By its arguments alone each node seems to depend on the whole backward.
    """
    if getattr(node.target, "__name__", "") != "make_subclass" or not inspect.isfunction(node.target):
        return []
    meta = inspect.getclosurevars(node.target).nonlocals.get("subclass_meta")
    first, count = (getattr(meta, name, None) for name in ("flat_tensor_start_idx", "arg_count"))
    if not isinstance(first, int) or not isinstance(count, int):
        return []
    return [each for each in node.args[first : first + count] if isinstance(each, fx.Node)]


def unchanged_by_prologue(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> dict[str, str]:
    """Return a map from each node that AOTAutograd's prologue returns unchanged to its equal operand, both by name.

    `values`: fake tensors of nodes. The prologue may also copy a gradient into another memory format. It is a closure,
    and AOTAutograd caches no graph that has a closure.
    """
    found: dict[str, str] = {}
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "call_aot_bwd_prologue":
            operands: dict[int, list[str]] = {}
            for each in node.all_input_nodes:
                operands.setdefault(id(values.get(each)), []).append(each.name)
            for user in node.users:
                same = operands.get(id(values[user]), ()) if isinstance(values.get(user), torch.Tensor) else ()
                if user.target is operator.getitem and len(same) == 1:
                    found[user.name] = same[0]
    return found


def make_cacheable(graph: fx.Graph) -> None:
    """Make a captured graph usable as a cache key: replace what differs between processes or cannot be pickled.

    Built-in autograd functions are called by their names; a custom one has a number, so a graph with it is not cached.
    A backward that AOTAutograd's cache returns with its forward has other node names and `aten.full` calls than a
    compiled one (see `refill_constants`). Here both get the same names and calls: a warm start then finds cached code.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
        dtype, device = node.kwargs.get("dtype"), node.kwargs.get("device")
        if dtype and device and node.users and not node.all_input_nodes:
            node.args = node.args[0], torch.tensor(node.args[1], dtype=dtype, device="cpu").item()
            node.kwargs = {"dtype": dtype, "device": device}
            min(node.users).prepend(node)
    for position, node in enumerate(graph.nodes):
        if isinstance(node.target, captured_ops.Op) and not node.target.is_custom_function:
            node.target = getattr(captured_ops, node.target.__name__)
        if node.op == "call_function":
            node._rename(f"n{position}_{getattr(node.target, '__name__', 'call').split('.')[0]}")


def accumulate_op() -> Any:
    """Return the AccumulateGrad target that captured graphs call. It exists only after the first capture."""
    return _compiled_autograd.ops.AccumulateGrad  # type: ignore[attr-defined]


def asks_for_errors(error: Exception) -> bool:
    """Return whether `error_on_recompile` or `set_stance("fail_on_recompile")` caused, or may have caused, `error`."""
    return isinstance(error, _RecompileError) or stance() == "fail_on_recompile"


def stance() -> str:
    """Return the stance set by `torch.compiler.set_stance`, "default" if none was set."""
    return str(_eval_frame._stance.stance)


def measure_no_guards() -> None:
    """Disable Dynamo's timing of guards, which serves only its log, for the rest of the process.

    Before timing, Dynamo flushes the CPU caches with 32 MiB. This takes 20 ms: a seventh of a small model's compile
    time. torch has no setting for it (2.13).
    """
    _guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]


def let_go_of_nodes(graph_module: fx.GraphModule) -> None:
    """Free the nodes of a graph that Dynamo traced. Call it after the graph is compiled.

    AOTAutograd's callable keeps the module alive but needs only its names. The nodes and their metadata would live as
    long as the code: 34 MiB for 600 parameters (torch 2.13).
    """
    graph_module._graph = fx.Graph()  # `graph = ` would compile the empty one


def structured_trace_is_on() -> bool:
    """Return whether torch's structured trace (`TORCH_TRACE`) is recorded. Reliable only after a first event."""
    return any(isinstance(handler, _TraceFile) for handler in _trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Add a text artifact to torch's structured trace; `tlparse` shows it under `name`."""
    metadata = {"name": name, "encoding": "string"}
    _trace_structured("artifact", lambda: metadata, payload_fn=lambda: text, expect_trace_id=False)
