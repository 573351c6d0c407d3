"""Benchmark of data-parallel training: every workload with every mode (method) over every network, in one run."""
