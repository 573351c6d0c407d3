"""The Python that the documents show is run on two ranks; their commands are run as they are shown, on small models."""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from docs_scripts import ROOT, blocks, python_of
from torch import nn
from torch.nn import functional as F

import dp_compile


def run_shown(code, batches=3):
    """Run lines with a small model on data of this rank's own, without code generation: what they print and leave."""
    torch.manual_seed(dist.get_rank())
    names = {"Model": lambda: nn.Linear(4, 3), "loss_fn": F.mse_loss, "WARMUP": 2}
    names["loader"] = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(batches)]

    def sgd():
        return names.setdefault("sgd", torch.optim.SGD(names["model"].parameters(), lr=0.1))

    names["optimizer"] = SimpleNamespace(step=lambda: sgd().step(), zero_grad=lambda: sgd().zero_grad())
    defaults = dp_compile.ReplicateConfig.__init__.__kwdefaults__
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.chdir(place),
        mock.patch.dict(defaults, backend="aot_eager"),
        mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        mock.patch.object(dist, "init_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        shared = [place]
        dist.broadcast_object_list(shared)
        names["directory"] = shared[0]
        exec(code, names)
        dist.barrier()  # the directory is the first rank's
        saved = torch.load("model.pt") if Path("model.pt").exists() else {}
    whole = names.get("state", {}).get("state", {})
    here = names["optimizer"].state if whole else {}
    return {
        "printed": printed.getvalue(),
        "report": " ".join(str(dp_compile.report(names["model"])).split()),
        "parameters": nn.utils.parameters_to_vector(names["model"].parameters()).tolist(),
        "saved": [each.tolist() for each in saved.values()],
        "steps": getattr(names.get("averager"), "step", None),
        "elements of state": [
            sum(each.numel() for one in states.values() for each in one.values() if each.dim())
            for states in (here, whole)
        ],
    }


def test_the_start_on_a_cluster():
    with mock.patch.object(dist, "init_process_group") as start, mock.patch.dict(os.environ, LOCAL_RANK="3"):
        names = {}
        exec(python_of("integrations.md", "Clusters"), names)
    assert names["local_rank"] == 3
    assert start.call_args.kwargs["timeout"].total_seconds() == 1800


def test_the_python_that_is_shown_trains(ranks2):
    quickstart = python_of("quickstart.md", "From DistributedDataParallel")
    quickstart += python_of("quickstart.md", "Save and resume") + python_of("quickstart.md", "Log metrics")
    in_backward = [python_of("tuning.md", "Optimizers in the backward", number) for number in range(4)]
    optimizer = in_backward[0].split("dp_compile.optim.in_backward")[0]
    for code, where, text in (
        (python_of("README.md", "Use it"), "printed", "backwards: 3 captured"),
        (f"{quickstart}print(metrics)", "printed", "backwards: 3 captured"),
        (python_of("tuning.md", "Link"), "report", "none yet"),
        (in_backward[0], "report", "2 parameters updated in the graph"),
        (in_backward[2], "report", "the last backward left 2 updates for the next forward"),
        (optimizer + in_backward[3], "report", "the last backward left 1 all-gather for the next"),
    ):
        one, other = ranks2.run(run_shown, code)
        assert text in one[where]
        assert one["parameters"] == other["parameters"]
    one, other = ranks2.run(run_shown, optimizer + in_backward[1])
    (here, whole), (there, _) = one["elements of state"], other["elements of state"]
    assert here + there == whole > 0
    assert one["parameters"] == other["parameters"]
    one, other = ranks2.run(run_shown, python_of("algorithms.md", "Averaging parameters"), 7)
    assert one["steps"] == 7
    assert one["parameters"] == other["parameters"]
    one, other = ranks2.run(run_shown, python_of("algorithms.md", "Decentralized data parallel"))
    assert "topology one-peer-exp" in one["report"]
    assert one["parameters"] != other["parameters"]
    assert one["saved"] == other["saved"] != []


ELSEWHERE = (
    *("pip install", "python -m pytest -n 2", "python tests/mutation_campaign.py --jobs 2", ".ci/nightly fuzzer"),
    *(".ci/gpu --rehearse", "cd docs/example_suite", "python -m dp_compile.elastic", "dp-compile train --check"),
)
"""Commands that CI itself runs, or a test of theirs."""

SMALLER = {
    "dp-compile train": "dp-compile train --layers 1 --width 32 --steps 14",
    "bench run short": "bench run short.toml",
    "dp-compile": f"{sys.executable} -m dp_compile",
    "torchrun": f"{sys.executable} -m torch.distributed.run",
}
SUITE = """
workloads = ["tiny-gpt"]
modes = ["oracle", "ours"]
networks = [{kind = "loopback"}]
warmup_steps = 1
repetitions = 3
"""
TRAIN = """
import torch
from torch import nn
from torch.nn.functional import mse_loss as loss_fn

Model, loader = lambda: nn.Linear(4, 3), [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(3)]
"""


def commands():
    """By document, in their order."""
    texts = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    shown = {path: [block for kind, block in blocks(text) if kind == "console"] for path, text in texts.items()}
    return {path: re.findall(r"^\$ (.*)$", "".join(each), re.MULTILINE) for path, each in shown.items() if each}


def test_commands_of_the_readme_are_run_elsewhere():
    assert all(command.startswith(ELSEWHERE) for command in commands()[ROOT / "README.md"])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_other_commands_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + python_of("quickstart.md", "From DistributedDataParallel"))
    (tmp_path / "short.toml").write_text(SUITE)
    for path, shown in commands().items():
        for command in (each for each in shown if not each.startswith(ELSEWHERE)):
            for name, smaller in SMALLER.items():
                command = command.replace(name, smaller)
            environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
            done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, (path.name, command, done.stdout, done.stderr)
