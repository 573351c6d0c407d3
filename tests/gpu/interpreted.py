"""The generated GPU code run on the CPU: kernels in Triton's interpreter, products by CPU torch.

Real tensors go beside the fake ones. What is on its way through the network is poisoned: from launch to wait a bucket
holds NaN, so whoever reads it too early, writes it in flight, or lives in its memory is found. What is only sent, as
the first of two levels does with a bucket, is compared with itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._inductor.async_compile
import torch._inductor.runtime.triton_helpers
import torch._inductor.runtime.triton_heuristics
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.interpreter import TensorHandle

from dp_compile.passes.bucket_memory import BucketMemory

_LIBRARY = ("erf", "rsqrt", "exp", "log", "sqrt", "tanh", "pow", "sin", "cos", "abs")
_HEURISTICS = ("pointwise", "reduction", "persistent_reduction", "cooperative_reduction")
_numbers = itertools.count()
_folder = tempfile.TemporaryDirectory()


class FlightError(AssertionError):
    """Somebody touched memory that the network had."""


class _Kernel:
    """A generated kernel, with block sizes of ours."""

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        self._function = function
        assert options["inductor_meta"]["grid_type"] in ("Grid1D", "Grid2D"), options["inductor_meta"]["grid_type"]

    def run(self, *arguments: Any, stream: Any = None) -> None:
        constants = [name for name in self._function.arg_names if name.isupper()]
        names = [name for name in self._function.arg_names if not name.isupper()]
        named = dict(zip(names, arguments, strict=True))
        sizes = {axis: int(named.get(size, 1)) for axis, size in _SIZES.items()}
        limits = {"XBLOCK": 32 if "R0_BLOCK" in constants else 4096, "YBLOCK": 4096, "R0_BLOCK": 16}
        blocks = {axis: min(triton.next_power_of_2(sizes[axis]), limits[axis]) for axis in constants}
        grid = tuple(triton.cdiv(sizes[axis], blocks.get(axis, 1)) for axis in ("XBLOCK", "YBLOCK"))
        self._function[grid](**named, **blocks)


_SIZES = {"XBLOCK": "xnumel", "YBLOCK": "ynumel", "R0_BLOCK": "r0_numel"}


def _of_numpy(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function of CUDA's mathematical library, which the interpreter lacks."""

    def call(first: Any, *rest: Any) -> Any:
        values = [np.asarray(getattr(getattr(value, "handle", None), "data", value)) for value in (first, *rest)]
        made = function(*[torch.from_numpy(np.atleast_1d(value)) for value in values]).numpy()
        handle = TensorHandle(made.astype(values[0].dtype).reshape(values[0].shape), first.handle.dtype)
        return triton.language.core.tensor(handle, first.type)

    return call


def _load_kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
    path = Path(_folder.name) / f"{name}_{next(_numbers)}.py"
    path.write_text(source)  # the interpreter reads it when the kernel is called
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def install() -> None:
    """Let Inductor's modules that kernels import mean the interpreter. For a process of its own."""
    helpers, heuristics = torch._inductor.runtime.triton_helpers, torch._inductor.runtime.triton_heuristics
    helpers.libdevice = SimpleNamespace(**{name: _of_numpy(getattr(torch, name)) for name in _LIBRARY})
    helpers.set_driver_to_gpu = lambda: None
    for name in _HEURISTICS:
        setattr(heuristics, name, lambda *_, **options: lambda function: _Kernel(function, options))
    compiler = torch._inductor.async_compile.AsyncCompile
    compiler.triton = _load_kernel
    compiler.wait = lambda *_: None
    torch._C._cuda_getCurrentRawStream = lambda _: 0


@dataclass(frozen=True)
class _Flight:
    """A collective on its way: what it leaves behind, what it was given, and the memory that it needs until then."""

    result: torch.Tensor
    sent: torch.Tensor
    sent_from: _Memory
    into: _Memory


class _Memory:
    """Where a tensor lies, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._where = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    @property
    def is_alive(self) -> bool:
        return not self._storage.expired()

    def holds(self, values: torch.Tensor) -> bool:
        """Whether these bits lie there; there may be NaN among them."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        there = torch.empty(0, dtype=self._dtype).set_(storage, *self._where)
        return torch.equal(there.view(torch.uint8), values.view(torch.uint8))


class Network:
    """All ranks hold what this one holds, so an average changes nothing and a sum multiplies by the ranks.

    This is the first rank of each group: of what is scattered it has the first part, and what it gathers is what all
    the others did to theirs.

    Args:
        ranks_of: how many ranks a group has, by its name.
    """

    def __init__(self, ranks_of: Callable[[str], int]) -> None:
        self._ranks_of, self.order = ranks_of, ""
        self._flying: dict[_Place, _Flight] = {}
        self._scattered: dict[_Place, torch.Tensor] = {}
        self._memory: dict[int, BucketMemory] = {}

    def all_reduce_(self, bucket: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
        whole = self._scattered.get(_place(bucket))
        if whole is not None:
            self._scattered[_place(bucket)] = self._reduced(whole, reduce_op, group)
        return self._launch(bucket, bucket, self._reduced(bucket, reduce_op, group))

    def all_reduce_coalesced_(self, buckets: Sequence[torch.Tensor], reduce_op: str, group: str) -> list[torch.Tensor]:
        made = [self.all_reduce_(bucket, reduce_op, group) for bucket in buckets]
        self.order = self.order[: len(self.order) - len(made)] + "A"
        return made

    def reduce_scatter_tensor(self, bucket: torch.Tensor, reduce_op: str, parts: int, group: str) -> torch.Tensor:
        whole = self._reduced(bucket, reduce_op, group)
        result = whole[: bucket.numel() // parts]
        shard = self._launch(bucket, torch.empty_like(result), result)
        self._scattered[_place(shard)] = whole
        return shard

    def all_gather_into_tensor(self, shard: torch.Tensor, parts: int, group: str) -> torch.Tensor:
        whole = self._scattered.pop(_place(shard), None)
        if whole is None or whole.numel() != parts * shard.numel():
            raise FlightError("gathered is another tensor than was scattered")
        return self._launch(shard, torch.empty_like(whole), whole)

    def wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check_alive()
        if _place(tensor) not in self._flying:
            raise FlightError("waited for what is not on its way")
        flight = self._flying.pop(_place(tensor))
        if not bool(tensor.isnan().all()):
            raise FlightError("a bucket was written while it was in flight")
        if not flight.sent_from.holds(flight.sent):
            raise FlightError("a bucket was written while it was being sent")
        tensor.copy_(flight.result)
        self.order += "W"
        return tensor

    def bucket_memory(self, replica: int, number: int, numel: int, dtype: torch.dtype, _: Any) -> torch.Tensor:
        """What the op gives, from this CPU."""
        memory = self._memory.setdefault(replica, BucketMemory())
        return memory.take(number, numel, dtype, torch.device("cpu")).fill_(math.nan)

    def end(self) -> None:
        self._check_alive()
        if self._flying:
            raise FlightError("a bucket was never waited for")

    def _reduced(self, tensor: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
        return tensor.clone() * (1 if reduce_op == "avg" else self._ranks_of(group))

    def _launch(self, given: torch.Tensor, into: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        self._check_alive()
        if _place(given) in self._flying:
            raise FlightError("launched with what is still on its way")
        into.fill_(math.nan)
        self._flying[_place(into)] = _Flight(result, given.clone(), _Memory(given), _Memory(into))
        self.order += "A"
        return into

    def _check_alive(self) -> None:
        if not all(flight.sent_from.is_alive and flight.into.is_alive for flight in self._flying.values()):
            raise FlightError("a bucket was freed while it was in flight")


_Place = tuple[int, int]


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory as an allocator may hand it out at its worst."""
    return torch.empty_strided(size, stride, dtype=dtype).fill_(math.nan if dtype.is_floating_point else 99)


def _convolution_backward(*arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """With the strides that code for a device without cuDNN expects, which a CPU's kernel does not always give."""
    results = torch.ops.aten.convolution_backward.default(*arguments)
    return tuple(None if each is None else each.contiguous() for each in results)


_OPERATORS = ("all_reduce_coalesced_", "all_reduce_", "reduce_scatter_tensor", "all_gather_into_tensor", "wait_tensor")


def load(code: str, network: Network) -> Callable[[list[Any]], Sequence[Any]]:
    """The wrapper's `call`, on CPU tensors."""
    for operator in _OPERATORS:
        code = code.replace(f"torch.ops._c10d_functional.{operator}.default", f"network.{operator}")
    code = code.replace("torch.ops.aten.convolution_backward.default", "convolution_backward")
    code = code.replace("torch.ops.dp_compile.bucket_memory.default", "network.bucket_memory")
    code = code.replace("torch.cuda._DeviceGuard(0)", "nullcontext()").replace("torch.cuda.set_device(0)", "pass")
    names: dict[str, Any] = {"__name__": "generated", "__file__": "/dev/null"}
    names.update(network=network, nullcontext=contextlib.nullcontext, convolution_backward=_convolution_backward)
    exec(compile(code, "generated", "exec"), names)
    names["empty_strided_cuda"] = _empty

    def call(arguments: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            outputs: Sequence[Any] = names["call"](arguments)
        network.end()
        return outputs

    return call


class Values:
    """The real tensors beside fake ones, found by the fake's memory."""

    def __init__(self) -> None:
        self._real: dict[tuple[Any, ...], torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._beside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.assumed: list[tuple[int, ...]] = []

    def put(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        assert fake.shape == real.shape, (fake.shape, real.shape)
        assert fake.stride() == real.stride(), (fake.stride(), real.stride())
        self._kept.append(fake)  # so that its storage is no other's later
        self._real[_key(fake)] = real
        self._beside.setdefault(real.untyped_storage()._cdata, (real, fake))

    def of(self, fake: Any) -> Any:
        """The real tensor. What nobody made is the seed of the backward, one, or flags, zeros."""
        if not isinstance(fake, torch.Tensor):
            return fake
        real = self._real.get(_key(fake))
        if real is not None:
            return real
        same = [real for key, real in self._real.items() if key[0] == _key(fake)[0]]
        if same:
            return same[0].as_strided(fake.shape, fake.stride(), fake.storage_offset())
        self.assumed.append(tuple(fake.shape))
        return (torch.ones if fake.dim() == 0 else torch.zeros)(fake.shape, dtype=fake.dtype)

    def fake_of(self, real: Any, mode: FakeTensorMode) -> Any:
        """A fake tensor of the played GPU beside what code returned, in the memory that is beside the real one's."""
        if not isinstance(real, torch.Tensor):
            return real
        memory = real.untyped_storage()
        if memory._cdata not in self._beside:
            flat = torch.empty(0, dtype=real.dtype).set_(memory)
            with mode:
                self.put(torch.empty(flat.shape, dtype=real.dtype, device="cuda:0"), flat)
        _, beside = self._beside[memory._cdata]
        with mode, torch.no_grad():
            fake = beside.as_strided(real.shape, real.stride(), real.storage_offset())
        self.put(fake, real)
        return fake


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
