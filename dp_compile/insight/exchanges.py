"""Measure steps of a decentralized module: when each bucket of parameters is sent, arrives, and is waited for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import torch.distributed as dist

from dp_compile.decentralized.mixing import ExchangeListener
from dp_compile.engine.launch_clock import BLOCKED_S, Stamp
from dp_compile.engine.observers import COMPILED_IN_IT
from dp_compile.engine.replica import Replica
from dp_compile.insight.step import MeasuredBucket, MeasuredStep
from dp_compile.plan.topologies import Edge

FIRST: Final = "nothing was seen of the step before it, in which buckets are sent"


@dataclass(eq=False, slots=True)
class _Sent:
    """A bucket on its way. `arrived`: on the CPU its own clock says when."""

    at: Stamp
    edge: Edge
    alone: bool
    arrived: Stamp | None = None


class _Wait(NamedTuple):
    begin: Stamp
    end: Stamp


@dataclass(eq=False, slots=True)
class _Backward:
    """One step. `before`: what the step before has sent for it."""

    start: Stamp
    before: dict[int, _Sent]
    captures: tuple[int, ...]
    waits: dict[int, _Wait] = field(default_factory=dict)
    sent: dict[int, _Sent] = field(default_factory=dict)
    end: Stamp | None = None


@dataclass(eq=False, slots=True)
class ExchangeClock(ExchangeListener):
    """Times the steps of one module; a GPU's clocks are read when all is over."""

    replica: Replica
    backwards: list[_Backward] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    _now: _Backward | None = None
    _before: dict[int, _Sent] = field(default_factory=dict)

    def begun(self) -> None:
        self._now = _Backward(Stamp(self.replica.device), self._before, self._captures())

    @contextlib.contextmanager
    def arriving(self, bucket: int, edge: Edge) -> Iterator[None]:
        begin = Stamp(self.replica.device)
        yield
        if self._now is not None:
            self._now.waits[bucket] = _Wait(begin, Stamp(self.replica.device))

    def sent(self, bucket: int, edge: Edge, work: dist.Work | None) -> None:
        if self._now is None:
            return
        sent = self._now.sent[bucket] = _Sent(Stamp(self.replica.device), edge, work is None)
        if work is not None and self.replica.device.type == "cpu":
            work.get_future().add_done_callback(partial(_note_arrival, sent))

    def ended(self) -> None:
        now, self._now = self._now, None
        if now is None:
            return
        now.end, self._before = Stamp(self.replica.device), now.sent
        if now.captures != self._captures():
            self.skipped[COMPILED_IN_IT] += 1
        elif set(now.before) != set(now.sent):
            self.skipped[FIRST] += 1
        else:
            self.backwards.append(now)

    def steps(self, source: str) -> list[MeasuredStep]:
        """What was seen, in order. `step_s` is known where the next step was seen too."""
        starts = [each.start.seconds_after(self.backwards[0].start) for each in self.backwards]
        lasted = [after - before for before, after in pairwise(starts)]
        return [_step(each, source, step_s) for each, step_s in zip(self.backwards, [*lasted, None], strict=False)]

    def _captures(self) -> tuple[int, ...]:
        """Changes when code is compiled."""
        return tuple(map(id, self.replica.history.captures.values()))


def _note_arrival(sent: _Sent, _: object) -> None:
    sent.arrived = Stamp(sent.at.device)


def _step(seen: _Backward, source: str, step_s: float | None) -> MeasuredStep:
    assert seen.end is not None
    buckets = tuple(_bucket(number, seen) for number in sorted(seen.before))
    return MeasuredStep(seen.end.seconds_after(seen.start), buckets, source, dist.get_rank(), step_s=step_s)


def _bucket(number: int, seen: _Backward) -> MeasuredBucket:
    before, sent, wait = seen.before[number], seen.sent[number], seen.waits.get(number)
    launch_s = before.at.seconds_after(seen.start)
    finish_s, waited_s, wait_s = (launch_s, 0.0, None) if before.alone or wait is None else _waited(before, wait, seen)
    return MeasuredBucket(
        launch_s,
        finish_s,
        waited_s,
        wait_s=wait_s,
        edge=before.edge.ranks,
        sent_s=sent.at.seconds_after(seen.start),
        next_edge=sent.edge.ranks,
    )


def _waited(before: _Sent, wait: _Wait, seen: _Backward) -> tuple[float | None, float, float]:
    begin_s, end_s = (each.seconds_after(seen.start) for each in wait)
    finish_s = end_s if end_s - begin_s > BLOCKED_S else None
    if before.arrived is not None:
        finish_s = min(before.arrived.seconds_after(seen.start), end_s)
    return finish_s, end_s - begin_s, begin_s
