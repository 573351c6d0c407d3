"""The module's side: `replicate`, the wrapper class, selection, `no_sync`, `join`, `warmup`."""
