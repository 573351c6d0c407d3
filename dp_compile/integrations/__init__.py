"""Integrations with frameworks that wrap and compile models themselves: one module each, imported on first use.

`strategies.py` is shared by `lightning` and `pytorch_lightning`, `common.py` by all.
"""
