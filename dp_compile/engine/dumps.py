"""What becomes of a captured backward, stage by stage, in torch's structured trace: `TORCH_TRACE=DIR`, then `tlparse`.

dp_compile-plan                     the buckets
dp_compile-0-captured               the backward as compiled autograd and Dynamo leave it
dp_compile-1-analysed               as our pipeline gets it, in ATen: reductions that were found
dp_compile-2-bucket-reductions      after each pass, by its name
dp_compile-..-to-inductor           what Inductor generates code from, after its own last changes
dp_compile-..-code                  the generated code; with `aot_eager` that of the final graph

Each graph is there in short, with its buckets and collectives, then as torch prints it. If the compilation fails later
stages are missing. Nothing here changes a graph or stops a training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import fx

from dp_compile._torch import dynamo
from dp_compile.passes.outline import outline
from dp_compile.passes.reduction import reductions_in
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count

CAPTURED: Final = "captured"
ANALYSED: Final = "analysed"
TO_INDUCTOR: Final = "to-inductor"

recorders: Final[list[Callable[[str, fx.Graph, Sequence[BucketPlan]], None]]] = []
"""Tools of tests: called with the name of each stage, its graph and the plans of the modules in it."""


def are_wanted() -> bool:
    """Whether graphs go into torch's structured trace, or to a recorder."""
    return dynamo.structured_trace_is_on() or bool(recorders)


class Dump:
    """One captured backward while it is compiled: its code is generated, also where a cache has it.

    `plans`: one for each module in it.
    """

    def __init__(self, plans: Sequence[BucketPlan]) -> None:
        self._plans = plans
        self._stages: list[str] = []
        self._write("plan", lambda: "\n\n".join(map(str, plans)) + "\n")

    def stage(self, name: str, graph: fx.Graph) -> None:
        """Write a graph at a stage."""

        def text() -> str:
            short = outline(graph, self._plans)
            if name == ANALYSED:
                short += f"   {count(len(reductions_in(graph)), 'reduction')} found\n"
            whole = graph.python_code("self", verbose=True, include_stride=True, include_device=True).src
            return f"{short}\n# As torch prints it\n{whole}"

        for record in recorders:
            record(name, graph, self._plans)
        self._write(f"{len(self._stages)}-{name}", text)
        self._stages.append(name)

    def code(self, graph: fx.Graph, code: str) -> None:
        """Write the graph that code was made of, and the code."""
        if ANALYSED in self._stages:
            self.stage(TO_INDUCTOR, graph)
        self._write(f"{len(self._stages)}-code", lambda: code)

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if not dynamo.structured_trace_is_on():
            return
        try:
            content = text()
        except Exception as error:  # a graph that cannot be printed may be compiled all the same
            content = f"{type(error).__name__}: {error}\n"
        dynamo.trace_artifact(f"dp_compile-{name}", content)
