"""The only door to private torch names.

Everything that is not part of torch's public interface is imported here, once, under a name that says what it is
for. If the installed torch lacks one of them the import fails with one clear error instead of a late, odd one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.algorithms.join import Joinable

from dp_compile.errors import UnsupportedTorchError

try:
    import torch._dynamo.compiled_autograd as _compiled_autograd
    import torch._dynamo.convert_frame as _convert_frame
    import torch._inductor.compile_fx as _compile_fx_module
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import Store as Store
    from torch._dynamo import config as _dynamo_config
    from torch._dynamo import eval_frame as _eval_frame
    from torch._dynamo.backends.common import aot_autograd as _aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
    from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError
    from torch._dynamo.external_utils import call_accumulate_grad as call_accumulate_grad
    from torch._dynamo.external_utils import call_hook as call_hook
    from torch._dynamo.utils import counters as _counters
    from torch._dynamo.utils import set_locals_to_steal as set_locals_to_steal
    from torch._functorch.aot_autograd import make_boxed_func as _make_boxed_func  # type: ignore[attr-defined]
    from torch._inductor import config as _inductor_config
    from torch._inductor import ir as _inductor_ir
    from torch._inductor.compile_fx import compile_fx as _compile_fx
    from torch._inductor.compile_fx import compile_fx_inner as _compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import get_hash_for_files
    from torch._inductor.lowering import lowerings as _lowerings
    from torch._inductor.lowering import register_lowering as register_lowering
    from torch._inductor.utils import fresh_cache as _fresh_cache
    from torch._inductor.utils import run_and_get_code as _run_and_get_code
    from torch._inductor.virtualized import V as _inductor_state
    from torch._logging._internal import LazyTraceHandler as _TraceFile
    from torch._logging._internal import trace_log as _trace_log
    from torch._logging._internal import trace_structured as _trace_structured
    from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
    from torch.autograd import graph as _autograd_graph
    from torch.autograd import profiler as _profiler
    from torch.distributed._composable.contract import _get_registry
    from torch.distributed._composable.replicate import replicate as _replicate
    from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
        _get_default_store,
        _get_process_group_name,
        _resolve_process_group,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as _FullyShardState
    from torch.distributed.utils import _sync_params_and_buffers
    from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_map_only as tree_map_only

    _current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
    _dispatch_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
    _assign_by_size: Callable[..., tuple[list[list[int]], list[int]]] = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    _broadcast_coalesced: Callable[..., None] = dist._broadcast_coalesced  # type: ignore[attr-defined]
    _register_comm_hook: Callable[..., None] = dist._register_comm_hook  # type: ignore[attr-defined]
    _engine_entry = _autograd_graph._engine_run_backward
    _profiled_at_import = _profiler._is_profiler_enabled  # the name has to be there
    # `size_hint` in torch 2.11.
    _size_hint = getattr(_symbolic_shapes, "optimization_hint", None) or _symbolic_shapes.size_hint  # type: ignore[attr-defined]
except (ImportError, AttributeError) as error:  # pragma: no cover - needs a torch that lacks a name
    raise UnsupportedTorchError(
        f"dp_compile needs a private name that torch {torch.__version__} does not have: {error}. "
        "Install a torch in the supported range: pip install 'torch>=2.11,<2.16'."
    ) from error

# What Dynamo raises when a frame cannot be captured whole; nothing of the frame has run by then.
CAPTURE_ERRORS: tuple[type[BaseException], ...] = (Unsupported, UserError)
RECOMPILE_LIMIT_ERRORS: tuple[type[BaseException], ...] = (FailOnRecompileLimitHit,)

BackwardEntry = Callable[..., tuple[torch.Tensor, ...]]
GraphPassFn = Callable[[fx.Graph], None]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place."""
    return tensor._version


# --- the autograd engine ---------------------------------------------------------------------------------------


def backward_entry() -> BackwardEntry:
    """The function through which `torch.autograd.backward` and `grad` enter the C++ engine."""
    return cast(BackwardEntry, _autograd_graph._engine_run_backward)


def set_backward_entry(entry: BackwardEntry) -> None:
    """Replace that function in both modules that hold it. torch's own non-strict tracing patches the same two."""
    _autograd_graph._engine_run_backward = entry
    torch.autograd._engine_run_backward = entry  # type: ignore[attr-defined]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now ends. Only valid inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


NO_GRAPH_TASK: Final = -1


def graph_task() -> int:
    """The number of the backward that this thread is in, `NO_GRAPH_TASK` outside of any."""
    return _current_graph_task()


def is_reentrant_checkpoint(hook: object) -> bool:
    """Whether this, among the functions that a captured backward calls, runs a backward of its own for a checkpoint."""
    return type(hook).__name__ == "CheckpointFunctionBackward"


def is_aot_backward(node: object) -> bool:
    """Whether an autograd node is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


# --- compiled autograd -----------------------------------------------------------------------------------------

EnableCapture = Callable[..., contextlib.AbstractContextManager[None]]


def capture_backward(compiler_fn: Callable[[fx.GraphModule], Any]) -> contextlib.AbstractContextManager[None]:
    """Backwards inside this context are captured and handed to `compiler_fn`. Shapes start out static."""
    return cast(EnableCapture, _compiled_autograd._enable)(compiler_fn, dynamic=False)


def capture_is_running() -> bool:
    """Whether some captured backward is executing in this process; a second capture would be an error then."""
    return bool(_compiled_autograd.in_compiled_autograd_region)


def is_capture_in_the_way(error: NotImplementedError) -> bool:
    """Whether a backward was turned away at the engine's door because a capture is going on."""
    return "within another compiled autograd call" in str(error)


def captures() -> int:
    """How many backwards compiled autograd has captured in this process so far."""
    return int(_counters["compiled_autograd"]["captures"])


def compiled_graphs() -> int:
    """How many graphs, of forwards and backwards, Dynamo has handed to a compiler in this process so far."""
    return int(_counters["stats"]["unique_graphs"])


def dispatch_mode_is_active() -> bool:
    """Whether a TorchDispatchMode is on: capture then fails or records the wrong thing."""
    return _dispatch_modes_active() > 0


def forced_eager() -> bool:
    """Whether the user has switched compilation off (`torch.compiler.set_stance` or TORCHDYNAMO_DISABLE)."""
    return _eval_frame._stance.stance == "force_eager" or bool(_dynamo_config.disable)


def trace_autograd_ops() -> bool:
    """Whether Dynamo traces `backward()` itself; it silently drops every post-accumulate-grad hook then."""
    return bool(getattr(_dynamo_config, "trace_autograd_ops", False))


def python_reducer_mode() -> bool:
    """Whether torch's own experimental `python_reducer` is switched on for the whole process."""
    return str(_dynamo_config.optimize_ddp).startswith("python_reducer")


def profiler_is_on() -> bool:
    """Whether `torch.profiler` records in this process at the moment; its waiting phases do not count."""
    return _profiler._is_profiler_enabled


def is_of_compiler(file: str) -> bool:
    """Whether a source file is on the stack while torch compiles, and only then."""
    return file in (_convert_frame.__file__, _compile_fx_module.__file__)


# --- peers of the benchmark, each in a process of its own ---------------------------------------------------------


def configure_process(*, dynamo: Mapping[str, Any] | None = None, inductor: Mapping[str, Any] | None = None) -> None:
    """Settings of Dynamo and Inductor for a whole process, by their names in torch's `config` modules."""
    for config, settings in ((_dynamo_config, dynamo), (_inductor_config, inductor)):
        for name, value in (settings or {}).items():
            setattr(config, name, value)


composable_replicate: Callable[..., Any] = _replicate

# --- compilers -------------------------------------------------------------------------------------------------


OnCode = Callable[[fx.Graph, str], None]
"""Called with the graph that code was generated from, and the code."""


def inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], graph_pass: CustomGraphPass, on_code: OnCode | None = None
) -> Callable[..., Any]:
    """Compile with Inductor, `graph_pass` last in the post-grad stage. The settings hold for this compile only."""
    patches: dict[str, Any] = {
        "post_grad_custom_post_pass": _chained(_inductor_config.post_grad_custom_post_pass, graph_pass),
        # On by default, it puts all compute first and then waits for each collective at once: no overlap left.
        "reorder_for_peak_memory": False,
    }
    if hasattr(_inductor_config.triton, "mix_order_reduction"):
        # Drops writes to slices of a concatenation, which is what a bucket is (pytorch#193061, in 2.10 to 2.13).
        patches["triton.mix_order_reduction"] = False
    told: dict[str, Any] = {} if on_code is None else {"inner_compile": _telling(on_code)}
    return cast(Callable[..., Any], _compile_fx(gm, inputs, config_patches=patches, **told))


def _telling(on_code: OnCode) -> Callable[..., Any]:
    """Inductor's compilation of one graph, which then tells what it went on with and what it made of it."""

    def compile_and_tell(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compiled = _compile_fx_inner(gm, *args, **kwargs)
        on_code(gm.graph, str(getattr(compiled, "source_code", "")))
        return compiled

    return compile_and_tell


def aot_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], graph_pass: CustomGraphPass, on_code: OnCode | None = None
) -> Callable[..., Any]:
    """Trace to ATen, run `graph_pass`, and run the graph without generating code: seconds faster, for tests."""

    def run_passes(aten_graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph_pass(aten_graph.graph)
        aten_graph.recompile()
        if on_code is not None:
            on_code(aten_graph.graph, str(aten_graph.code))
        return _make_boxed_func(aten_graph.forward)

    backend = _aot_autograd(fw_compiler=run_passes, keep_inference_input_mutations=True)
    return backend(gm, inputs)


def size_hint(size: int | torch.SymInt) -> int:
    """The value that a size has in the example that is being traced, without a guard on it."""
    return int(_size_hint(size))


inductor_ir: Any = _inductor_ir
"""The kinds of kernels, buffers and views that a lowering puts together."""


def inductor_graph() -> Any:
    """The graph that Inductor is lowering right now. Only valid inside a lowering."""
    return _inductor_state.graph


def lower_multiplication(value: Any, factor: float) -> Any:
    """`value * factor` among Inductor's tensors, computed by whoever reads it."""
    return _lowerings[torch.ops.aten.mul.Tensor](value, factor)


def structured_trace_is_on() -> bool:
    """Whether torch's structured trace is recorded (`TORCH_TRACE`). For sure only after something was traced."""
    return any(isinstance(handler, _TraceFile) for handler in _trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Put a text into torch's structured trace, where `tlparse` shows it under this name."""
    _trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors have no memory: dtype, shape, strides, and which of them share a storage."""
    return cast(contextlib.AbstractContextManager[Any], _FakeTensorMode())


def empty_cache() -> contextlib.AbstractContextManager[None]:
    """Inside, Inductor's caches start out empty and go away at the end."""
    return cast(Callable[[], contextlib.AbstractContextManager[None]], _fresh_cache)()


def generated_anew() -> contextlib.AbstractContextManager[None]:
    """Inside, Inductor generates all code, though it may find it compiled already."""
    return cast(contextlib.AbstractContextManager[None], _inductor_config.patch(fx_graph_cache=False))


def code_of(function: Callable[[], Any]) -> list[str]:
    """The code that Inductor generates while `function` runs, a text for each graph."""
    return [str(code) for code in _run_and_get_code(function)[1]]


class ChainedPass(CustomGraphPass):
    """The user's own post-grad pass first, then ours; neither overwrites the other."""

    def __init__(self, first: GraphPassFn, second: CustomGraphPass) -> None:
        self.first, self.second = first, second

    def __call__(self, graph: fx.Graph) -> None:
        self.first(graph)
        self.second(graph)

    def uuid(self) -> Any:
        first = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        second = self.second.uuid()
        return None if first is None or second is None else (first, second)


def _chained(existing: Any, ours: CustomGraphPass) -> CustomGraphPass:
    for graph_pass in reversed(existing if isinstance(existing, (list, tuple)) else [existing]):
        if graph_pass is not None:
            ours = ChainedPass(graph_pass, ours)
    return ours


def source_hash(paths: Sequence[str]) -> str:
    """A hash over the text of source files, the same in every process."""
    return str(get_hash_for_files(tuple(paths)))


# --- distributed -----------------------------------------------------------------------------------------------


def group_name(group: dist.ProcessGroup) -> str:
    """The name under which functional collectives find a process group."""
    return str(_get_process_group_name(group))


def group_of_name(name: str) -> dist.ProcessGroup:
    """The inverse of `group_name`."""
    return _resolve_process_group(cast(Any, name))


def default_store() -> Store:
    """The key-value store behind the default process group."""
    return _get_default_store()


def collectives_launched(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives on tensors of `device` this rank has launched. Only differences mean something.

    gloo and NCCL count them; for a backend that does not the answer is always 0.
    """
    try:
        return int(cast(Any, group)._get_backend(device)._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def is_communication_error(error: BaseException | None) -> bool:
    """Whether an error came from a process group or a store.

    gloo's is a plain RuntimeError. It names its source file, but for the one with which an operation that timed out
    ends all others.
    """
    if isinstance(error, dist.DistError):
        return True
    signs = ("/gloo/", "Application timeout caused pair closure", "Operation timed out!")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def connect_again(store: Store, timeout_s: float) -> Store:
    """A connection of its own to the same store, with its own time-out."""
    connection = cast(Store, cast(Any, store).clone())
    connection.set_timeout(timedelta(seconds=timeout_s))
    return connection


def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int, source: int = 0) -> None:
    """Copy the tensors of one rank of the group, by its rank in it, to all others, coalesced by dtype."""
    if tensors:
        _broadcast_coalesced(group, list(tensors), bucket_bytes, source)


def broadcast_state(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int, source: int = 0
) -> None:
    """As `broadcast`, with the precautions that torch's DDP takes for parameters at the start."""
    if tensors:
        _sync_params_and_buffers(group, list(tensors), bucket_bytes, source)


def join_is_on(joinable: Joinable) -> bool:
    """Whether the latest `Join` context of a joinable is enabled."""
    return bool(joinable._join_config.enable)


def ddp_buckets(parameters: Sequence[torch.Tensor], caps_bytes: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    """torch's own rule for the buckets of its DDP, as lists of indices.

    Args:
        parameters: in the order in which the buckets are filled.
        caps_bytes: the cap of the first bucket, of the second and so on; the last one counts from there on.
        order: the indices of `parameters`, or nothing for the rule before the first backward.
    """
    return _assign_by_size(list(parameters), list(caps_bytes), [], list(order))[0]


def composable_apis(module: nn.Module) -> tuple[str, ...]:
    """Names of torch's composable APIs (`replicate`, `fully_shard`, ...) that were applied to this module."""
    return tuple(_get_registry(module) or ())


def is_hook_of_fully_shard(hook: object) -> bool:
    """Whether an autograd hook belongs to a module that `fully_shard` manages."""
    return isinstance(getattr(hook, "__self__", None), _FullyShardState)


class TorchReducer:
    """torch's C++ reducer for parameters, driven from the backward instead of from a wrapped forward.

    Holds a `torch.nn.parallel.DistributedDataParallel` of which only the reducer is used, around a module that has
    nothing but the parameters, as torch's composable `replicate` does. `prepare` does before each backward what its
    forward would have done: torch's `_pre_forward` and `_post_forward`, same order.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], **options: Any) -> None:
        holder = nn.Module()
        holder._parameters.update(parameters)  # register_parameter() refuses the dots of qualified names
        self._ddp = nn.parallel.DistributedDataParallel(holder, init_sync=False, **options)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket. `hook` was checked before."""
        _register_comm_hook(self._ddp.reducer, state, hook)

    def prepare(self, outputs: Sequence[torch.Tensor]) -> None:
        """Arm the reducer for the backward from `outputs`."""
        reducer = self._ddp.reducer
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward(list(outputs) if self._ddp.find_unused_parameters else [])

    def close(self) -> None:
        """Take the reducer's hooks off the parameters."""
        self._ddp.reducer._remove_autograd_hooks()
