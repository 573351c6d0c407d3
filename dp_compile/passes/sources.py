"""The code that a pass or a comm hook consists of, as keys: one that does something else must have another key.

code_key(pass)     for this process
source_key(pass)   the text of the file that it was loaded from, and of what that imports of its package. For caches
                   that outlive this process, and for what ranks compare; `None` without a file
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_SHARED: Final = frozenset({"site-packages", "dist-packages"})
_OURS: Final = __name__.partition(".")[0]
_numbers = itertools.count()


def code_key(graph_pass: object) -> str:
    """A key of what a pass does. A user's has another one each time: what its functions call may have been replaced."""
    kind = type(graph_pass)
    return kind.__qualname__ if _belongs(kind.__module__, _OURS) else f"{kind.__qualname__}:{next(_numbers)}"


def source_key(graph_pass: object) -> str | None:
    """A key that is the same in every process in which a pass has the same source; `None` without a file."""
    kind = type(graph_pass)
    file = _file_of(kind.__module__)
    if file is None:
        return None
    # A file may have been edited since it was loaded, so the methods that run are in the key, too.
    methods = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, types.FunctionType)]
    codes = [each.__code__ for each in methods if _belongs(str(each.__module__), kind.__module__)]
    parts = [part for code in codes for part in _of_code(code)]
    parts += [text for _, text in sorted(_texts(kind.__module__, file).items())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _of_code(code: types.CodeType) -> Iterator[str]:
    yield from (code.co_code.hex(), ",".join(code.co_names))
    for constant in code.co_consts:
        yield from _of_code(constant) if isinstance(constant, types.CodeType) else (_constant(constant),)


def _constant(value: object) -> str:
    return ",".join(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _texts(name: str, file: Path) -> dict[str, str]:
    """The source of a module and of what it imports of its package, and those import, by name."""
    texts: dict[str, str] = {}
    waiting = [(name, file)]
    while waiting:
        name, file = waiting.pop()
        if name not in texts:
            texts[name] = file.read_text(encoding="utf-8")
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            for imported in _imports(texts[name], package):
                found = _file_of(imported) if _belongs(imported, name) else None
                if found is not None:
                    waiting.append((imported, found))
    return texts


@functools.cache
def _imports(text: str, package: str) -> tuple[str, ...]:
    """The modules that a source may import, wherever in it: `from a.b import c` is `a`, `a.b` and perhaps `a.b.c`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            found += [".".join(parts[: count + 1]) for count in range(len(parts))]
    return tuple(found)


def _belongs(name: str, home: str) -> bool:
    """Whether a module is of the same package as `home`, or a file beside it as scripts have them."""
    if name.partition(".")[0] == home.partition(".")[0]:
        return True
    ours, theirs = _file_of(home.partition(".")[0]), _file_of(name.partition(".")[0])
    if ours is None or theirs is None or ours.name == "__init__.py":
        return False
    directory = ours.parent
    shared = directory.name in _SHARED or directory == Path(sysconfig.get_paths()["stdlib"])
    return not shared and directory in theirs.parents


def _file_of(name: str) -> Path | None:
    """The source file of a module, loaded or not; `None` if it has none."""
    module = sys.modules.get(name)
    try:
        found = getattr(module, "__file__", None)
        if module is None and (spec := importlib.util.find_spec(name)) is not None:
            found = spec.origin
    except (ImportError, ValueError, AttributeError):
        return None
    path = Path(found) if isinstance(found, str) and found.endswith(".py") else None
    return path if path is not None and path.is_file() else None
