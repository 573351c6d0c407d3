"""The lists of planted faults fit the code of today."""

import ast
from functools import cache

import pytest
from mutation_campaign import LISTS, ROOT, NotPlanted, load


@pytest.mark.parametrize("lists", ["*.toml", "nightly/*.toml"])
def test_every_mutant_can_be_planted_and_has_a_test_that_runs(lists):
    """On every push, but for those in `mutants/nightly`."""
    problems = []
    for mutant in load(sorted(LISTS.glob(lists))):
        try:
            mutant.planted((ROOT / mutant.file).read_text())
        except (NotPlanted, OSError) as problem:
            problems.append(str(problem))
        tests = [find(*test.split("[")[0].split("::")) for test in mutant.tests]
        problems += [f"{mutant.id}: there is no {test}" for test, at in zip(mutant.tests, tests, strict=True) if not at]
        if "nightly" not in lists and all(NIGHTLY in marks for marks in tests):
            problems.append(f"{mutant.id}: all its tests are nightly")
    assert not problems, "\n".join(problems)


NIGHTLY = "@pytest.mark.nightly"


@cache
def tree_of(path):
    return ast.parse((ROOT / path).read_text() if (ROOT / path).exists() else "")


def find(path, *names):
    """The decorators of a test and of its class, and the mark of its file; the path first. Empty if it is not there."""
    node = tree_of(path)
    found = [path] * bool(node.body)
    found += [NIGHTLY for each in node.body if ast.unparse(each) == "pytestmark = pytest.mark.nightly"]
    for name in names:
        node = next((each for each in node.body if getattr(each, "name", "") == name), None)
        if node is None:
            return []
        found += [f"@{ast.unparse(each)}" for each in node.decorator_list]
    return found
