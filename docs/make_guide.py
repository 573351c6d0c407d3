"""The outputs in docs/guide.md: made anew, or compared with what the commands say today.

    python docs/make_guide.py             run the commands on the files in docs/guide, write their outputs and pictures
    python docs/make_guide.py --measured  also train, which makes new step files: read the guide's text again afterwards
    python docs/make_guide.py --check     fail with a difference if an output is not what the guide shows

The commands of a block run in a copy of docs/guide. Blocks behind `<!-- measured -->` train or depend on a training.
They are left alone unless asked for, and then `--check` compares words and not figures, and `--first-only` runs the
blocks of the first training alone.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dp_compile.cli import main as cli

GUIDE: Final = Path(__file__).parent / "guide.md"
FILES: Final = GUIDE.parent / "guide"
MADE: Final = ("slow.json", "fast.json", "slow_trace.json.gz", "*.svg")
"""What commands write that is kept in the repository."""

DARK: Final = {
    "#ffffff": "#15181c", "#1b1f24": "#edf0f3", "#59636e": "#a4adb7", "#d9dee3": "#353b42", "#f8ebe3": "#392c23",
    "#5c6670": "#8d97a2", "#0067a3": "#5ab3e6", "#bf4b00": "#f5924a", "#e4e9ee": "#2c333a", "#8b96a1": "#77828d",
}  # fmt: skip
"""For readers with a dark screen: the colours of a picture, and those that the page of a timeline has for them."""

_BLOCK: Final = re.compile(r"(?P<mark><!-- measured -->\n)?```console\n(?P<body>.*?)```\n", re.DOTALL)
_NOISE: Final = re.compile(r"^(USDT:|\[?W\d{4} |\[rank \d+\] .* dp_compile\.drift: ).*\n?", re.MULTILINE)
"""Lines of torchrun, of the profiler, and on the comparison of parameters."""

_SKIPPED: Final = ("cp ", "cd ")
"""Commands that put the reader where the others run."""

_DIFFERENT: Final = "dp-compile plan diff"
"""It exits with 1 where there is a difference."""


@dataclass(frozen=True, slots=True)
class Block:
    """Commands, each with its output below it."""

    start: int
    body: str
    measured: bool

    def commands(self) -> list[str]:
        return [line[2:] for line in self.body.splitlines() if line.startswith("$ ")]


def blocks_in(text: str) -> list[Block]:
    return [Block(m.start("body"), m["body"], m["mark"] is not None) for m in _BLOCK.finditer(text)]


def output_of(command: str, directory: Path) -> str:
    """What a command says, in this process if it is `dp-compile` alone: starting torch takes seconds."""
    if command.startswith(_SKIPPED):
        return ""
    words = shlex.split(command, comments=True)
    if words[0] != "dp-compile" or {"|", ">"} & set(words):
        return _NOISE.sub("", _in_a_shell(command, directory))
    said = io.StringIO()
    with contextlib.chdir(directory), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.main(words[1:])
    if status and not command.startswith(_DIFFERENT):
        raise SystemExit(f"{command}: exit status {status}\n{said.getvalue()}")
    return said.getvalue()


def run(block: Block, directory: Path) -> str:
    """The block with what its commands say today."""
    return "".join(f"$ {command}\n{_shown(output_of(command, directory))}" for command in block.commands())


def in_the_dark(picture: str) -> str:
    """A picture with the colours of `DARK`; all of its colours are there."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: DARK[colour[0]], picture)


def without_figures(text: str) -> list[str]:
    """The lines of an output without their numbers, each kind once: what two trainings have in common.

    Empty lines do not count: two ranks that log at the same time write their line ends one after the other.
    """
    masked = (re.sub(r"\d[\d,.:]*(e[+-]?\d+)?", "#", line) for line in text.splitlines())
    return sorted({re.sub(r"\s+", " ", line).strip() for line in masked if line.strip()})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--measured", action="store_true", help="train, too")
    parser.add_argument("--first-only", action="store_true", help="nothing but the first training and what shows it")
    options = parser.parse_args(arguments)
    text = GUIDE.read_text()
    blocks = blocks_in(text)
    if options.first_only:
        blocks = list(_of_first_training(blocks))
    elif not options.measured:
        blocks = [block for block in blocks if not block.measured]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "guide")
        shutil.copytree(FILES, directory)
        new = {block: run(block, directory) for block in blocks}
        (directory / "fast_dark.svg").write_text(in_the_dark((directory / "fast.svg").read_text()))
        if options.check:
            different = [*_differences(new), *([] if options.first_only else _other_files(directory))]
            print("\n".join(different) or "the guide shows what its commands say")
            return 1 if different else 0
        for block in sorted(new, key=lambda block: -block.start):
            text = text[: block.start] + new[block] + text[block.start + len(block.body) :]
        GUIDE.write_text(text)
        for path in _made(directory):
            shutil.copy(path, FILES)
    return 0


def _of_first_training(blocks: Sequence[Block]) -> Iterator[Block]:
    later = False
    for block in blocks:
        trains = any("torchrun" in command for command in block.commands())
        if block.measured and not (trains and later):
            yield block
        later = later or trains


def _differences(new: dict[Block, str]) -> Iterator[str]:
    for block, text in new.items():
        pair = (block.body, text)
        before, after = map(without_figures, pair) if block.measured else (each.splitlines() for each in pair)
        yield from difflib.unified_diff(before, after, "docs/guide.md", "today", lineterm="")


def _other_files(directory: Path) -> Iterator[str]:
    for path in _made(directory):
        kept = FILES / path.name
        if path.suffix != ".gz" and (not kept.exists() or kept.read_bytes() != path.read_bytes()):
            yield f"docs/guide/{path.name} is another file today. Run python docs/make_guide.py and look at it."


def _made(directory: Path) -> list[Path]:
    return sorted(path for pattern in MADE for path in directory.glob(pattern))


def _in_a_shell(command: str, directory: Path) -> str:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail\n{command}"],
        cwd=directory,
        env=os.environ | cache,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode and not command.startswith(_DIFFERENT):
        raise SystemExit(f"{command}: exit status {ended.returncode}\n{ended.stdout}")
    return ended.stdout


def _shown(output: str) -> str:
    lines = [line.rstrip() for line in output.splitlines()]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
