"""The subcommands of `dp-compile`: `add_NAME` declares one, its `run` is called with what was given."""
