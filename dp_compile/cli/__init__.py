"""The subcommands of `dp-compile`, a file each: `add` declares one, its `run` is called with what was given."""
