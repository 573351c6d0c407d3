"""The subcommands of `dp-compile`: `_add_NAME` declares one, and `main` calls its `run` with the parsed options."""
