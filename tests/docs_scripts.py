"""The scripts in the folder of the documentation, as modules; and what documents show."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """`docs/NAME.py`, loaded again."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(name: str, heading: str) -> str:
    """A document from a heading of the second level to the next one."""
    text = (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text()
    return next(part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(f"{heading}\n"))


def python_of(name: str, heading: str, number: int = 0) -> str:
    """A block of Python of a section, by its number."""
    return [block for language, block in blocks(section(name, heading)) if language == "python"][number]
