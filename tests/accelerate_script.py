"""One of accelerate's own test scripts, as it is, with our `Accelerator` under accelerate's name.

python -m torch.distributed.run --standalone --nproc-per-node=2 tests/accelerate_script.py test_sync|test_script|...
"""

import sys
from importlib import import_module

import accelerate.accelerator

from dp_compile.integrations.accelerate import Accelerator

if __name__ == "__main__":
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
    script = import_module(f"accelerate.test_utils.scripts.{sys.argv.pop(1)}")
    script.main()
    print("through")
