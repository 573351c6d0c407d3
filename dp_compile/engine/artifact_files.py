"""What was compiled, as files that outlive a process: found by a key, checked, written in one step, never an error.

    <directory>/<hash of the graph>/<hash of all fields>        a line of magic, a checksum, the fields, the content

A file is served only if its fields are those that were asked for, to the letter. Where another one of the same graph is
there, its fields say what has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dp_compile.fx.canonical import digest

_MAGIC: Final = b"dp_compile artifact 1\n"
_SHOWN: Final = 40
_MOST_NAMED: Final = 3
GRAPH: Final = "graph"
"""The field by which files of one graph lie beside each other."""


class Miss(Exception):
    """There is nothing to be served; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Key:
    """All that what was compiled depends on, by name."""

    fields: Mapping[str, str]

    def file(self) -> Path:
        """Where its file lies below the directory."""
        parts = [text for pair in sorted(self.fields.items()) for text in pair]
        return Path(digest(self.fields[GRAPH])[:32], digest(*parts)[:32])


def read(directory: Path, key: Key) -> bytes:
    """The content that was written under a key.

    Raises:
        Miss: there is none, or none that can be trusted.
    """
    path = directory / key.file()
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise Miss(_nearest(path, key)) from None
    except OSError as error:
        raise Miss(f"the entry cannot be read: {error.strerror or error}") from error
    fields, content = _parsed(raw)
    if fields != dict(key.fields):
        raise Miss(f"the entry is one of something else: {_differences(fields, key)}")
    return content


def packed(key: Key, content: bytes) -> bytes:
    """A file's bytes."""
    body = json.dumps(dict(key.fields), sort_keys=True).encode() + b"\n" + content
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def write(directory: Path, key: Key, content: bytes) -> None:
    """Write a content under a key, in one step: who reads meanwhile, or after this was killed, sees all or nothing.

    Raises:
        OSError: it cannot be written.
    """
    write_file(directory / key.file(), packed(key, content))


def write_file(path: Path, raw: bytes) -> None:
    """As `write`, of bytes as they are.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _parsed(raw: bytes) -> tuple[dict[str, str], bytes]:
    if not raw.startswith(_MAGIC):
        raise Miss("the entry is damaged, or was written by another version")
    checksum, _, body = raw[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise Miss("the entry is damaged")
    head, _, content = body.partition(b"\n")
    return json.loads(head), content


def _nearest(path: Path, key: Key) -> str:
    """Why there is no file, from those of the same graph that differ in the fewest fields."""
    others = sorted((len(_changed(fields, key)), _differences(fields, key)) for fields in _fields_beside(path))
    return f"{others[0][1]}" if others else "nothing is kept of this graph"


def _fields_beside(path: Path) -> Iterator[dict[str, str]]:
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            with contextlib.suppress(OSError, Miss, ValueError):
                yield _parsed(other.read_bytes())[0]


def _changed(fields: Mapping[str, str], key: Key) -> list[str]:
    return [name for name in sorted({*fields, *key.fields}) if fields.get(name) != key.fields.get(name)]


def _differences(fields: Mapping[str, str], key: Key) -> str:
    names = _changed(fields, key)
    said = []
    for name in names[:_MOST_NAMED]:
        before, now = fields.get(name, "nothing"), key.fields.get(name, "nothing")
        short = len(before) <= _SHOWN and len(now) <= _SHOWN
        said.append(f"{name} was {before}, is {now}" if short else f"{name} changed")
    return "; ".join(said) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
