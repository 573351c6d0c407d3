"""Ranks that mix parameters with few neighbours in each step, in place of an all-reduce of gradients."""

from dp_compile.decentralized.module import DecentralizedModule as DecentralizedModule
from dp_compile.decentralized.module import decentralize as decentralize
