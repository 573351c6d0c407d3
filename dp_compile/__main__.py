"""`python -m dp_compile`: the same as the command `dp-compile`."""

import sys

from dp_compile.cli.main import main

# Processes that a run starts import this file too, under another name.
if __name__ == "__main__":
    sys.exit(main())
