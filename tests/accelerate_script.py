"""One of accelerate's own test scripts with `dp_compile.DistributedDataParallel` under torch's name.

python -m torch.distributed.run --standalone --nproc-per-node=2 tests/accelerate_script.py test_sync|test_script
"""

from __future__ import annotations

import sys
from importlib import import_module

import torch

import dp_compile

if __name__ == "__main__":
    torch.nn.parallel.DistributedDataParallel = dp_compile.DistributedDataParallel
    script = import_module(f"accelerate.test_utils.scripts.{sys.argv.pop(1)}")
    script.main()
    print("through")
