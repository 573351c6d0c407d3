"""The architecture as a test: who may import whom, where private names of torch live, how large things get."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dp_compile

ROOT = Path(dp_compile.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

# From low to high. A module imports only from rows below its own.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "_torch"),
    ("cost_model",),
    ("config", "backends", "fx", "links", "devices", "timeline", "calibration", "module_names", "comm_hook", "logs"),
    ("plan", "partition"),
    ("certificate", "report", "model_shapes", "ready_times", "progress"),
    ("strategies", "launch_clock", "step", "bucket_events", "dump_files"),
    ("prediction",),
    ("explanation",),
    ("graph_pass", "grad_reduction", "lowering", "agreement", "replica", "plan_file", "dump_index"),
    ("settling", "intact", "replica_step"),
    ("passes", "hooks", "planning", "finite", "forward_hooks", "selection"),
    ("graph_names", "repro"),
    ("binding", "monitor", "replicated_module", "profiling", "dumps"),
    ("reduced_graph",),
    ("compilation",),
    ("capture",),
    ("backward",),
    ("replicate",),
    ("join", "warmup", "observe", "measuring"),
    ("explain", "what_if", "rehearsal", "timelines"),
    ("distributed",),
    ("train", "plan_table"),
    ("pass_table", "bench"),
    ("testing",),
    ("commands",),
    ("__init__", "cli", "__main__", "tables"),
)
# Inside a row: importer -> what it may import, for a reason.
INSIDE_A_ROW = {
    "_torch": {"errors"},  # the one error for a torch that lacks a name
    "replica": {"graph_pass", "grad_reduction"},  # a replica carries passes and tags of reductions
    "repro": {"graph_names"},  # says which collectives come out in the same words as the dump
    "__main__": {"cli"},
}
# Inside the packages, from low to high; files of one step do not know each other.
INSIDE_A_PACKAGE = {
    "fx": (("collectives", "storages"), ("edit", "memory", "printer", "verify"), ("outline",)),
    "passes": (
        ("analysis", "producers", "ready_times"),
        ("pieces",),
        ("bucketing", "overlap", "pipeline"),
        ("__init__",),
    ),
    "explanation": (("exposure", "advice"), ("facts", "text"), ("explained",), ("__init__",)),
    "timelines": (("events", "svg"), ("page", "picture", "trace_events"), ("__init__",)),
    "bench": (
        ("contract", "fabric", "machine", "progress", "models"),
        ("beds", "reference", "workloads", "modes/loop", "modes/packages", "modes/unavailable"),
        ("modes/ours", "modes/torch_ddp", "modes/functional", "modes/bounds", "modes/decent_dp", "modes/thunder"),
        ("modes/python_reducer", "selfcheck"),
        ("modes/__init__",),
        ("catalogue",),
        ("suite", "worker"),
        ("results", "crew"),
        ("ratios", "runner"),
        ("bound",),
        ("compare", "report", "picture"),
        ("__init__",),
    ),
    "testing": (
        ("golden", "ranks", "schedule", "training"),
        ("recording",),
        ("seen", "same_training"),
        ("checks",),
        ("__init__", "plugin"),
    ),
    "commands": (
        ("parsing", "files"),
        ("bench", "dump", "explain", "plan", "timeline", "train", "whatif"),
        ("__init__",),
    ),
}
PRIVATE_TORCH = {
    # Importing it registers the ops that this file gives names to; torch has no public import for that.
    ("fx/collectives.py", "torch.distributed._functional_collectives"),
    # Only to ask whether a node's target is an op; torch.ops itself hands out objects of this class.
    ("fx/printer.py", "torch._ops"),
    ("fx/storages.py", "torch._ops"),
    # A process group without processes: to measure the compiler, to look at a model's backward without its GPUs, to
    # run the passes over a dumped graph. Not worth loading with the package.
    ("pass_table.py", "torch.testing._internal.distributed.fake_pg"),
    ("rehearsal.py", "torch.testing._internal.distributed.fake_pg"),
    ("repro.py", "torch.testing._internal.distributed.fake_pg"),
    # The one kernel of torch that only takes time; `_torch` is full, and nothing else of the package needs it.
    ("bench/fabric.py", "torch.cuda._sleep"),
}
OPTIONS = [
    "ddp_python_hook",
    "strategy",
    "bucket_cap_mb",
    "first_bucket_cap_mb",
    "cost",
    "alignment_bytes",
    "replan_after",
    "unused_parameters",
    "find_unused_parameters",
    "broadcast_buffers",
    "check_reductions",
    "check_nan",
    "backend",
    "timeout_s",
    "monitor_after_s",
    "dump_dir",
]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Imported:
    """One import statement's target: `dp_compile.fx.edit`, or `torch`; and whether it stands inside a function."""

    module: str
    line: int
    local: bool


def tree_of(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text())


def imports_of(tree: ast.Module) -> Iterator[Imported]:
    inside = {
        id(child)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(alias.name, node.lineno, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                yield Imported(f"{node.module}.{alias.name}", node.lineno, id(node) in inside)


def names_of(file: str) -> tuple[str, str]:
    """The unit of the package that a file belongs to, and its name in there: `("fx", "edit")`, `("plan", "")`."""
    first, _, rest = file.removesuffix(".py").partition("/")
    return first, rest


def target_of(module: str) -> tuple[str, str] | None:
    """The same for something imported, `None` if it is not ours."""
    package, *parts = module.split(".")
    if package != "dp_compile":
        return None
    while parts and f"{'/'.join(parts)}.py" not in FILES and f"{'/'.join(parts)}/__init__.py" not in FILES:
        parts.pop()  # a name inside a module
    if not parts:
        return "__init__", ""
    if f"{'/'.join(parts)}/__init__.py" in FILES:
        parts.append("__init__")
    return parts[0], "/".join(parts[1:])


def row_of(unit: str) -> int:
    (row,) = [number for number, units in enumerate(ROWS) if unit in units]
    return row


def step_of(unit: str, name: str) -> int:
    (step,) = [number for number, names in enumerate(INSIDE_A_PACKAGE[unit]) if name in names]
    return step


def may_import(importer: tuple[str, str], target: tuple[str, str]) -> bool:
    unit, name = importer
    if unit != target[0]:
        return row_of(target[0]) < row_of(unit) or target[0] in INSIDE_A_ROW.get(unit, ())
    if unit not in INSIDE_A_PACKAGE:
        return unit == "train"
    return step_of(unit, target[1]) < step_of(unit, name)


# --- imports ----------------------------------------------------------------------------------------------------


def test_every_file_has_a_place() -> None:
    placed = {unit for units in ROWS for unit in units}
    assert {names_of(file)[0] for file in FILES} <= placed
    for package, steps in INSIDE_A_PACKAGE.items():
        files = {names_of(file)[1] for file in FILES if file.startswith(f"{package}/")}
        assert files - {"__init__"} == {name for names in steps for name in names} - {"__init__"}


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down(file: str) -> None:
    upwards = [
        f"line {imported.line}: {imported.module}"
        for imported in imports_of(tree_of(file))
        if (target := target_of(imported.module)) is not None and not may_import(names_of(file), target)
    ]
    assert not upwards


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        (("plan", ""), ("config", ""), True),
        (("config", ""), ("plan", ""), False),
        (("hooks", ""), ("passes", "__init__"), False),
        (("passes", "overlap"), ("hooks", ""), False),
        (("passes", "overlap"), ("passes", "bucketing"), False),
        (("passes", "__init__"), ("passes", "pipeline"), True),
        (("fx", "edit"), ("plan", ""), False),
        (("replica", ""), ("agreement", ""), False),
        (("grad_reduction", ""), ("replica", ""), False),
        (("replicate", ""), ("__init__", ""), False),
    ],
)
def test_the_rule_itself(importer: tuple[str, str], target: tuple[str, str], allowed: bool) -> None:
    assert may_import(importer, target) is allowed


@pytest.mark.parametrize("file", FILES)
def test_no_import_inside_a_function(file: str) -> None:
    assert not [f"line {imported.line}: {imported.module}" for imported in imports_of(tree_of(file)) if imported.local]


PURE = [
    *("plan.py", "config.py", "report.py", "errors.py", "cost_model.py", "prediction.py", "plan_file.py", "step.py"),
    *(file for file in FILES if file.startswith(("explanation/", "timelines/"))),
]


@pytest.mark.parametrize("file", PURE)
def test_pure_modules_do_not_know_torch(file: str) -> None:
    if file in FILES:
        assert not [imported for imported in imports_of(tree_of(file)) if imported.module.split(".")[0] == "torch"]


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("passes/")])
def test_passes_do_not_communicate(file: str) -> None:
    modules = {imported.module for imported in imports_of(tree_of(file))}
    assert not [module for module in modules if module.startswith("torch.distributed")]


def test_tools_for_tests_are_imported_by_name_only() -> None:
    others = [file for file in FILES if not file.startswith("testing/")]
    modules = {file: [imported.module for imported in imports_of(tree_of(file))] for file in others}
    assert not [file for file in others if any(name.startswith("dp_compile.testing") for name in modules[file])]


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("testing/")])
def test_tools_for_tests_need_no_pytest_and_no_bench(file: str) -> None:
    modules = {imported.module for imported in imports_of(tree_of(file))}
    assert not [module for module in modules if module.startswith("dp_compile.bench")]
    assert file == "testing/plugin.py" or not [module for module in modules if module.split(".")[0] == "pytest"]


# --- private names of torch -----------------------------------------------------------------------------------------


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split(".")[1:])


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_torch_names(tree: ast.Module) -> set[str]:
    """Imports of, and dotted names below, something private in torch. `torch.ops` names ops, not Python names."""
    found = {imported.module for imported in imports_of(tree) if imported.module.split(".")[0] == "torch"}
    aliases = {
        (alias.asname or alias.name.split(".")[0]): (alias.name if alias.asname else alias.name.split(".")[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (alias.asname or alias.name): f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = _dotted(node).partition(".")
            if aliases.get(first, "").split(".")[0] == "torch" and rest:
                found.add(f"{aliases[first]}.{rest}")
    return {name for name in found if _is_private(name) and not name.startswith("torch.ops.")}


@pytest.mark.parametrize("file", [file for file in FILES if file != "_torch.py"])
def test_private_names_of_torch_have_one_door(file: str) -> None:
    allowed = {name for allowed_file, name in PRIVATE_TORCH if allowed_file == file}
    found = {
        name
        for name in private_torch_names(tree_of(file))
        if not any(name == each or name.startswith(f"{each}.") for each in allowed)
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", {"torch._dynamo"}),
        ("from torch._inductor import config", {"torch._inductor.config"}),
        ("import torch\ntorch._C.f()", {"torch._C.f", "torch._C"}),
        ("import torch.distributed as dist\ndist._broadcast(1)", {"torch.distributed._broadcast"}),
        ("from torch import nn\nnn.Module._call_impl", {"torch.nn.Module._call_impl"}),
        ("import torch\ntorch.ops._c10d_functional.all_reduce", set()),
        ("import torch\ntorch.nn.Module.__init__", set()),
        ("import other\nother._torch.private", set()),
    ],
)
def test_private_names_are_found(source: str, expected: set[str]) -> None:
    assert private_torch_names(ast.parse(source)) == expected


def test_exceptions_are_still_needed() -> None:
    for file, name in PRIVATE_TORCH:
        assert any(found.startswith(name) for found in private_torch_names(tree_of(file))), (file, name)


def test_functional_collectives_are_named_in_one_file() -> None:
    spelled = {file for file, path in FILES.items() if "ops._c10d_functional" in path.read_text()}
    assert spelled == {"fx/collectives.py"}


# --- words, names, sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("fx/")])
def test_graph_tools_have_no_policy(file: str) -> None:
    assert not re.findall("gradient|bucket", FILES[file].read_text(), re.IGNORECASE)


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [file for file in FILES if set(file.removesuffix(".py").split("/")) & drawers]


def test_what_the_package_exports() -> None:
    exported = {
        alias.asname
        for node in ast.walk(tree_of("__init__.py"))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(dp_compile.__all__) == sorted(exported - {None, "__version__"})
    assert list(dp_compile.__all__) == sorted(dp_compile.__all__)
    assert all(hasattr(dp_compile, name) for name in dp_compile.__all__)


def test_option_names_are_fixed() -> None:
    assert [field.name for field in dataclasses.fields(dp_compile.ReplicateConfig)] == OPTIONS


@pytest.mark.parametrize("file", FILES)
def test_files_are_short(file: str) -> None:
    assert len(FILES[file].read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("file", FILES)
def test_functions_are_short(file: str) -> None:
    """Counted without the docstring: a long explanation is no fault."""
    long = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{node.name}: {lines} lines")
    assert not long


@pytest.mark.parametrize("file", FILES)
def test_every_file_says_what_it_is(file: str) -> None:
    assert ast.get_docstring(tree_of(file))
