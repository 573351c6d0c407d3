"""Functions for modules: `replicate`, the wrapper class, selection, `no_sync`, `join`, `warmup`."""
