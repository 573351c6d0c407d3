"""Benchmark of data-parallel training: workloads x modes x networks, in one run."""
