"""Public reports of data parallelism that goes wrong, each as a small case that torch's wrappers and ours run.

`python -m corpus` from `tests/` runs all of it on two gloo ranks and writes `docs/corpus.md`.
"""
