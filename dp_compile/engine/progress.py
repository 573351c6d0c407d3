"""How far each rank is with a replicated module, and who is waited for. Pure data: nothing here communicates.

Synchronised backwards are counted from 1, buckets from 0 as in the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.words import count

COMPILING: Final = "compiling"
AGREEING: Final = "waiting for another rank in the store"
MOST_RANKS_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one rank is with one module."""

    done: int
    """Synchronised backwards that are done."""
    local: int
    """Backwards without synchronisation."""
    launched: int | None
    """Collectives that the backward in progress has launched; `None` outside of a synchronised backward."""
    failed: str = ""
    """The error that ended backward `done` + 1."""
    gave_up: bool = False
    """Whether that error only says that other ranks could not be reached."""


@dataclass(frozen=True, slots=True)
class Word:
    """What one process says of itself: the number of the question that it answers, and its standings by topic."""

    question: int
    standings: Mapping[str, Standing]
    place: str = ""
    """The line of the user's code that is running."""
    doing: str = ""
    left: bool = False
    """The program has ended, or has dropped its replicated modules."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Word:
        plain: dict[str, Any] = json.loads(text)
        standings = {topic: Standing(**standing) for topic, standing in plain.pop("standings").items()}
        return cls(standings=standings, **plain)


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back when the other ranks of a group were asked: the latest word of each that ever said one."""

    question: int = 0
    words: Mapping[int, Word] = field(default_factory=dict)
    trouble: str = ""
    """Why nobody could be asked."""


@dataclass(frozen=True, slots=True)
class View:
    """What one rank knows of a backward that it cannot finish. `ranks` are the others in the group.

    `labels` describe the buckets in launch order; empty if the number of a collective does not tell the bucket.
    """

    topic: str
    own: Standing
    labels: tuple[str, ...]
    ranks: tuple[int, ...]
    answers: Answers


class _Verdict(NamedTuple):
    """A rank as this rank sees it. `blame`: 2 if it is waited for, 1 if it failed because of others, 0 if it waits."""

    blame: int
    text: str


def bucket_labels(plan: BucketPlan) -> tuple[str, ...]:
    """A bucket's first and last gradient in words, for each bucket of a plan."""
    labels = []
    for bucket in plan.buckets:
        names = [member.gradient.name for member in bucket.members if member.gradient.name != UNUSED_FLAGS]
        labels.append(" .. ".join(dict.fromkeys((names[0], names[-1]))) if names else "flags only")
    return tuple(labels)


def explain(view: View) -> str:
    """Who is waited for in which bucket, as far as the answers tell."""
    own = view.own
    launched = own.launched or 0
    of_all = f" of {len(view.labels)}" if view.labels else ""
    head = f"synchronised backward {own.done + 1}, {launched}{of_all} collectives launched"
    if view.answers.trouble:
        return f"{head}; who is missing is not known: {view.answers.trouble}"
    verdicts: dict[_Verdict, list[int]] = {}
    for rank in view.ranks:
        verdicts.setdefault(_judge(view, rank), []).append(rank)
    most = max((verdict.blame for verdict in verdicts), default=0)
    told = sorted(verdicts, key=lambda verdict: -verdict.blame)
    texts = [f"{_name(verdicts[verdict])} {verdict.text}" for verdict in told]
    if most == 0:
        cause = (
            "the connection between ranks is cut or slow" if launched else "all are slow before the first collective"
        )
        texts.append(f"nobody is behind: {cause}")
    return "; ".join([head, *texts])


def _judge(view: View, rank: int) -> _Verdict:
    own, word = view.own, view.answers.words.get(rank)
    standing = word.standings.get(view.topic) if word is not None else None
    if word is not None and word.left:
        return _Verdict(2, _left(own, standing))
    if word is None or word.question < view.answers.question:
        return _Verdict(
            2, "gives no sign of life: killed, stopped, cut off or held up in native code. Look at its log first"
        )
    if standing is None:
        return _Verdict(2, "does not have this module any more")
    if standing.failed and standing.gave_up:
        return _Verdict(1, f"gave up in backward {standing.done + 1}: {standing.failed}")
    if standing.failed:
        return _Verdict(2, f"left backward {standing.done + 1} with an error: {standing.failed}")
    if _position(standing) < _position(own):
        return _Verdict(2, _behind(view, standing, word))
    if _position(standing) > _position(own):
        return _Verdict(0, f"is ahead, {_activity(standing, word)}")
    return _Verdict(0, "waits in the same place")


def _left(own: Standing, standing: Standing | None) -> str:
    if standing is None:
        return "has left: its program ended, or it dropped the module"
    if standing.failed:
        how = "after giving up" if standing.gave_up else "with an error"
        return f"has left in backward {standing.done + 1} {how}: {standing.failed}"
    hint = _accumulated(own, standing) or ": did it skip a step, or have less data?"
    return f"has left after {_backwards(standing.done)}{hint if standing.done <= own.done else ''}"


def _behind(view: View, standing: Standing, word: Word) -> str:
    own = view.own
    same = standing.done == own.done
    if own.launched is None:
        return f"is behind, {_activity(standing, word)}"
    bucket = _bucket(view.labels, (standing.launched or 0) if same else 0)
    return f"is waited for in {bucket}: it is {_activity(standing, word)}{_accumulated(own, standing)}"


def _activity(standing: Standing, word: Word) -> str:
    if standing.launched is None:
        what = f"in no backward after {_backwards(standing.done)}"
    else:
        what = f"in backward {standing.done + 1} with {count(standing.launched, 'collective')} launched"
    return ", ".join(filter(None, (what, word.doing, f"at {word.place}" if word.place else "")))


def _accumulated(own: Standing, standing: Standing) -> str:
    if standing.local == own.local:
        return ""
    return (
        f". It ran {count(standing.local, 'backward')} without synchronisation, this rank {own.local}: is no_sync used "
        "on some ranks only?"
    )


def _bucket(labels: Sequence[str], number: int) -> str:
    if not labels:
        return f"collective {number}"
    if number >= len(labels):
        return "what follows the last bucket, a copy of buffers or a comparison of parameters"
    return f"bucket {number} of {len(labels)} ({labels[number]})"


def _backwards(number: int) -> str:
    return count(number, "synchronised backward")


def _position(standing: Standing) -> tuple[int, int]:
    return standing.done, -1 if standing.launched is None else standing.launched


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = len(ranks) - MOST_RANKS_NAMED
    named = ", ".join(map(str, ranks[:MOST_RANKS_NAMED])) + (f" and {rest} more" if rest > 0 else "")
    return f"each of ranks {named}"
