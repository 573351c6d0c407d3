"""Plan files, as `strategies.plan_to_json` writes them: read, checked, compared. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dp_compile.errors import ConfigError
from dp_compile.insight.explanation.exposure import with_measured_backward
from dp_compile.insight.explanation.text import format_ms
from dp_compile.insight.prediction import Scenario, predict
from dp_compile.insight.step import Step
from dp_compile.plan.buckets import PACKED, PLAN_VERSION, BucketPlan, Member, covers
from dp_compile.plan.strategies import plan_explicit, plan_to_json
from dp_compile.plan.words import count, format_bytes

SHOWN_NAMES: Final = 4


def read_plan(text: str) -> BucketPlan:
    """What a plan file says, as it stands there, whether it makes sense or not.

    Raises:
        ConfigError: not a plan file, or one of another version.
    """
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not a plan file of dp_compile: {error}. Save one with plan_to_json.") from error
    if not isinstance(data, dict) or not {"version", "buckets"} <= data.keys():
        raise ConfigError(f"not a plan file of dp_compile: {_what_it_is(data)}. Save one with plan_to_json.")
    if data["version"] != PLAN_VERSION:
        raise ConfigError(f"the plan file is of version {data['version']!r}, readable is {PLAN_VERSION}. Save it anew.")
    try:
        plan = BucketPlan.from_dict(data)
        str(replace(plan, buckets=tuple(bucket for bucket in plan.buckets if bucket.members)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"not a plan file of dp_compile: {error!r}. Save one with plan_to_json.") from error
    empty = [number for number, bucket in enumerate(plan.buckets) if not bucket.members]
    if empty:
        raise ConfigError(f"bucket {empty[0]} of the plan file is empty. Take it out.")
    return plan


def _what_it_is(data: object) -> str:
    if isinstance(data, dict) and "plan" in data and "ready" in data:
        return "it is a step file: dp-compile explain"
    if isinstance(data, dict):
        return f"it has no {' and no '.join(repr(name) for name in ('version', 'buckets') if name not in data)}"
    return f"it is a {type(data).__name__}, not an object"


# --- whether a plan makes sense ---------------------------------------------------------------------------------------


def problems(plan: BucketPlan) -> Iterator[str]:
    """What is wrong with a plan in itself, a sentence each; nothing if every gradient is in it once."""
    if not plan.buckets:
        yield "the plan has no buckets"
    yield from _indices(plan)
    places: dict[str, list[Member]] = {}
    for bucket in plan.buckets:
        for member in bucket.members:
            places.setdefault(member.gradient.name, []).append(member)
    for name, members in places.items():
        yield from _problems_of(name, members)


def _problems_of(name: str, members: Sequence[Member]) -> Iterator[str]:
    """Of one gradient, from all the places where it stands."""
    gradient = members[0].gradient
    if any(member.gradient != gradient for member in members):
        yield f"{name} is described in different ways: shape, strides, dtype, index and scale have to be the same"
        return
    if min((gradient.itemsize, *gradient.shape), default=0) < 0 or len(gradient.shape) != len(gradient.stride):
        yield f"{name} has shape {list(gradient.shape)} and strides {list(gradient.stride)}, which is no tensor"
        return
    sent_in = gradient.key.reduction.wire or gradient.key.dtype
    if (itemsize := _itemsize(sent_in)) not in (None, gradient.itemsize):
        yield f"{name} is sent in {sent_in}, {itemsize} bytes an element, but the file says {gradient.itemsize}"
    pieces = [member.rows for member in members if member.rows is not None]
    if pieces and (why := gradient.why_in_one_piece()) is not None:
        yield f"{name} is cut into rows, but {why}"
    elif len(pieces) == len(members) and not covers(pieces, gradient.shape[0]):
        yield f"the pieces of {name} overlap or miss rows of its {gradient.shape[0]}: {sorted(pieces)}"
    elif len(pieces) < len(members) > 1:
        yield f"{name} is in the plan {len(members)} times"


def _itemsize(dtype: str) -> int | None:
    """Bytes of an element, from the bits in a dtype's name; `None` if there are none in it."""
    bits = re.search(r"[0-9]+", dtype)
    return None if bits is None else int(bits[0]) // 8


def _indices(plan: BucketPlan) -> Iterator[str]:
    named: dict[int, set[str]] = {}
    for bucket in plan.buckets:
        for member in bucket.members:
            named.setdefault(member.gradient.index, set()).add(member.gradient.name)
    for index, names in named.items():
        if len(names) > 1:
            yield f"{', '.join(sorted(names))} have the same index, {index}"


# --- what a plan reaches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reach:
    """What a plan is predicted to reach for a step, in seconds after the start of the backward.

    `own_s` is the end under the step's own plan. `assumed`: nobody has timed the step's backward.
    """

    end_s: float
    exposed_s: float
    bound_s: float
    own_s: float
    assumed: bool

    def __str__(self) -> str:
        word = "assuming that the backward takes as long as the bytes do" if self.assumed else "predicted"
        ratio = self.end_s / (self.bound_s or 1.0)
        return (
            f"it fits the step; {word}: end {format_ms(self.end_s)}, {format_ms(self.exposed_s)} exposed\n"
            f"bound {format_ms(self.bound_s)}, ratio {ratio:.3f}; the step's own plan ends at {format_ms(self.own_s)}"
        )


def reach(plan: BucketPlan, step: Step) -> Reach:
    """What a plan file's plan is predicted to reach for a step.

    Raises:
        ConfigError: it does not fit the step's gradients: names, shapes, dtypes, rows.
    """
    gradients = step.plan.gradients
    listed = {gradient.name: gradient for gradient in plan.gradients}
    for gradient in gradients:
        named = listed.get(gradient.name)
        if named is not None and (named.shape, named.key.dtype) != (gradient.shape, gradient.key.dtype):
            raise ConfigError(
                f"{gradient.name} is {named.key.dtype}{list(named.shape)} in the plan file, {gradient.key.dtype}"
                f"{list(gradient.shape)} in the step: the file is of another model."
            )
    step = with_measured_backward(step)
    fitted = plan_explicit(gradients, plan_to_json(plan), PACKED).plan
    here, own = predict(replace(step, plan=fitted), Scenario()), predict(step, Scenario())
    return Reach(here.makespan_s, here.exposed_s, here.bound_s, own.makespan_s, step.ready.backward_s is None)


# --- two plans --------------------------------------------------------------------------------------------------------

_Places = Mapping[str, tuple[int, Member]]
"""By a member's label, the number of its bucket and what it is there."""


def differences(before: BucketPlan, after: BucketPlan) -> Iterator[str]:
    """What is different in the second plan, a line each; nothing if both are the same under one alignment.

    Buckets of the two are taken for the same one if they share most bytes, so that one bucket more in the front does
    not count as a move of all gradients behind it. Reasons and offsets are not compared: `strategy="explicit"` does
    not read them, but for an offset `null`, which means apart.
    """
    old, new = _places(before), _places(after)
    same = _same_buckets(before, old, new)
    if before.folds_scale != after.folds_scale:
        yield f"folds_scale: {before.folds_scale} -> {after.folds_scale}"
    yield from _named("only in the first", [label for label in old if label not in new])
    yield from _named("only in the second", [label for label in new if label not in old])
    if len(before.buckets) != len(after.buckets):
        yield f"{count(len(before.buckets), 'bucket')} -> {len(after.buckets)}"
    yield from _moves(old, new, same)
    yield from _ends(before, after, same)
    yield from _orders(before, after, same, new)
    yield from _descriptions(old, new)
    yield from _apart(old, new)


def _places(plan: BucketPlan) -> _Places:
    return {member.label: (number, member) for number, bucket in enumerate(plan.buckets) for member in bucket.members}


def _same_buckets(before: BucketPlan, old: _Places, new: _Places) -> dict[int, int]:
    """By a bucket of the first plan, that of the second with most of its bytes, each at most once."""
    shared: Counter[tuple[int, int]] = Counter()
    for label, (number, member) in old.items():
        if label in new:
            shared[number, new[label][0]] += member.nbytes + 1
    same: dict[int, int] = {}
    for (number, other), _ in shared.most_common():
        if number not in same and other not in same.values():
            same[number] = other
    return dict(sorted(same.items()))


def _named(what: str, labels: Sequence[str]) -> Iterator[str]:
    if labels:
        more = f" and {len(labels) - SHOWN_NAMES} more" if len(labels) > SHOWN_NAMES else ""
        yield f"{what}: {', '.join(labels[:SHOWN_NAMES])}{more}"


def _moves(old: _Places, new: _Places, same: Mapping[int, int]) -> Iterator[str]:
    moved: dict[tuple[int, int], list[Member]] = {}
    for label, (number, member) in old.items():
        if label in new and same.get(number) != new[label][0]:
            moved.setdefault((number, new[label][0]), []).append(member)
    first = {other: number for number, other in same.items()}
    for (number, other), members in moved.items():
        where = _pair(first[other], other) if other in first else f"a new one, {other} in the second"
        size = f"{count(len(members), 'gradient')}, {format_bytes(sum(member.nbytes for member in members))}"
        yield from _named(f"from bucket {number} to {where}: {size}", [member.label for member in members])


def _ends(before: BucketPlan, after: BucketPlan, same: Mapping[int, int]) -> Iterator[str]:
    for number, other in same.items():
        last, now = (bucket.members[-1].label for bucket in (before.buckets[number], after.buckets[other]))
        if last != now:
            yield f"{_pair(number, other)} ends with {now}, not with {last}"


def _orders(before: BucketPlan, after: BucketPlan, same: Mapping[int, int], new: _Places) -> Iterator[str]:
    if list(same.values()) != sorted(same.values()):
        pairs = ", ".join(f"{number} -> {other}" for number, other in same.items())
        yield f"launch order: {pairs}"
    for number, other in same.items():
        members = {member.label for member in before.buckets[number].members}
        was = [
            each.label for each in before.buckets[number].members if each.label in new and new[each.label][0] == other
        ]
        now = [each.label for each in after.buckets[other].members if each.label in members]
        moved = next(((first, second) for first, second in zip(was, now, strict=True) if first != second), None)
        if moved is not None:
            yield f"{_pair(number, other)}: {moved[1]} comes before {moved[0]}"


def _descriptions(old: _Places, new: _Places) -> Iterator[str]:
    for label, (_, member) in old.items():
        if label in new:
            was, now = _described(member), _described(new[label][1])
            if was != now:
                yield f"{label}: {was} -> {now}"


def _described(member: Member) -> str:
    gradient, key = member.gradient, member.gradient.key
    return (
        f"{key.dtype}{list(gradient.shape)} strides {list(gradient.stride)} {key.device} {key.reduction.reduce_op} "
        f"times {key.reduction.scale:g}, index {gradient.index}"
    )


def _apart(old: _Places, new: _Places) -> Iterator[str]:
    both = [label for label in old if label in new]
    apart = [label for label in both if old[label][1].offset is not None and new[label][1].offset is None]
    yield from _named("now apart, in memory of their own", apart)
    flat = [label for label in both if old[label][1].offset is None and new[label][1].offset is not None]
    yield from _named("no longer apart", flat)


def _pair(number: int, other: int) -> str:
    return f"bucket {number}" if number == other else f"bucket {number} ({other} in the second)"
