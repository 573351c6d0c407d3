"""The page of names and options is that of today, and every argument of a public function is explained."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import api
import pytest

import dp_compile
from dp_compile.config import ReplicateConfig

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
FUNCTIONS = [name for name in dp_compile.__all__ if inspect.isfunction(getattr(dp_compile, name))]


def test_the_page_is_that_of_today() -> None:
    assert PAGE.read_text() == api.document(), "run python docs/api.py"


def test_every_option_is_explained() -> None:
    assert list(api.options()) == [field.name for field in dataclasses.fields(ReplicateConfig)]
    assert all(said.startswith("`") and ", default" in said for said in api.options().values())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_explained(name: str) -> None:
    function = getattr(dp_compile, name)
    said = inspect.getdoc(function) or ""
    arguments = [each for each in inspect.signature(function).parameters if each not in ("module", "model", "modules")]
    assert [each for each in arguments if not re.search(rf"^ +{each}: ", said, re.MULTILINE)] == []
