"""A pytest plugin: golden files with an accept mode, a pool of ranks, a compiler without a past.

    pytest_plugins = ["dp_compile.testing.plugin"]     in the conftest.py at the root of your tests, or
    addopts = "-p dp_compile.testing.plugin"           in pytest's configuration

It is no entry point of the distribution: pytest would then import torch at the start of every run of every project in
the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dp_compile.testing.golden import ACCEPT_VARIABLE
from dp_compile.testing.ranks import Ranks
from dp_compile.testing.recording import fresh_compiler

GOLDEN = "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dp_compile")
    group.addoption(
        "--dp-compile-accept",
        action="store_true",
        help="write the golden files of dp_compile.testing as they are found, instead of comparing with them",
    )
    group.addoption(
        "--dp-compile-ranks", type=int, default=2, metavar="N", help="processes of the fixture dp_ranks (2 by default)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--dp-compile-accept") and not os.environ.get(ACCEPT_VARIABLE):
        os.environ[ACCEPT_VARIABLE] = "1"  # seen by processes that pytest-xdist starts, too
        config.add_cleanup(partial(os.environ.__delitem__, ACCEPT_VARIABLE))


@pytest.fixture
def dp_golden(request: pytest.FixtureRequest) -> Path:
    """The directory of golden files: `golden` beside the test's file."""
    return request.path.parent / GOLDEN


@pytest.fixture(scope="session")
def dp_ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Real processes in one gloo group, for `assert_same_training(..., ranks=dp_ranks)`. They start with the first use
    and stay up until the end of the session; after an error there are new ones."""
    ranks = Ranks(pytestconfig.getoption("--dp-compile-ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture
def dp_fresh_compiler() -> Iterator[None]:
    """The test finds nothing of what Dynamo compiled before, and leaves nothing behind."""
    with fresh_compiler():
        yield
