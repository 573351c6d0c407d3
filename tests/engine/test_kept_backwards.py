"""Compiled backwards that are kept: when a key is another one, and what a damaged, foreign or missing file does.

A stale entry would be wrong without a word, so the first test changes what a key is made of, one thing at a time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import dp_compile
from dp_compile._torch import artifacts as torch_artifacts
from dp_compile._torch import inductor
from dp_compile.engine import artifacts, cache_blob
from dp_compile.engine.artifact_files import GRAPH, Key, Miss, packed, read, write
from dp_compile.engine.compilation import CompiledBackward
from dp_compile.engine.reduced_graph import CapturedGraph, ToReduce
from dp_compile.engine.replica import AfterReduction, Replica
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.pipeline import Pipeline
from dp_compile.testing.ranks import Ranks

try:
    from dp_compile._torch import kept_forward
except dp_compile.UnsupportedTorchError:
    kept_forward = None  # type: ignore[assignment]

FORWARDS = pytest.mark.skipif(kept_forward is None, reason="torch 2.11 has no object that saves a forward")

aten = torch.ops.aten


# --- the key ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Material:
    """What a key is made from."""

    captured: CapturedGraph
    replicas: tuple[Replica, ...]
    wanted: ToReduce
    inputs: list[Any]
    pipeline: Pipeline

    def key(self) -> Key:
        return artifacts.key_of(self.captured, self.replicas, self.wanted, self.inputs, self.pipeline)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def material_of(build: Callable[[], nn.Module], loss: Callable[[Any], Any], **options: Any) -> Material:
    """What a key would be made from in the first backward of a model."""
    seen: list[Material] = []
    make = CompiledBackward._make

    def watched(self: CompiledBackward, replicas: tuple[Replica, ...], inputs: list[Any]) -> Any:
        seen.append(Material(self._captured, replicas, self._to_reduce(), list(inputs), self._pipeline(inputs)))
        return make(self, replicas, inputs)

    torch.compiler.reset()
    torch.manual_seed(0)
    model = dp_compile.replicate(build(), config=dp_compile.ReplicateConfig(backend="aot_eager", **options))
    try:
        CompiledBackward._make = watched  # type: ignore[method-assign]
        loss(torch.compile(model, backend="aot_eager"))
    finally:
        CompiledBackward._make = make  # type: ignore[method-assign]
        dp_compile.unreplicate(model)
    return seen[0]


def step(model: Any) -> None:
    model(torch.ones(4, 6)).square().mean().backward()


@pytest.fixture(scope="module")
def material(fake_group: dist.ProcessGroup) -> Material:
    return material_of(Model, step)


def replaced(material: Material, **changes: Any) -> Material:
    return dataclasses.replace(material, **changes)


def with_graph(material: Material, change: Callable[[fx.Graph], None]) -> Material:
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    whole = material.captured.graph_module
    graph.output(graph.graph_copy(whole.graph, nodes))
    change(graph)
    captured = dataclasses.replace(material.captured, graph_module=fx.GraphModule(whole, graph))
    return replaced(material, captured=captured)


def another_op(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.target is aten.mm.default)
    node.target = aten.matmul.default


def another_constant(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.target is aten.sum.dim_IntList)
    node.args = (*node.args[:2], not node.args[2])


def another_edge(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.target is aten.mm.default)
    node.args = (node.args[1], node.args[0])


def another_order(graph: fx.Graph) -> None:
    first, second = [node for node in graph.nodes if getattr(node.target, "__name__", "") == "call_hook"][:2]
    second.append(first)


def other_names(graph: fx.Graph) -> None:
    for number, node in enumerate(graph.nodes):
        node.name = f"aot9_{number}"


def input_changed(change: Callable[[torch.Tensor], Any], kind: type = torch.Tensor) -> Callable[[Material], Material]:
    def changed(material: Material) -> Material:
        place = next(place for place, each in enumerate(material.inputs) if type(each) is kind and each.dim() == 2)
        inputs = [*material.inputs]
        inputs[place] = change(inputs[place])
        return replaced(material, inputs=inputs)

    return changed


def replica_changed(name: str, value: Callable[[Replica], Any]) -> Callable[[Material], Material]:
    def changed(material: Material) -> Material:
        (replica,) = material.replicas
        return replaced(material, replicas=(_Instead(replica, {name: value(replica)}),))

    return changed


class _Instead:
    """A replica of which one thing is another one."""

    def __init__(self, replica: Replica, changes: dict[str, Any]) -> None:
        self._replica, self._changes = replica, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._replica, name)


def other_plans(material: Material) -> Material:
    (plan,) = material.pipeline.plans
    gradients = []
    for each in plan.gradients:
        stages = tuple(stage._replace(group="7") for stage in each.key.reduction.stages)
        reduction = dataclasses.replace(each.key.reduction, stages=stages)
        gradients.append(dataclasses.replace(each, key=each.key._replace(reduction=reduction)))
    return replica_changed("plan", lambda _: plan.with_keys_of(gradients))(material)


def pipeline_changed(passes: Any = None, held: Any = None) -> Callable[[Material], Material]:
    def changed(material: Material) -> Material:
        old = material.pipeline
        made = Pipeline(old.passes if passes is None else passes, old.plans, old.on_record, held or old.held)
        return replaced(material, pipeline=made)

    return changed


def binding_changed(**changes: Any) -> Callable[[Material], Material]:
    def changed(material: Material) -> Material:
        binding = dataclasses.replace(material.captured.binding, **changes)
        return replaced(material, captured=dataclasses.replace(material.captured, binding=binding))

    return changed


def view_at_one(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel() + 1).as_strided(tensor.shape, tensor.stride(), 1)


CHANGES: dict[str, tuple[str, Callable[[Material], Material]]] = {
    "an op": (GRAPH, lambda m: with_graph(m, another_op)),
    "a constant": (GRAPH, lambda m: with_graph(m, another_constant)),
    "an edge": (GRAPH, lambda m: with_graph(m, another_edge)),
    "an order": (GRAPH, lambda m: with_graph(m, another_order)),
    "a shape": ("inputs", input_changed(lambda t: torch.empty(t.shape[0] + 1, t.shape[1]))),
    "strides": ("inputs", input_changed(lambda t: torch.empty(t.shape[1], t.shape[0]).t())),
    "a dtype": ("inputs", input_changed(lambda t: t.double())),
    "an offset": ("inputs", input_changed(view_at_one)),
    "requires_grad": ("inputs", input_changed(lambda t: t.detach().clone().requires_grad_())),
    "a parameter that is none": ("inputs", input_changed(lambda t: t.detach().clone().requires_grad_(), nn.Parameter)),
    "one more input": ("inputs", lambda m: replaced(m, inputs=[*m.inputs, torch.ones(1)])),
    "ranks": ("ranks", replica_changed("group", lambda r: _Instead(r.group, {"world_size": 3}))),
    "a group": ("plans", other_plans),
    "buckets that live on": (
        "plans",
        replica_changed("plan", lambda r: dataclasses.replace(r.plan, keeps_memory=True)),
    ),
    "an option": ("options", replica_changed("config", lambda r: dataclasses.replace(r.config, check_nan=True))),
    "who is reduced": ("what is reduced", lambda m: replaced(m, wanted=dataclasses.replace(m.wanted, synced=()))),
    "what is unused": (
        "what is unused",
        lambda m: replaced(m, wanted=dataclasses.replace(m.wanted, unused={0: (1,)})),
    ),
    "all at the end": ("what is reduced", lambda m: replaced(m, wanted=dataclasses.replace(m.wanted, deferred=True))),
    "whose hooks": ("binding", lambda m: binding_changed(hooked=m.captured.binding.hooked[::-1])(m)),
    "the passes": ("passes", pipeline_changed(passes=DEFAULT_PASSES[:1])),
    "who keeps an input": ("passes", pipeline_changed(held=(True,))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_backward_has_another_key(material: Material, name: str) -> None:
    field, change = CHANGES[name]
    one, other = material.key(), change(material).key()
    assert one.file() != other.file()
    assert one.fields[field] != other.fields[field]


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextlib.contextmanager
def state(change: Callable[[], Any], back: Callable[[], Any]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        back()


@dataclasses.dataclass(frozen=True)
class Named(inductor.CustomGraphPass):
    name: str

    def __call__(self, graph: fx.Graph) -> None: ...

    def uuid(self) -> Any:
        return self.name or None


SURROUNDINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "torch": ("torch", lambda: patched(torch, "__version__", "2.12.1")),
    "torch's files": ("torch's files", lambda: patched(torch_artifacts, "_torch_key", lambda: b"another")),
    "our files": ("dp_compile", lambda: patched(inductor, "source_hash", lambda _: "another")),
    "Python": ("Python", lambda: patched(artifacts.sys, "version", artifacts.sys.version.replace("3.", "4.", 1))),
    "machine": ("machine", lambda: patched(artifacts.platform, "machine", lambda: "arm")),
    "CPU": ("CPU", lambda: patched(torch_artifacts, "_pick_vec_isa", lambda: "neon")),
    "C++ compiler": ("C++ compiler", lambda: patched(torch_artifacts, "_compiler", lambda: "clang 4")),
    "Inductor's settings": ("Inductor's settings", lambda: torch._inductor.config.patch("epilogue_fusion", False)),
    "a pass of the user's": (
        "Inductor's settings",
        lambda: torch._inductor.config.patch("joint_custom_post_pass", Named("mine")),
    ),
    "AOTAutograd's settings": (
        "AOTAutograd's settings",
        lambda: torch._functorch.config.patch("functionalize_rng_ops", True),
    ),
    "Dynamo's settings": ("Dynamo's settings", lambda: torch._dynamo.config.patch("specialize_float", True)),
    "deterministic algorithms": (
        "state of torch",
        lambda: state(
            lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
        ),
    ),
    "default dtype": (
        "state of torch",
        lambda: state(lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    ),
    "threads": (
        "state of torch",
        lambda: state(lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
    ),
    "autocast": ("state of torch", lambda: torch.autocast("cpu", torch.bfloat16)),
    "float16 products": (
        "state of torch",
        lambda: state(
            lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
            lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
        ),
    ),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_another_torch_machine_or_setting_has_another_key(material: Material, name: str) -> None:
    field, change = SURROUNDINGS[name]
    one = material.key()
    with change():
        other = material.key()
    assert one.file() != other.file()
    assert one.fields[field] != other.fields[field]
    assert material.key().file() == one.file()


def test_a_device_is_in_the_key() -> None:
    assert artifacts._text_of_input(torch.empty(2)) != artifacts._text_of_input(torch.empty(2, device="meta"))


def test_names_of_nodes_are_not_in_the_key(material: Material) -> None:
    assert with_graph(material, other_names).key() == material.key()


def test_the_same_model_has_the_same_key_again(material: Material) -> None:
    again = material_of(Model, step)
    assert again.captured.graph_module is not material.captured.graph_module
    assert again.key() == material.key()


# --- what is not kept -----------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def through_a_function(model: Any) -> None:
    Double.apply(model(torch.ones(4, 6))).sum().backward()


def with_a_hook(model: Any) -> None:
    out = model(torch.ones(4, 6))
    out.register_hook(lambda grad: grad * 2)
    out.sum().backward()


def onto_gradients(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(model)


@pytest.mark.parametrize("loss", [through_a_function, with_a_hook, onto_gradients])
def test_what_runs_code_that_is_in_no_key_is_not_kept(
    fake_group: dist.ProcessGroup, loss: Callable[[Any], None]
) -> None:
    with pytest.raises(artifacts.NotKept):
        material_of(Model, loss).key()


def foreign_op(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.target is aten.mm.default)
    node.target = torch.ops._test.get_first.default


def takes_sizes(graph: fx.Graph) -> None:
    sizes = next(node for node in graph.nodes if node.target == "sizes")
    first = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(first):
        size = graph.call_function(lambda x: x, (sizes,))
    size.target = torch.numel


@pytest.mark.parametrize("change", [foreign_op, takes_sizes])
def test_graphs_that_are_not_kept(material: Material, change: Callable[[fx.Graph], None]) -> None:
    with pytest.raises(artifacts.NotKept):
        with_graph(material, change).key()


class Sub(torch.Tensor):
    """A class of its own."""


NOT_KEPT: dict[str, Callable[[Material], Material]] = {
    "a class of its own": input_changed(lambda t: t.as_subclass(Sub)),
    "a sparse input": input_changed(lambda t: t.to_sparse()),
    "a conjugate": input_changed(lambda t: t.to(torch.complex64).conj()),
    "no tensor": lambda m: replaced(m, inputs=[*m.inputs, 3]),
    "old gradients": binding_changed(kept=((0, 0),)),
    "a hook of the user's": binding_changed(hooked=(None,)),
    "a comm hook": replica_changed("comm_hook", lambda _: object()),
    "a DTensor": replica_changed("dtensors", lambda _: frozenset({1})),
    "a part for each rank": replica_changed("after", lambda _: AfterReduction(scattered=frozenset({1}))),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_is_not_kept(material: Material, name: str) -> None:
    with pytest.raises(artifacts.NotKept):
        NOT_KEPT[name](material).key()


def test_a_pass_of_the_users_without_a_key_keeps_nothing(material: Material) -> None:
    for setting, value in (("joint_custom_post_pass", Named("")), ("post_grad_custom_post_pass", Named(""))):
        with torch._inductor.config.patch(setting, value), pytest.raises(artifacts.NotKept):
            material.key()


def test_torchs_switches_are_obeyed() -> None:
    assert artifacts.why_off("inductor") == ""
    assert artifacts.why_off("aot_eager")
    for config, name, value in (
        (torch.compiler.config, "force_disable_caches", True),
        (torch._inductor.config, "fx_graph_cache", False),
        (torch._functorch.config, "enable_autograd_cache", False),
        (torch._inductor.config, "triton.cudagraphs", True),
    ):
        with config.patch(name, value):
            assert artifacts.why_off("inductor"), name


def test_gradients_that_come_from_elsewhere_are_seen() -> None:
    parameters = {3: nn.Parameter(torch.ones(2)), 5: nn.Parameter(torch.ones(2))}
    grads, flags = [torch.ones(2), torch.zeros(2)], torch.ones(1)
    for parameter, grad in zip(parameters.values(), grads, strict=True):
        parameter.grad = grad
    assert artifacts.places_of(parameters, [grads[1], flags, grads[0]], [flags]) == (5, -1, 3)
    for outputs, returned in (
        ([grads[0], flags], [flags]),
        ([*grads, flags, torch.ones(1)], [flags]),
        (grads, [flags]),
    ):
        with pytest.raises(artifacts.NotKept):
            artifacts.places_of(parameters, outputs, returned)


# --- files --------------------------------------------------------------------------------------------------------

KEY = Key({GRAPH: "g", "torch": "2.13.0", "inputs": "x" * 64})


def changed(**fields: str) -> Key:
    return Key({**KEY.fields, **fields})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, KEY, b"content\nof two lines")
    assert read(tmp_path, KEY) == b"content\nof two lines"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (changed(torch="2.12.1"), "torch was 2.13.0, is 2.12.1"),
        (changed(inputs="y" * 64), "inputs changed"),
        (changed(graph="h"), "nothing is kept of this graph"),
        (changed(more="1"), "more was nothing, is 1"),
    ],
)
def test_a_miss_says_what_has_changed(tmp_path: Path, asked: Key, said: str) -> None:
    write(tmp_path, KEY, b"content")
    write(tmp_path, changed(torch="2.0", inputs="z"), b"further away")
    with pytest.raises(Miss, match=f"^{said}$"):
        read(tmp_path, asked)


def truncated(raw: bytes) -> bytes:
    return raw[:-1]


def flipped(raw: bytes) -> bytes:
    return raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:]


@pytest.mark.parametrize(
    "damage", [truncated, flipped, lambda raw: b"", lambda raw: b"\x80\x04N.", lambda raw: raw[:30]]
)
def test_a_damaged_file_is_a_miss_and_is_written_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write(tmp_path, KEY, b"content")
    file = tmp_path / KEY.file()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Miss, match="damaged"):
        read(tmp_path, KEY)
    write(tmp_path, KEY, b"content")
    assert read(tmp_path, KEY) == b"content"


def test_a_file_of_something_else_is_a_miss(tmp_path: Path) -> None:
    file = tmp_path / KEY.file()
    file.parent.mkdir(parents=True)
    file.write_bytes(packed(changed(torch="2.12.1"), b"content"))
    with pytest.raises(Miss, match="something else: torch was"):
        read(tmp_path, KEY)


def test_a_writer_that_was_killed_leaves_nothing_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, KEY, b"content")
    (tmp_path / KEY.file()).parent.joinpath(".half").write_bytes(packed(KEY, b"content")[:40])  # kill -9
    with pytest.raises(Miss, match="nothing is kept"):
        read(tmp_path, KEY)


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(artifacts, "directory", lambda: tmp_path / "file")
    assert artifacts.keep(KEY, artifacts.Kept(b"", (), None)).startswith("not kept: ")
    with pytest.raises(Miss):
        artifacts.find(KEY)


@pytest.mark.parametrize("content", [b"no pickle", b"\x80\x04N."])
def test_content_that_is_no_backward_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(artifacts, "directory", lambda: tmp_path)
    write(tmp_path, KEY, content)
    with pytest.raises(Miss):
        artifacts.find(KEY)
    artifacts.keep(KEY, artifacts.Kept(b"no entry", (), None))
    with pytest.raises(Miss, match="cannot be loaded"):
        artifacts.find(KEY)


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in (1, 2)]
    threads = [
        threading.Thread(target=lambda each=each: [write(tmp_path, KEY, each) for _ in range(30)]) for each in contents
    ]
    write(tmp_path, KEY, contents[0])
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read(tmp_path, KEY) in contents
    assert [path.name for path in (tmp_path / KEY.file()).parent.iterdir()] == [KEY.file().name]


# --- all of it, with Inductor ---------------------------------------------------------------------------------------


class OpsOfThisTest:
    """Those that other tests of this process have defined would keep every forward from being saved."""

    def __init__(self) -> None:
        self._before = frozenset(torch.library._defs)

    def __iter__(self) -> Iterator[str]:
        return iter(torch.library._defs - self._before)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DP_COMPILE_CACHE", "1")
    if kept_forward is not None:
        monkeypatch.setattr(kept_forward, "_defined", OpsOfThisTest())
    with inductor.empty_cache():
        yield


def like_a_new_process() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def gradients_of(model: nn.Module, compiled: Any, batch: int = 4) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(batch)
    compiled(torch.randn(batch, 6)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def fresh(**options: Any) -> Any:
    like_a_new_process()
    torch.manual_seed(0)
    return dp_compile.replicate(Model(), **options)


def aot_counters() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["aot_autograd"])


@pytest.mark.usefixtures("keeping")
def test_found_again(fake_group: dist.ProcessGroup) -> None:
    """One story, for what is compiled once for it: kept, found, other sizes, and who else finds the forward."""
    model = fresh()
    first = gradients_of(model, torch.compile(model))
    (record,) = dp_compile.report(model).captures
    assert record.kept == "miss: nothing is kept of this graph; kept now"
    assert f"kept backwards: {record.kept}" in str(record)

    model = fresh()
    compiled = torch.compile(model)
    assert all(map(torch.equal, gradients_of(model, compiled), first))
    again, counted = dp_compile.report(model).captures[-1], aot_counters()
    assert again.kept.startswith("hit, ")
    assert (again.collectives, again.passes, again.placements) == (record.collectives, record.passes, record.placements)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # the forward's; no backward went through Dynamo
    if kept_forward is not None:
        assert counted["autograd_cache_hit"] == 1
        assert not counted.get("autograd_cache_miss")
    buckets = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(buckets) == len(dp_compile.report(model).plan.buckets)


class Leaves(nn.Module):
    """Dynamo guards how often pytree's table of classes was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (leaf,) = torch.utils._pytree.tree_leaves([x])
        result: torch.Tensor = self.last(leaf)
        return result


@pytest.mark.usefixtures("keeping")
def test_a_forward_through_a_pytree_is_compiled_once(fake_group: dist.ProcessGroup) -> None:
    """What keeps a forward's graph, and what reads it, leaves that table alone: else each step compiles."""
    for graphs in (2, 1):  # a forward and a backward; then the backward is found
        like_a_new_process()
        model = dp_compile.replicate(Leaves())
        compiled = torch.compile(model)
        for _ in range(3):
            gradients_of(model, compiled)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.nightly
@pytest.mark.usefixtures("keeping")
def test_other_sizes_than_those_that_were_kept(fake_group: dist.ProcessGroup) -> None:
    """Kept code would read past the end, or give other gradients."""
    for _ in range(2):
        model = fresh()
        compiled = torch.compile(model)
        gradients_of(model, compiled)
    expected = Model()
    expected.load_state_dict(model.state_dict())
    for batch in (9, 4, 2):
        ours, wanted = gradients_of(model, compiled, batch), gradients_of(expected, expected, batch)
        for one, two in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one * dist.get_world_size(), two)
    assert not dp_compile.report(model).captures[-1].kept.startswith("hit")


@pytest.mark.nightly
@pytest.mark.usefixtures("keeping")
def test_what_does_not_fit_any_more_is_compiled(fake_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    first = gradients_of(model, torch.compile(model))
    model = fresh()
    compiled = torch.compile(model)
    gradients_of(model, compiled)
    monkeypatch.setattr(torch_artifacts.Fits, "__call__", lambda *_: False)
    for _ in range(2):
        assert all(map(torch.equal, gradients_of(model, compiled), first))
    assert dp_compile.report(model).captures[-1].kept == "miss: inputs or settings changed since it was found"


def test_what_fits_is_what_dynamo_would_guard_on() -> None:
    tensors = [torch.ones(3, 4), torch.ones(2, requires_grad=True)]
    fits = torch_artifacts.Fits(tensors)
    assert fits([torch.zeros(3, 4), torch.zeros(2, requires_grad=True)])
    for others in (
        tensors[:1],
        [*tensors, torch.ones(1)],
        [torch.ones(4, 3).t(), tensors[1]],
        [torch.ones(3, 5), tensors[1]],
        [torch.ones(3, 4).double(), tensors[1]],
        [torch.ones(3, 4).requires_grad_(), tensors[1]],
        [torch.ones(3, 4).as_subclass(Sub), tensors[1]],
        [torch.ones(3, 4, device="meta"), tensors[1]],
    ):
        assert not fits(others)
    same = torch.ones(2)
    assert not torch_artifacts.Fits([torch.ones(2), torch.ones(2)])([same, same])
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(tensors)


@pytest.mark.nightly
@FORWARDS
@pytest.mark.usefixtures("keeping")
def test_a_process_without_us_finds_the_forward_and_trains_right(fake_group: dist.ProcessGroup) -> None:
    """Its backward is no code there."""
    model = fresh()
    gradients_of(model, torch.compile(model))
    expected = Model()
    expected.load_state_dict(model.state_dict())
    like_a_new_process()
    wanted = gradients_of(expected, expected)
    compiled = torch.compile(expected)
    for _ in range(2):
        for one, two in zip(gradients_of(expected, compiled), wanted, strict=True):
            torch.testing.assert_close(one, two)
    assert aot_counters()["autograd_cache_hit"] >= 1
    expected.zero_grad()
    torch.manual_seed(4)
    asked = torch.autograd.grad(compiled(torch.randn(4, 6)).square().mean(), list(expected.parameters()))
    for one, two in zip(asked, wanted, strict=True):
        torch.testing.assert_close(one, two)


class Positions(nn.Module):
    """Its backward starts from zeros and from positions: calls that are given no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(x + self.position(torch.arange(len(x))))
        return result


@pytest.mark.usefixtures("keeping")
def test_a_forward_that_torch_saved_gives_the_backward_that_was_compiled(fake_group: dist.ProcessGroup) -> None:
    """Who had tried plain `torch.compile` first compiled in every process: its entries had constants for such calls."""
    like_a_new_process()
    torch.manual_seed(0)
    expected = Positions()
    wanted = gradients_of(expected, torch.compile(expected))
    for said in ("miss: nothing is kept of this graph; kept now", "hit, "):
        like_a_new_process()
        model = dp_compile.replicate(copy.deepcopy(expected))
        for one, two in zip(gradients_of(model, torch.compile(model)), wanted, strict=True):
            torch.testing.assert_close(one * dist.get_world_size(), two)
        assert aot_counters()["autograd_cache_hit"] == 1
        (record,) = dp_compile.report(model).captures
        assert record.kept.startswith(said)
        assert "copied" not in str(record)


@pytest.mark.nightly
@FORWARDS
@pytest.mark.usefixtures("keeping")
def test_one_blob_holds_all_that_was_compiled(fake_group: dist.ProcessGroup) -> None:
    model = fresh()
    first = gradients_of(model, torch.compile(model))
    saved = dp_compile.save_cache_artifacts()
    assert saved is not None
    with inductor.empty_cache():
        info = dp_compile.load_cache_artifacts(saved[0])
        assert len(info.artifacts["dp_compile"]) == 2  # the backward, and when its gradients are ready
        model = fresh()
        assert all(map(torch.equal, gradients_of(model, torch.compile(model)), first))
        assert dp_compile.report(model).captures[-1].kept.startswith("hit, ")
        assert aot_counters() == {"total": 1, "ok": 1, "autograd_cache_hit": 1}


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "0" * 32 + "/../" + "0" * 32])
def test_a_blob_writes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    written: list[Path] = []
    monkeypatch.setattr(cache_blob, "write_file", lambda path, _: written.append(path))
    monkeypatch.setattr(artifacts, "directory", lambda: tmp_path)
    cache_blob._write(name, b"")
    assert not written
    cache_blob._write("0" * 32 + "/" + "f" * 32, b"")
    assert written == [tmp_path / ("0" * 32) / ("f" * 32)]


def trained(cache: str, batches: list[int]) -> tuple[list[torch.Tensor], str]:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DP_COMPILE_CACHE", cache)
        model = fresh()
        compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), 0.1)
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            torch.manual_seed(10 * number + rank)
            compiled(torch.randn(batch, 6)).square().mean().backward()
            optimizer.step()
        said = dp_compile.report(model).captures[0].kept
        return [parameter.detach().clone() for parameter in dp_compile.unreplicate(model).parameters()], said


def one_finds_and_one_compiles(directory: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", directory)
        one, first = trained("1", [4, 4])
        two, second = trained("1" if dist.get_rank() == 0 else "0", [4, 4])
        assert all(map(torch.equal, one, two))
        for each in two:
            others = [torch.empty_like(each) for _ in range(dist.get_world_size())]
            dist.all_gather(others, each)
            assert all(torch.equal(other, each) for other in others)
        return [first, second, material_of(Model, step).key().fields]


@pytest.mark.nightly
def test_one_rank_finds_and_one_compiles(ranks2: Ranks, tmp_path: Path) -> None:
    (first, found, key), (_, compiled, other_key) = ranks2.run(one_finds_and_one_compiles, str(tmp_path))
    assert key == other_key  # the rank is not in it
    assert first.startswith("miss")
    assert found.startswith("hit")
    assert compiled == ""


class Calls(nn.Module):
    user: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.user(x)


def formula(how: str, factor: float, library: torch.library.Library) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a user has in his own source, where `factor` stands: the forward doubles, the backward says otherwise."""
    if how == "traced through":
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x: x * factor, "CompositeImplicitAutograd")
        op = torch.ops.stale.scaled  # so that no line of source that torch writes beside a graph names it
        return lambda x: op(x)
    if how == "no gradient":  # nothing of the op is in the backward's graph
        library.define("added(Tensor x) -> Tensor")
        library.impl("added", lambda x: x + factor, "CompositeImplicitAutograd")
        op = torch.ops.stale.added
        return lambda x: op(x)
    if how == "function":

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient * factor

        return lambda x: Scaled.apply(x)  # type: ignore[no-any-return]

    @torch.library.custom_op("stale::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: gradient * factor)
    return lambda x: torch.ops.stale.twice(x)


@pytest.mark.parametrize("how", ["custom op", "traced through", "no gradient", "function"])
@pytest.mark.usefixtures("keeping")
def test_code_of_the_users_that_was_edited(
    fake_group: dist.ProcessGroup, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dp_compile.kept")
    for factor in (2.0, 3.0):
        library = torch.library.Library("stale", "FRAGMENT")
        user = formula(how, factor, library)
        like_a_new_process()
        torch.manual_seed(0)
        model = dp_compile.replicate(nn.Sequential(nn.Linear(6, 6), Calls()))
        model[1].user = user
        found = gradients_of(model, torch.compile(model))
        with dp_compile.no_sync(model):
            local = gradients_of(model, model)
        torch.testing.assert_close(found, [gradient / 2 for gradient in local])  # the fake group has two ranks
        assert dp_compile.report(model).captures
        library._destroy()
    assert how == "function" or kept_forward is None or "a forward is not saved: the source of stale::" in caplog.text
