"""One captured backward on torch's fake process group: its plan and graph as text, and its counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_compile._torch import autograd, compiler, inductor
from dp_compile.config import ReplicateConfig
from dp_compile.engine.dumps import CAPTURED, TO_INDUCTOR, recorders
from dp_compile.errors import ConfigError, UnsupportedModuleError, require, require_integer
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.fx.edit import provenance_of
from dp_compile.fx.text import last_name, type_text
from dp_compile.insight.observe import report
from dp_compile.passes.reduction import FLAT_BUCKET
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan
from dp_compile.plan.cost import link as link_of
from dp_compile.plan.cost import ring_or_tree
from dp_compile.plan.words import count, format_bytes
from dp_compile.replication.replicate import replicate_module, unreplicate
from dp_compile.testing.golden import assert_text
from dp_compile.testing.training import Training

SHOWN: Final = 8
_HINT: Final = "Only a captured backward has a graph. TORCH_LOGS=dp_compile says why it was not captured."


@dataclass(frozen=True, slots=True)
class Counts:
    """`collectives` of the backward, those of the model included; `reduced_nbytes` that ours are given.

    In all steps `graphs` were compiled, for forward and backward, and `captures` of the backward were traced; of both
    together `recompiles` in identical later steps. `copied_nbytes` of gradients are computed outside their bucket and
    copied into it; `None` without Inductor, whose code does so.
    """

    collectives: int
    reduced_nbytes: int
    graphs: int
    captures: int
    recompiles: int
    copied_nbytes: int | None


@dataclass(frozen=True, slots=True)
class SeenBackward:
    """A captured backward; `copied`: a line for each gradient that is copied."""

    plan: BucketPlan
    plan_text: str
    graph_text: str
    counts: Counts
    copied: tuple[str, ...]

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {value:,}" for name, value in asdict(self.counts).items() if value is not None)
        return "\n".join([self.plan_text, self.graph_text, counts])


def assert_plan(seen: SeenBackward, expected: str | os.PathLike[str]) -> None:
    """Compare the plan with a triple-quoted string, or with a golden file given as a `Path`."""
    assert_text(seen.plan_text, expected, "plan")


def assert_graph(seen: SeenBackward, expected: str | os.PathLike[str]) -> None:
    """Compare the graph after the passes with a triple-quoted string, or with a golden file given as a `Path`."""
    assert_text(seen.graph_text, expected, "graph")


def assert_counts(seen: SeenBackward, **expected: int) -> None:
    """Compare counts, by their names in `Counts`; what differs is shown with what it is made of."""
    found = asdict(seen.counts)
    require(bool(expected) and expected.keys() <= found.keys(), "counts", f"some of {', '.join(found)}", [*expected])
    is_counted = "copied_nbytes" not in expected or seen.counts.copied_nbytes is not None
    require(is_counted, "copied_nbytes", "of generated code: backward_of(..., backend='inductor')", None)
    launched = [line for line in seen.graph_text.splitlines() if line.startswith((">>", "   bucket"))]
    parts: Mapping[str, Sequence[str]] = {
        "collectives": launched,
        "reduced_nbytes": launched,
        "graphs": ["TORCH_LOGS=graph_breaks shows where a forward was split"],
        "captures": ["compiled autograd traced the backward so often; TORCH_LOGS=+dp_compile shows why"],
        "recompiles": ["identical later steps were compiled again; TORCH_LOGS=recompiles shows why"],
        "copied_nbytes": seen.copied,
    }
    wrong = [name for name, value in expected.items() if found[name] != value]
    lines = [f"{len(wrong)} of {len(expected)} counts differ:"]
    for name in wrong:
        lines.append(f"  {name}: expected {expected[name]:,}, found {found[name]:,}")
        lines += [f"    {line}" for line in parts[name][:SHOWN]]
        lines += [f"    ... and {len(parts[name]) - SHOWN} more"] if len(parts[name]) > SHOWN else []
    if wrong:
        raise AssertionError("\n".join(lines))


def backward_of(
    training: Training, *, link: str, ranks: int, backend: str = "aot_eager", on: str = "cpu"
) -> SeenBackward:
    """Capture the backward of a training on this rank alone and return its plan, graph and counts.

    Nothing is sent; gradients are summed and divided as with gloo. Only rank 0's batch of step 0 is used. Dynamo's
    caches in this process are dropped before and after.

    Args:
        training: what is trained, and how it is replicated.
        link: a name of `plan.cost.LINKS`. The plan is made for it unless `training.config` has a cost.
        ranks: of the group, at least 2.
        backend: `aot_eager`, or `inductor`, which generates code, so that copies can be counted.
        on: `cpu`, or `meta` for models that are too large to be computed here: nothing is computed or allocated.

    Raises:
        ConfigError, UnsupportedModuleError: a value is not allowed, a process group is up, or no backward was captured.
    """
    require_integer("ranks", ranks, 2)
    require(on != "meta" or backend == "aot_eager", "backend on 'meta'", "'aot_eager': it generates no code", backend)
    if dist.is_initialized():
        raise ConfigError("a process group is initialised. backward_of() creates a fake one: destroy yours first.")
    # On the meta device the flags of unused parameters have no values to read.
    checks = training.config.check_reductions and on == "cpu"
    config = replace(training.config, backend=backend, check_reductions=checks)
    cost = link_of(link).cost(ranks, formula=ring_or_tree)  # also where it is not read: a wrong name is an error
    strategy = config.chosen_strategy(has_policy=training.bucket_policy is not None)
    if strategy == "optimal" and config.cost is None:
        config = replace(config, cost=cost)
    recorder = _Recorder()
    recorders.append(recorder.stage)
    with contextlib.ExitStack() as exits:
        exits.callback(recorders.remove, recorder.stage)
        for each in (torch.random.fork_rng(devices=[]), fresh_compiler(), inductor.generated_anew()):
            exits.enter_context(each)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        exits.callback(dist.destroy_process_group)
        with torch.device(on):
            model = training.model().to(on)
        batch = autograd.tree_map_only(torch.Tensor, lambda tensor: tensor.to(on), training.make_batch(0, 0))
        replicate_module(model, {}, config=config, needs_values=False, **training.options)
        exits.callback(unreplicate, model)
        return _seen(training, config, model, batch, recorder)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Dynamo's caches are empty at the start and at the end."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def _seen(
    training: Training, config: ReplicateConfig, model: nn.Module, batch: Any, recorder: _Recorder
) -> SeenBackward:
    compiled = torch.compile(model, backend=config.backend)

    def step() -> None:
        model.zero_grad()
        training.loss(compiled, batch).backward()

    start = compiler.captures(), compiler.compiled_graphs()
    step()
    first = compiler.captures(), compiler.compiled_graphs()
    for _ in range(2):  # identical steps, which must compile nothing
        step()
    end = compiler.captures(), compiler.compiled_graphs()
    found = report(model)
    if not found.captures:
        raise UnsupportedModuleError(f"the backward was not captured but ran as {', '.join(found.backwards)}. {_HINT}")
    unused = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    if unused and not config.may_be_unused:  # found by flags, which have no values on the meta device
        raise UnsupportedModuleError(
            f"parameters without a gradient: {', '.join(unused[:SHOWN])}. Allow it: find_unused_parameters."
        )
    record = found.captures[-1]
    graphs = recorder.graphs[-record.graphs :]
    copied = [each for each in record.placements if each.is_copied and each.gradient != UNUSED_FLAGS]
    texts, collectives, nbytes = zip(*graphs, strict=True)
    traced, graphs_made = (later - before for later, before in zip(end, start, strict=True))
    copied_nbytes = sum(each.nbytes for each in copied) if config.backend == "inductor" else None
    counts = Counts(sum(collectives), sum(nbytes), graphs_made, traced, sum(end) - sum(first), copied_nbytes)
    lines = tuple(f"{each.gradient}, {format_bytes(each.nbytes)}" for each in copied)
    return SeenBackward(found.plan, plan_text(found.plan), "".join(texts), counts, lines)


def plan_text(plan: BucketPlan) -> str:
    """A line for each bucket: its size, dtype and gradients, not the reasons. Equal plans have equal texts."""
    gradients = [gradient for gradient in plan.gradients if gradient.name != UNUSED_FLAGS]
    lines = [f"{count(len(plan.buckets), 'bucket')}, {count(len(gradients), 'gradient')}, {plan.nbytes:,} bytes"]
    for number, bucket in enumerate(plan.buckets):
        key = f"{bucket.key.dtype} {bucket.key.reduction.reduce_op}"
        lines.append(f"{number}: {bucket.nbytes:,} bytes, {key}, {_span(bucket)}")
    return "\n".join(lines) + "\n"


def _span(bucket: Bucket) -> str:
    labels = [member.gradient.name for member in bucket.members if member.gradient.name != UNUSED_FLAGS]
    ends = dict.fromkeys((labels[0], labels[-1])) if labels else []
    flags = ["flags"] if len(labels) < len(bucket.members) else []
    return f"{count(len(labels), 'gradient')}: {' + '.join([' .. '.join(ends), *flags])}"


class _Recorder:
    """Keeps the text of each compiled graph after the last pass, its collectives, and bytes that they are given."""

    def __init__(self) -> None:
        self.graphs: list[tuple[str, int, int]] = []

    def stage(self, name: str, graph: fx.Graph, plans: Sequence[BucketPlan]) -> None:
        if name == CAPTURED:  # as Dynamo leaves it, without values
            self.graphs.append(("", 0, 0))
        elif name != TO_INDUCTOR:
            launches = list(filter(is_collective, graph.nodes))
            given = (node.all_input_nodes[0] for node in launches if provenance_of(node) is not None)
            nbytes = sum(each.meta["val"].nbytes for each in given)
            self.graphs[-1] = _graph_text(graph, plans), len(launches), nbytes


def _name(node: fx.Node) -> str:
    """What a node is called in the text: `launch 0`, `wait 0`, `bucket 0`; another one by its op."""
    kind = "launch" if is_collective(node) else "wait" if is_wait(node) else "bucket"
    if kind == "bucket" and node.target is not FLAT_BUCKET:
        return "input" if node.op == "placeholder" else last_name(node)
    provenance = provenance_of(node)
    return f"{kind} {'of the model' if provenance is None else provenance.unit.removeprefix('0.')}"


def _graph_text(graph: fx.Graph, plans: Sequence[BucketPlan]) -> str:
    """A line for each bucket, collective and wait, without names that a tracer numbers; other nodes are counted."""
    lines, between = [], 0
    for node in graph.nodes:
        provenance, what = provenance_of(node), type_text(node.meta.get("val"))
        line = f"{_name(node)}: {what}"
        if node.op == "output":
            line = f"   return {count(len(node.all_input_nodes), 'tensor')}"
        elif is_wait(node):
            line = f"<< {line}"
        elif is_collective(node):
            given = [_name(each) for each in node.all_input_nodes] + [
                str(each) for each in node.args[1:2] if isinstance(each, str)
            ]
            line = f">> {_name(node)} = {last_name(node)}({', '.join(given)}): {what}"
        elif node.target is FLAT_BUCKET and provenance is not None:
            replica, number = map(int, provenance.unit.split("."))
            line = f"   {_name(node)} = {_span(plans[replica].buckets[number])}: {what}"
        else:
            between += node.op != "placeholder"
            continue
        lines += [f"   ... {count(between, 'node')}", line] if between else [line]
        between = 0
    return "\n".join(lines) + "\n"
