"""Dumps of a captured backward at each compile stage, in torch's structured trace (`TORCH_TRACE=DIR`, then `tlparse`).

dp_compile-plan                     the buckets
dp_compile-0-captured               the backward after compiled autograd and Dynamo
dp_compile-1-analysed               the ATen graph at the start of our pipeline, with the reductions found
dp_compile-2-bucket-reductions      the graph after the pass `bucket-reductions`; further passes follow
dp_compile-..-to-inductor           Inductor's final graph, from which it generates code
dp_compile-..-code                  the generated code; with `aot_eager`, the Python code of the final graph

Each graph is dumped as an outline with its buckets and collectives, followed by torch's own print. If the compilation
fails, later stages are missing. A dump never changes a graph, and an error while dumping never ends a training.
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
"""Callbacks of tests. They receive the name of each stage, its graph and the plans of the modules in it."""


def are_wanted() -> bool:
    """Return whether graphs are dumped, to torch's structured trace or to a recorder."""
    return dynamo.structured_trace_is_on() or bool(recorders)


class Dump:
    """The dump of one captured backward, which is compiled without caches, so that there is code to dump.

    `plans`: one for each module in the backward.
    """

    def __init__(self, plans: Sequence[BucketPlan]) -> None:
        self._plans = plans
        self._stages: list[str] = []
        self._write("plan", lambda: "\n\n".join(map(str, plans)) + "\n")

    def stage(self, name: str, graph: fx.Graph) -> None:
        """Write the graph as of the compile stage `name`."""

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
        """Write the graph from which code was generated, and the code."""
        if ANALYSED in self._stages:
            self.stage(TO_INDUCTOR, graph)
        self._write(f"{len(self._stages)}-code", lambda: code)

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if not dynamo.structured_trace_is_on():
            return
        try:
            content = text()
        except Exception as error:  # a graph that fails to print may still compile
            content = f"{type(error).__name__}: {error}\n"
        dynamo.trace_artifact(f"dp_compile-{name}", content)
