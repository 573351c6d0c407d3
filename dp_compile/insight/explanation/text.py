"""How an explanation is put on a screen: times, tables, paragraphs. 110 characters wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dp_compile.insight.explanation.advice import Advice
from dp_compile.insight.explanation.exposure import SHORTEST_S, ExplainedBucket
from dp_compile.plan.words import count, format_bytes

WIDTH: Final = 110
NAME_WIDTH: Final = 40
SHORT_NAME_WIDTH: Final = 24
UNKNOWN: Final = "-"


@dataclass(frozen=True, slots=True)
class Times:
    """How times are said: in milliseconds, or in percent of `whole_s`, where that is assumed."""

    whole_s: float | None

    @property
    def unit(self) -> str:
        return "times in ms" if self.whole_s is None else "in % of the backward"

    def cell(self, seconds: float | None) -> str:
        """Without the unit, `-` if not known."""
        if seconds is None or self.whole_s is None:
            return digits_ms(seconds)
        return f"{100 * seconds / self.whole_s:.1f}" if self.whole_s else "0"

    def said(self, seconds: float) -> str:
        return format_ms(seconds) if self.whole_s is None else f"{self.cell(seconds)}%"


def format_ms(seconds: float) -> str:
    """Seconds for people, in milliseconds with three significant digits: `12.3 ms`."""
    return f"{digits_ms(seconds)} ms"


def digits_ms(seconds: float | None) -> str:
    """The same without the unit, `-` if not known, for the cells of a table."""
    if seconds is None:
        return UNKNOWN
    ms = seconds * 1e3
    if abs(ms) < 0.5e-6:
        return "0"
    return f"{ms:.0f}" if abs(ms) >= 99.95 else f"{ms:#.3g}" if abs(ms) >= 1e-4 else "<0.0001"


def percent(share: float) -> str:
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def wrapped(text: str, indent: int = 0) -> list[str]:
    """A paragraph; all lines but the first are indented by two more. Names are never cut."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def short_name(name: str, width: int) -> str:
    """The end of a name that is too long, which tells more than its start."""
    return name if len(name) <= width else f"..{name[2 - width :]}"


def columns(rows: Sequence[Sequence[str]], left: Iterable[int] = ()) -> list[str]:
    """Rows in aligned columns, two blanks apart: to the right, those numbered in `left` to the left."""
    to_left = set(left)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in to_left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def figures_table(
    rows: Sequence[tuple[str, str, str]], predicted: str, measured: str | None, times: Times
) -> list[str]:
    """Predicted beside measured figures, the second column only if something was measured."""
    head = (times.unit, predicted, measured or "")
    kept = [row if measured else row[:2] for row in (head, *rows)]
    return [f"  {line}" for line in columns(kept, left=(0,))]


def lines_of_advice(advice: Sequence[Advice], word: str, end_s: float, times: Times, what: str) -> Iterator[str]:
    """What would help, with the gains.

    `end_s`: what they are shares of, and `what` that is; `word`: what times are, as `predicted`.
    """
    if not advice:
        yield "What would help: of what was tried, nothing gains more than the model can tell (0.5%)."
        return
    of = "the time" if times.whole_s is not None else format_ms(end_s)
    yield f"What would help, each alone ({word}, of {of} {what})"
    gains = [("up to" if each.at_most else "", format_ms(each.gain_s), percent(each.share)) for each in advice]
    if times.whole_s is not None:
        gains = [(most, share) for most, _, share in gains]  # type: ignore[misc]
    for gain, each in zip(columns(gains), advice, strict=True):
        first, *more = textwrap.wrap(each.change, WIDTH - len(gain) - 4)
        yield f"  {gain}  {first}"
        yield from (" " * (len(gain) + 4) + line for line in more)


def bucket_table(buckets: Sequence[ExplainedBucket], *, at_most: int | None, word: str, times: Times) -> Iterator[str]:
    """One line for each bucket, times in ms; of very many those that say most, the exposed and the outermost ones.

    Args:
        buckets: in the plan's order.
        at_most: how many to show; `None`: all.
        word: what planned times are: `predicted`, `assumed`.
        times: how planned ones are said.
    """
    shown = _telling(buckets, at_most)
    keys = list(dict.fromkeys(bucket.key for bucket in buckets))
    timed, measured = any(bucket.planned for bucket in buckets), any(bucket.measured for bucket in buckets)
    head = ["#", "bytes", "gradients", *(["key"] if len(keys) > 1 else [])]
    crossing = any(bucket.planned and bucket.planned.needed_s is not None for bucket in buckets)
    head += ["ready", "launch", "finish", *(["needed"] if crossing else []), "exposed"] if timed else []
    head += ["launch", "finish", "waited"] if measured else []
    width = SHORT_NAME_WIDTH if measured else NAME_WIDTH
    rows = [[*head, "ready last" if timed else "largest"]]
    rows += [_row(buckets[number], len(keys) > 1, timed, measured, width, times, crossing) for number in shown]
    yield _bucket_title(buckets, keys, [word] * timed + ["measured"] * measured, times)
    lines = columns(rows, left={len(rows[0]) - 1} | ({3} if len(keys) > 1 else set()))
    yield f"  {lines[0]}"
    for before, number, line in zip([-1, *shown], shown, lines[1:], strict=False):
        if number > before + 1:
            yield f"  ... {count(number - before - 1, 'bucket')} more, all of them: --buckets, text(verbose=True)"
        yield f"  {line}"


def _telling(buckets: Sequence[ExplainedBucket], at_most: int | None) -> list[int]:
    if at_most is None or len(buckets) <= at_most:
        return list(range(len(buckets)))
    outermost = [0, 1, 2, len(buckets) - 3, len(buckets) - 2, len(buckets) - 1]
    by_exposure = sorted(range(len(buckets)), key=lambda number: -exposed_s(buckets[number]))
    return sorted([*outermost, *(number for number in by_exposure if number not in outermost)][:at_most])


def exposed_s(bucket: ExplainedBucket) -> float:
    """Predicted, 0 if not known."""
    return bucket.planned.exposed_s if bucket.planned is not None else 0.0


def _bucket_title(buckets: Sequence[ExplainedBucket], keys: Sequence[str], words: Sequence[str], times: Times) -> str:
    facts = [f"all {keys[0]}"] if len(keys) == 1 else []
    if words:
        facts.append(f"{times.unit}, {', then '.join(words)}")
    return "Buckets in launch order" + (f" ({'; '.join(facts)})" if facts else "")


def _row(
    bucket: ExplainedBucket, with_key: bool, timed: bool, measured: bool, width: int, times: Times, crossing: bool
) -> list[str]:
    row = [str(bucket.number), format_bytes(bucket.nbytes), str(bucket.gradients), *([bucket.key] if with_key else [])]
    if timed:
        planned = bucket.planned
        row += [
            times.cell(time_s) for time_s in ((planned.ready_s, planned.start_s, planned.finish_s) if planned else ())
        ]
        row += [times.cell(planned.needed_s if planned else None)] if crossing else []
        row += ["hidden" if exposed_s(bucket) < SHORTEST_S else times.cell(exposed_s(bucket))]
    if measured:
        seen = bucket.measured
        row += [digits_ms(time_s) for time_s in ((seen.launch_s, seen.finish_s, seen.waited_s) if seen else ())]
    return [*row, short_name((bucket.released_by or "the end of the backward") if timed else bucket.largest, width)]


def members_of_buckets(buckets: Sequence[ExplainedBucket]) -> Iterator[str]:
    """Each bucket's members by name, and why it ends where it ends."""
    yield "Members, and why a bucket ends where it ends (times as believed when it was planned)"
    for bucket in buckets:
        yield from wrapped(f"bucket {bucket.number}: {bucket.reason}", 2)
        yield from wrapped(", ".join(bucket.members), 4)
