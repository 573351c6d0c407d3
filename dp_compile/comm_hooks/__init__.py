"""Reductions of a bucket in place of an all-reduce: casts, functional hooks, eight bits; any Python hook of torch."""
