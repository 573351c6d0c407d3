"""What this package computes, kept as text: a change of its inside shows with it that it computes the same.

    python tests/harness compare          print what differs from what is kept; exit with 1 if anything does
    python tests/harness compare graphs   one part
    python tests/harness keep fuzz        accept what is there now

| part     | what is kept                                                                                          |
|----------|-------------------------------------------------------------------------------------------------------|
| `parity` | a model in 148 cells with torch's DDP and FSDP2: equal bits or how far, and the way of its backwards   |
| `graphs` | plan, graph after all passes and counters of six models                                                |
| `fuzz`   | 300 random training runs as values, and a digest of the gradients and parameters of each               |

`tests/mutants/*.toml` has which test sees which planted fault; `mutation_campaign.py` proves it. Speed is compared
within one run, with a worktree of the earlier commit.

Digests depend on the processor's kernels. On another machine than the first line of a file names, `keep` them first on
the commit to compare with.
"""

import argparse
import dataclasses
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

import fuzzing  # noqa: E402
import hypothesis  # noqa: E402
import torch  # noqa: E402
from engine.test_fuzz import cases  # noqa: E402
from harness import graphs, parity  # noqa: E402
from tqdm import tqdm  # noqa: E402

from dp_compile.testing.ranks import RankError, Ranks  # noqa: E402

RANKS = 2
CASES = 300


def draw():
    """The same cases each time, for one version of the strategy and of hypothesis."""
    drawn = {}

    @hypothesis.settings(
        max_examples=2 * CASES,  # some come twice
        phases=[hypothesis.Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
    )
    @hypothesis.given(cases())
    def collect(case):
        drawn.setdefault(short(case), case)

    collect()
    return list(drawn.values())[:CASES]


def short(value):
    """`repr` of a case without what is as by default."""
    if isinstance(value, tuple):
        return f"({', '.join(map(short, value))}{',' * (len(value) == 1)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = ((each.name, getattr(value, each.name), each.default) for each in dataclasses.fields(value))
    texts = [f"{name}={short(value)}" for name, value, default in given if value != default]
    return f"{type(value).__name__}({', '.join(texts)})"


def parse(text):
    """The case of a text of `short`; `TypeError` if it names an option that the fuzzer does not have."""
    names = {name: getattr(fuzzing, name) for name in ("BlockSpec", "Failure", "FuzzCase", "Micro", "Step")}
    return eval(text, {"__builtins__": {}}, names)


def _parity(ranks):
    rows = {}
    for cell in tqdm(list(parity.cells()), "parity", leave=False):
        found = ranks.run(parity.compare, cell)
        rows[str(cell)] = found[0] if len(set(found)) == 1 else " / ".join(found)
    return {"parity.txt": "".join(f"{name:46} {text}\n" for name, text in rows.items())}


def _fuzz(ranks):
    kept = KEPT / "fuzz.txt"
    texts = [line.split(" ", 1)[1] for line in kept.read_text().splitlines()[1:]] if kept.exists() else []
    texts = texts or [short(case) for case in draw()]
    lines = []
    for text in tqdm(texts, "fuzz", leave=False):
        try:
            outcomes = ranks.run(fuzzing.run_case, parse(text))
        except TypeError as error:
            lines.append(f"{str(error).partition('()')[2].strip()}: {text}")
            continue
        except RankError as error:
            lines.append(f"RAISES {text}")
            print(f"{text}\n{error}", file=sys.stderr)
            continue
        different = next((each.difference for each in outcomes if each.difference), "")
        lines.append(f"{'DIFFERS' if different else outcomes[0].digest} {text}")
    return {"fuzz.txt": "\n".join(lines) + "\n"}


def _graphs(ranks):
    return {f"{name}.txt": ranks.run(graphs.describe, name)[0] for name in graphs.MODELS}


PARTS = {"parity": _parity, "fuzz": _fuzz, "graphs": _graphs}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        "python tests/harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=["compare", "keep"])
    parser.add_argument("parts", nargs="*", metavar="part", default=list(PARTS))
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    head = f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}\n"
    ranks, differ = Ranks(RANKS), False
    try:
        for part in given.parts:
            for file, text in PARTS[part](ranks).items():
                differ |= _keep(KEPT / file, head + text) if given.do == "keep" else _differs(KEPT / file, head + text)
    finally:
        ranks.stop()
    return int(differ)


def _keep(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return False


def _differs(path, text):
    """Print what a file has otherwise."""
    kept = path.read_text() if path.exists() else ""
    lines = list(difflib.unified_diff(kept.splitlines(), text.splitlines(), path.name, "now", n=0, lineterm=""))
    print("\n".join(lines) if lines else f"{path.name}: as kept", flush=True)
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
