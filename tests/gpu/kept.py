"""A process of its own: python kept.py results.json first, and then python kept.py results.json second.

With `TORCHINDUCTOR_CACHE_DIR` a folder of theirs and `DP_COMPILE_CACHE=1`. As `generate.py`, but torch and we keep what
is compiled, and code runs from its text alone. The second process is on another GPU of the same kind and is to find
what the first has kept; afterwards it is where nothing must be found.
"""

from __future__ import annotations

import played

if __name__ == "__main__":
    played.load()

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import generate
import torch._inductor.runtime.triton_compat as triton_compat


def like_h100(**properties: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(played.H100), **properties})


def be_another() -> None:
    """Another GPU, and another Triton."""
    triton_compat.triton_key = lambda: "another"
    # In builds for CUDA `gcnArchName` is the name, and torch's own keys have that of the two.
    played.be(like_h100(name="NVIDIA A100", gcnArchName="NVIDIA A100", major=8, multi_processor_count=108))


def main(target: str, process: str) -> None:
    generate.begin()
    generated = played.keep(lambda code: generate.current.run.loaded(code))

    def result_of(name: str) -> dict[str, Any]:
        generated.clear()
        result = generate.result_of(replace(cases.SMALL[name], plants=False))
        return result | {"generated": [code for code in generated if "all_reduce_" in code]}

    if process == "second":
        played.be(like_h100(uuid="the second", pci_bus_id=2, pci_device_id=1, pci_domain_id=1))
    results = {name: result_of(name) for name in cases.KEPT}
    if process == "second":
        be_another()
        results["another"] = result_of(cases.KEPT[0])
    Path(target).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
