"""The forward's entry in AOTAutograd's own cache, saved though its backward is never compiled by itself.

AOTAutograd saves a forward when its backward is compiled too. A captured backward takes that compilation's place, so
nothing is ever saved and the next process compiles the forward again. Here the entry is saved with a backward that is a
graph and no code: a capture takes the graph, and whoever runs the entry in another way, as `torch.autograd.grad` or a
process without this package's capture, compiles it in its first backward.

The graph is kept as it is. torch's own way (2.13) turns each constant in it into a tensor of full size and gives
other names, so what is captured from it would be another graph than in the process that compiled.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from dp_compile._torch.missing import named

with named():
    from torch._dynamo.convert_frame import compile_lock as _compile_lock
    from torch._functorch._aot_autograd.aot_autograd_result import InductorOutput as _InductorOutput
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache as _AOTAutogradCache
    from torch._functorch._aot_autograd.autograd_cache import should_bundle_autograd_cache as _should_bundle
    from torch._functorch._aot_autograd.runtime_wrappers import AutogradLazyBackwardCompileInfo as _LazyInfo
    from torch._functorch._aot_autograd.runtime_wrappers import _AutogradBackwardCompiler
    from torch._guards import compile_context as _compile_context
    from torch._guards import tracing as _tracing
    from torch._inductor.compile_fx import compile_fx as _compile_fx
    from torch._library.custom_ops import OPDEFS as _OPDEFS
    from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler as _GraphPickler
    from torch.fx._graph_pickler import Options as _Options
    from torch.fx._graph_pickler import _GraphUnpickler, _UnpickleState
    from torch.library import _defs as _defined

_NAMESPACES: Final = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor _inductor_debug _inductor_test _native _quantized _test "
    "_torch_testing ao aten bucketing c10d c10d_functional debug_mode_ops debugprims device_mesh dp_compile "
    "export flex_lib fsdp higher_order inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn onnx "
    "onnx_symbolic prim prims profiler quantization quantized quantized_decomposed rngprims semi_structured "
    "sparse static_runtime streams symm_mem torch_attn".split()
)
"""Of ops that come with torch, whose version is in the key, and of ours."""

logger = logging.getLogger("dp_compile.kept")


class KeptGraph(fx.GraphModule):
    """A graph that is pickled as it is, node by node."""

    content: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], fx.GraphModule], tuple[bytes]]:
        return graph_of, (self.content,)


def graph_of(content: bytes) -> fx.GraphModule:
    """The graph that was pickled. Found by its name in entries of torch's cache."""
    module = _GraphUnpickler(io.BytesIO(content), _UnpickleState(_FakeTensorMode())).load()
    assert isinstance(module, fx.GraphModule)
    module.recompile()
    return module


def _kept(module: fx.GraphModule) -> KeptGraph:
    plain = copy.deepcopy(module)
    plain.meta = {}
    for node in plain.graph.nodes:
        node.meta = {}
    kept = KeptGraph(plain, plain.graph)
    stream = io.BytesIO()
    # Not `dumps`, and above not `loads`: these let pytree know slices meanwhile (torch 2.13), and Dynamo guards how
    # often its table of classes was written to. A forward that goes through a pytree was compiled anew in each step, up
    # to Dynamo's limit. A slice of nodes is an error without that: such a forward is not saved.
    _GraphPickler(stream, _Options(ops_filter=None)).dump(plain)
    kept.content = stream.getvalue()
    return kept


@dataclass
class GraphBackward(_InductorOutput[Any]):
    """The backward of an entry, as a graph. Found by its name in entries of torch's cache."""

    backward_state_indices: list[int]
    num_symints_saved_for_bw_: int
    graph: Any
    """As `SerializedGraphModule`."""

    def pre_save(self) -> None:
        """There is nothing to be made ready."""

    def load(self, example_inputs: Sequence[Any]) -> Any:
        code: Callable[..., Any] | None = None

        def run(args: list[Any]) -> Any:
            nonlocal code
            given = [*args]
            args.clear()
            if code is None:
                code = _compiled(self.graph.deserialize(), given)
            return code(*given)

        return run

    def post_compile(self, result: Any, fx_config: Any) -> Any:
        run: Any = torch.compiler.disable(result, reason="a backward that is a graph compiles itself")
        run._boxed_call = True
        return run


def _compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    try:
        with torch.no_grad():
            return _compile_fx(module, list(inputs))  # type: ignore[return-value]
    except Exception as error:  # whatever the compiler has against it: the graph itself is right
        logger.warning("a backward from a cache runs uncompiled: %s", str(error).strip().split("\n")[0])
        return module


def save_forwards(nodes: Iterable[Any]) -> int:
    """Save the entries of forwards that were compiled in this process and have none yet.

    Args:
        nodes: of an autograd graph, at any time.

    Returns:
        How many were saved.
    """
    compilers = {id(each): each for each in map(_unsaved, nodes) if each is not None}
    if not compilers or _should_bundle():
        return 0
    with _compile_lock:  # nobody else saves an entry while ours is made
        return sum(map(_save, compilers.values()))


def _unsaved(node: Any) -> Any:
    """What would compile the backward of a node of AOTAutograd's, and then save both; `None` if that is over."""
    implementation = getattr(getattr(node, "_forward_cls", None), "_backward_impl", None)
    for cell in getattr(implementation, "__closure__", None) or ():
        compiler = cell.cell_contents
        if isinstance(compiler, _AutogradBackwardCompiler):
            waits = compiler.compiled_bw is None and compiler.try_save_cache_entry is not None
            return compiler if waits and isinstance(compiler.lazy_backward_info, _LazyInfo) else None
    return None


class _Stands:
    """What stands for a compiled backward until the entry is made: it has a key, which is not looked up."""

    _fx_graph_cache_key = "a graph"
    _time_taken_ns = 0


def _op_of_another_package(compiler: Any) -> str:
    """An op that is in no key, or only by its name; empty if there is none.

    torch's key has the graph of Dynamo, in which a user's op is a name, and what is saved is traced through its
    backward, or through all of it: after an edit of its source the next process would train by the formula of before.
    """
    save = compiler.try_save_cache_entry
    cells = dict(zip(save.__code__.co_freevars, save.__closure__ or (), strict=True))
    text = str(cells["joint_graph_str"].cell_contents)
    for namespace, name in re.findall(r"torch\.ops\.(\w+)\.(\w+)", text):
        if namespace not in _NAMESPACES:
            return f"{namespace}::{name}"
    # Of these the graph shows nothing: they may be traced through.
    for name in sorted(_defined):
        opaque = name in _OPDEFS and not _OPDEFS[name]._torch_dispatch_fns
        if name.partition("::")[0] not in _NAMESPACES and not opaque:
            return name
    return ""


def _save(compiler: Any) -> bool:
    metadata, info = compiler.fw_metadata, compiler.lazy_backward_info
    if foreign := _op_of_another_package(compiler):
        compiler.try_save_cache_entry = None
        logger.info("a forward is not saved: the source of %s, which may be in it, is in no key", foreign)
        return False
    special = (
        metadata.num_graphsafe_rng_states,
        metadata.is_rng_op_functionalized,
        metadata.num_backward_tokens,
        metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw,
    )
    save, compiler.try_save_cache_entry = compiler.try_save_cache_entry, None
    if any(special):
        return False
    plain = copy.copy(metadata)
    plain.bw_donated_idxs = []  # nobody's code relies on it, and a backward may be run twice
    try:
        with _made_with_graph(), _tracing(info.saved_context), _compile_context(info.saved_compile_context):
            return save(_Stands(), _kept(info.bw_module), plain, compiler.aot_config) is not None
    except Exception as error:  # the next process compiles it again; what runs here does not depend on it
        logger.debug("a forward is not saved: %s", str(error).strip().split("\n")[0])
        return False


@contextlib.contextmanager
def _made_with_graph() -> Iterator[None]:
    make = _AOTAutogradCache.make_entry

    def make_with_graph(*args: Any, **kwargs: Any) -> Any:
        entry = make(*args, **kwargs)
        entry.compiled_bw = GraphBackward(
            kwargs["backward_state_indices"], kwargs["num_symints_saved_for_bw"], kwargs["serialized_bw_module"]
        )
        return entry

    _AOTAutogradCache.make_entry = staticmethod(make_with_graph)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _AOTAutogradCache.make_entry = staticmethod(make)  # type: ignore[method-assign]
