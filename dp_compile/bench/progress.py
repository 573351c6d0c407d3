"""How far a run is, and how long it will still take: preparations and turns take very different times."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Final

from tqdm import tqdm

_FORMAT: Final = "{percentage:3.0f}% |{bar:20}| {elapsed}{postfix} {desc}"


class Progress:
    """Counts work by kind; what is left of a kind is expected to take the mean of what is done of it."""

    def __init__(self, *, show: bool) -> None:
        # tqdm's own lock is a system-wide semaphore, which a killed process would leave behind.
        tqdm.set_lock(threading.RLock())
        self._bar: tqdm[Any] = tqdm(total=0, bar_format=_FORMAT, disable=not show, file=sys.stderr)
        self._left: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def expect(self, kind: str, count: int) -> None:
        """`count` more of a kind, fewer if negative."""
        self._left[kind] = max(0, self._left.get(kind, 0) + count)

    def say(self, text: str) -> None:
        self._bar.set_description_str(text)

    def did(self, kind: str, since: float, count: int = 1) -> None:
        """`since`: `time.monotonic()` when it began."""
        self.expect(kind, -count)
        self._done[kind] = self._done.get(kind, 0) + count
        self._seconds[kind] = self._seconds.get(kind, 0.0) + time.monotonic() - since
        left_s = self.left_s()
        if left_s is not None:
            spent_s = sum(self._seconds.values())
            self._bar.total, self._bar.n = spent_s + left_s, spent_s
            minutes, seconds = divmod(round(left_s), 60)
            self._bar.set_postfix_str(f"left {minutes}:{seconds:02}", refresh=False)
        self._bar.refresh()

    def left_s(self) -> float | None:
        """`None` while nothing of some kind is done yet."""
        open_kinds = [kind for kind, count in self._left.items() if count]
        if any(not self._done.get(kind) for kind in open_kinds):
            return None
        return sum(self._left[kind] * self._seconds[kind] / self._done[kind] for kind in open_kinds)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
