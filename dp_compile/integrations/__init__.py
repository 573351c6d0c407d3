"""Frameworks that wrap and compile models themselves. One file for each; nothing is imported before it is asked for.

`strategies.py` is what the twins `lightning` and `pytorch_lightning` have in common, `common.py` what all have.
"""
