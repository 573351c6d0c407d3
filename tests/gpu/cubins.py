"""A process of its own: python cubins.py results.json kernels.json

Compiles every Triton kernel of the code in `generate.py`'s results for sm_90, by the assembler inside Triton's wheel,
and writes down by the kernel's name in each case how large each configuration's binary is.
"""

from __future__ import annotations

import played

if __name__ == "__main__":
    played.load()

import hashlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch._inductor.config
import torch._inductor.runtime.triton_helpers
from generated_code import triton_sources


def compiled(name: str, source: str, folder: Path) -> list[dict[str, Any]]:
    path = folder / f"kernel_{hashlib.sha256(source.encode()).hexdigest()}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    binaries = [kernel._precompile_config(config).kernel.asm for config in kernel.configs]
    return [{"cubin": len(each["cubin"]), "sm_90": ".target sm_90" in each["ptx"]} for each in binaries]


def main(results: str, target: str) -> None:
    played.set_triton_target()
    torch._inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
    torch._inductor.config.use_static_cuda_launcher = False
    known: dict[str, list[dict[str, Any]]] = {}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, result in json.loads(Path(results).read_text()).items():
            for code in result.get("codes", ()):
                for name, source in triton_sources(code).items():
                    same = source.replace(name, "kernel")
                    if same not in known:
                        known[same] = compiled(name, source, Path(folder))
                    found.setdefault(case, {})[name] = known[same]
    Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
