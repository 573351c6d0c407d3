"""Decentralized training: each step mixes parameters with a few other ranks, in place of an all-reduce of gradients."""

from dp_compile.decentralized.module import DecentralizedModule as DecentralizedModule
from dp_compile.decentralized.module import decentralize as decentralize
