"""What the documents show is run: each command and each piece of Python by a test, or there is a reason why not."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from docs_scripts import blocks, python_of
from test_docs import names_in
from torch import nn
from torch.nn import functional as F

import dp_compile
from dp_compile.testing.ranks import Ranks

ROOT = Path(__file__).parents[2]
TEXTS: Final = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}

CI: Final = "docs/test_commands.py::test_ci_runs_what_is_shown"
PYTHON: Final = "docs/test_commands.py::test_the_python_that_is_shown_trains"
SUITE: Final = "testing/test_example_suite.py::test_the_suite_passes"
SAME_FILES: Final = "testing/test_example_suite.py::test_the_guide_shows_the_files"

# Of each document: a command, or the first line of a block of Python; `...` at its end stands for the rest of it. Then
# the tests that run it, below `tests/`, and in words what they do not run, and why.
SHOWN: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "README.md": {
        "pip install -c constraints.txt . && dp-compile train": (
            "train/test_train.py::test_two_ranks_train_and_end_where_torch_does",
            "a smaller GPT for 22 steps; it is installed by the other command",
        ),
        "pip install -c constraints.txt -e '.[test]' && python -m pytest -n 2": (CI,),
        "import torch, torch.distributed as dist, dp_compile": (PYTHON,),
    },
    "accelerate.md": {
        "import torch": ("integrations/test_accelerate.py::test_the_page",),
    },
    "averaging.md": {
        "import torch, torch.distributed as dist, dp_compile": (PYTHON,),
    },
    "bench.md": {
        "dp-compile bench run short": (
            "bench/test_bench.py::test_the_packaged_smoke_suite",
            "at night, the suite `smoke`; this one wants some minutes of a quiet machine",
        ),
        "dp-compile bench report bench-short.json": ("bench/test_bench.py::test_a_real_run_from_the_command_line",),
        "dp-compile bench compare baseline.json bench-short.json": (
            "bench/test_compare.py::test_exit_status_and_text",
        ),
    },
    "clusters.md": {
        "import os": ("docs/test_commands.py::test_the_start_on_a_cluster",),
    },
    "decentralized.md": {
        "import torch, dp_compile": (PYTHON,),
    },
    "development.md": {
        "python tests/mutation_campaign.py --jobs 2": (CI, "test_mutants.py::test_a_campaign_says_what_saw_a_fault"),
        "DP_COMPILE_FUZZ_EXAMPLES=3000 ...": (CI, "engine/test_fuzz.py::test_random_training_runs"),
    },
    "lightning.md": {
        "import lightning": ("integrations/test_lightning.py::test_the_page",),
    },
    "migration.md": {
        "import torch, torch.distributed as dist, dp_compile": (PYTHON,),
    },
    "optimizers.md": {
        "import torch, torch.distributed as dist, dp_compile": (PYTHON,),
        "import torch, dp_compile, torch.distributed as dist": (PYTHON,),
        "# as above, up to the optimizer": ("docs/test_commands.py::test_the_sharded_optimizer_that_is_shown",),
        "# up to the optimizer as above": (PYTHON,),
    },
    "ray.md": {
        "import os": (
            "integrations/test_ray.py::test_the_page",
            "at night: Ray is half a gigabyte, and waits for minutes until it starts dead workers again",
        ),
    },
    "trainer.md": {
        "from transformers import TrainingArguments": ("integrations/test_trainer.py::test_the_page",),
    },
    "torchtitan.md": {
        "import dataclasses": ("integrations/test_torchtitan.py::test_the_page", "with two layers, on CPUs, at night"),
    },
    "tensor_parallel.md": {
        "import torch, torch.distributed as dist, dp_compile": (
            "engine/test_tensor_parallel.py::test_the_page",
            "by day without the compiler",
        ),
        "from dp_compile import state": ("engine/test_tensor_parallel.py::test_the_page",),
    },
    "testing.md": {
        '"""A model as you might have one, and how it is trained."""': (SUITE, SAME_FILES),
        'pytest_plugins = ["dp_compile.testing.plugin"]': (SUITE, SAME_FILES),
        '"""What has to stay true of the training of `my_model`."""': (SUITE, SAME_FILES),
    },
}


def shown_in(text: str) -> Iterator[str]:
    """Commands without their comments, and first lines of Python."""
    for language, block in blocks(text):
        if language == "python":
            yield block.split("\n")[0]
        elif language == "console":
            yield from re.findall(r"^\$ (.*?)(?:  +# .*)?$", block, re.MULTILINE)


def entries_for(shown: str, entries: dict[str, tuple[str, ...]]) -> list[str]:
    return [key for key in entries if shown == key or (key.endswith("...") and shown.startswith(key[:-3]))]


def is_test(said: str) -> bool:
    return "::" in said


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_shown_is_in_the_table_and_the_other_way_round(name: str) -> None:
    entries, met = (
        SHOWN.get(name, {}),
        [(shown, entries_for(shown, SHOWN.get(name, {}))) for shown in shown_in(TEXTS[name])],
    )
    assert [shown for shown, keys in met if len(keys) != 1] == []
    assert sorted(key for _, keys in met for key in keys) == sorted(entries)
    assert {language for language, _ in blocks(TEXTS[name])} <= {"", "console", "python", "text"}


def test_the_table_names_documents_and_tests_that_exist() -> None:
    assert set(SHOWN) <= set(TEXTS)
    for entries in SHOWN.values():
        for key, said in entries.items():
            assert said, key
            for each in said:
                file, _, name = each.partition("::")
                assert name in names_in(ROOT / "tests" / file) if is_test(each) else " " in each, each


@pytest.mark.parametrize(
    ("file", "words", "document"),
    [
        ("setup", "-e '.[test]'", "README.md"),
        ("run", "python -m pytest -n 2", "README.md"),
        ("nightly", "python tests/mutation_campaign.py", "development.md"),
        ("nightly", "python -m pytest tests/engine/test_fuzz.py -rP", "development.md"),
    ],
)
def test_ci_runs_what_is_shown(file: str, words: str, document: str) -> None:
    assert any(words in shown for shown in shown_in(TEXTS[document]))
    assert words in (ROOT / ".ci" / file).read_text()


def test_what_is_not_in_the_table_is_seen() -> None:
    text = "```console\n$ a  # b\nout\n$ c d\n```\n```python\nx = 1\ny\n```\n```\n$ e\n```\n"
    assert list(shown_in(text)) == ["a", "c d", "x = 1"]
    assert entries_for("c d", {"c": ("",), "c ...": ("",), "c d": ("",), "d": ("",)}) == ["c ...", "c d"]


# --- the Python ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_on_a_rank_of_the_tests() -> Iterator[io.StringIO]:
    """It has its group already, and generates no code: that takes a minute. What is printed inside."""
    defaults = dp_compile.ReplicateConfig.__init__.__kwdefaults__
    quick = partial(torch.compile, backend="aot_eager")
    with mock.patch.dict(defaults, backend="aot_eager"), mock.patch.object(torch, "compile", quick):
        with mock.patch.object(dist, "init_process_group"), contextlib.redirect_stdout(io.StringIO()) as printed:
            yield printed


def train_ten_lines(code: str) -> tuple[str, list[float]]:
    """Run the README's lines with a small model on data of this rank's own; what they print, and the parameters."""
    torch.manual_seed(dist.get_rank())
    names: dict[str, Any] = {"Model": lambda: nn.Linear(4, 3), "loss_fn": F.mse_loss}
    names["loader"] = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(3)]

    def optimizer() -> torch.optim.Optimizer:
        return names.setdefault("sgd", torch.optim.SGD(names["model"].parameters(), lr=0.1))

    names["optimizer"] = SimpleNamespace(step=lambda: optimizer().step(), zero_grad=lambda: optimizer().zero_grad())
    with as_on_a_rank_of_the_tests() as printed:
        exec(code, names)
    return printed.getvalue(), nn.utils.parameters_to_vector(names["model"].parameters()).tolist()


def update_in_backward(code: str) -> tuple[str, list[float]]:
    """Run the lines on optimizers; the report, and the parameters."""
    torch.manual_seed(dist.get_rank())
    names: dict[str, Any] = {"Model": lambda: nn.Linear(4, 3), "loss_fn": F.mse_loss}
    names["loader"] = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(3)]
    with as_on_a_rank_of_the_tests():
        exec(code, names)
    values = nn.utils.parameters_to_vector(names["model"].parameters()).tolist()
    return str(dp_compile.report(names["model"])), values


def shard(above: str, code: str, directory: str) -> tuple[list[float], int, int]:
    """Run the lines on a sharded optimizer behind those above; parameters, elements of state here and in all."""
    torch.manual_seed(dist.get_rank())
    names: dict[str, Any] = {"Model": lambda: nn.Linear(4, 3), "loss_fn": F.mse_loss, "directory": directory}
    names["loader"] = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(3)]
    with as_on_a_rank_of_the_tests():
        exec(above.split("dp_compile.optim.in_backward")[0] + "import torch.distributed.checkpoint\n" + code, names)
    values = nn.utils.parameters_to_vector(names["model"].parameters()).tolist()
    states = names["optimizer"].state, names["state"]["state"]
    here, whole = (
        sum(each.numel() for one in state.values() for each in one.values() if each.dim()) for state in states
    )
    return values, here, whole


def train_locally(code: str) -> tuple[int, list[float]]:
    """Run the lines on local SGD, two reduced steps and five of each rank: averages, and the parameters."""
    torch.manual_seed(dist.get_rank())
    names: dict[str, Any] = {"Model": lambda: nn.Linear(4, 3), "WARMUP": 2, "loss_fn": F.mse_loss}
    names["loader"] = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(7)]
    with as_on_a_rank_of_the_tests():
        exec(code, names)
    return names["averager"].step, nn.utils.parameters_to_vector(names["model"].parameters()).tolist()


def mix_parameters(code: str) -> tuple[str, list[float], list[float]]:
    """Run the lines on ranks that mix parameters: the report, a rank's own parameters, and what it saved."""
    torch.manual_seed(dist.get_rank())
    names: dict[str, Any] = {"Model": lambda: nn.Linear(4, 3), "loss_fn": F.mse_loss}
    names["loader"] = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(3)]
    with as_on_a_rank_of_the_tests(), tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        exec(code, names)
        saved = torch.load("model.pt")
    own = nn.utils.parameters_to_vector(names["model"].parameters()).tolist()
    return str(dp_compile.report(names["model"])), own, nn.utils.parameters_to_vector(saved.values()).tolist()


def test_the_start_on_a_cluster() -> None:
    with mock.patch.object(dist, "init_process_group") as start, mock.patch.dict(os.environ, LOCAL_RANK="3"):
        names: dict[str, Any] = {}
        exec(python_of("clusters.md"), names)
    assert names["local_rank"] == 3
    assert start.call_args.kwargs["timeout"].total_seconds() == 1800


def test_the_sharded_optimizer_that_is_shown(ranks2: Ranks, tmp_path: Path) -> None:
    code = python_of("optimizers.md"), python_of("optimizers.md", 1)
    (one, here, whole), (other, there, _) = ranks2.run(shard, *code, str(tmp_path))
    assert one == other
    assert here + there == whole


def test_the_python_that_is_shown_trains(ranks2: Ranks) -> None:
    (report, one), (_, other) = ranks2.run(train_ten_lines, python_of("README.md"))
    assert "backwards: 3 captured" in report
    assert one == other
    optimizer = python_of("optimizers.md").split("dp_compile.optim.in_backward")[0]
    for code, said in (
        (python_of("optimizers.md"), "2 parameters updated in it"),
        (python_of("optimizers.md", 2), "the last backward left 2 updates for the next forward"),
        (optimizer + python_of("optimizers.md", 3), "the last backward left 1 all-gather for the next forward"),
    ):
        (report, one), (_, other) = ranks2.run(update_in_backward, code)
        assert said in report
        assert one == other
    (report, one), (_, other) = ranks2.run(train_ten_lines, python_of("migration.md"))
    assert "backwards: 3 captured" in report
    assert one == other
    (steps, one), (_, other) = ranks2.run(train_locally, python_of("averaging.md"))
    assert steps == 7
    assert one == other
    (report, one, saved), (_, other, saved_by_other) = ranks2.run(mix_parameters, python_of("decentralized.md"))
    assert "2 parameters updated in it" in report
    assert one != other
    assert saved == saved_by_other


def test_functions_that_are_named_are_exported() -> None:
    """In running text and tables, where nothing is run."""
    for text in TEXTS.values():
        named = set(re.findall(r"`[^`\n]*?\bdp_compile\.(\w+)\(", text))
        assert named <= set(dp_compile.__all__)
