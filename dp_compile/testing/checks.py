"""Assertions on a backward that was seen: what was expected, what was found, what it comes from, what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from dp_compile.errors import ConfigError
from dp_compile.insight.step import format_ms
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket
from dp_compile.plan.cost import check_number
from dp_compile.plan.words import count, format_bytes
from dp_compile.testing.golden import assert_text
from dp_compile.testing.schedule import ScheduledCollective
from dp_compile.testing.seen import SeenBackward

SHOWN: Final = 8
NBYTES: Final = ("reduced_nbytes", "copied_nbytes")


# --- texts ----------------------------------------------------------------------------------------------------------


def assert_plan(seen: SeenBackward, expected: str | os.PathLike[str]) -> None:
    """Whether the plan is the expected one: a triple-quoted string, or the `Path` of a golden file.

    Raises:
        AssertionError: it is not, with the difference; or the file is missing.
        ConfigError: `expected` is neither text nor path.
    """
    assert_text(seen.plan_text, expected, "plan")


def assert_graph(seen: SeenBackward, expected: str | os.PathLike[str]) -> None:
    """Whether the graph that the passes leave is the expected one; otherwise as `assert_plan`."""
    assert_text(seen.graph_text, expected, "graph")


# --- counts ---------------------------------------------------------------------------------------------------------


def assert_counts(seen: SeenBackward, **expected: int) -> None:
    """Whether these counts, by their names in `Counts`, are the expected ones.

    Raises:
        AssertionError: some are not; with what they come from.
        ConfigError: none is named, one has another name, or code would have to be generated to know it.
    """
    found = asdict(seen.counts)
    _check_names(found, expected)
    wrong = [name for name, value in expected.items() if found[name] != value]
    if wrong:
        lines = [f"{len(wrong)} of {len(expected)} counts differ:"]
        for name in wrong:
            lines.append(f"  {name}: expected {_amount(name, expected[name])}, found {_amount(name, found[name])}")
            if (found[name] or 0) > expected[name] or name in _MADE_OF_LAUNCHES:
                lines += [f"    {line}" for line in _shortened(list(_COME_FROM[name](seen)))]
        raise AssertionError("\n".join(lines))


def _check_names(found: Mapping[str, int | None], expected: Mapping[str, int]) -> None:
    unknown = [name for name in expected if name not in found]
    if unknown or not expected:
        given = f"got {unknown[0]!r}" if unknown else "none was given"
        raise ConfigError(f"a count must be one of {', '.join(found)}; {given}.")
    unseen = [name for name in expected if found[name] is None]
    if unseen:
        raise ConfigError(f"{unseen[0]} can only be counted in generated code: backward_of(..., backend='inductor').")


def _amount(name: str, value: int) -> str:
    return f"{value:,} bytes ({format_bytes(value)})" if name in NBYTES and value >= 1024 else f"{value:,}"


def _copies(seen: SeenBackward) -> Iterator[str]:
    for each in seen.copied:
        yield f"{each.gradient}, {format_bytes(each.nbytes)}: {each.copied}"
    known = sum(each.nbytes for each in seen.copied)
    if known < (seen.counts.copied_nbytes or 0):
        yield (
            f"{format_bytes((seen.counts.copied_nbytes or 0) - known)}: not filled by dp_compile's bucket op, which a "
            "pass has replaced"
        )


def _launches(seen: SeenBackward) -> Iterator[str]:
    for number, each in enumerate(seen.schedule.collectives):
        yield f"{each.name}: {_content(seen, number, each)}"


_MADE_OF_LAUNCHES: Final = ("collectives", "reduced_nbytes")
_COME_FROM: Final[Mapping[str, Callable[[SeenBackward], Sequence[str] | Iterator[str]]]] = {
    **dict.fromkeys(_MADE_OF_LAUNCHES, _launches),
    "captures": lambda _: ["compiled autograd traced the backward so often in all steps; TORCH_LOGS=+dp_compile: why"],
    "recompiles": lambda _: ["identical later steps were compiled anew; TORCH_LOGS=recompiles says why"],
    "graph_breaks": lambda _: ["all reductions stand at the end of a broken backward; TORCH_LOGS=graph_breaks: where"],
    "copied_nbytes": _copies,
    "kernels": lambda seen: [
        "generated kernels that the backward calls. One more may be a copy: look for clone, cat, copy_ in graph_text"
    ],
}
"""What a count is made of, or where to look if it is too large."""


# --- times and memory -----------------------------------------------------------------------------------------------


def assert_exposed_below(seen: SeenBackward, *, ms: float) -> None:
    """Whether compute is predicted to stand still for communication for less than so many milliseconds.

    Raises:
        AssertionError: it is not; with the waits at which it does.
        ConfigError: not a number, or negative.
    """
    check_number("ms", ms, zero_allowed=True)
    if seen.schedule.exposed_s * 1e3 >= ms:
        raise AssertionError(_too_long(seen, "exposed communication", seen.schedule.exposed_s, ms))


def assert_end_below(seen: SeenBackward, *, ms: float) -> None:
    """Whether backward and communication are predicted to be over in less than so many milliseconds.

    Raises:
        AssertionError, ConfigError: as in `assert_exposed_below`.
    """
    check_number("ms", ms, zero_allowed=False)
    if seen.schedule.end_s * 1e3 >= ms:
        raise AssertionError(_too_long(seen, "end of backward and communication", seen.schedule.end_s, ms))


def _too_long(seen: SeenBackward, what: str, found_s: float, ms: float) -> str:
    times = seen.schedule
    lines = [
        f"{what}: {format_ms(found_s)} predicted, expected less than {format_ms(ms * 1e-3)}",
        f"  {times.basis}; compute alone takes {format_ms(times.backward_s)}",
    ]
    stalled = [(number, each) for number, each in enumerate(times.collectives) if each.stalled_s > 0]
    stalled.sort(key=lambda item: -item[1].stalled_s)
    lines += _shortened([f"  {_stall(seen, number, each)}" for number, each in stalled])
    return "\n".join([*lines, *_advice(seen, ends_s=found_s, allowed_s=ms * 1e-3)])


def _stall(seen: SeenBackward, number: int, each: ScheduledCollective) -> str:
    return (
        f"wait for {each.name}: {format_ms(each.stalled_s)}; launched at {format_ms(each.launch_s)}, waited for at "
        f"{format_ms(each.wait_s)}, there at {format_ms(each.finish_s)}; {_content(seen, number, each)}"
    )


def _content(seen: SeenBackward, number: int, each: ScheduledCollective) -> str:
    size = format_bytes(each.nbytes)
    if len(seen.schedule.collectives) != len(seen.plan.buckets):
        return size
    return f"{size}, {_span(seen.plan.buckets[number])}"


def _span(bucket: Bucket) -> str:
    labels = [member.label for member in bucket.members if member.gradient.name != UNUSED_FLAGS] or ["flags only"]
    return f"{count(len(labels), 'gradient')}, {' .. '.join(dict.fromkeys((labels[0], labels[-1])))}"


def _advice(seen: SeenBackward, *, ends_s: float, allowed_s: float) -> Iterator[str]:
    times = seen.schedule
    if ends_s == times.end_s and allowed_s <= times.backward_s:
        yield "  compute alone takes longer than that: no other buckets or order would help."
        return
    gain_s = times.end_s - times.end_if_waited_last_s
    if gain_s > 0.01 * times.exposed_s:
        yield f"  waits come too early: at the end of the backward they would save {format_ms(gain_s)}. See graph_text."
        return
    busy_s = sum(each.finish_s - each.start_s for each in times.collectives)
    if busy_s > times.backward_s:
        yield f"  the network is busy for {format_ms(busy_s)}, longer than compute: it has too many bytes."
    else:
        yield f"  the network is busy for {format_ms(busy_s)} only: buckets are launched too late."


def assert_untouched_in_flight(seen: SeenBackward) -> None:
    """Whether generated code leaves alone what the network has: from launch to wait nobody writes or frees it.

    Read off the code's text, in the order of its calls.

    Raises:
        AssertionError: somebody does, with the lines.
        ConfigError: no code was generated.
    """
    if seen.touched is None:
        raise ConfigError("who touches a bucket is read off generated code: backward_of(..., backend='inductor').")
    if seen.touched:
        lines = [f"  {line}" for line in _shortened(seen.touched)]
        raise AssertionError("\n".join(["generated code touches memory that the network has:", *lines]))


def assert_peak_below(seen: SeenBackward, *, nbytes: int | None = None) -> None:
    """Whether the simulated peak memory of the backward is less than so many bytes, parameters included.

    Args:
        seen: the backward.
        nbytes: how many; without it, not more than the simulated peak of torch's DDP.

    Raises:
        AssertionError: it is not.
        ConfigError: not a number, or no pass of the training simulates the peak.
    """
    if seen.memory is None:
        raise ConfigError("no pass of this training simulates the peak memory. ScheduleCollectives does.")
    if nbytes is not None:
        check_number("nbytes", nbytes, zero_allowed=False)
    peak, limit = seen.memory.nbytes, seen.memory.ddp_nbytes if nbytes is None else nbytes
    if peak > limit or (nbytes is not None and peak == limit):
        word = "not more than torch's DDP," if nbytes is None else "less than"
        raise AssertionError(
            f"simulated peak memory: {format_bytes(peak)} ({peak:,} bytes), expected {word} {format_bytes(limit)}\n"
            f"  reached at {seen.memory.node}; torch's DDP would need {format_bytes(seen.memory.ddp_nbytes)}\n"
            "  ScheduleCollectives(memory_bound_nbytes=...) keeps launches from moving compute past a bound"
        )


def _shortened(lines: Sequence[str]) -> list[str]:
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]
