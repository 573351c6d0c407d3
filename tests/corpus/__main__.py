"""`python -m corpus` from `tests/`, or `python tests/corpus`: run the cases and write `docs/corpus.md`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "tests"), str(ROOT)]
sys.path[:0] = PATHS

from corpus import table  # noqa: E402
from corpus.judge import CASES, SUBJECTS, Outcome, run  # noqa: E402
from dp_compile.testing.ranks import Ranks  # noqa: E402

PAGE = ROOT / "docs" / "corpus.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m corpus", description=__doc__)
    parser.add_argument("--subject", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--row", nargs="+", metavar="ROW", default=list(CASES), help="3a, or 3 for 3a and 3b")
    parser.add_argument("--output", type=Path, help="where to write the page; docs/corpus.md if there is all of it")
    parser.add_argument(
        "--outcomes", type=Path, help="file of the outcomes of earlier runs: they stay, these are added"
    )
    given = parser.parse_args(arguments)
    cases = [each for each in CASES.values() if {each.name, str(each.row)} & set(given.row)]
    if not cases:
        parser.error(f"no such row: {' '.join(given.row)}. Rows: {' '.join(CASES)}")
    _preload()
    start, outcomes = time.monotonic(), _read(given.outcomes)
    for subject in map(SUBJECTS.__getitem__, given.subject):
        ranks = Ranks(2, "forkserver")
        try:
            for case in cases:
                outcome = outcomes[case.name, subject.name] = run(ranks, case, subject)
                _say(case.name, subject.name, outcome)
        finally:
            ranks.stop()
            _write(given.outcomes, outcomes)
    print(f"{len(cases) * len(given.subject)} cases in {time.monotonic() - start:.0f} s", flush=True)
    is_all = outcomes.keys() >= {(case, subject) for case in CASES for subject in SUBJECTS}
    output = given.output or (PAGE if is_all else None)
    if output is not None:
        output.write_text(table.page(outcomes))
    return 0


def _preload() -> None:
    """Ranks are copies of a process with all of this loaded: new ones after a crash cost little."""
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(["corpus.judge", "torch._dynamo", "torch._inductor.compile_fx"])


def _read(path: Path | None) -> dict[tuple[str, str], Outcome]:
    if path is None or not path.exists():
        return {}
    return {(case, subject): Outcome(**outcome) for case, subject, outcome in json.loads(path.read_text())}


def _write(path: Path | None, outcomes: dict[tuple[str, str], Outcome]) -> None:
    if path is not None:
        path.write_text(json.dumps([(*key, asdict(outcome)) for key, outcome in outcomes.items()], indent=1))


def _say(case: str, subject: str, outcome: Outcome) -> None:
    times = f"{outcome.seconds:5.1f} s {outcome.processor_s:5.1f} s of processor"
    print(f"{case:4} {subject:15} {outcome.kind:12} {times}  {outcome.text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
