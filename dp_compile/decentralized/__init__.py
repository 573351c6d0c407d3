"""Decentralized training: each step mixes parameters with few neighbours, in place of an all-reduce of gradients."""

from dp_compile.decentralized.module import DecentralizedModule as DecentralizedModule
from dp_compile.decentralized.module import decentralize as decentralize
