"""The lists of planted faults fit the code of today, and the campaign says rightly what was seen."""

import ast
from functools import cache

import pytest
from mutation_campaign import LISTS, ROOT, Campaign, Mutant, NotPlanted, load


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


SUMS = "def add(a, b):\n    return a + b\n"
TESTS = """\
import pytest
from dp_compile.sums import add

def test_zero(): assert add(3, 0) == 3
def test_three(): assert add(1, 2) == 3
def test_four(): assert add(2, 2) == 4
def test_red(): assert add(1, 1) == 3
@pytest.mark.skip(reason="needs a GPU")
def test_skipped(): assert add(1, 1) == 3
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    # Plugins that nothing here needs take six times as long to load as all the rest of a run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {"dp_compile/__init__.py": "", "dp_compile/sums.py": SUMS, "tests/test_sums.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def row(tree, new, *tests, collect=False, limit_s=99):
    named = tuple(f"tests/test_sums.py::test_{test}" for test in tests)
    campaign = Campaign(tree, collect=collect, timeout_s=limit_s)
    (verdict,) = campaign.run([Mutant("sum", "dp_compile/sums.py", "return a + b", new, named, "why")])
    return verdict.row().rsplit(" |", 2)[0]


def test_a_campaign_says_what_saw_a_fault(tree):
    three, four = "tests/test_sums.py::test_three", "tests/test_sums.py::test_four"
    assert row(tree, "return a - b", "zero") == "| sum | why | **SURVIVED**"
    assert row(tree, "return a - b", "zero", "three", "four", collect=True) == f"| sum | why | {three}<br>{four}"
    assert (tree / "dp_compile" / "sums.py").read_text() == SUMS


def test_a_campaign_is_not_taken_in(tree):
    """By a test that fails anyway, is skipped or not there, a fault that does not fit, or one that never ends."""
    assert "fails without the fault too: tests/test_sums.py::test_red" in row(tree, "return 2", "red")
    assert "no test ran: 1 skipped" in row(tree, "return 2", "skipped")
    assert "pytest ended with 4" in row(tree, "return 2", "gone")
    assert "is no Python" in row(tree, "return (", "zero")
    assert row(tree, "while True: pass", "zero", limit_s=3) == "| sum | why | hang"
