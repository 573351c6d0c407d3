"""Compiled graphs that outlive their process. Loading this loads Dynamo and Inductor.

AOTAutograd keeps what it compiled in a cache whose key it makes from the graph that Dynamo gave it. A captured backward
has no such key: what a capture calls lies in no module. So the entry is taken here where AOTAutograd would save it, and
whoever takes it needs a key of his own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch
from torch import fx

from dp_compile._torch.missing import named

with named():
    import torch._dynamo.compiled_autograd as _compiled_autograd
    from torch._C._dynamo.guards import GlobalStateGuard as _GlobalStateGuard
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
    from torch._dynamo import config as _dynamo_config
    from torch._dynamo.device_interface import get_interface_for_device as _interface_of
    from torch._functorch import config as _functorch_config
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache as _AOTAutogradCache
    from torch._functorch._aot_autograd.schemas import PlainTensorMeta as _PlainTensorMeta
    from torch._guards import TracingContext as _TracingContext
    from torch._guards import tracing as _tracing
    from torch._inductor import config as _config
    from torch._inductor.codecache import BypassFxGraphCache as _BypassFxGraphCache
    from torch._inductor.codecache import FxGraphCache as _FxGraphCache
    from torch._inductor.codecache import FxGraphCachePickler as _FxGraphCachePickler
    from torch._inductor.codecache import FxGraphHashDetails as _FxGraphHashDetails
    from torch._inductor.codecache import torch_key as _torch_key
    from torch._inductor.cpp_builder import get_compiler_version_info as _compiler_version
    from torch._inductor.cpp_builder import get_cpp_compiler as _cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa as _pick_vec_isa
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex as _BoxedDeviceIndex
    from torch._inductor.runtime.cache_dir_utils import cache_dir as _cache_dir
    from torch._inductor.utils import BoxedBool as _BoxedBool
    from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as _ShapeEnv
    from torch.utils._triton import has_triton as _has_triton
    from torch.utils._triton import triton_hash_with_backend as _triton_hash

    _prologue_name = "call_aot_bwd_prologue"
    _is_disabled: Callable[[], bool] = lambda: bool(torch.compiler.config.force_disable_caches)  # noqa: E731
    _is_disabled()


_WHICH_OF_ITS_KIND: Final = ("uuid", "pci_bus_id", "pci_device_id", "pci_domain_id")


class NotKept(Exception):
    """What was compiled cannot be kept, or cannot be found again; the message says why."""


def directory() -> Path:
    """Where torch keeps what it compiled, for this user or as `TORCHINDUCTOR_CACHE_DIR` says."""
    return Path(_cache_dir())


def why_caches_are_off() -> str:
    """Why nothing is to be kept or found; empty if it is."""
    if _is_disabled():
        return "torch's caches are switched off (TORCHINDUCTOR_FORCE_DISABLE_CACHES)"
    if not _config.fx_graph_cache or not _functorch_config.enable_autograd_cache:
        return "torch's cache of graphs is switched off"
    if _config.triton.cudagraphs:
        return "CUDA graphs are on"
    return ""


# --- what code depends on beside its graph ------------------------------------------------------------------------


def surroundings(patches: Mapping[str, Any], devices: Sequence[torch.device]) -> dict[str, str]:
    """All of torch, of its settings and of the machine that compiled code depends on, by name.

    Args:
        patches: settings of Inductor that hold for the compilation.
        devices: those that the graph computes on.

    Raises:
        NotKept: a setting cannot be told from another, as a pass of the user's without `uuid()`.
    """
    empty = fx.GraphModule({}, fx.Graph())
    with _config.patch(dict(patches)):
        try:
            _check_can_cache(empty)
            with _FakeTensorMode():
                like = [torch.empty(0, device=device) for device in devices]
            details = _FxGraphHashDetails(empty, like, {}, [])
            inductor = _FxGraphCachePickler(empty).get_hash(details)
        except (_BypassFxGraphCache, AssertionError, RuntimeError, pickle.PicklingError) as error:
            raise NotKept(f"a setting of Inductor has no key: {_first_line(error)}") from error
    found = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "torch's files": _torch_key().hex(),
        "Inductor's settings": inductor,
        "AOTAutograd's settings": _settings(_functorch_config),
        "Dynamo's settings": _settings(_dynamo_config),
        "state of torch": str(_GlobalStateGuard().__getstate__()),
    }
    if any(device.type == "cpu" for device in devices):
        found |= {"C++ compiler": _compiler(), "CPU": str(_pick_vec_isa())}
    accelerators = [device for device in devices if device.type != "cpu"]
    if accelerators:
        # Inductor's own hash has it in builds for CUDA and ROCm only, and neither the assembler nor what it is for.
        found["Triton"] = _triton_hash() if _has_triton() else "none"
    return found | {str(device): _properties(device) for device in accelerators}


def _check_can_cache(empty: fx.GraphModule) -> None:
    if "require_shape_env" in inspect.signature(_FxGraphCache._check_can_cache).parameters:
        _FxGraphCache._check_can_cache(empty, require_shape_env=False)
    else:  # torch 2.11 wants one
        with _tracing(_TracingContext(_FakeTensorMode(shape_env=_ShapeEnv()))):
            _FxGraphCache._check_can_cache(empty)


def _properties(device: torch.device) -> str:
    """All that torch says of a device, but for which of its kind it is: no code depends on that."""
    properties = _interface_of(device).get_device_properties(device)
    said = {name: getattr(properties, name) for name in dir(properties) if name not in _WHICH_OF_ITS_KIND}
    return ", ".join(f"{name}={said[name]!r}" for name in sorted(said) if name[0] != "_" and not callable(said[name]))


@functools.cache
def _compiler() -> str:
    compiler = _cpp_compiler()
    return f"{compiler} {_compiler_version(compiler)}"


def _settings(config: Any) -> str:
    """All settings of a module of them, in an order that no seed of a hash changes."""
    return "; ".join(f"{name}={_setting(value)}" for name, value in sorted(config.get_config_copy().items()))


def _setting(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_setting, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_setting(key)}: {_setting(each)}' for key, each in value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_setting, value))}]"
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_prologue(node: fx.Node) -> bool:
    """Whether a captured graph's call puts the inputs of AOTAutograd's backward into order."""
    return (
        getattr(node.target, "__module__", "") == _compiled_autograd.__name__
        and getattr(node.target, "__name__", "") == _prologue_name
    )


def text_of_prologue(node: fx.Node) -> str:
    """What such a call does, which is a function that was made for one forward.

    Raises:
        NotKept: it depends on something that has no text.
    """
    cells = dict(zip(node.target.__code__.co_freevars, node.target.__closure__ or (), strict=True))  # type: ignore[union-attr]
    if "bw_prologue_fn" not in cells:
        return _text_of_metadata(cells["metadata"].cell_contents, cells["maybe_subclass_metadata"].cell_contents)
    inner = cells["bw_prologue_fn"].cell_contents
    metas = inner.__globals__.get("_tangent_metas_")
    if inner.__closure__ or "_unwrap_" in inner.__globals__ or metas is None:
        raise NotKept("tensors of a class of their own pass through the backward")
    _check_plain_tangents(metas)
    return f"{_text_of_code(inner.__code__)} {metas!r}"


def _check_plain_tangents(metas: Iterable[Any]) -> None:
    if not all(type(meta) is _PlainTensorMeta for meta in metas):
        raise NotKept("tensors of a class of their own are the outputs of a forward")


def _text_of_metadata(metadata: Any, of_subclasses: Any) -> str:
    """Torch 2.11 makes no function for one forward; this is all that its function for all of them reads.

    May go with 2.11 (`_backward_prologue_functional`).
    """
    if of_subclasses is not None:
        raise NotKept("tensors of a class of their own pass through the backward")
    _check_plain_tangents(metadata.subclass_tangent_meta)
    inputs = [(each.mutates_data, each.requires_grad) for each in metadata.input_info]
    outputs = [(each.output_type.name, str(each.raw_type), each.requires_grad) for each in metadata.output_info]
    numbers = metadata.num_outputs, metadata.num_intermediate_bases, metadata.num_backward_tokens
    modes = metadata.deterministic, metadata.is_rng_op_functionalized
    mutated = metadata.mutated_inp_runtime_indices
    return f"{numbers} {modes} {mutated} {inputs} {outputs} {metadata.subclass_tangent_meta!r}"


def _text_of_code(code: CodeType) -> str:
    inner = [_text_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {inner}"


def name_of_op(target: Any) -> str | None:
    """The name of a function of autograd's own, or of one that was written in C++ with torch; `None`: it is neither."""
    if isinstance(target, _compiled_autograd.Op) and not target.is_custom_function:
        return f"autograd {target.__name__}"
    return None


# --- taking and loading -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """What AOTAutograd would have saved of a compilation; `why_not` if that is nothing, or nothing that can be kept."""

    content: bytes = b""
    why_not: str = "AOTAutograd had nothing to save"


@contextlib.contextmanager
def taking() -> Iterator[Taken]:
    """What AOTAutograd compiles inside, and would save, is taken instead. Only inside a compilation of Dynamo's.

    Dynamo compiles one frame at a time in a process, so nobody else's entry comes here.
    """
    taken = Taken()
    save = _AOTAutogradCache.save

    def take(key: str, entry: Any, remote: bool) -> None:
        taken.content, taken.why_not = b"", _why_not(entry) if not taken.content else "it was compiled in pieces"
        if not taken.why_not:
            entry.pre_save()
            taken.content = _AOTAutogradCache._pickle_entry(entry, False) or b""
            taken.why_not = "" if taken.content else "AOTAutograd's entry cannot be written"

    _AOTAutogradCache.save = staticmethod(take)  # type: ignore[method-assign]
    try:
        # A graph that has no key gets a random one, and AOTAutograd goes on as if it had one.
        with _functorch_config.patch(bypass_autograd_cache_key=True):
            yield taken
    finally:
        _AOTAutogradCache.save = staticmethod(save)  # type: ignore[method-assign]


def _why_not(entry: Any) -> str:
    metadata = entry.runtime_metadata
    if entry.compiled_bw is not None or entry.maybe_subclass_meta is not None:
        return "it is no plain graph"
    if entry.guards_expr not in (None, "", "True"):
        return "its shapes are dynamic"
    if metadata.num_mutated_inp_runtime_indices or metadata.num_outputs_aliased:
        return "it writes to its inputs"
    return ""


def load(content: bytes) -> Callable[[list[Any]], Sequence[Any]]:
    """Code from what was taken. It takes a list of inputs, which it empties.

    Raises:
        Exception: of any kind; the content is not what was taken, or what belongs to it is gone.
    """
    entry = pickle.loads(content)
    context = _TracingContext(_FakeTensorMode(shape_env=_ShapeEnv()))
    how: Any = {
        "cudagraphs": _BoxedBool(False),
        "boxed_forward_device_index": _BoxedDeviceIndex(None),
        "compile_region_name": None,
    }
    with _tracing(context):
        run = entry.wrap_post_compile([], entry.sanitized_aot_config, how)
    if not getattr(run, "_boxed_call", False):
        raise NotKept("it does not take a list")
    return run  # type: ignore[no-any-return]


class Fits:
    """Whether inputs are like those that code was made for, and torch in the same state: what Dynamo's guards ask."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        for each in inputs:
            # torch's guards throw for a tensor without strides, an error of C++ that nothing catches: it goes past each
            # `finally` of the frames above, or ends the process (torch 2.13).
            each.stride()
        self._tensors = _TensorGuards(*inputs, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._state = _GlobalStateGuard()
        self._count = len(inputs)

    def __call__(self, inputs: Sequence[Any]) -> bool:
        return len(inputs) == self._count and self._state.check() and self._tensors.check(*inputs)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
