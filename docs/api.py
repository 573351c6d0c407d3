"""Options and public names, from the docstrings: `python docs/api.py` writes api.md."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import dp_compile
from dp_compile import errors, optim, state
from dp_compile.config import ReplicateConfig
from dp_compile.errors import DPCompileError

HEAD = """\
# Options and names

`help(dp_compile.replicate)`, and so on, has all arguments and errors. Names that are not listed may change without
notice. This page is generated from docstrings (`python docs/api.py`).
"""


PACKAGES: Final = ("averaging", "elastic", "decentralized", "testing")
ELSEWHERE: Final = (
    ("insight.profile", "measured_step"),
    ("replication.join", "joinable"),
    ("replication.warmup", "WarmupRecord"),
)


def document() -> str:
    """The whole page."""
    names = [name for name in dp_compile.__all__ if not inspect.ismodule(getattr(dp_compile, name))]
    values = {name: getattr(dp_compile, name) for name in names}
    classes = {name: value for name, value in values.items() if inspect.isclass(value) and not _is_error(value)}
    functions = {name: value for name, value in values.items() if not inspect.isclass(value)}
    in_errors = {name: value for name, value in vars(errors).items() if _is_error(value)}
    packages = {home: vars(import_module(f"dp_compile.{home}")) for home in PACKAGES}
    public = {f"{home}.{name}": value for home in PACKAGES for name, value in packages[home].items() if callable(value)}
    elsewhere = {f"{home}.{name}": getattr(import_module(f"dp_compile.{home}"), name) for home, name in ELSEWHERE}
    in_optim = {name: value for name, value in vars(optim).items() if callable(value)}
    in_state = {name: value for name, value in vars(state).items() if _is_public(name, value, state.__name__)}
    parts = [HEAD, "## Options: `ReplicateConfig`\n", *_options()]
    parts += ["\n## Functions\n", *_rows(functions), "\n## Classes\n", *_rows(classes)]
    parts += ["\n## In `dp_compile.errors`\n", *_rows(in_errors), "\n## In `dp_compile.optim`\n", *_rows(in_optim)]
    parts += ["\n## In `dp_compile.state`\n", *_rows(in_state)]
    parts += ["\n## In other submodules of `dp_compile`\n", *_rows(public | elsewhere)]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page."""
    (Path(__file__).parent / "api.md").write_text(document())


def _is_public(name: str, value: object, module: str) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == module


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, DPCompileError)


def _rows(values: dict[str, Any]) -> Iterator[str]:
    yield "| name | what |\n|---|---|"
    for name, value in values.items():
        yield f"| `{_signature(name, value)}` | {_in_a_cell(_first_paragraph(value))} |"


def _signature(name: str, value: Any) -> str:
    """The name of a class, or that of a function with its arguments."""
    if inspect.isclass(value):
        return name
    arguments = []
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        arguments.append(each.name if each.default is each.empty else f"{each.name}=")
    return f"{name}({', '.join(arguments)})"


def _first_paragraph(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|")


def options() -> dict[str, str]:
    """The description of each option in the docstring of its class."""
    text = (inspect.getdoc(ReplicateConfig) or "").split("Args:\n")[1].split("\n\nRaises:")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _options() -> Iterator[str]:
    descriptions = options()
    yield "| option | type, default, meaning |\n|---|---|"
    for field in dataclasses.fields(ReplicateConfig):
        yield f"| `{field.name}` | {_in_a_cell(descriptions[field.name])} |"


if __name__ == "__main__":
    main()
