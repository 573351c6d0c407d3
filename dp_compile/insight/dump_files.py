"""What lies in a directory of graph dumps, written and read: pure data and file names.

DIR/rank0/capture0/stages.json              one captured backward: stages, counts, refusals, collectives
DIR/rank0/capture0/2-bucket-reductions.txt  a stage as short text; `.full.txt`: all of it
DIR/rank0/capture0/2-bucket-reductions.diff.txt  the short text against the one of the stage before
DIR/rank0/capture0/5-code.full.txt          the code that was generated
DIR/rank0/capture0/repro.py                 the graph before our passes, to run on any machine
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from dp_compile.errors import ConfigError
from dp_compile.passes.result import Refusal, count_changes

DUMP_VERSION: Final = 1
STAGES_FILE: Final = "stages.json"
REPRO_FILE: Final = "repro.py"
STEP_FILE: Final = "step.json"
CODE_STAGE: Final = "code"

_COUNTED: Final = {
    "nodes": ("nodes",),
    "gradients reduced alone": ("reduce_grad",),
    "buckets filled": ("flat_bucket",),
    "all-reduces": ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    "waits": ("wait_tensor",),
}

_CAPTURE = re.compile(r"capture(\d+)")
_RANK = re.compile(r"rank(\d+)")


@dataclass(frozen=True, slots=True)
class DumpedStage:
    """One stage: `counts` are those of `fx/printer.py:op_counts`, empty for generated code. `refusals`: what the
    analysis looked at and left alone."""

    number: int
    name: str
    counts: Mapping[str, int]
    refusals: tuple[Refusal, ...] = ()

    @property
    def label(self) -> str:
        """Number and name, as in file names: `2-bucket-reductions`."""
        return f"{self.number}-{self.name}"

    @property
    def has_outline(self) -> bool:
        """Whether it is a graph; generated code has no short form."""
        return self.name != CODE_STAGE

    @property
    def short_file(self) -> str:
        return f"{self.label}.txt"

    @property
    def full_file(self) -> str:
        return f"{self.label}.full.txt"

    @property
    def diff_file(self) -> str:
        return f"{self.label}.diff.txt"

    def plain(self) -> dict[str, Any]:
        return {"label": self.label} | asdict(self)


@dataclass(frozen=True, slots=True)
class DumpedCapture:
    """One captured backward that was compiled. `all_stages` are those that a compilation without a cache has;
    `collectives` are the final graph's, in its order; `notes` are for people."""

    rank: int
    world_size: int
    backend: str
    versions: str
    all_stages: tuple[str, ...]
    stages: tuple[DumpedStage, ...] = ()
    collectives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def with_stage(self, stage: DumpedStage) -> DumpedCapture:
        return replace(self, stages=(*self.stages, stage))

    def find(self, wanted: str) -> DumpedStage:
        """A stage by its name, number or both.

        Raises:
            ConfigError: there is none.
        """
        for stage in self.stages:
            if wanted in (stage.name, str(stage.number), stage.label):
                return stage
        names = ", ".join(stage.label for stage in self.stages)
        raise ConfigError(f"no stage {wanted!r} in this dump. It has {names}. A name or a number is enough.")

    def to_json(self) -> str:
        data = asdict(self) | {"stages": [stage.plain() for stage in self.stages]}
        return json.dumps({"version": DUMP_VERSION} | data, indent=1) + "\n"


def read_capture(directory: Path) -> DumpedCapture:
    """What `to_json` wrote into the directory of one capture.

    Raises:
        ConfigError: there is no such file, or it is not one of ours, or of another version.
    """
    path = directory / STAGES_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.pop("version")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Give the directory of a graph dump.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a file of a graph dump: {error!r}.") from error
    if version != DUMP_VERSION:
        raise ConfigError(f"{path} is of version {version!r}, readable is {DUMP_VERSION}. Dump the graphs anew.")
    try:
        return _capture(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a file of a graph dump: {error!r}.") from error


def captures_in(directory: Path) -> list[Path]:
    """The directories of all captures, by rank and number: `directory` may be that of a dump, a rank or one capture.

    Raises:
        ConfigError: there is none.
    """
    if (directory / STAGES_FILE).exists():
        return [directory]
    ranks = [directory] if _RANK.fullmatch(directory.resolve().name) else _numbered(directory, _RANK)
    found = [capture for rank in ranks for capture in _numbered(rank, _CAPTURE) if (capture / STAGES_FILE).exists()]
    if not found:
        raise ConfigError(
            f"no graph dump in {directory}: expected rank0/capture0/{STAGES_FILE} there. Train a step with "
            f"DP_COMPILE_DUMP_DIR={directory} or ReplicateConfig(dump_dir={str(directory)!r})."
        )
    return found


def difference(before: str, after: str, names: tuple[str, str]) -> str:
    """A unified diff of two short texts, empty if they are equal."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=2)
    return "".join(f"{line}\n" for line in lines)


def _numbered(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        found = [(int(match[1]), path) for path in directory.iterdir() if (match := pattern.fullmatch(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found)]


def _capture(data: Mapping[str, Any]) -> DumpedCapture:
    texts = {name: _texts(data[name]) for name in ("all_stages", "collectives", "notes")}
    return DumpedCapture(**{**data, **texts, "stages": tuple(_stage(each) for each in data["stages"])})


def _stage(data: Mapping[str, Any]) -> DumpedStage:
    refusals = tuple(Refusal(**each) for each in data["refusals"])
    return DumpedStage(int(data["number"]), str(data["name"]), dict(data["counts"]), refusals)


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))


def counted(stage: DumpedStage) -> dict[str, int]:
    """The counts of a stage that tell most, under names for people."""
    return {name: sum(stage.counts.get(op, 0) for op in ops) for name, ops in _COUNTED.items()}


def changes_between(dump: DumpedCapture) -> dict[int, list[str]]:
    """By the number of a stage, how its counts of ops differ from those of the stage before."""
    graphs = [stage for stage in dump.stages if stage.has_outline]
    return {after.number: count_changes(before.counts, after.counts) for before, after in pairwise(graphs)}
