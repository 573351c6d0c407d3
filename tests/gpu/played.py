"""A GPU that is not there: `load` before torch is imported, `install` after it, and Inductor writes code for sm_90.

Everything is for the whole process, which has to be one of its own. What was met on the way, and why each patch is
needed, is told in docs/gpu.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("played_cuda.cpp")
# Written down, not read off a device.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    total_memory=85_000_000_000,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=52428800,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
    clock_rate=1980000,
    gcnArchName="NVIDIA H100 80GB HBM3",
    is_integrated=0,
    uuid="the first",
    pci_bus_id=1,
    pci_device_id=0,
    pci_domain_id=0,
)


def build() -> Path:
    """The shared object, from the user's cache if this source was compiled for this torch before.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: the compiler failed, or there is none.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder, version = Path(spec.origin).parent, importlib.metadata.version("torch")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dp_compile"
    known = hashlib.sha256(SOURCE.read_bytes() + str(torch_folder).encode()).hexdigest()[:12]
    target = cache / f"played_cuda-{version}-{known}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made, libraries = target.with_suffix(f".{os.getpid()}"), torch_folder / "lib"
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE)]
        command += ["-o", str(made), f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(target)  # another process may be at it too
    return target


def load() -> None:
    """Before torch, for it asks only once which devices there are."""
    assert "torch" not in sys.modules
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)


Compiled = Callable[[list[Any]], list[Any]]


def install() -> None:
    """Let Inductor write code for the GPU. What is to be done with that, `keep_nothing` says."""
    from torch._inductor import config

    be(H100)
    # The first would compute constants on the device, the second measure there.
    config.joint_graph_constant_folding = config.shape_padding = False
    config.compile_threads = 1


def keep_nothing(run_instead: Callable[[Any, str], Compiled]) -> None:
    """All caches are off; `run_instead` is given each graph and its code, and makes what is called."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    config.fx_graph_cache = functorch_config.enable_autograd_cache = False

    def compile_to_module(graph: Any) -> SimpleNamespace:
        code = graph.codegen()[0].value
        return SimpleNamespace(call=run_instead(graph.module, code), __file__=os.devnull, key="played", _runners=None)

    GraphLowering.compile_to_module = compile_to_module


def be(device: SimpleNamespace) -> None:
    """This is the GPU from now on. What was asked of another is forgotten."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import codecache
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils._triton import triton_hash_with_backend
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    capability = device.major, device.minor
    for owner in (CudaInterface, CudaInterface.Worker, torch.cuda):
        owner.get_device_properties = staticmethod(lambda *_: device)
    answers: dict[str, Any] = {
        "is_available": True,
        "get_compute_capability": capability[0] * 10 + capability[1],
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    # `torch.cuda.is_available` stays False: fake tensors would ask the device for more.
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.device_count = lambda: 1
    # Triton asks its driver what to compile for.
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability[0] * 10 + capability[1], device.warp_size),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_current_stream=lambda _=None: 0,
            launcher_cls=None,
            utils=None,
            binary_ext="cubin",
        )
    )
    codecache.triton_key.clear()
    for asked in (DeviceProperties.create, triton_hash_with_backend, codecache.CacheBase.get_system):
        asked.cache_clear()
