"""Compilers and lowerings. Importing this loads Dynamo and Inductor: import it only in code that compiles."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from filelock import FileLock, Timeout
from torch import fx

from dp_compile._torch.captured_ops import NamedOp
from dp_compile._torch.missing import named

with named():
    from torch._dynamo.backends.common import aot_autograd as _aot_autograd
    from torch._functorch import config as _functorch_config
    from torch._functorch.aot_autograd import make_boxed_func as _make_boxed_func  # type: ignore[attr-defined]
    from torch._inductor import config as config
    from torch._inductor import config_comms
    from torch._inductor import ir as _ir
    from torch._inductor import list_mode_options as list_mode_options
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir
    from torch._inductor.compile_fx import compile_fx as _compile_fx
    from torch._inductor.compile_fx import compile_fx_inner as _compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import get_hash_for_files
    from torch._inductor.lowering import fallback_handler as _fallback_handler
    from torch._inductor.lowering import lowerings as _lowerings
    from torch._inductor.lowering import register_lowering as register_lowering
    from torch._inductor.virtualized import V as _state

# Settings with which Inductor launches collectives while it compiles, so that all ranks have to compile at once.
_COLLECTIVES: Final = (
    "distributed_max_autotune_gemm",
    "aten_distributed_optimizations.enable_overlap_scheduling",
    "aten_distributed_optimizations.spmd_check",
)

GraphPassFn = Callable[[fx.Graph], None]
OnCode = Callable[[fx.Graph, str], None]
"""Receives the graph from which code was generated, and the code."""


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], graph_pass: CustomGraphPass, on_code: OnCode | None = None
) -> Callable[..., Any]:
    """Compile with Inductor, with `graph_pass` as the last post-grad pass. Patches config for this compile only."""
    chained = _chained(config.post_grad_custom_post_pass, graph_pass)
    patches: dict[str, Any] = {
        "post_grad_custom_post_pass": chained,
        # On by default. It schedules all compute first and then waits right after each launch, so nothing overlaps.
        "reorder_for_peak_memory": False,
    }
    if hasattr(config.triton, "mix_order_reduction"):
        # Drops writes to slices of a concatenation, such as a bucket (pytorch#193061, in 2.10 to 2.13).
        patches["triton.mix_order_reduction"] = False
    if hasattr(getattr(config, "aten_distributed_optimizations", None), "enable_simple_overlap"):
        # On by default since 2.14 (pytorch#184240). It moves the launches and waits that the graph pass has placed,
        # within its own memory bound. It moves them past writes into a bucket: Inductor sees no dependency on those.
        patches["aten_distributed_optimizations.enable_simple_overlap"] = False

    def compile_inner(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compiled = _compile_fx_inner(gm, *args, **kwargs)
        assert on_code is not None
        on_code(gm.graph, str(getattr(compiled, "source_code", "")))
        return compiled

    # AOTAutograd caches no function of unknown modules. Name, arguments and torch's version define a `NamedOp` fully.
    names = {f"{t.__module__}.{t.__name__}" for t in (node.target for node in gm.graph.nodes) if isinstance(t, NamedOp)}
    # Sorted, because the order is a part of the cache's key.
    cacheable = config.unsafe_marked_cacheable_functions | dict.fromkeys(sorted(names), torch.__version__)
    inner: dict[str, Any] = {} if on_code is None else {"inner_compile": compile_inner}
    key = repr((gm.code, chained.uuid(), [getattr(each, "shape", None) for each in inputs]))
    is_cached = config.fx_graph_cache and not config.force_disable_caches and chained.uuid() is not None
    meets = config_comms.runtime_estimations_align_across_all_distributed_ranks
    meets = meets or any(config.get_config_copy().get(name) for name in _COLLECTIVES)
    with (
        config.patch(unsafe_marked_cacheable_functions=cacheable),
        first_on_host(key) if is_cached and not meets else contextlib.nullcontext(),
    ):
        return cast(Callable[..., Any], _compile_fx(gm, inputs, config_patches=patches, **inner))


@contextlib.contextmanager
def first_on_host(key: str) -> Iterator[None]:
    """Run the block first in one process of this host. Others with this key wait until it ends, at most 10 minutes.

    So one rank compiles a graph, and the others find its code in the compile caches.
    """
    lock = FileLock(Path(get_lock_dir(), f"dp_compile_{hashlib.sha256(key.encode()).hexdigest()}.lock"))
    try:
        with contextlib.suppress(OSError, Timeout):  # without a lock every process compiles
            try:
                lock.acquire(blocking=False)
            except Timeout:
                lock.acquire(timeout=LOCK_TIMEOUT)
                lock.release()
        yield
    finally:
        lock.release()


def compile_forward_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], graph_pass: CustomGraphPass | None, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a forward as `torch.compile` does, with `options` and with `graph_pass` as the first post-grad pass.
    Inductor later runs the pass on the backward too: the pass must distinguish the two graphs."""
    patches = dict(options)
    if graph_pass is not None:
        patches["post_grad_custom_pre_pass"] = _chained(config.post_grad_custom_pre_pass, graph_pass)
    return cast(Callable[..., Any], _compile_fx(gm, inputs, config_patches=patches))


def uses_cuda_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether code compiled with these options is replayed as CUDA graphs, without running its Python code."""
    return bool(options.get("triton.cudagraphs", config.triton.cudagraphs))


class Keyed(CustomGraphPass):
    """Makes a callable frozen dataclass an Inductor pass; its cache key is the dataclass's repr and source file."""

    def __init__(self, graph_pass: GraphPassFn) -> None:
        self.graph_pass = graph_pass

    def __call__(self, graph: fx.Graph) -> None:
        self.graph_pass(graph)

    def uuid(self) -> Any:
        sources = source_hash([str(inspect.getfile(type(self.graph_pass)))])
        return hashlib.sha256(repr((sources, self.graph_pass)).encode()).hexdigest()


def compile_with_aot_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], graph_pass: CustomGraphPass, on_code: OnCode | None = None
) -> Callable[..., Any]:
    """Trace to ATen and run `graph_pass` on the forward and its backward. Saves seconds: it generates no code."""

    def run_passes(aten_graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph_pass(aten_graph.graph)
        aten_graph.recompile()
        if on_code is not None:
            on_code(aten_graph.graph, str(aten_graph.code))
        return _make_boxed_func(aten_graph.forward)

    backend = _aot_autograd(fw_compiler=run_passes, keep_inference_input_mutations=True)
    return backend(gm, inputs)


ir: Any = _ir
"""Inductor's IR: the classes of kernels, buffers and views from which lowerings build their results."""


def graph_being_lowered() -> Any:
    """Return the graph that Inductor is lowering. Only valid inside a lowering."""
    return _state.graph


def lower(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower an op with Inductor's own lowering: its consumers compute it inline or fuse it."""
    return _lowerings[op](*args, **kwargs)


def lower_as_call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower an op as an external call (a fallback kernel)."""
    return _fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)


def run_first(buffer: Any, users: Sequence[Any]) -> None:
    """Make Inductor schedule the call (without inputs) that creates `buffer` before `users`, which write into the
    buffer: Inductor does not see this dependency. Also keep Inductor from reusing the memory for another buffer."""
    graph = _state.graph
    operation = buffer.get_defining_op()
    graph.operations.remove(operation)
    graph.operations.insert(0, operation)
    graph.never_reuse_buffers.add(buffer.get_name())
    # The dependencies below only order, so dead code elimination would drop a call without other users. (pytorch#188301
    # removed `additional_star_deps`, which also count as uses, in 2.15.)
    operation.has_side_effects = lambda: True
    for user in users:
        graph.additional_buffer_deps[user.get_operation_name()].add(buffer.get_name())


@contextlib.contextmanager
def generated_anew() -> Iterator[None]:
    """Bypass the compile caches in this block, so that Inductor generates all code. AOTAutograd's cache, which holds
    whole graphs, is looked up before Inductor's."""
    with config.patch(fx_graph_cache=False), _functorch_config.patch(enable_autograd_cache=False):
        yield


class ChainedPass(CustomGraphPass):
    """The user's post-grad pass followed by ours; neither overwrites the other."""

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
    """Return a hash of the contents of source files, equal in every process."""
    return str(get_hash_for_files(tuple(paths)))
