"""Pools of ranks, and a test that each rank of one runs, as in `@on_ranks("ranks2")`: it fails where one raises."""

import functools
import inspect
from importlib import import_module

import torch

from dp_compile.replica.replica import owners
from dp_compile.testing.ranks import Ranks


class Pool(Ranks):
    """Each call begins with a fresh compiler, as each test does, and leaves no replica."""

    def run(self, function, *args, **options):
        return super().run(_freshly, function, *args, **options)


def _freshly(function, *args):
    torch._dynamo.reset()
    try:
        return function(*args)
    finally:
        forget_replicas()


def forget_replicas():
    """A replicated module may hold itself until Python collects it, and counts in each backward of the process."""
    for replica in tuple(owners):
        owners.remove(replica)


def on_ranks(pool):
    """`pool`: a fixture of `conftest.py`. Parameters of the test are fixtures and what `parametrize` gives, as ever."""

    def decorate(scenario):
        @functools.wraps(scenario)
        def test(request, **given):
            request.getfixturevalue(pool).run(_run, scenario.__module__, scenario.__name__, given)

        first = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *inspect.signature(scenario).parameters.values()])
        return test

    return decorate


def _run(module, name, given):
    getattr(import_module(module), name).__wrapped__(**given)
