"""What documents show."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(text):
    """The language and the text of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(name, heading):
    """A document from a heading of the second level to the next one."""
    text = (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text()
    return next(part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(f"{heading}\n"))


def python_of(name, heading, number=0):
    """A block of Python of a section, by its number."""
    return [block for language, block in blocks(section(name, heading)) if language == "python"][number]
