"""A pass that does something else has another key, in this process and on disk, however it came to be loaded."""

from __future__ import annotations

import importlib
import linecache
import os
import subprocess
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


def defined(source: str, filename: str = "<cell>") -> Any:
    """A pass as a notebook defines one: no module with a file."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType("users_notebook")
    sys.modules["users_notebook"] = module  # where dataclasses look for it
    exec(compile(source, filename, "exec"), vars(module))
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


@pytest.mark.parametrize(
    "change",
    [
        {"ran": "2"},
        {"helper": "2"},
        {"factor": "2", "uses": "FACTOR"},
    ],
)
def test_a_pass_that_is_defined_again_has_another_key(change: dict[str, str]) -> None:
    was, now = (defined(text(**{"uses": change.get("uses", "helper()"), **each}))["Mine"]() for each in ({}, change))
    assert repr(was) == repr(now)
    assert code_key(was) != code_key(now)
    assert source_key(was) is not None
    assert source_key(was) != source_key(now)


def test_the_same_source_is_the_same_on_disk_and_a_class_is_itself_in_a_process() -> None:
    one, other = (defined(text())["Mine"] for _ in range(2))
    assert source_key(one()) == source_key(other())
    assert code_key(one()) == code_key(one())
    assert code_key(one()) != code_key(other())


def test_a_function_that_was_put_in_anothers_place_is_seen() -> None:
    """The class stays: what it calls has another body."""
    namespace = defined(text())
    before = code_key(namespace["Mine"]())
    namespace["helper"] = defined(text(helper="3"))["helper"]
    assert code_key(namespace["Mine"]()) != before


def test_a_pass_without_source_is_never_served_from_a_cache() -> None:
    namespace = defined(text(), "<stdin>")
    del linecache.cache["<stdin>"]
    assert source_key(namespace["Mine"]()) is None
    assert Pipeline((*DEFAULT_PASSES, namespace["Mine"]()), (), lambda records: None).uuid() is None
    assert Pipeline(DEFAULT_PASSES, (), lambda records: None).uuid() is not None


@pytest.mark.parametrize(
    "imports",
    [
        "from users_package.second import third",
        "from users_package import second",
        "from . import second",
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


def test_a_file_beside_a_script_is_in_its_key(package: Path) -> None:
    keys = []
    for value in (1, 2, 2):
        (package.parent / "users_pass.py").write_text(text(imports="import users_helper"))
        (package.parent / "users_helper.py").write_text(f"VALUE = {value}\n")
        keys.append(source_key(loaded("users_pass").Mine()))
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


PROGRAM = """
import torch, dp_compile, torch.distributed as dist
from dp_compile.passes import DEFAULT_PASSES
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = torch.nn.Linear(4, 4)
passes = (*DEFAULT_PASSES, Mine())
dp_compile.replicate(model, passes=passes, config=dp_compile.ReplicateConfig(check_reductions=False))
torch.compile(model)(torch.ones(2, 4)).sum().backward()
print("ran", RAN)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["-c", "-"])
def test_a_pass_of_the_command_line_is_not_taken_from_a_cache_on_disk(tmp_path: Path, way: str) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for number in ("1", "2"):
        program = text(ran=number) + PROGRAM
        command = [sys.executable, way, *([program] if way == "-c" else [])]
        done = subprocess.run(
            command,
            input=program if way == "-" else None,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert f"ran [{number}]" in done.stdout, done.stderr[-2000:]
