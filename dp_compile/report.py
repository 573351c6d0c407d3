"""What was done, what was left alone, and why: names and numbers only, never a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dp_compile.plan import BucketPlan, count, format_bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something a pass did not recognise and left alone."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The simulated peak of a backward in bytes, the node at which it is reached, and that of torch's DDP.

    All tensors that the backward reads or makes, parameters included. DDP is the same graph in its own order with
    `gradient_as_bucket_view=True`.
    """

    nbytes: int
    node: str
    ddp_nbytes: int

    def __str__(self) -> str:
        return f"simulated peak memory: {format_bytes(self.nbytes)}, as torch's DDP {format_bytes(self.ddp_nbytes)}"


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass says of itself. `memory`: of a backward in the order that the pass gave it."""

    changed: bool
    refusals: tuple[Refusal, ...] = ()
    memory: PeakMemory | None = None


def count_changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """How the counts of ops differ, `mm 4 -> 3`, by name; the number of all `nodes` last."""
    return [
        f"{name} {before.get(name, 0)} -> {after.get(name, 0)}"
        for name in [*sorted({*before, *after} - {"nodes"}), "nodes"]
        if before.get(name, 0) != after.get(name, 0)
    ]


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of one pass, as the pipeline saw it. `duration_ms` is wall time."""

    name: str
    result: PassResult
    before: Mapping[str, int]
    after: Mapping[str, int]
    duration_ms: float

    def __str__(self) -> str:
        changes = count_changes(self.before, self.after)
        did = ", ".join(changes) if changes else "moved nodes" if self.result.changed else "nothing to do"
        return f"{self.name}: {did} ({self.duration_ms:.1f} ms)"


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
    without a gradient. `collectives` come out. `deferred`: all reductions stand at the end of the backward, because
    it broke into several graphs or no pass makes buckets. `cached`: the code came from a compiler's cache, so the
    passes did not run. Without `synced` it is a backward inside `no_sync()`, with nothing to reduce. `placements`
    are of the gradients that code was generated for.
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

    @property
    def memory(self) -> PeakMemory | None:
        """The simulated peak, of the largest graph; `None` if no pass simulated it, as with code from a cache."""
        found = [record.result.memory for record in self.passes if record.result.memory is not None]
        return max(found, key=lambda memory: memory.nbytes, default=None)

    def __str__(self) -> str:
        if not self.synced:
            return f"without synchronisation, {count(self.graphs, 'graph')}"
        head = (
            f"{count(self.hooks, 'hook')} fired, {count(self.reductions, 'reduction')} in, "
            f"{count(self.collectives, 'collective')} out, {count(self.graphs, 'graph')}"
        )
        notes = [f"{self.completed} completed with zeros"] if self.completed else []
        notes += ["all reductions at the end of the backward"] if self.deferred else []
        notes += ["code from the compiler's cache"] if self.cached else []
        head += f" ({'; '.join(notes)})" if notes else ""
        lines = [head, *(f"  {record}" for record in self.passes)]
        lines += [
            f"  refused {refusal.node}: {refusal.reason}"
            for record in self.passes
            for refusal in record.result.refusals
        ]
        lines += [f"  {self.memory}"] if self.memory else []
        return "\n".join([*lines, *_describe_placements(self.placements)])


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one replicated module: its plan, what was captured, how many backwards took which way.

    `promise`: what the plan was predicted to reach, if it was made from a cost.
    """

    mode: str
    world_size: int
    plan: BucketPlan
    captures: tuple[CaptureRecord, ...]
    backwards: Mapping[str, int] = field(default_factory=dict)
    promise: str = ""

    def __str__(self) -> str:
        ways = ", ".join(f"{count} {way}" for way, count in self.backwards.items()) or "none yet"
        lines = [f"mode: {self.mode}, {count(self.world_size, 'rank')}, backwards: {ways}"]
        lines += [self.promise] if self.promise else []
        lines.append(str(self.plan))
        for number, record in enumerate(self.captures):
            lines.append(f"captured backward {number}: {record}")
        return "\n".join(lines)


def _describe_placements(placements: Sequence[Placement]) -> list[str]:
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
