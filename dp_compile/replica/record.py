"""Records of captured backwards and of optimizers that update in a backward: names and numbers only, no FX node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.words import count, format_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """How compiled code writes a gradient to its bucket: computed in place, or copied."""

    gradient: str
    nbytes: int
    is_copied: bool


IN_BACKWARD: Final = "in-backward"
SHARDED: Final = "sharded"
OVERLAP_FORWARD: Final = "overlap-forward"  # in the backward, with some updates deferred to the next forward


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer that updates in the backward, as of the latest one. Sizes are computed from shapes, not measured."""

    name: str  # its class
    way: str  # `IN_BACKWARD`, `SHARDED` or `OVERLAP_FORWARD`
    nbytes: int  # of its parameters, equal to those of their gradients
    updates: int = 0  # deferred to the next forward; `SHARDED`: deferred all-gathers
    left: tuple[int, ...] = ()  # bucket numbers of the deferred updates
    left_nbytes: int = 0  # in flight in these buckets
    stayed: bool | None = None  # whether they were in flight after `step()`; `None`: `step()` was not called yet
    ranks: int = 1  # over which its state is sharded; 1: not sharded
    elements: int = 0  # updated on all ranks together
    own_elements: int = 0  # updated on this rank
    state_nbytes: int = 0  # of its state on this rank

    def __str__(self) -> str:
        if self.way == SHARDED:
            return self._sharded()
        text = f"{self.name} updates {format_bytes(self.nbytes)} of parameters in the backward"
        text += self._left("update") if self.way == OVERLAP_FORWARD else ""
        return f"{text} (computed from sizes)"

    def _left(self, what: str) -> str:
        waits = "step() (the forward is not one graph of this backend)" if self.stayed is False else ""
        text = f"; the last backward left {count(self.updates, what)} for {waits or 'the next forward'}"
        return f"{text}, {format_bytes(self.left_nbytes)} in flight until then" if self.left_nbytes else text

    def _sharded(self) -> str:
        text = f"{self.name} is sharded over {count(self.ranks, 'rank')}: each updates its shard of the buckets"
        if not self.elements:
            return text
        text += f"; this one {self.own_elements:,} of {self.elements:,} elements"
        if self.state_nbytes and self.own_elements:
            whole = round(self.state_nbytes * self.elements / self.own_elements)
            text += f", with {format_bytes(self.state_nbytes)} of state instead of {format_bytes(whole)}"
        text += self._left("all-gather") if self.updates else ""
        return f"{text} (computed from sizes)"


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """Counts, peak memory and refusals of passes for one captured backward that was compiled."""

    hooks: int  # gradient hooks called during tracing
    reductions: int  # in the graph, including those of flags and of parameters without a gradient
    completed: int  # reductions of parameters without a gradient
    collectives: int  # counted in the graph after the last pass; planned if `cached`
    graphs: int
    cached: bool  # the code is from a compiler's cache, and the passes did not run
    refusals: tuple[Refusal, ...] = ()
    memory: PeakMemory | None = None  # simulated peak, `None` if `cached`
    placements: tuple[Placement, ...] = ()  # of gradients with generated code
    updated: int = 0  # parameters that optimizers update in the graph

    def __str__(self) -> str:
        words = self.reductions - self.hooks - self.completed
        flags = f" + {count(words, 'status word')}" if words > 0 else ""
        made = f"{count(self.collectives, 'collective')}, {count(self.graphs, 'graph')}"
        head = f"{count(self.hooks, 'gradient')}{flags} -> {made}"
        notes = [f"zeros reduced for {count(self.completed, 'parameter')} without a gradient"] if self.completed else []
        notes += ["code from the compiler's cache, so collectives are counted in the plan"] if self.cached else []
        head += f" ({'; '.join(notes)})" if notes else ""
        lines = [head, *(f"  refused {refusal.node}: {refusal.reason}" for refusal in self.refusals)]
        lines += [f"  {self.memory}"] if self.memory else []
        lines += [f"  {count(self.updated, 'parameter')} updated in the graph"] if self.updated else []
        # Flags are omitted: a few bytes, always copied.
        placements = [each for each in self.placements if each.gradient != UNUSED_FLAGS]
        copied = [each for each in placements if each.is_copied]
        nbytes, total = (sum(each.nbytes for each in some) for some in (copied, placements))
        lines += [f"  computed in their buckets: {1 - nbytes / total:.1%} of {format_bytes(total)}"] if total else []
        if total and copied:
            names = dict.fromkeys((copied[0].gradient, copied[-1].gradient))
            lines.append(f"  copied {count(len(copied), 'gradient')}, {format_bytes(nbytes)}: {' .. '.join(names)}")
        return "\n".join(lines)
