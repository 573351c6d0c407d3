"""A GPU that is not there: `load` before torch is imported, `install` after it, and Inductor writes code for sm_90.

Everything is for the whole process, which has to be a separate one. What was met on the way, and why each patch is
needed, is in docs/gpu.md.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("played_cuda.cpp")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", gcnArchName="NVIDIA H100 80GB HBM3", major=9, minor=0, is_integrated=0,
    multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536, max_threads_per_block=1024,
    max_threads_per_multi_processor=2048, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, total_memory=85_000_000_000, L2_cache_size=52428800,
    memory_clock_rate=2619000, memory_bus_width=5120, clock_rate=1980000,
    uuid="the first", pci_bus_id=1, pci_device_id=0, pci_domain_id=0,
)  # fmt: skip
"""Written down, not read off a device."""


def load():
    """Before torch, which asks once which devices there are. The shared object is kept in the user's cache."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
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
    ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def install(compiled):
    """Let Inductor write code for the GPU, which nothing runs or keeps: `compiled` is given each graph and its code."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    for owner in (CudaInterface, CudaInterface.Worker, torch.cuda):
        owner.get_device_properties = staticmethod(lambda *_: H100)
    answers = {
        "is_available": True,
        "get_compute_capability": 90,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    # `torch.cuda.is_available` stays False: fake tensors would ask the device for more.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.device_count = lambda: 1
    # Triton asks its driver what to compile for.
    played = {"get_current_target": lambda: GPUTarget("cuda", 90, H100.warp_size), "get_current_device": lambda: 0}
    played |= {"get_active_torch_device": lambda: torch.device("cuda", 0), "get_current_stream": lambda _=None: 0}
    driver.set_active(SimpleNamespace(**played, launcher_cls=None, utils=None, binary_ext="cubin"))
    # The first would compute constants on the device, the second measure there.
    config.joint_graph_constant_folding = config.shape_padding = False
    config.compile_threads = 1
    config.fx_graph_cache = functorch_config.enable_autograd_cache = False

    def compile_to_module(graph):
        call = compiled(graph.module, graph.codegen()[0].value)
        return SimpleNamespace(call=call, __file__=os.devnull, key="played", _runners=None)

    GraphLowering.compile_to_module = compile_to_module
