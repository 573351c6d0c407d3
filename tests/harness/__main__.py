"""What this package computes, kept as text: a change of its inside shows with it that it computes the same.

    python tests/harness compare          print what differs from what is kept; exit with 1 if anything does
    python tests/harness compare graphs   one part
    python tests/harness keep graphs      accept what is there now

| part     | what is kept                                                                                          |
|----------|-------------------------------------------------------------------------------------------------------|
| `parity` | a model in 148 cells with torch's DDP and FSDP2: equal bits or how far, and the way of its backwards   |
| `graphs` | plan, graph after all passes and counters of six models                                                |

`tests/mutants/*.toml` has which test sees which planted fault; `mutation_campaign.py` proves it. Speed is compared
within one run, with a worktree of the earlier commit.

Numbers depend on the processor's kernels. On another machine than the first line of a file names, `keep` them first on
the commit to compare with.
"""

import argparse
import difflib
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "tests"), str(ROOT)]
sys.path[:0] = PATHS
os.environ.setdefault("DP_COMPILE_LINK", "nominal")  # plans are those of nominal links on every machine
KEPT = Path(__file__).parent / "kept"

import torch  # noqa: E402
from harness import graphs, parity  # noqa: E402
from tqdm import tqdm  # noqa: E402

from dp_compile.testing.ranks import RankError, Ranks  # noqa: E402


def _parity(ranks):
    rows = {}
    for cell in tqdm(list(parity.cells()), "parity", leave=False):
        try:
            rows[str(cell)] = " / ".join(dict.fromkeys(ranks.run(parity.compare, cell)))
        except RankError as error:
            print(f"{cell}\n{error}", file=sys.stderr)
            rows[str(cell)] = "RAISES"
    return {"parity.txt": "".join(f"{name:46} {text}\n" for name, text in rows.items())}


def _graphs(ranks):
    return {f"{name}.txt": ranks.run(graphs.describe, name)[0] for name in graphs.MODELS}


PARTS = {"parity": _parity, "graphs": _graphs}


def main():
    parser = argparse.ArgumentParser(
        "python tests/harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=["compare", "keep"])
    parser.add_argument("parts", nargs="*", metavar="part", default=list(PARTS))
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    head = f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}\n"
    ranks, differ = Ranks(2), False
    try:
        for part in given.parts:
            for file, text in PARTS[part](ranks).items():
                if given.do == "keep":
                    (KEPT / file).write_text(head + text)
                else:
                    differ |= _differs(KEPT / file, head + text)
    finally:
        ranks.stop()
    return int(differ)


def _differs(path, text):
    """Print what a file has otherwise."""
    kept = path.read_text() if path.exists() else ""
    lines = list(difflib.unified_diff(kept.splitlines(), text.splitlines(), path.name, "now", n=0, lineterm=""))
    print("\n".join(lines) if lines else f"{path.name}: as kept", flush=True)
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
