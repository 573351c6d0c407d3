"""Write down what becomes of a captured backward, stage by stage, for people; and put it into torch's structured trace.

    0-captured            as Dynamo leaves the backward
    1-analysed            as our pipeline gets it, in ATen: the reductions that were found, and refusals
    2-bucket-reductions   after each pass, by its name
    3-schedule-collectives
    4-to-inductor         what Inductor generates code from, after its own last changes
    5-code                the generated code; with `aot_eager` that of the final graph

Nothing here may touch a graph or stop a training: what cannot be written is given up with one warning.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx

from dp_compile._torch import dynamo
from dp_compile.engine.observers import CAPTURED, Compilation, Observer
from dp_compile.engine.replica import Replica
from dp_compile.fx.outline import outline
from dp_compile.fx.printer import op_counts
from dp_compile.insight.dump_files import (
    CODE_STAGE,
    REPRO_FILE,
    STAGES_FILE,
    STEP_FILE,
    DumpedCapture,
    DumpedStage,
    difference,
)
from dp_compile.insight.graph_names import collectives_of, node_names
from dp_compile.insight.replica_step import step_of_replica
from dp_compile.insight.repro import NotRecordable, repro_source
from dp_compile.passes.analysis import Analysis, analyse
from dp_compile.passes.result import GraphPass
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count

logger = logging.getLogger("dp_compile.dumps")

ANALYSED: Final = "analysed"
TO_INDUCTOR: Final = "to-inductor"
_FROM_CACHE: Final = "The code came from a compiler's cache: the passes did not run, so their stages are missing."
_NO_CODE: Final = "aot_eager generates no code: the stage 'code' is the final graph as Python."

_given_up: set[str] = set()
"""Directories that could not be written."""


def dumps_wanted(root: str | None) -> bool:
    """Whether somebody will see a dump: the directory's owner, or who records torch's structured trace."""
    return root is not None or dynamo.structured_trace_is_on()


class Dumps(Observer):
    """Writes down every compilation that somebody wants to see, and what explains a step beside it."""

    def __init__(self) -> None:
        self._directory: WeakKeyDictionary[Replica, Path] = WeakKeyDictionary()

    def compilation(self, begun: Compilation) -> Dump | None:
        if not dumps_wanted(begun.dump_dir):
            return None
        dump = Dump(
            begun.dump_dir, begun.plans, begun.passes, begun.inputs, begun.world_size, begun.backend, begun.behind
        )
        for replica in begun.replicas:
            self._directory.pop(replica, None)
            if dump.directory is not None:
                self._directory[replica] = dump.directory
        return dump

    def wants_code(self, dump_dir: str | None) -> bool:
        return dumps_wanted(dump_dir)

    def compiled(self, replicas: Sequence[Replica]) -> None:
        """Write what explains a step beside each module's latest dump; of a second module in it, with its number."""
        for ordinal, replica in enumerate(replicas):
            if (directory := self.directory(replica)) is not None:
                path = directory / (STEP_FILE if not ordinal else f"{ordinal}-{STEP_FILE}")
                try:
                    path.write_text(step_of_replica(replica).to_json(), encoding="utf-8")
                except OSError as error:
                    _say_once(str(path), error)

    def directory(self, replica: Replica) -> Path | None:
        """Where this rank's latest dump of a captured backward is."""
        return self._directory.get(replica)


observer: Final = Dumps()


def all_stages(passes: Sequence[GraphPass], behind: Sequence[str] = ()) -> tuple[str, ...]:
    """The stages of a compilation, in their order. `behind`: the names of passes behind these."""
    return (CAPTURED, ANALYSED, *(graph_pass.name for graph_pass in passes), *behind, TO_INDUCTOR, CODE_STAGE)


@dataclass(slots=True)
class Dump:
    """One captured backward while it is compiled. A context that writes the rest when the compilation ends.

    Args:
        root: the directory of all dumps; `None`: only into the structured trace.
        plans: one for each replica in this backward.
        passes: what the pipeline runs.
        inputs: the parameter that each input is, as in `graph_names.node_names`.
        world_size: ranks of the group.
        backend: what compiles.
        behind: the names of passes that run behind `passes`; the repro is without them.
    """

    root: str | None
    plans: Sequence[BucketPlan]
    passes: Sequence[GraphPass]
    inputs: Sequence[str | None]
    world_size: int
    backend: str
    behind: Sequence[str] = ()
    directory: Path | None = None
    """Where the files of this backward are, if they can be written."""
    _seen: DumpedCapture = field(init=False)
    _texts: dict[int, str] = field(default_factory=dict)
    """The short form of each stage, by its number."""

    def __post_init__(self) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        versions = f"dp_compile {version('dp_compile')}, torch {torch.__version__}"
        self._seen = DumpedCapture(rank, self.world_size, self.backend, versions, all_stages(self.passes, self.behind))
        if self.root is not None and self.root not in _given_up:
            with self._giving_up():
                self.directory = _new_directory(Path(self.root) / f"rank{rank}")

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._giving_up():
            if error is not None:
                self._note(
                    f"The compilation failed, later stages are missing: {kind.__name__ if kind else ''}: {error}"
                )
            self._finish()

    def stage(self, name: str, graph: fx.Graph) -> None:
        """Write down a graph at a stage."""
        with self._giving_up():
            found = analyse(graph) if name == ANALYSED else Analysis((), ())
            stage = DumpedStage(self._number(name), name, op_counts(graph), found.refusals)
            text = outline(graph, node_names(graph, self.plans, self.inputs))
            if name == ANALYSED:
                text += "".join(f"   {line}\n" for line in _lines_of(found))
            self._trace(stage, text)
            self._texts[stage.number] = text
            self._seen = self._seen.with_stage(stage)
            if self.directory is not None:
                self._write(stage.short_file, text)
                self._write(stage.full_file, _whole(graph))
                self._look_at_collectives(name, graph)

    def code(self, graph: fx.Graph, code: str) -> None:
        """Write down the graph that code was made of, and the code. Both at once: compilers tell them at their end."""
        if any(stage.name == ANALYSED for stage in self._seen.stages):
            self.stage(TO_INDUCTOR, graph)
        else:
            self._note(_FROM_CACHE)
        if self.backend == "aot_eager":
            self._note(_NO_CODE)
        with self._giving_up():
            stage = DumpedStage(self._number(CODE_STAGE), CODE_STAGE, {})
            self._trace(stage, code)
            self._seen = self._seen.with_stage(stage)
            self._write(stage.full_file, code)

    def _number(self, name: str) -> int:
        """The stage's number; of two passes with one name the second comes second."""
        start = self._seen.stages[-1].number + 1 if self._seen.stages else 0
        return self._seen.all_stages.index(name, start)

    def _look_at_collectives(self, name: str, graph: fx.Graph) -> None:
        if name == ANALYSED:
            about = f"A captured backward of rank {self._seen.rank}, {count(self.world_size, 'rank')}."
            try:
                source = repro_source(graph, self.plans, self.passes, world_size=self.world_size, about=about)
                self._write(REPRO_FILE, source)
            except NotRecordable as error:
                self._note(f"There is no repro: {error}.")
        if name not in (CAPTURED, TO_INDUCTOR):
            self._seen = replace(self._seen, collectives=collectives_of(graph, self.plans))

    def _finish(self) -> None:
        if self.directory is None:
            return
        if not any(stage.name == TO_INDUCTOR for stage in self._seen.stages):
            self._seen = replace(self._seen, collectives=())
            if not self._seen.notes:  # a cache that gave the code without telling it
                self._note(_FROM_CACHE)
        for number, text in self._differences():
            if text:
                self._write(f"{number}-{self._seen.all_stages[number]}.diff.txt", text)
        self._write(STAGES_FILE, self._seen.to_json())

    def _differences(self) -> Iterator[tuple[int, str]]:
        stages = [stage for stage in self._seen.stages if stage.has_outline]
        for before, after in pairwise(stages):
            labels = before.label, after.label
            yield after.number, difference(self._texts[before.number], self._texts[after.number], labels)

    def _note(self, note: str) -> None:
        self._seen = replace(self._seen, notes=(*self._seen.notes, note))

    def _write(self, name: str, text: str) -> None:
        if self.directory is not None:
            (self.directory / name).write_text(text, encoding="utf-8")

    def _trace(self, stage: DumpedStage, text: str) -> None:
        if dynamo.structured_trace_is_on():
            dynamo.trace_artifact(f"dp_compile-{stage.label}", text)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """A dump is for people to look at: whatever goes wrong with it, the training goes on without it."""
        try:
            yield
        except Exception as error:
            self.directory = None
            _say_once(self.root or "torch's structured trace", error)


def _say_once(where: str, error: Exception) -> None:
    if where not in _given_up:
        _given_up.add(where)
        logger.warning(
            "nothing is dumped into %s any more: %s: %s. Training goes on.", where, type(error).__name__, error
        )


def _lines_of(found: Analysis) -> list[str]:
    return [
        f"{count(len(found.reductions), 'reduction')} found",
        *(f"refused {refusal.node}: {refusal.reason}" for refusal in found.refusals),
    ]


def _whole(graph: fx.Graph) -> str:
    """All of a graph as torch prints it, with shapes, strides and devices."""
    return graph.python_code("self", verbose=True, include_stride=True, include_device=True).src


def _new_directory(rank: Path) -> Path:
    """A directory that no other capture has: not of this process, and not of an earlier run."""
    rank.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        path = rank / f"capture{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path
