"""A pytest plugin, to be loaded by name: as an entry point, it would make pytest import torch in every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dp_compile.testing.backward import ACCEPT_VARIABLE
from dp_compile.testing.ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dp_compile")
    group.addoption("--dp-compile-accept", action="store_true", help="write golden files instead of comparing")
    group.addoption("--dp-compile-ranks", type=int, default=2, metavar="N", help="processes of the fixture dp_ranks")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--dp-compile-accept") and not os.environ.get(ACCEPT_VARIABLE):
        os.environ[ACCEPT_VARIABLE] = "1"  # also for processes that pytest-xdist starts
        config.add_cleanup(partial(os.environ.__delitem__, ACCEPT_VARIABLE))


@pytest.fixture
def dp_golden(request: pytest.FixtureRequest) -> Path:
    """The directory `golden` next to the test's file."""
    return request.path.parent / "golden"


@pytest.fixture(scope="session")
def dp_ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Gloo processes for `assert_same_training(..., ranks=dp_ranks)`; they start with the first use."""
    with Ranks(pytestconfig.getoption("--dp-compile-ranks")) as ranks:
        yield ranks
