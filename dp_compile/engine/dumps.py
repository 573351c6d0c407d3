"""Write what becomes of a captured backward, stage by stage, as plain text, and into torch's structured trace.

DIR/rank0/capture0/plan.txt                  the buckets
                   0-captured.txt            the backward as compiled autograd and Dynamo leave it
                   1-analysed.txt            as our pipeline gets it, in ATen: reductions that were found
                   2-bucket-reductions.txt   after each pass, by its name
                   ..-to-inductor.txt        what Inductor generates code from, after its own last changes
                   ..-code.txt               the generated code; with `aot_eager` that of the final graph
                   notes.txt                 why stages are missing, if some are

Each graph is there in short, with the names of parameters and buckets, then as torch prints it. Nothing here changes a
graph or stops a training: what cannot be written is given up with one warning.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import fx

from dp_compile._torch import dynamo
from dp_compile.config import dump_directory
from dp_compile.fx.text import outline
from dp_compile.passes.graph_names import node_names
from dp_compile.passes.reduction import reductions_in
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count

logger = logging.getLogger("dp_compile.dumps")

CAPTURED: Final = "captured"
ANALYSED: Final = "analysed"
TO_INDUCTOR: Final = "to-inductor"

recorders: Final[list[Callable[[str, fx.Graph, Sequence[BucketPlan]], None]]] = []
"""Tools of tests: called with the name of each stage, its graph and the plans of the modules in it."""
_given_up: set[str] = set()
"""Directories that could not be written."""


def are_wanted() -> bool:
    """Whether graphs go to a directory, into torch's structured trace, or to a recorder."""
    return dump_directory() is not None or dynamo.structured_trace_is_on() or bool(recorders)


class Dump:
    """One captured backward while it is compiled: its code is generated, also where a cache has it.

    `plans`: one for each module in it. `inputs`: the parameter that each input is, `None` for others.
    """

    def __init__(self, plans: Sequence[BucketPlan], inputs: Sequence[str | None]) -> None:
        self._plans, self._inputs, self._root = plans, inputs, dump_directory()
        self._directory: Path | None = None
        self._stages: list[str] = []
        if self._root is not None and self._root not in _given_up:
            with self._giving_up():
                rank, numbers = dist.get_rank() if dist.is_initialized() else 0, itertools.count()
                while self._directory is None:  # one that no other capture has, of this process or of an earlier run
                    path = Path(self._root, f"rank{rank}", f"capture{next(numbers)}")
                    with contextlib.suppress(FileExistsError):
                        path.mkdir(parents=True)
                        self._directory = path
                self._write("plan", "\n\n".join(map(str, plans)) + "\n")

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._giving_up():
            if error is not None:
                what = f"{type(error).__name__}: {error}"
                self._write("notes", f"The compilation failed, later stages are missing: {what}\n")
            elif ANALYSED not in self._stages:
                text = "The code is from a cache of the compiler: passes did not run, stages are missing.\n"
                self._write("notes", text)

    def stage(self, name: str, graph: fx.Graph) -> None:
        """Write a graph at a stage."""
        for record in recorders:
            record(name, graph, self._plans)
        with self._giving_up():
            text = outline(graph, node_names(graph, self._plans, self._inputs))
            if name == ANALYSED:
                text += f"   {count(len(reductions_in(graph)), 'reduction')} found\n"
            whole = graph.python_code("self", verbose=True, include_stride=True, include_device=True).src
            self._write(f"{len(self._stages)}-{name}", f"{text}\n# As torch prints it\n{whole}")
        self._stages.append(name)

    def code(self, graph: fx.Graph, code: str) -> None:
        """Write the graph that code was made of, and the code."""
        if ANALYSED in self._stages:
            self.stage(TO_INDUCTOR, graph)
        with self._giving_up():
            self._write(f"{len(self._stages)}-code", code)

    def _write(self, name: str, text: str) -> None:
        if dynamo.structured_trace_is_on():
            dynamo.trace_artifact(f"dp_compile-{name}", text)
        if self._directory is not None:
            (self._directory / f"{name}.txt").write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """A dump that cannot be written must not stop the training."""
        try:
            yield
        except Exception as error:
            self._directory = None
            if self._root is not None and self._root not in _given_up:
                _given_up.add(self._root)
                what = f"{type(error).__name__}: {error}"
                logger.warning("no more dumps into %s: %s. Training goes on.", self._root, what)
