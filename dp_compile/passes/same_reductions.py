"""What a graph reduces, read from its operations: which values, in which group, with which op, dtype and factor.

    before   reduce_grad(mm, ...)                                           mm * 0.5, summed in float32 over group 0
    after    wait(all_reduce(flat_bucket([mm, sin], ...))), as_strided      the same, from the same place of the bucket

Behind a reduce-scatter a rank has some part of what was added up; what is done to that is done to all parts, until the
same group puts them together.

Both are followed as sequences of elements (`fx/elements.py`): from what computes a gradient, through views, factors,
buckets, collectives and views back, to what the graph returns or writes. Nothing that a pass says of its own nodes is
read. A node that is not known here is a value of its own, so a pass that puts one between a gradient and its
collective, or behind it, is refused: nobody can tell that it does no harm.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import collectives, elements
from dp_compile.fx.elements import Elements, Run
from dp_compile.fx.printer import op_name
from dp_compile.fx.storages import Storage, storages_of, written_by
from dp_compile.passes.bucket_ops import FLAT_BUCKET, places_of
from dp_compile.passes.functional_hook import HOOK_STATE, HOOK_STEP
from dp_compile.passes.reduction import REDUCE_GRAD, GradReduction, dtype_of, match
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, Update, read_update
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.reduction import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Stage

aten, prims = torch.ops.aten, torch.ops.prims


class _Reduced(NamedTuple):
    """A source: another one times a factor, reduced."""

    source: int
    factor: float
    group: str
    reduce_op: str
    dtype: torch.dtype
    by: tuple[str, ...] = ()

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        factors = " times ".join((f"{self.factor:g}", *self.by))
        return f"{self.reduce_op} over group {self.group} in {dtype}, each contribution times {factors}"


class _Share(NamedTuple):
    """A source: this rank's part of elements that are cut into `parts` equal ones over the ranks of a group.

    Which part that is nobody needs to know, as long as the same group puts the parts together again.
    """

    whole: Elements
    parts: int
    group: str


class _Moved(NamedTuple):
    """A source: what each rank of a group sends to this one, one after the other.

    By `all_to_all` the part of its elements that belongs to this rank, by `all_gather` all of them.
    """

    op: str
    whole: Elements
    parts: int
    group: str


class _Cast(NamedTuple):
    """A source: another one, which was of dtype `was`, in another dtype."""

    source: int
    was: torch.dtype
    dtype: torch.dtype


class _Sent(NamedTuple):
    """A source: what a functional hook hands out after `step` rounds. All else follows from what it is given."""

    gradients: tuple[Elements, ...]
    state: Any
    names: tuple[str, ...]
    hook: str
    group: str
    step: int


class _ByHook(NamedTuple):
    """A source: what a functional hook makes of a gradient; with a `position`, what it remembers there from now on."""

    gradient: Elements
    hook: str
    group: str
    """Whose ranks it knows of."""
    rounds: tuple[Stage, ...]
    position: int | None = None
    state: Any = None

    def __str__(self) -> str:
        rounds = ", ".join(f"{stage.op} over group {stage.group}" for stage in self.rounds)
        return f"reduced by hook {self.hook}: {rounds}"


class _Pairs(NamedTuple):
    """A source: real and imaginary parts of a complex one, side by side; if not `real`, complex numbers of those."""

    source: int
    real: bool


@dataclass(slots=True)
class Sources:
    """Numbers for what elements come from, the same for all stages of a graph."""

    _numbers: dict[Any, int] = field(default_factory=dict)
    _keys: list[Any] = field(default_factory=list)

    def number(self, key: Any) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return self._numbers[key]

    def key(self, number: int) -> Any:
        return self._keys[number]

    def root(self, number: int) -> int:
        """What was reduced at first, before casts and the like."""
        key = self._keys[number]
        if isinstance(key, _ByHook) and key.gradient:
            return self.root(key.gradient[0].source)
        return self.root(key.source) if isinstance(key, (_Reduced, _Cast, _Pairs)) else number

    def is_reduced(self, number: int) -> bool:
        key = self._keys[number]
        return isinstance(key, (_Reduced, _ByHook)) or (
            isinstance(key, (_Cast, _Pairs)) and self.is_reduced(key.source)
        )


@dataclass(frozen=True, slots=True)
class Reductions:
    """How many elements of each source are reduced, where reduced values go, and which gradient each source is of."""

    numel: Counter[int]
    uses: tuple[Any, ...]
    gradients: Mapping[int, tuple[int, int]]
    """By root: the replica and the index."""
    unknown: frozenset[str]
    """Nodes that are values of their own."""


_GAP: Final = "what lies between the members of a bucket"


def reductions_of(graph: fx.Graph, sources: Sources, plans: Sequence[BucketPlan]) -> Reductions:
    """Follow every reduction of a graph. Those that still stand as `reduce_grad` are what the plans say."""
    writes = {node: written for node in graph.nodes if (written := written_by(node))}
    walk = _Walk(sources, writes, plans)
    for node in graph.nodes:
        walk.visit(node)
    return Reductions(walk.numel, tuple(walk.uses(graph.output_node())), walk.gradients, frozenset(walk.unknown))


def check_same(
    before: Reductions, after: Reductions, sources: Sources, *, made_by: str, names: Mapping[tuple[int, int], str]
) -> None:
    """Check that a pass left every reduction what it was.

    Args:
        before: of the graph before the first pass; `after` of what the pass `made_by` left.
        names: of gradients, by replica and index.

    Raises:
        InvalidGraphError: a gradient is reduced otherwise, from other values, not at all or twice, or the result goes
            to another place.
    """
    if before.numel != after.numel:
        number = min([*(before.numel - after.numel), *(after.numel - before.numel)])
        root = sources.root(number)
        place = before.gradients.get(root)
        if place is None:
            reason = f"{sources.key(root)} is reduced, which is no gradient"
        else:
            was, now = (_described(facts.numel, root, sources) for facts in (before, after))
            said = f"the gradient of {names.get(place, place)}: {was or 'not reduced'} became {now or 'not reduced'}"
            reason = said
        raise InvalidGraphError(f"pass '{made_by}' changed what is reduced: {reason}{_hint(after, before)}")
    for position, (was, now) in enumerate(zip(before.uses, after.uses, strict=False)):
        if was != now:
            gradients = sorted({names.get(place, str(place)) for place in _gradients_in((was, now), before, sources)})
            raise InvalidGraphError(
                f"pass '{made_by}' changed where reduced gradients go: result {position} of the backward is not what "
                f"it was; it has to do with {', '.join(gradients) or 'no gradient any more'}{_hint(after, before)}"
            )
    if len(before.uses) != len(after.uses):
        raise InvalidGraphError(
            f"pass '{made_by}' changed where reduced gradients go: {len(before.uses)} results and writes became "
            f"{len(after.uses)}"
        )


def _described(numel: Counter[int], root: int, sources: Sources) -> str:
    found = [
        f"{sources.key(number)}{f' ({count} elements)' if len(numel) > 1 else ''}"
        for number, count in numel.items()
        if sources.root(number) == root
    ]
    return " and ".join(found)


def _hint(after: Reductions, before: Reductions) -> str:
    new = sorted(after.unknown - before.unknown)
    return f". Not understood, so refused: {', '.join(new[:3])}" if new else ""


def _gradients_in(value: Any, facts: Reductions, sources: Sources) -> Iterator[tuple[int, int]]:
    if isinstance(value, Run):
        root = sources.root(value.source)
        if (place := facts.gradients.get(root)) is not None:
            yield place
        else:
            yield from _gradients_in(sources.key(root), facts, sources)
    elif isinstance(value, tuple):
        for each in value:
            yield from _gradients_in(each, facts, sources)


# --- the walk -----------------------------------------------------------------------------------------------------


class _Walk:
    """Elements of every node of a graph, in the order in which it runs."""

    def __init__(
        self, sources: Sources, writes: Mapping[fx.Node, tuple[fx.Node, ...]], plans: Sequence[BucketPlan]
    ) -> None:
        self.sources, self._written_by = sources, writes
        self._planned = [{each.index: each.key.reduction for each in plan.gradients} for plan in plans]
        self._rounds = {
            (str(replica), each.hook): each.stages
            for replica, planned in enumerate(self._planned)
            for each in planned.values()
        }
        """By replica and functional hook."""
        self._in_parts = {
            (replica, member.gradient.index): (member, bucket.key.reduction.stages[-1])
            for replica, plan in enumerate(plans)
            for bucket in plan.buckets
            for member in bucket.members
            if bucket.key.reduction.is_scattered
        }
        """By replica and index, the members of buckets of which each rank keeps a part."""
        self._by_hook: dict[tuple[int, int], _ByHook] = {}
        """By replica and index."""
        self.numel: Counter[int] = Counter()
        self.gradients: dict[int, tuple[int, int]] = {}
        self.unknown: set[str] = set()
        self._of: dict[fx.Node, Any] = {}
        """Elements, several of them for an operation with several results, or a key that is equal for equal values."""
        self._reduced: set[fx.Node] = set()
        """Nodes whose values depend on something reduced."""
        self._writes: list[Any] = []
        self._aliases: dict[Storage, list[fx.Node]] = {}

    def visit(self, node: fx.Node) -> None:
        starts = node.target in (REDUCE_GRAD, HOOK_STATE, HOOK_STEP)
        if starts or any(source in self._reduced for source in node.all_input_nodes):
            self._reduced.add(node)
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        found = rule(self, node) if rule is not None else None
        value = node.meta.get("val")
        if collectives.adds_up(node):
            self._reduced.add(node)
        if isinstance(found, tuple) and isinstance(value, torch.Tensor) and not self._fits(found, value):
            found = None
        self._of[node] = self._itself(node) if found is None else found
        # Who shares memory matters only where some is written.
        for storage in storages_of(node) if self._written_by and node.op != "output" else ():
            self._aliases.setdefault(storage, []).append(node)
        if node.target in (UPDATE, UPDATE_LATER):
            update = read_update(node)
            self._writes.append(("update", *update[2:], tuple(self._given_to(update))))
        elif written := self._written_by.get(node):
            self._write(node, written)

    def _given_to(self, update: Update) -> Iterator[Any]:
        """What an update is given of each gradient: all ranks together, if each of them has a part of its bucket."""
        for index, gradient in zip(update.indices, update.gradients, strict=True):
            found, planned = self.elements_of(gradient), self._in_parts.get((update.replica, index))
            together = None if not found or planned is None else self._together(found, planned[1])
            if planned is None or together is None:
                yield self.of(gradient)
            else:
                member = planned[0]
                yield elements.strided(together, member.gradient.shape, member.gradient.stride, member.offset or 0)

    def _together(self, given: Elements, stage: Stage) -> Elements | None:
        """The whole of which a rank has this part, cut by a stage; with all that was done to the part."""
        run = given[0]
        if given != (replace(elements.whole(run.source, run.numel)[0], factor=run.factor, by=run.by),):
            return None
        key = self.sources.key(run.source)
        if isinstance(key, _Cast):
            inner = self._together(elements.whole(key.source, run.numel), stage)
            inner = None if inner is None else self._as_dtype(inner, key.was, key.dtype)
        else:
            is_cut = isinstance(key, _Share) and (key.parts, key.group) == (stage.parts, stage.group)
            inner = key.whole if is_cut and elements.numel_of(key.whole) == run.numel * key.parts else None
        if inner is None:
            return None
        gap = self.sources.number(_GAP)
        numbers: list[float | str] = [run.factor, *run.by]
        for number in numbers:
            inner = tuple(each if each.source == gap else each.times(number) for each in inner)
        return inner

    def uses(self, output: fx.Node) -> Iterator[Any]:
        """Where reduced values end: what is returned, in its place, and what is written, in any order."""
        for value in _flat(output.args[0]):
            depends = isinstance(value, fx.Node) and value in self._reduced
            yield self.of(value) if depends else None
        yield from sorted(self._writes, key=repr)

    def of(self, argument: Any) -> Any:
        """What an argument is, as something that is equal for equal values."""
        if isinstance(argument, fx.Node):
            return self._of[argument]
        if isinstance(argument, (list, tuple)):
            return tuple(map(self.of, argument))
        if isinstance(argument, dict):
            return tuple((name, self.of(value)) for name, value in sorted(argument.items()))
        return argument if isinstance(argument, (int, float, str, bool, torch.dtype)) else str(argument)

    def elements_of(self, argument: Any) -> Elements | None:
        """The elements of a tensor; `None` if its size is not known."""
        found = self._of.get(argument) if isinstance(argument, fx.Node) else None
        return found if _is_elements(found) else None

    def _itself(self, node: fx.Node) -> Any:
        """A value of its own. What depends on something reduced is told apart by how it does."""
        key: Any = (node.op, node.name)
        if node in self._reduced and node.op != "output":
            key = (*key, str(node.target), self.of(node.args), self.of(dict(node.kwargs)))
        value = node.meta.get("val")
        number = self.sources.number(key)
        if node.op == "call_function":
            self.unknown.add(f"{node.name} ({op_name(node)})")
        shape = _static(value)
        return (node.name, number) if shape is None else elements.whole(number, math.prod(shape))

    def _fits(self, found: Any, value: torch.Tensor) -> bool:
        """Whether elements are as many as they have to be, and can be told apart by dimension later."""
        shape = _static(value)
        if shape is None or not _is_elements(found) or elements.numel_of(found) != math.prod(shape):
            return False
        return len(found) != 1 or elements.aligned(found[0], shape) is not None

    def _write(self, node: fx.Node, written: Sequence[fx.Node]) -> None:
        """Whatever shares memory with what is written is not what it was."""
        target = written[0] if node.target in _COPIES and len(written) == 1 else None
        if node in self._reduced:
            self._writes.append((self.of(list(written)), str(node.target), self.of(node.args), self.of(node.kwargs)))
        changed = {each for one in written for storage in storages_of(one) for each in self._aliases.get(storage, ())}
        before = {each: self._of[each] for each in changed}
        given = self.of(node.args) if node in self._reduced else ""  # what is written to is among it
        for each in changed - {node}:
            self._of[each] = self._after_write(each, node, given)
            if node in self._reduced:
                self._reduced.add(each)
        if target is not None:
            self._of[target] = self._of[node]
            self._fill(target, node, before)

    def _after_write(self, each: fx.Node, by: fx.Node, given: Any) -> Any:
        number = self.sources.number(("written", each.name, by.name, given))
        shape = _static(each.meta.get("val"))
        return (each.name, number) if shape is None else elements.whole(number, math.prod(shape))

    def _fill(self, target: fx.Node, by: fx.Node, before: Mapping[fx.Node, Any]) -> None:
        """A copy into a part of flat memory: the memory holds it from now on, and elsewhere what it held."""
        part = target.meta["val"]
        for memory, held in before.items():
            value = memory.meta["val"]
            if memory is target or memory is by or _static(value) is None or _static(part) is None:
                continue
            if _is_elements(held) and value.dim() == 1 and value.is_contiguous() and part.is_contiguous():
                first = part.storage_offset() - value.storage_offset()
                last = first + part.numel()
                if 0 <= first and last <= value.numel():
                    rest = elements.between(held, 0, first), elements.between(held, last, value.numel())
                    self._of[memory] = elements.joined([rest[0], self._of[by], rest[1]])

    # --- what operations do: `None` if they do something else here

    def same(self, node: fx.Node) -> Elements | None:
        return self.elements_of(node.args[0])

    def item(self, node: fx.Node) -> Any:
        several: Any = self._of.get(_node(node.args[0]))
        position = node.args[1]
        known = isinstance(several, tuple) and isinstance(position, int) and position < len(several)
        return several[position] if known and _is_elements(several[position]) else None

    def permute(self, node: fx.Node) -> Elements | None:
        source = _node(node.args[0])
        given, shape = self.elements_of(source), _static(source.meta.get("val"))
        if given is None or shape is None:
            return None
        order = list(range(len(shape)))
        if node.target is aten.t.default:
            order.reverse()
        elif node.target is aten.transpose.int:
            one, other = (int(str(each)) for each in node.args[1:3])
            order[one], order[other] = order[other], order[one]
        else:
            order = [dimension % len(shape) for dimension in _ints(node.args[1])]
        return elements.permuted(given, shape, order)

    def slice(self, node: fx.Node) -> Elements | None:
        source, given = _node(node.args[0]), self.elements_of(node.args[0])
        shape = _static(source.meta.get("val"))
        where = _rows(node, shape) if shape is not None else None
        if given is None or shape is None or where is None:
            return None
        return elements.sliced(given, shape, *where)

    def strided(self, node: fx.Node) -> Elements | None:
        source, given = _node(node.args[0]), self.elements_of(node.args[0])
        value: Any = source.meta.get("val")
        sizes = (*node.args[1:4], None)
        if given is None or _static(value) is None or not value.is_contiguous():
            return None
        shape, stride = _ints(sizes[0]), _ints(sizes[1])
        offset = 0 if sizes[2] is None else int(str(sizes[2])) - value.storage_offset()
        return elements.strided(given, shape, stride, offset)

    def product_with_number(self, node: fx.Node) -> Elements | None:
        given, factor = self.elements_of(node.args[0]), node.args[1]
        if isinstance(factor, fx.Node) and factor.op == "placeholder" and node.target is aten.mul.Tensor:
            if factor.meta["val"].dim():
                return None
            same = _node(node.args[0]).meta["val"].dtype == node.meta["val"].dtype
            return None if given is None or not same else tuple(run.times(self._number(factor)) for run in given)
        if given is None or not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor == 0:
            return None
        source, value = _node(node.args[0]).meta["val"], node.meta["val"]
        if source.dtype != value.dtype or not (value.is_floating_point() or value.is_complex()):
            return None
        if node.target in (aten.div.Tensor, aten.div.Scalar):
            factor = 1 / factor
        return tuple(run.times(factor) for run in given)

    def _number(self, node: fx.Node) -> str:
        """A name for what a tensor without dimensions holds, equal for equal numbers."""
        return f"number {self.of(node)}"

    def cast(self, node: fx.Node) -> Elements | None:
        given = self.elements_of(node.args[0])
        if given is None:
            return None
        return self._as_dtype(given, _node(node.args[0]).meta["val"].dtype, node.meta["val"].dtype)

    def copy(self, node: fx.Node) -> Elements | None:
        given = self.elements_of(node.args[1])
        target, source = (_node(each).meta["val"] for each in node.args[:2])
        if given is None or target.shape != source.shape:
            return None
        return self._as_dtype(given, source.dtype, target.dtype)

    def _as_dtype(self, given: Elements, old: torch.dtype, new: torch.dtype) -> Elements:
        return given if old == new else self._each(given, lambda source: self._cast(source, old, new))

    def _cast(self, source: int, old: torch.dtype, new: torch.dtype) -> int:
        key = self.sources.key(source)
        # Through a dtype that holds every number of the first: as if that cast had not been.
        if isinstance(key, _Cast) and torch.promote_types(key.was, key.dtype) == key.dtype:
            return key.source if key.was == new else self.sources.number(_Cast(key.source, key.was, new))
        return self.sources.number(_Cast(source, old, new))

    def _each(self, given: Elements, number: Callable[[int], int]) -> Elements:
        """Something that is done to each element by itself."""
        gap = self.sources.number(_GAP)
        return elements.joined(
            (run if run.source == gap else replace(run, source=number(run.source)),) for run in given
        )

    def real(self, node: fx.Node) -> Elements | None:
        given = self.elements_of(node.args[0])
        return None if given is None else self._real(given)

    def _real(self, given: Elements) -> Elements:
        return elements.joined((run,) for run in map(self._real_run, given))

    def _real_run(self, run: Run) -> Run:
        key = self.sources.key(run.source)
        paired = (
            key.source if isinstance(key, _Pairs) and not key.real else self.sources.number(_Pairs(run.source, True))
        )
        loops = (*((size, 2 * stride) for size, stride in run.loops), (2, 1))
        if run.loops and run.loops[-1][1] == 1:
            loops = (*loops[:-2], (2 * run.loops[-1][0], 1))
        return Run(paired, loops, 2 * run.offset, run.factor)

    def complex(self, node: fx.Node) -> Elements | None:
        given = self.elements_of(node.args[0])
        return None if given is None else self._complex(given)

    def _complex(self, given: Elements) -> Elements | None:
        runs: list[Run] = []
        for run in given:
            loops = elements.aligned(run, [run.numel // 2, 2]) if run.numel % 2 == 0 else None
            if loops is None or loops[1] != [(2, 1)] or run.offset % 2 or any(stride % 2 for _, stride in loops[0]):
                return None
            key = self.sources.key(run.source)
            whole = (
                key.source if isinstance(key, _Pairs) and key.real else self.sources.number(_Pairs(run.source, False))
            )
            runs.append(
                Run(whole, tuple((size, stride // 2) for size, stride in loops[0]), run.offset // 2, run.factor)
            )
        return elements.joined((run,) for run in runs)

    def reduction(self, node: fx.Node) -> Elements | None:
        found = match(node)
        given = self.elements_of(node.args[0])
        if not isinstance(found, GradReduction) or given is None or found.replica >= len(self._planned):
            return None
        planned = self._planned[found.replica].get(found.index)
        if planned is None:
            return None
        for run in given:
            self.gradients.setdefault(self.sources.root(run.source), (found.replica, found.index))
        if planned.hook is not None:
            by_hook = _ByHook(given, planned.hook, planned.stages[0].group, planned.stages)
            self._by_hook[found.replica, found.index] = by_hook
            return self._hooked(by_hook)
        dtype = node.meta["val"].dtype
        wire = dtype if planned.wire is None else dtype_of(planned.wire)
        if len(found.factors) != planned.given:
            return None
        given_factors = list(map(self._number, found.factors))
        scale = given_factors[0] if planned.given > 0 else planned.scale
        post_scale = given_factors[1] if planned.given > 1 else planned.post_scale
        reduced = self._as_dtype(tuple(run.times(scale) for run in given), dtype, wire)
        for stage in planned.stages:
            if stage.reduce_op:  # else parts are put together that were cut apart
                reduced = self._reduce(reduced, stage.group, stage.reduce_op, wire)
        return tuple(run.times(post_scale) for run in self._as_dtype(reduced, wire, dtype))

    def _hooked(self, what: _ByHook) -> Elements:
        number, numel = self.sources.number(what), elements.numel_of(what.gradient)
        self.numel[number] += numel
        return elements.whole(number, numel)

    def _remembered(self, what: _ByHook, state: Sequence[Any], values: Sequence[torch.Tensor]) -> tuple[Elements, ...]:
        keys = (what._replace(position=position, state=tuple(state)) for position in range(len(state)))
        pairs = zip(keys, values, strict=True)
        return tuple(elements.whole(self.sources.number(key), value.numel()) for key, value in pairs)

    def state_of_hook(self, node: fx.Node) -> Any:
        tensors, _, index, replica = node.args
        what = self._by_hook.get((int(str(replica)), int(str(index))))
        state = [self.of(each) for each in _sequence(tensors)]
        return None if what is None else self._remembered(what, state, node.meta["val"])

    def step_of_hook(self, node: fx.Node) -> Any:
        """What a hook hands out is as it is; the end counts if all before it went through the collectives it has to."""
        gradients, state, received, names, hook, group, unit = node.args
        planned = self._rounds.get((str(unit).partition(".")[0], str(hook)), ())
        given = [self.elements_of(each) for each in _sequence(gradients)]
        known = tuple(each for each in given if each is not None)
        if len(known) < len(given) or not planned:
            return None
        states = [self.of(each) for each in _sequence(state)]
        kinds, values = tuple(map(str, _sequence(names))), node.meta["val"]
        sent = _Sent(known, tuple(states), kinds, str(hook), str(group), len(_sequence(received)))
        rounds: list[Stage] = []
        for step, argument in enumerate(_sequence(received)):
            # Of what nobody sent there is nothing to see.
            is_empty = not _node(argument).meta["val"].numel()
            found = planned[step] if is_empty else self._round_of(argument, sent._replace(step=step))
            if found is None:
                return None
            rounds.append(found)
        if len(rounds) < len(planned):
            return (elements.whole(self.sources.number(sent), values[0].numel()),)
        reduced: list[Elements] = []
        remembered: list[Elements] = []
        left = list(states)
        for gradient, kind in zip(known, kinds, strict=True):
            what = _ByHook(gradient, str(hook), str(group), tuple(rounds))
            count = len(kind.split(",")) if kind else 0
            reduced.append(self._hooked(what))
            first = len(known) + len(states) - len(left)
            remembered += self._remembered(what, left[:count], values[first : first + count])
            del left[:count]
        return (*reduced, *remembered)

    def _round_of(self, received: Any, sent: _Sent) -> Stage | None:
        """The collective that all of `sent` went through, if nothing else happened to it."""
        found, value = self.elements_of(received), _node(received).meta["val"]
        key = self.sources.key(found[0].source) if found and len(found) == 1 else None
        if found != elements.whole(self.sources.number(key), value.numel()):
            return None
        number = self.sources.number(sent)
        if isinstance(key, _Reduced):
            alike = key == _Reduced(number, 1.0, key.group, "sum", value.dtype)
            return Stage(ALL_REDUCE, key.group, key.reduce_op) if alike else None
        if isinstance(key, _Moved) and key.whole == elements.whole(number, elements.numel_of(key.whole)):
            return Stage(key.op, key.group, parts=key.parts)
        return None

    def all_reduce(self, node: fx.Node) -> Any:
        what, reduce_op, group = node.args[:3]
        if isinstance(what, (list, tuple)):
            return tuple(self._reduced_tensor(each, str(group), str(reduce_op)) for each in what)
        return self._reduced_tensor(what, str(group), str(reduce_op))

    def _reduced_tensor(self, argument: Any, group: str, reduce_op: str) -> Elements | None:
        given = self.elements_of(argument)
        if given is None:
            return None
        dtype, share = _node(argument).meta["val"].dtype, self._share(given)
        if share is None:
            return self._reduce(given, group, reduce_op, dtype)
        return self._shared(share._replace(whole=self._reduce(share.whole, group, reduce_op, dtype)))

    def reduce_scatter(self, node: fx.Node) -> Elements | None:
        what, reduce_op, parts, group = node.args[:4]
        given = self.elements_of(what)
        if given is None or not isinstance(parts, int) or elements.numel_of(given) % parts:
            return None
        reduced = self._reduce(given, str(group), str(reduce_op), _node(what).meta["val"].dtype)
        return self._shared(_Share(reduced, parts, str(group)))

    def all_to_all(self, node: fx.Node) -> Elements | None:
        what, received, sent, group = node.args[:4]
        given = self.elements_of(what)
        if given is None or list(_sequence(received)) != list(_sequence(sent)) or len(set(_sequence(sent))) != 1:
            return None
        return self._exchanged(given, len(_sequence(sent)), str(group))

    def all_to_all_in_pairs(self, node: fx.Node) -> Elements | None:
        what, parts, group = node.args[:3]
        given = self.elements_of(what)
        return None if given is None or not isinstance(parts, int) else self._exchanged(given, parts, str(group))

    def _exchanged(self, given: Elements, parts: int, group: str) -> Elements:
        exchanged = _Moved(ALL_TO_ALL, given, parts, group)
        return elements.whole(self.sources.number(exchanged), elements.numel_of(given))

    def sum_of_parts(self, node: fx.Node) -> Elements | None:
        """The parts that ranks have sent each other, added up: a reduce-scatter. Of other sums nothing is known."""
        source, given = _node(node.args[0]), self.elements_of(node.args[0])
        key = self.sources.key(given[0].source) if given and len(given) == 1 else None
        if (
            given is None
            or not isinstance(key, _Moved)
            or key.op != ALL_TO_ALL
            or node.kwargs
            or list(node.args[1:]) != [[0]]
        ):
            return None
        value = source.meta["val"]
        if given != elements.whole(given[0].source, elements.numel_of(key.whole)) or value.shape[0] != key.parts:
            return None
        self._reduced.add(node)
        reduced = self._reduce(key.whole, key.group, "sum", value.dtype)
        return self._shared(_Share(reduced, key.parts, key.group))

    def all_gather(self, node: fx.Node) -> Elements | None:
        """Parts put together again by the ranks that have them; of anything else nobody knows what it is."""
        what, parts, group = node.args[:3]
        given = self.elements_of(what)
        share = None if given is None else self._share(given)
        if given and share is None and isinstance(parts, int) and self._is_sent(given):
            gathered = self.sources.number(_Moved(ALL_GATHER, given, parts, str(group)))
            return elements.whole(gathered, elements.numel_of(given) * parts)
        return share.whole if share is not None and share[1:] == (parts, str(group)) else None

    def _is_sent(self, given: Elements) -> bool:
        return all(isinstance(self.sources.key(run.source), _Sent) for run in given)

    def _shared(self, share: _Share) -> Elements:
        return elements.whole(self.sources.number(share), elements.numel_of(share.whole) // share.parts)

    def _share(self, given: Elements) -> _Share | None:
        """What a rank's part is a part of, if that is all there is, in its order."""
        key = self.sources.key(given[0].source) if len(given) == 1 else None
        return key if isinstance(key, _Share) and given == self._shared(key) else None

    def _reduce(self, given: Elements, group: str, reduce_op: str, dtype: torch.dtype) -> Elements:
        gap, reduced = self.sources.number(_GAP), list[Elements]()
        for run in given:
            if run.source != gap:
                number = self.sources.number(_Reduced(run.source, run.factor, group, reduce_op, dtype, run.by))
                if not isinstance(self.sources.key(run.source), _Sent):  # the gradients count that it is made of
                    self.numel[number] += run.numel
                run = replace(run, source=number, factor=1.0, by=())
            reduced.append((run,))
        return elements.joined(reduced)

    def bucket(self, node: fx.Node) -> Elements | None:
        members, scales, strides, offsets, numel = node.args[:5]
        factor = node.args[7] if len(node.args) > 7 else None
        nodes = [_node(member) for member in _sequence(members)]
        shapes = [member.meta["val"].shape for member in nodes]
        places = places_of(shapes, _ints(strides), _ints(offsets))
        gap, parts, at = self.sources.number(_GAP), list[Elements](), 0
        for member, scale, place in sorted(
            zip(nodes, _sequence(scales), places, strict=True), key=lambda each: (each[2].offset, each[2].numel)
        ):
            given = self.elements_of(member)
            there = None if given is None else elements.in_memory(given, place.shape, place.stride)
            if there is None or place.offset < at:
                return None
            there = self._as_dtype(there, member.meta["val"].dtype, node.meta["val"].dtype)
            by = float(scale) if factor is None else self._number(_node(factor))
            parts += [elements.whole(gap, place.offset - at), tuple(run.times(by) for run in there)]
            at = place.offset + place.numel
        return elements.joined([*parts, elements.whole(gap, int(str(numel)) - at)])

    def concatenation(self, node: fx.Node) -> Elements | None:
        parts = [_node(part) for part in _sequence(node.args[0])]
        given = [self.elements_of(part) for part in parts]
        flat = all((shape := _static(part.meta.get("val"))) is not None and len(shape) == 1 for part in parts)
        same = len({part.meta["val"].dtype for part in parts}) == 1 if flat else False
        return elements.joined([each for each in given if each is not None]) if same and None not in given else None

    def scatter(self, node: fx.Node) -> Elements | None:
        """Rows of a flat tensor that are replaced by those of another."""
        base, rows = (self.elements_of(each) for each in node.args[:2])
        shape = _static(_node(node.args[0]).meta.get("val"))
        where = _rows(node, shape, first=2) if shape is not None else None
        if base is None or rows is None or shape is None or where is None or len(shape) != 1:
            return None
        _, first, last = where
        return elements.joined([elements.between(base, 0, first), rows, elements.between(base, last, shape[0])])

    # --- what computes gradients: passes give it a factor

    def matrix_product(self, node: fx.Node) -> Elements | None:
        """`factor * (a @ b)`."""
        added, left, right = (None, *node.args) if len(node.args) == 2 else node.args
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)) or (not beta and not alpha):
            return None
        floating = node.meta["val"].is_floating_point() or node.meta["val"].is_complex()
        if added is not None and beta != 0:
            if not floating:
                return None
            factor = alpha or beta
            ratio = float(f"{beta / alpha:.9g}") if alpha else "nothing but what is added"
            key: Any = ("sum and product", self.of(added), self.of(left), self.of(right), ratio)
            return tuple(run.times(factor) for run in self._source(node, key))
        if node.target in (aten.bmm.default, aten.baddbmm.default):
            key = ("batch of products", self.of(left), self.of(right))
            found: Elements | None = self._source(node, key)
        else:
            found = self._product(_node(left), _node(right))
        if alpha == 1 or found is None:
            return found
        return tuple(run.times(alpha) for run in found) if floating else None

    def _product(self, left: fx.Node, right: fx.Node) -> Elements | None:
        """Of two matrices."""
        shape = _static_sizes([left.meta["val"].shape[0], right.meta["val"].shape[1]])
        if shape is None:
            return None
        return elements.whole(self.sources.number(("product", self.of(left), self.of(right))), math.prod(shape))

    def _source(self, node: fx.Node, key: Any) -> Elements:
        shape = _static(node.meta["val"])
        return () if shape is None else elements.whole(self.sources.number(key), math.prod(shape))

    def scattered(self, node: fx.Node) -> Elements | None:
        """Values put into zeros: a factor of the values is one of the result."""
        position = 3 if node.target is aten._unsafe_masked_index_put_accumulate.default else 2
        given = self.elements_of(node.args[position])
        if not given or len({run.factor for run in given}) != 1 or not _is_zero(_node(node.args[0])):
            return None
        bare = tuple(replace(run, factor=1.0) for run in given)
        rest = [self.of(each) for each in (*node.args[1:position], *node.args[position + 1 :])]
        key = ("scattered", str(node.target), bare, *rest, self.of(dict(node.kwargs)))
        return tuple(run.times(given[0].factor) for run in self._source(node, key))


def _is_zero(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


def _is_elements(found: Any) -> bool:
    return isinstance(found, tuple) and all(isinstance(run, Run) for run in found)


def _rows(node: fx.Node, shape: Sequence[Any] | None, first: int = 1) -> tuple[int, int, int] | None:
    """Dimension, first and last index of a slice whose numbers are known and that leaves none out; in bounds."""
    given: list[Any] = [*node.args[first : first + 4]]
    dimension, start, end, step = given + [0, None, None, 1][len(given) :]
    start, end = 0 if start is None else start, 2**63 - 1 if end is None else end
    if node.kwargs or not all(isinstance(each, int) for each in (dimension, start, end, step)) or step != 1:
        return None
    if shape is None:
        return dimension, start, end
    dimension %= len(shape)
    size = shape[dimension]
    if not isinstance(size, int):
        return None
    low, high = (min(max(each + size if each < 0 else each, 0), size) for each in (start, end))
    return dimension, low, max(low, high)


def _static(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor whose sizes and strides are numbers. To ask symbols for theirs would pin them."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    known = all(isinstance(each, int) for each in (*value.shape, *value.stride(), value.storage_offset()))
    return tuple(value.shape) if known else None


def _static_sizes(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else None


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node), argument
    return argument


def _sequence(argument: Any) -> Sequence[Any]:
    assert isinstance(argument, (list, tuple)), argument
    return argument


def _ints(argument: Any) -> list[int]:
    return [int(str(each)) for each in _sequence(argument)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


_COPIES: Final = (aten.copy_.default,)
_RULES: Final[Mapping[Any, Callable[[_Walk, fx.Node], Any]]] = {
    REDUCE_GRAD: _Walk.reduction,
    HOOK_STATE: _Walk.state_of_hook,
    HOOK_STEP: _Walk.step_of_hook,
    FLAT_BUCKET: _Walk.bucket,
    collectives.ALL_REDUCE: _Walk.all_reduce,
    collectives.GROUPED_ALL_REDUCE: _Walk.all_reduce,
    collectives.REDUCE_SCATTER: _Walk.reduce_scatter,
    collectives.ALL_TO_ALL: _Walk.all_to_all,
    collectives.PAIRED_ALL_TO_ALL: _Walk.all_to_all_in_pairs,
    aten.sum.dim_IntList: _Walk.sum_of_parts,
    collectives.ALL_GATHER: _Walk.all_gather,
    collectives.PAIRED_ALL_GATHER: _Walk.all_gather,
    collectives.WAIT: _Walk.same,
    operator.getitem: _Walk.item,
    aten.cat.default: lambda walk, node: walk.concatenation(node) if len(node.args) == 1 or node.args[1] == 0 else None,
    aten.slice_scatter.default: _Walk.scatter,
    aten.copy_.default: _Walk.copy,
    aten.copy.default: _Walk.copy,
    **dict.fromkeys(
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
            aten.clone.default,
            aten.contiguous.default,
            aten.alias.default,
            aten.detach.default,
        ),
        _Walk.same,
    ),
    **dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), _Walk.permute),
    aten.slice.Tensor: _Walk.slice,
    aten.as_strided.default: _Walk.strided,
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar), _Walk.product_with_number),
    **dict.fromkeys((aten._to_copy.default, prims.convert_element_type.default), _Walk.cast),
    aten.view_as_real.default: _Walk.real,
    aten.view_as_complex.default: _Walk.complex,
    **dict.fromkeys(
        (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), _Walk.matrix_product
    ),
    **dict.fromkeys(
        (aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default),
        _Walk.scattered,
    ),
}
