"""Real text that is on every machine: the source of Python's standard library, bytes as tokens."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dp_compile.errors import ConfigError

VOCABULARY = 256
HELD_OUT_WINDOWS = 128

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)
_HELD_OUT_EVERY = 10

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, both `int64[batch, time]`; the targets are the inputs one token later."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as `uint8[bytes]`, split by file: no file is in both parts."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"Python {platform.python_version()} standard library, bytes as tokens: "
            f"{len(self.train_files)} files, {len(self.train) / 1e6:.1f} MB to train on; "
            f"{len(self.held_out_files)} files, {len(self.held_out) / 1e6:.1f} MB held out"
        )


def load_corpus(context: int, root: Path | None = None) -> Corpus:
    """Read the text and check that it is long enough.

    Args:
        context: tokens per sequence.
        root: where to look; the running Python's standard library by default.

    Raises:
        ConfigError: there is no Python source at `root`, or one of the parts is shorter than a sequence.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = _source_files(root)
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train = [file for file in files if file not in frozenset(held_out)]
    if not held_out:
        raise ConfigError(
            f"found {len(files)} Python files under {root}, need {_HELD_OUT_EVERY} or more. "
            "Use a Python whose standard library is installed as source."
        )
    corpus = Corpus(_read(root, train), _read(root, held_out), tuple(train), tuple(held_out))
    shortest = min(len(corpus.train), len(corpus.held_out))
    if context >= shortest:
        raise ConfigError(f"--context must be < {shortest}, the bytes of held-out text, got {context}.")
    return corpus


def batches(
    data: torch.Tensor, *, context: int, batch_size: int, rank: int, world_size: int, seed: int
) -> Iterator[Batch]:
    """Endless random batches of one rank: its share of a global batch that all ranks draw alike.

    Args:
        data: `uint8[bytes]`, longer than `context`.
        context: tokens per sequence.
        batch_size: sequences per rank.
        seed: the same on every rank.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - context, (world_size, batch_size), generator=generator)
        yield _windows(data, starts[rank], context)


def held_out_batches(
    data: torch.Tensor, *, context: int, batch_size: int, rank: int, world_size: int
) -> tuple[Batch, ...]:
    """One rank's share of windows that lie evenly over `data`: the same windows every time."""
    count = max(HELD_OUT_WINDOWS, world_size)
    starts = torch.linspace(0, len(data) - context - 1, count, dtype=torch.float64).long()
    return tuple(_windows(data, part, context) for part in starts[rank::world_size].split(batch_size))


def _windows(data: torch.Tensor, starts: torch.Tensor, context: int) -> Batch:
    tokens = data[starts[:, None] + torch.arange(context + 1)].long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _source_files(root: Path) -> list[str]:
    """Paths below `root` with forward slashes, sorted: the same list on every rank."""
    found = (path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts))
    return sorted(path.relative_to(root).as_posix() for path in found if path.is_file())


def _read(root: Path, files: list[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join((root / file).read_bytes() for file in files)), dtype=torch.uint8)
