"""Public reports of data parallelism that goes wrong, as small cases that torch's wrappers and ours run."""
