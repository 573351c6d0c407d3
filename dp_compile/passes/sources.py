"""The code that a pass consists of, as keys: a pass that does something else must have another key.

    code_key(pass)     what is loaded now: its methods, and what they use of the same package. For this process.
    source_key(pass)   also the text of the files that it was loaded from. For caches that outlive this process;
                       `None` if some of the code has no text: such a pass must never be served from one.

Neither is enough alone. A file may have been edited since it was loaded, so its text is not what runs; and what a
pass reaches by ways that bytecode does not show (`getattr`, a table) stands in the text only.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import linecache
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_CONSTANTS: Final = (str, bytes, int, float, complex, bool, type(None), type(...))
_SHARED: Final = frozenset({"site-packages", "dist-packages"})
_numbers = itertools.count()
_of_class: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()


def code_key(graph_pass: object) -> str:
    """A key of what a pass would do if it ran now. A class that was defined again has another, though it be equal."""
    kind = type(graph_pass)
    # Not id(): that of a class that is gone goes to the next one.
    number = _of_class.setdefault(kind, next(_numbers))
    return f"{number}:{_digest(*_Code(kind).of(graph_pass))}"


def source_key(graph_pass: object) -> str | None:
    """A key that is the same in every process in which a pass has the same source; `None` if it has none."""
    kind = type(graph_pass)
    code = _Code(kind)
    parts = [*code.of(graph_pass)]
    file = _file_of(kind.__module__)
    if file is not None:
        return _digest(*parts, *(text for _, text in sorted(_texts(kind.__module__, file).items())))
    for name in sorted(code.filenames):
        # What was typed into a notebook lies in this cache, under a name that is no file.
        text = "".join(linecache.getlines(name))
        if not text:
            return None
        parts.append(text)
    return _digest(*parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# --- what is loaded -----------------------------------------------------------------------------------------------


class _Code:
    """A walk over functions and classes of one package, from a pass to whatever it names."""

    def __init__(self, kind: type) -> None:
        self._home = kind.__module__
        self._seen: set[int] = set()
        self._belongs: dict[str, bool] = {}
        self.filenames: set[str] = set()

    def of(self, value: object) -> Iterator[str]:
        """Texts that change with what a value is or does."""
        if isinstance(value, _CONSTANTS):
            yield repr(value)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            yield from self._of_new(value)

    def _of_new(self, value: Any) -> Iterator[str]:
        if isinstance(value, (tuple, list, set, frozenset, dict)):
            yield from self._of_collection(value)
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            yield from self.of(value.__func__)
        elif isinstance(value, property):
            yield from (*self.of(value.fget), *self.of(value.fset))
        elif not self._is_ours(value):
            yield str(getattr(value, "__qualname__", type(value).__qualname__))
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        else:
            slots = getattr(type(value), "__slots__", ())
            yield from self.of(type(value))
            yield from self.of(getattr(value, "__dict__", {name: getattr(value, name, None) for name in slots}))

    def _of_collection(self, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            value = [item for pair in value.items() for item in pair]
        parts = [part for item in value for part in self.of(item)]
        yield from sorted(parts) if isinstance(value, (set, frozenset)) else parts

    def _of_class(self, kind: type) -> Iterator[str]:
        for base in filter(self._is_ours, kind.__mro__):
            yield base.__qualname__
            for name, item in sorted(vars(base).items()):
                if name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"):
                    yield name
                    yield from self.of(item)

    def _of_function(self, function: types.FunctionType) -> Iterator[str]:
        # What a decorator made, as that of dataclasses does, has no text, and follows from what it decorates.
        if function.__code__.co_filename != "<string>" or not _is_made_by_dataclass(function.__name__):
            self.filenames.add(function.__code__.co_filename)
        yield from self._of_code(function.__code__, function.__globals__)
        for value in (function.__defaults__, function.__kwdefaults__, vars(function).get("__wrapped__")):
            yield from self.of(value)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty: what it is for is not defined yet
                yield from self.of(cell.cell_contents)

    def _of_code(self, code: types.CodeType, names: dict[str, Any]) -> Iterator[str]:
        yield code.co_code.hex()
        yield ",".join((*code.co_names, *code.co_varnames, *code.co_freevars))
        for constant in code.co_consts:
            yield from self._of_code(constant, names) if isinstance(constant, types.CodeType) else self.of(constant)
        found = [names[name] for name in code.co_names if name in names]
        for value in found:
            yield from self.of(value)
            if isinstance(value, types.ModuleType) and _belongs(value.__name__, self._home):
                yield from itertools.chain.from_iterable(
                    self.of(vars(value)[name]) for name in code.co_names if name in vars(value)
                )

    def _is_ours(self, value: object) -> bool:
        holder = value if isinstance(value, (type, types.FunctionType)) else type(value)
        name = str(getattr(holder, "__module__", ""))
        if name not in self._belongs:
            self._belongs[name] = _belongs(name, self._home)
        return self._belongs[name]


def _is_made_by_dataclass(name: str) -> bool:
    return name.startswith("__") and name not in ("__call__", "__post_init__")


# --- the text that it was loaded from -----------------------------------------------------------------------------


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
