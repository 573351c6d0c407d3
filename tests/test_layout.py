"""The house as a test: rooms import downwards, private names of torch have one door."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import dp_compile

ROOT = Path(dp_compile.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

# From the top to the ground. A room imports only from rooms below its own; those in one line do not know each other.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("bench",),
    ("train",),
    ("integrations", "testing"),
    ("__init__",),
    ("insight",),
    ("decentralized",),
    ("averaging", "elastic"),
    ("optim",),
    ("state",),
    ("replication",),
    ("engine",),
    ("replica",),
    ("passes",),
    ("comm_hooks",),
    ("config",),
    ("fx",),
    ("_torch",),
    ("plan",),
    ("errors",),
)
PRIVATE_TORCH = {
    # Importing it registers the ops that this file gives names to; torch has no public import for that.
    ("fx/collectives.py", "torch.distributed._functional_collectives"),
    # Only to ask whether a node's target is an op; torch.ops itself hands out objects of this class.
    ("fx/text.py", "torch._ops"),
    ("fx/memory.py", "torch._ops"),
    # A process group without processes. Not worth loading with the package.
    ("testing/backward.py", "torch.testing._internal.distributed.fake_pg"),
    # The one kernel of torch that only takes time; nothing else of the package needs it.
    ("bench/simulated_group.py", "torch.cuda._sleep"),
}


def imports_of(file):
    """What a file imports, modules and names in them, by full dotted name."""
    for node in ast.walk(ast.parse(FILES[file].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(dotted):
    """`dp_compile.fx.edit` is in `fx`; a name of the package itself in `__init__`."""
    parts = dotted.split(".")[1:]
    return parts[0] if parts and any(parts[0] in rooms for rooms in ROOMS) else "__init__"


def floor_of(room):
    (floor,) = [number for number, rooms in enumerate(ROOMS) if room in rooms]
    return -floor


def test_rooms_import_downwards():
    for file in FILES:
        room = file.removesuffix(".py").split("/")[0]
        ours = [name for name in imports_of(file) if name.split(".")[0] == "dp_compile" and room_of(name) != room]
        assert not [name for name in ours if floor_of(room_of(name)) >= floor_of(room)], file
    assert len([file for file in FILES if "/" not in file]) <= 8


def test_files_import_in_no_circle_and_can_be_read_in_one_go():
    """Imports for types only count: data knows no behaviour."""
    modules = {f"dp_compile.{file.removesuffix('.py').replace('/', '.')}": file for file in FILES}
    imported = {
        file: {
            modules[name] for each in imports_of(file) for name in (each, each.rpartition(".")[0]) if name in modules
        }
        for file in FILES
    }
    graphlib.TopologicalSorter(imported).prepare()
    assert not [file for file, path in FILES.items() if len(path.read_text().splitlines()) > 700]


def test_what_a_room_does_not_know():
    """Plans are pure numbers, passes do not communicate, graph tools have no policy; each file says what it is."""
    for file, path in FILES.items():
        room, names = file.split("/")[0], list(imports_of(file))
        assert room != "plan" or not [name for name in names if name.split(".")[0] == "torch"], file
        if room == "passes" and "reduction" not in file:
            assert not [name for name in names if name.startswith("torch.distributed")], file
        assert room != "fx" or not re.findall("gradient|bucket", path.read_text(), re.IGNORECASE), file
        assert ast.get_docstring(ast.parse(path.read_text())), file


def private_torch_names(source):
    """Imports of, and dotted names below, something private in torch. `torch.ops` names ops, not Python names."""
    aliases = {}
    found = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {(alias.asname or "torch"): (alias.name if alias.asname else "torch") for alias in node.names}
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"[\w.]+", dotted):
            first, _, rest = dotted.partition(".")
            found |= {f"{aliases[first]}.{rest}"} if first in aliases else set()
    return {name for name in found if re.match(r"torch\.(?!ops\.)(.*\.)?_(?!_)", name)}


def test_private_names_of_torch_have_one_door():
    for file, path in FILES.items():
        allowed = tuple(name for allowed_file, name in PRIVATE_TORCH if allowed_file == file)
        found = private_torch_names(path.read_text())
        if not file.startswith("_torch"):
            assert not [name for name in found if not name.startswith(allowed or ("nothing",))], file
        assert all(any(name.startswith(each) for name in found) for each in allowed), f"{file} needs less than allowed"


def test_what_the_package_exports():
    """Twice by need: for type checkers, and for who asks for a name when it is needed."""
    for_checkers = {name.rpartition(".") for name in imports_of("__init__.py") if room_of(name) not in ("__init__",)}
    homes = {(f"dp_compile.{home}", ".", name) for name, home in dp_compile._HOME.items()}
    assert for_checkers == homes
    assert all(hasattr(dp_compile, name) for name in dp_compile.__all__)
    assert dir(dp_compile) == dp_compile.__all__


def test_the_package_loads_no_compiler():
    """`import dp_compile` costs nothing more than torch, and `replicate` loads neither Dynamo nor Inductor (D20)."""
    heavy = "{'torch._dynamo', 'torch._inductor', 'torch.distributed.fsdp', 'dp_compile.plan.cost'}"
    for source, also in (
        ("import dp_compile", []),
        ("import dp_compile; dp_compile.replicate", ["dp_compile.plan.cost"]),
    ):
        command = f"import sys, torch; {source}; print(sorted({heavy}.intersection(sys.modules)))"
        loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
        assert loaded.strip() == str(also)
    help_alone = "import sys; from dp_compile.cli import main; main._build_parser()"
    command = f"{help_alone}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout == "False\n"
