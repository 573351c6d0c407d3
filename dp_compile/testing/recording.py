"""A few steps of a training on the fake process group, with a pass at the end that writes down what the others left."""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import autograd, compiler, inductor
from dp_compile.engine.record import CaptureRecord
from dp_compile.engine.replica import Replica
from dp_compile.errors import DPCompileError, ModuleError
from dp_compile.fx.collectives import is_collective
from dp_compile.fx.edit import positions
from dp_compile.fx.outline import outline
from dp_compile.insight import dumps
from dp_compile.insight.dump_files import CODE_STAGE, captures_in, read_capture
from dp_compile.insight.graph_names import node_names
from dp_compile.insight.rehearsal import CPU, scalar_loss
from dp_compile.modules.replicate import replicate, replicate_without_values, unreplicate
from dp_compile.modules.replicated_module import replica_of
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.bucket_ops import ASSEMBLE, FLAT_BUCKET
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.devices import Device
from dp_compile.testing.schedule import Event, events_of
from dp_compile.testing.training import Training

INDUCTOR: Final = "inductor"
AGAIN: Final = 2
"""So many identical steps follow those in which the plan is settled. They must compile nothing."""
MOST_FIRST_STEPS: Final = 3
SHOWN: Final = 8
_HINT: Final = "Only a captured backward has a graph to look at. TORCH_LOGS=dp_compile says why it was not captured."
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SeenGraph:
    """A graph as the passes left it: its short form, what happens in it, and gradients of which a clone is reduced."""

    text: str
    events: tuple[Event, ...]
    cloned: frozenset[str]


@dataclass(frozen=True, slots=True)
class Recorder:
    """The last pass: changes nothing, and keeps what it is shown in `graphs`.

    No two have the same `number`, so that none of them is shown nothing because code exists already.
    """

    device: Device
    efficiency: float
    number: int = field(default_factory=lambda: next(_numbers))
    graphs: list[SeenGraph] = field(default_factory=list, repr=False, compare=False)
    name: ClassVar[str] = "recorder"
    realises_plan: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        names = node_names(graph, plans, ())
        stages = (stage for plan in plans for bucket in plan.buckets for stage in bucket.key.reduction.stages)
        links = {stage.group: stage.link for stage in stages}
        events = events_of(graph, names, self.device, self.efficiency, links)
        text = outline(graph, names, shown=_around_collectives(graph))
        self.graphs.append(SeenGraph(text, events, frozenset(_cloned(graph, names))))
        return PassResult(changed=False)


def _around_collectives(graph: fx.Graph) -> set[fx.Node]:
    """What is reduced, and what is computed last of it: everything else a short text only counts."""
    now = positions(graph)
    shown: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in (FLAT_BUCKET, ASSEMBLE, REDUCE_GRAD):
            computed = [each for each in node.all_input_nodes if each.op != "placeholder"]
            shown |= {node, *sorted(computed, key=now.__getitem__)[-1:]}
    return shown


def _cloned(graph: fx.Graph, names: Mapping[fx.Node, str]) -> Iterator[str]:
    """Lowering takes a clone for generated code, which costs nothing: what it reads is a copy all the same."""
    for node in graph.nodes:
        if node.target is FLAT_BUCKET or is_collective(node):
            clones = (each for each in node.all_input_nodes if each.target is torch.ops.aten.clone.default)
            yield from (names[each].removeprefix("grad ") for each in clones if each in names)


@dataclass(frozen=True, slots=True)
class Steps:
    """What came of the steps. `codes`: of the latest backward, a text for each graph; `None` if none was generated."""

    plan: BucketPlan
    record: CaptureRecord
    captures: int
    recompiles: int
    codes: tuple[str, ...] | None


def run_steps(training: Training, recorder: Recorder, on: str, device_mesh: DeviceMesh | None = None) -> Steps:
    """Train without an optimizer until the plan is settled, and `AGAIN` times more.

    Raises:
        ConfigError, ModuleError: as in `replicate`; the loss is not a scalar, or the backward was not captured.
    """
    with inductor.generated_anew(), tempfile.TemporaryDirectory() as directory:
        if training.config.backend == INDUCTOR:
            training = replace(training, config=replace(training.config, dump_dir=directory))
        return _replicated(training, recorder, on, device_mesh)


def _replicated(training: Training, recorder: Recorder, on: str, device_mesh: DeviceMesh | None) -> Steps:
    with torch.device(on):
        model = training.model()
    batch = autograd.tree_map_only(torch.Tensor, lambda tensor: tensor.to(on), training.make_batch(0, 0))
    model.to(on)
    wishes = training.wishes | {"device_mesh": device_mesh}
    wishes["passes"] = (*(DEFAULT_PASSES if training.passes is None else training.passes), recorder)
    if on == CPU:
        replicate(model, config=training.config, **wishes)
    else:
        _check_not_lazy(model)
        replicate_without_values(model, training.config, **wishes)
    try:
        steps = _steps(model, batch, training)
        if on != CPU and not training.config.may_be_unused:
            _check_all_used(model)
        return steps
    finally:
        unreplicate(model)


def _check_not_lazy(model: nn.Module) -> None:
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ModuleError(f"{lazy[0]} is lazy, so it has no shape on the meta device. Look with on='cpu'.")


def _check_all_used(model: nn.Module) -> None:
    """With values the reduced flags tell it."""
    unused = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    if unused:
        raise ModuleError(
            f"parameters without a gradient: {', '.join(unused[:SHOWN])}. Every parameter has to take part in the loss "
            "unless find_unused_parameters=True."
        )


def _steps(model: nn.Module, batch: Any, training: Training) -> Steps:
    compiled = torch.compile(model, backend=training.config.backend)

    def step() -> None:
        model.zero_grad()
        scalar_loss(compiled, batch, training.loss_fn).backward()

    start = _made()
    for _ in range(MOST_FIRST_STEPS):
        _first_step(step, model)
        replica = replica_of(model)
        if not replica.revisions.due and _captured(replica):
            break
    settled, record = _made(), _latest(replica)
    for _ in range(AGAIN):
        step()
    end = _made()
    return Steps(
        plan=replica.plan,
        record=record,
        captures=end[0] - start[0],
        recompiles=sum(end) - sum(settled),
        codes=_codes(replica, record) if training.config.backend == INDUCTOR else None,
    )


def _codes(replica: Replica, record: CaptureRecord) -> tuple[str, ...]:
    """The generated code of the latest backward."""
    directory = dumps.observer.directory(replica)
    assert directory is not None
    latest = captures_in(directory.parent)[-record.graphs :]
    codes = (dump / read_capture(dump).find(CODE_STAGE).full_file for dump in latest)
    return tuple(code.read_text(encoding="utf-8") for code in codes)


def kernels_called(code: str) -> int:
    """Calls of generated kernels in Inductor's code for CPU; calls of libraries and collectives are not counted."""
    body = code[code.index("def call(") :]
    return len(re.findall(r"^\s*cpp_fused\w*\(", body, flags=re.MULTILINE))


def _first_step(step: Callable[[], None], model: nn.Module) -> None:
    """torch's own reducer does not work on a fake process group; that it was asked is what there is to say."""
    try:
        step()
    except RuntimeError as error:
        if isinstance(error, DPCompileError) or _captured(replica_of(model)):
            raise
        raise ModuleError(
            f"the backward was not captured: was the forward compiled? {_HINT} What it ended with, "
            f"{type(error).__name__}, is shown above."
        ) from error


def _made() -> tuple[int, int]:
    """Captures, and graphs of forwards and backwards, in this process so far."""
    return compiler.captures(), compiler.compiled_graphs()


def _captured(replica: Replica) -> list[CaptureRecord]:
    return [record for record in replica.history.captures.values() if record.synced]


def _latest(replica: Replica) -> CaptureRecord:
    captured = _captured(replica)
    if not captured:
        ways = ", ".join(replica.history.backwards) or "none"
        raise ModuleError(
            f"the backward was not captured but went another way: {ways}, reduced by {replica.mode}. {_HINT}"
        )
    return captured[-1]


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Inside, Dynamo knows nothing of what ran before; afterwards nothing of what ran inside."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()
