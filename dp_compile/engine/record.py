"""What became of a captured backward: names and numbers only, never a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dp_compile.passes.result import PassRecord, PeakMemory
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.words import count, format_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """How compiled code fills a gradient's place: where it is computed, or `copied`, with the reason.

    The place is in the bucket's flat memory, or `apart`: memory that only this gradient has.
    """

    gradient: str
    nbytes: int
    copied: str | None
    apart: bool = False


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """One captured backward that was compiled.

    `hooks` fired while it was traced and put `reductions` into the graph; `completed` of them stand for parameters
    without a gradient. `collectives` come out, counted in the graph after the last
    pass, planned if `cached`. `deferred`: all reductions stand at the end of the backward, because
    it broke into several graphs or no pass makes buckets. `cached`: the code came from a compiler's cache, so the
    passes did not run. `why_deferred`: what is in the way, if it is known.
    Without `synced` it is a backward inside `no_sync()`, with nothing to reduce. `placements` are of the gradients that
    code was generated for.
    """

    hooks: int
    reductions: int
    completed: int
    collectives: int
    graphs: int
    deferred: bool
    cached: bool
    synced: bool
    passes: tuple[PassRecord, ...] = ()
    placements: tuple[Placement, ...] = ()
    updated: int = 0
    """How many parameters optimizers update in it, and in words what they leave to `step()`."""
    left_to_step: tuple[str, ...] = ()
    kept: str = ""
    """Whether its code was found among the backwards that are kept for later processes, or why not."""
    why_deferred: str = ""

    @property
    def memory(self) -> PeakMemory | None:
        """The simulated peak, of the largest graph; `None` if no pass simulated it, as with code from a cache."""
        found = [record.result.memory for record in self.passes if record.result.memory is not None]
        return max(found, key=lambda memory: memory.nbytes, default=None)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """What came of it. `verbose`: what each pass did to the graph, too."""
        if not self.synced:
            return f"without synchronisation, {count(self.graphs, 'graph')}"
        words = self.reductions - self.hooks - self.completed
        flags = f" + {count(words, 'flag word')}" if words > 0 else ""
        head = (
            f"{count(self.hooks, 'gradient')}{flags} -> {count(self.collectives, 'collective')}, "
            f"{count(self.graphs, 'graph')}"
        )
        notes = [f"{count(self.completed, 'parameter')} without one completed with zeros"] if self.completed else []
        if self.deferred:
            notes.append(": ".join(filter(None, ("all reductions at the end of the backward", self.why_deferred))))
        notes += ["code from the compiler's cache, so collectives are counted in the plan"] if self.cached else []
        head += f" ({'; '.join(notes)})" if notes else ""
        lines = [head, *([f"  kept backwards: {self.kept}"] if self.kept else [])]
        lines += [f"  {record}" for record in self.passes]
        lines = [head, *(f"  {record}" for record in (self.passes if verbose else ()))]
        lines += [
            f"  refused {refusal.node}: {refusal.reason}"
            for record in self.passes
            for refusal in record.result.refusals
        ]
        lines += [f"  {self.memory}"] if self.memory else []
        lines += [f"  {count(self.updated, 'parameter')} updated in it"] if self.updated else []
        lines += [f"  left to step(): {each}" for each in self.left_to_step]
        return "\n".join([*lines, *_describe_placements(self.placements)])


def _describe_placements(given: Sequence[Placement]) -> list[str]:
    """Of gradients: the flags are a few bytes of bookkeeping, always copied."""
    placements = [each for each in given if each.gradient != UNUSED_FLAGS]
    total = sum(each.nbytes for each in placements)
    if not total:
        return []
    reasons: dict[str, list[Placement]] = {}
    for each in placements:
        if each.copied is not None:
            reasons.setdefault(each.copied, []).append(each)
    lines = []
    for apart, where in ((False, "in their buckets"), (True, "in their own memory")):
        if any(each.apart == apart for each in placements):
            there = sum(each.nbytes for each in placements if each.apart == apart and each.copied is None)
            lines.append(f"  computed {where}: {there / total:.1%} of {format_bytes(total)}")
    for reason, group in reasons.items():
        names = group[0].gradient if len(group) == 1 else f"{group[0].gradient} .. {group[-1].gradient}"
        size = format_bytes(sum(each.nbytes for each in group))
        lines.append(f"  copied {count(len(group), 'gradient')}, {size}, {names}: {reason}")
    return lines
