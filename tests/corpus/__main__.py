"""`python -m corpus` from `tests/`, or `python tests/corpus`: run the cases and write `docs/corpus.md`."""

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "tests"), str(ROOT)]
sys.path[:0] = PATHS

from corpus import table  # noqa: E402
from corpus.judge import CASES, SUBJECTS, run  # noqa: E402
from dp_compile.testing.ranks import Ranks  # noqa: E402

PAGE = ROOT / "docs" / "corpus.md"


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m corpus", description=__doc__)
    parser.add_argument("--subject", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--row", nargs="+", metavar="ROW", default=list(CASES), help="3a, or 3 for 3a and 3b")
    parser.add_argument("--output", type=Path, help="where to write the page; docs/corpus.md if there is all of it")
    given = parser.parse_args(arguments)
    cases = [each for each in CASES.values() if {each.name, str(each.row)} & set(given.row)]
    if not cases:
        parser.error(f"no such row: {' '.join(given.row)}. Rows: {' '.join(CASES)}")
    # Ranks are copies of a process with all of this loaded: new ones after a crash cost little.
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(["corpus.judge", "torch._dynamo", "torch._inductor.compile_fx"])
    start, outcomes = time.monotonic(), {}
    for subject in map(SUBJECTS.__getitem__, given.subject):
        with Ranks(2, "forkserver") as ranks:
            for case in cases:
                outcome = outcomes[case.name, subject.name] = run(ranks, case, subject)
                times = f"{outcome.seconds:5.1f} s {outcome.processor_s:5.1f} s of processor"
                print(f"{case.name:4} {subject.name:15} {outcome.kind:12} {times}  {outcome.text}", flush=True)
    print(f"{len(outcomes)} cases in {time.monotonic() - start:.0f} s", flush=True)
    is_all = len(outcomes) == len(CASES) * len(SUBJECTS)
    if output := given.output or (PAGE if is_all else None):
        output.write_text(table.page(outcomes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
