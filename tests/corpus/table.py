"""The page: what came of each case under each subject."""

import datetime
import os
import platform
import re
from pathlib import Path

import torch

from corpus.cases import CASES, REPORTS
from corpus.judge import CRASH, HANG, NOT_OFFERED, REFUSED, RIGHT, WRONG
from corpus.sides import SUBJECTS

REPOSITORIES = {
    "pytorch": "pytorch/pytorch",
    "torchtitan": "pytorch/torchtitan",
    "ao": "pytorch/ao",
    "accelerate": "huggingface/accelerate",
    "peft": "huggingface/peft",
    "trl": "huggingface/trl",
    "pytorch-image-models": "huggingface/pytorch-image-models",
    "lightning": "Lightning-AI/pytorch-lightning",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "ColossalAI": "hpcaitech/ColossalAI",
    "nanochat": "karpathy/nanochat",
}
"""Where a report can be read. Others are named without a link."""

HEAD = """\
# Where data parallelism goes wrong: public reports, run

Each row is a public bug report about data-parallel training, rewritten as a small program. Each program ran on two
gloo ranks with six implementations: torch's `DistributedDataParallel` (DDP), eager and under `torch.compile`; torch's
experimental `python_reducer` (`torch._dynamo.config.optimize_ddp = "python_reducer"`, the backward under compiled
autograd); torch's newest `replicate`, built on FSDP2 (`torch/distributed/_composable/replicate_with_fsdp.py`), eager;
and dp_compile, under `torch.compile` and eager. The right result is that of one process that trains the plain module
on the joint batch, or a count. A row shows what the code does in one case, not how often that happens.

| cell | result |
|---|---|
| right | parameters, gradients and buffers are those of one process, within rounding, or the count is right |
| refused | an error or warning on every rank that names parameter, option, rank or cause; with dp_compile within 10 s |
| wrong | no error, and wrong numbers; the footnote says which value, and by how much |
| crash | an error that names none of these, or the process is aborted |
| hang | a rank waits until the time-out of its group, {timeout} here (30 minutes by default for gloo), or longer |
| - | the implementation has no such option, or the report is not about it |
"""

HOW = """\
## How to run it

`python tests/corpus` runs everything and writes this page. `python tests/corpus --subject ours ddp --row 3a 10` runs
a part and prints the result. A case is a function of `tests/corpus/cases.py` that trains a `Side`: an implementation,
or the one process that has the right result. Everything is compiled with `backend="aot_eager"`, except row 9, which
is about Inductor. CI runs both columns of dp_compile for each change, and everything in nightly runs
(`tests/corpus/test_corpus.py`).
"""


def page(outcomes):
    """The page, in Markdown. A case that was not run under a subject has an empty cell."""
    notes = {}
    titles = " | ".join(each.title for each in SUBJECTS.values())
    lines = [
        HEAD.format(timeout=_timeouts()),
        _count(outcomes),
        "## The table",
        "",
        f"| row | reports | what goes wrong | {titles} |",
        "|---" * (3 + len(SUBJECTS)) + "|",
        *(_row(name, outcomes, notes) for name in sorted(REPORTS, key=lambda each: (int(each.rstrip("abc")), each))),
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, {_machine()}; "
        f"{len(outcomes)} cells in {sum(each.seconds for each in outcomes.values()) / 60:.0f} minutes, "
        f"{sum(each.processor_s for each in outcomes.values()) / 60:.0f} of a processor.",
        "",
        HOW,
        "## Details of cells",
        "",
        *(f"[^{number}]: {text}" for text, number in notes.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(name, outcomes, notes):
    cells = [_cell(outcomes.get((name, subject)), notes) for subject in SUBJECTS]
    report = REPORTS[name]
    what = f". Right: {report['right']}" if name in CASES else f": {report['needs']}"
    return f"| {name} | {_links(report['threads'].split())} | {report['symptom']}{what} | {' | '.join(cells)} |"


def _cell(outcome, notes):
    if outcome is None:
        return ""
    shown = {RIGHT: "right", REFUSED: "refused", NOT_OFFERED: "-"}.get(outcome.kind, f"**{outcome.kind}**")
    if outcome.kind == RIGHT or not outcome.text:
        return shown
    number = notes.setdefault(_plain(outcome.text), len(notes) + 1)
    return f"{shown} [^{number}]"


def _plain(text):
    """Errors are quoted as they are: no sign of theirs may become Markdown."""
    text = re.sub(r"\[gloo/gloo/transport/tcp/\w+\.cc:\d+\] ", "", text)
    return re.sub(r"([\[\]*_<>|`])", r"\\\1", text)


def _links(threads):
    found = []
    for each in threads:
        name, number = each.split("#")
        address = f"https://github.com/{REPOSITORIES[name]}/issues/{number}" if name in REPOSITORIES else ""
        found.append(f"[{each}]({address})" if address else each)
    return ", ".join(found)


def _count(outcomes):
    kinds = (RIGHT, REFUSED, WRONG, CRASH, HANG, NOT_OFFERED)
    shown = [*kinds[:-1], "-"]
    lines = [f"| | {' | '.join(shown)} |", "|---" * (1 + len(kinds)) + "|"]
    for subject in SUBJECTS.values():
        of_subject = [outcome.kind for (_, name), outcome in outcomes.items() if name == subject.name]
        lines.append(f"| {subject.title} | {' | '.join(str(of_subject.count(kind)) for kind in kinds)} |")
    return "\n".join([*lines, ""])


def summary(rows):
    """The row of the README, from the cells of a page by row: how many were wrong, crashed or hung, by subject."""
    counts = (sum(cells[place].startswith("**") for cells in rows.values()) for place in range(len(SUBJECTS)))
    return f"| {' | '.join(map(str, counts))} |"


def _timeouts():
    usual = max(set(times := [case.group_timeout_s for case in CASES.values()]), key=times.count)
    short = {}
    for case in CASES.values():
        if case.group_timeout_s != usual:
            short.setdefault(case.group_timeout_s, []).append(case.name)
    others = [f"{seconds:.0f} s in {', '.join(names)}" for seconds, names in sorted(short.items())]
    return f"{usual:.0f} s ({'; '.join(others)})"


def _machine():
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"
