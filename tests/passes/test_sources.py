"""A pass that does something else has another key, in this process and on disk, however it came to be loaded."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_compile
from dp_compile import ReplicateConfig
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.sources import code_key, source_key

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
{imports}
RAN = []
FACTOR = {factor}

def helper():
    return {helper}

@dataclass(frozen=True)
class Mine:
    name: ClassVar[str] = "mine"
    realises_plan: ClassVar[bool] = False

    def __call__(self, graph, plans):
        from dp_compile.passes.result import PassResult
        RAN.append({ran})
        return PassResult(changed=bool({uses}))
"""


def text(*, imports: str = "", factor: str = "1", helper: str = "1", ran: str = "1", uses: str = "helper()") -> str:
    return MINE.format(imports=imports, factor=factor, helper=helper, ran=ran, uses=uses)


def defined(source: str) -> Any:
    """A pass as a notebook defines one: no module with a file."""
    module = types.ModuleType("users_notebook")
    sys.modules["users_notebook"] = module  # where dataclasses look for it
    exec(compile(source, "<cell>", "exec"), vars(module))
    return vars(module)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a user's that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "__init__.py").write_text("")
    yield tmp_path / "users_package"
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def loaded(name: str) -> Any:
    for each in [each for each in sys.modules if each.startswith("users_")]:
        del sys.modules[each]
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_a_key_is_of_a_process_or_of_a_source(package: Path) -> None:
    (package / "first.py").write_text(text())
    one, other = (loaded("users_package.first").Mine() for _ in range(2))
    assert repr(one) == repr(other)
    assert source_key(one) == source_key(other)
    assert code_key(one) != code_key(other)
    assert code_key(DEFAULT_PASSES[0]) == code_key(DEFAULT_PASSES[0])


def test_a_pass_without_source_is_never_served_from_a_cache() -> None:
    namespace = defined(text())
    assert source_key(namespace["Mine"]()) is None
    assert Pipeline((*DEFAULT_PASSES, namespace["Mine"]()), (), lambda records: None).uuid() is None
    assert Pipeline(DEFAULT_PASSES, (), lambda records: None).uuid() is not None


@pytest.mark.parametrize(
    "imports",
    [
        "from .second import third",
        "import users_package.second",
    ],
)
def test_what_a_pass_imports_of_its_package_is_in_its_key(package: Path, imports: str) -> None:
    keys = []
    for value in (1, 2, 2):
        (package / "first.py").write_text(text(imports=imports))
        (package / "second.py").write_text("def third():\n    import users_package.fourth as fourth\n")
        (package / "fourth.py").write_text(f"TABLE = {{'a': {value}}}\n")
        keys.append(source_key(loaded("users_package.first").Mine()))
    assert keys[0] != keys[1]
    assert keys[1] == keys[2]


def test_a_file_that_was_edited_after_it_was_loaded_is_not_taken_for_what_runs(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of two files of one size and second Python takes one's
    (package / "first.py").write_text(text(ran="1"))
    old = loaded("users_package.first").Mine()
    (package / "first.py").write_text(text(ran="2"))
    new = loaded("users_package.first").Mine()
    assert source_key(old) != source_key(new)


@pytest.mark.usefixtures("fake_group")
def test_a_pass_that_is_defined_again_runs() -> None:
    """Two replicas of one shape share compiled code; that of the older pass is not shared with the newer."""
    ran = []
    for number in ("1", "2"):
        namespace = defined(text(ran=number))
        model = nn.Linear(4, 4)
        config = ReplicateConfig(backend="aot_eager", check_reductions=False)
        dp_compile.replicate(model, passes=(*DEFAULT_PASSES, namespace["Mine"]()), config=config)
        torch.compile(model, backend="aot_eager")(torch.ones(2, 4)).sum().backward()
        ran.append(namespace["RAN"])
    assert ran == [[1], [2]]
