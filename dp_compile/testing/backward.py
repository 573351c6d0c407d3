"""One captured backward on torch's fake process group: its plan and graph as text, and its counts."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_compile._torch import autograd, compiler, inductor
from dp_compile.config import ReplicateConfig
from dp_compile.engine.dumps import CAPTURED, TO_INDUCTOR, recorders
from dp_compile.errors import ConfigError, UnsupportedModuleError, require, require_integer
from dp_compile.fx.collectives import is_collective
from dp_compile.fx.edit import provenance_of
from dp_compile.insight.observe import report
from dp_compile.passes.outline import outline, span
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.cost import link as link_of
from dp_compile.plan.cost import ring_or_tree
from dp_compile.plan.words import count
from dp_compile.replication.replicate import replicate_module, unreplicate
from dp_compile.replication.selection import BucketPolicy

SHOWN: Final = 8
ACCEPT_VARIABLE: Final = "DP_COMPILE_ACCEPT"
HOW_TO_ACCEPT: Final = "pytest --dp-compile-accept (or DP_COMPILE_ACCEPT=1)"


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum. Its update is linear in the gradient, so a wrong gradient shows in the parameter."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training to test. It is pickled, so its functions must be defined at the top level of a module.

    Args:
        make_model: called after torch's seed is set to `seed`.
        make_batch: `make_batch(rank, step)`, called by position. Values should differ by both, shapes need not.
        loss_fn: `loss_fn(model, batch)` is the scalar loss.
        make_optimizer: called with the parameters. Default: SGD with a learning rate of 0.1 and momentum 0.9.
        config: argument of `replicate`. Its `backend` is ignored: the checks choose it.
        bucket_policy: argument of `replicate`: which modules share buckets.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    config: ReplicateConfig = field(default_factory=ReplicateConfig)
    bucket_policy: BucketPolicy | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("make_model", "make_batch", "loss_fn", "make_optimizer"):
            value = getattr(self, name)
            is_function = callable(value) and not (name == "make_model" and isinstance(value, nn.Module))
            require(is_function, f"Training.{name}", "a function, which each check calls", type(value))

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.make_model()

    def loss(self, called: Any, batch: Any) -> torch.Tensor:
        loss = self.loss_fn(called, batch)
        if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
            return loss
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UnsupportedModuleError(f"loss_fn must return a scalar that requires a gradient, got {got}.")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a captured backward: `collectives`, including the model's own, and `reduced_nbytes` of all buckets.

    Over one step and identical later steps: `graphs` compiled for forward and backward, and `captures` (traces) of the
    backward. `recompiles`: the sum of both in the later steps alone.
    """

    collectives: int
    reduced_nbytes: int
    graphs: int
    captures: int
    recompiles: int


@dataclass(frozen=True, slots=True)
class SeenBackward:
    """What `backward_of` returns about a captured backward: the plan, plan and graph as text, and counts."""

    plan: BucketPlan
    plan_text: str
    graph_text: str
    counts: Counts

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {value:,}" for name, value in asdict(self.counts).items())
        return "\n".join([self.plan_text, self.graph_text, counts])


def assert_plan(seen: SeenBackward, expected: str | os.PathLike[str]) -> None:
    """Compare the plan with a triple-quoted string, or with a golden file given as a `Path`."""
    _assert_text(seen.plan_text, expected, "plan")


def assert_graph(seen: SeenBackward, expected: str | os.PathLike[str]) -> None:
    """Compare the graph of buckets, launches and waits with a triple-quoted string, or a golden file at a `Path`."""
    _assert_text(seen.graph_text, expected, "graph")


def assert_counts(seen: SeenBackward, **expected: int) -> None:
    """Compare counts, by their names in `Counts`. The error lists the items of each count that differs."""
    found = asdict(seen.counts)
    require(bool(expected) and expected.keys() <= found.keys(), "counts", f"some of {', '.join(found)}", [*expected])
    launched = [line for line in seen.graph_text.splitlines() if line.startswith((">>", "   bucket"))]
    parts: Mapping[str, Sequence[str]] = {
        "collectives": launched,
        "reduced_nbytes": launched,
        "graphs": ["TORCH_LOGS=graph_breaks shows where a forward was split"],
        "captures": ["compiled autograd traced the backward this often; TORCH_LOGS=+dp_compile shows why"],
        "recompiles": ["identical later steps were compiled again; TORCH_LOGS=recompiles shows why"],
    }
    wrong = [name for name, value in expected.items() if found[name] != value]
    lines = [f"{len(wrong)} of {len(expected)} counts differ:"]
    for name in wrong:
        lines.append(f"  {name}: expected {expected[name]:,}, found {found[name]:,}")
        lines += [f"    {line}" for line in parts[name][:SHOWN]]
        lines += [f"    ... and {len(parts[name]) - SHOWN} more"] if len(parts[name]) > SHOWN else []
    if wrong:
        raise AssertionError("\n".join(lines))


def _assert_text(found: str, expected: str | os.PathLike[str], what: str) -> None:
    """Compare a text with a golden string or file, or write the file if `DP_COMPILE_ACCEPT` is set."""
    where, remedy, golden = "in the test", "", expected
    if not isinstance(golden, str):
        path = Path(golden)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        if os.environ.get(ACCEPT_VARIABLE, "0") not in ("", "0"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
            return
        if not path.exists():
            raise AssertionError(
                f"there is no golden file {shown} for the {what} yet. Make it with {HOW_TO_ACCEPT}, read it, and "
                "commit it."
            )
        where, golden = f"in {shown}", path.read_text(encoding="utf-8")
        remedy = f"\nIf the change is intended: {HOW_TO_ACCEPT}, read what changed in git, and commit it."
    if found != golden:
        changes = list(difflib.unified_diff(golden.splitlines(), found.splitlines(), n=1, lineterm=""))[2:]
        head = f"the {what} is not the one {where} (- expected, + found):"
        raise AssertionError("\n".join([head, *(f"  {line}" for line in changes)]) + remedy)


def backward_of(training: Training, *, link: str, ranks: int, on: str = "cpu") -> SeenBackward:
    """Capture the backward of a training in this process alone, and return the backward's plan, graph and counts.

    Nothing is sent; gradients are summed and divided as with gloo. Only rank 0's batch of step 0 is used. Dynamo's
    caches in this process are dropped before and after.

    Args:
        training: the model and the options of its replication.
        link: a name in `plan.cost.LINKS`. The plan is made for it unless `training.config` has a cost.
        ranks: size of the group, at least 2.
        on: `cpu`, or `meta` for models that are too large for this machine: nothing is computed or allocated.

    Raises:
        ConfigError, UnsupportedModuleError: a value is not allowed, a process group is up, or no backward was captured.
    """
    require_integer("ranks", ranks, 2)
    if dist.is_initialized():
        raise ConfigError("a process group is initialised. backward_of() creates a fake one: destroy yours first.")
    # On the meta device the flags of unused parameters have no values to read.
    checks = training.config.check_reductions and on == "cpu"
    config = replace(training.config, backend="aot_eager", check_reductions=checks)
    cost = link_of(link).cost(ranks, hops=ring_or_tree)  # even if unused: raises for a wrong name
    strategy = config.chosen_strategy(has_policy=training.bucket_policy is not None)
    if strategy == "optimal" and config.cost is None:
        config = replace(config, cost=cost)
    graphs: list[tuple[str, int, int]] = []  # per graph: text after the last pass, collectives, and their bytes

    def record(name: str, graph: fx.Graph, plans: Sequence[BucketPlan]) -> None:
        if name == CAPTURED:  # from Dynamo, without `meta["val"]`
            graphs.append(("", 0, 0))
        elif name != TO_INDUCTOR:
            launches = list(filter(is_collective, graph.nodes))
            given = (node.all_input_nodes[0] for node in launches if provenance_of(node) is not None)
            nbytes = sum(each.meta["val"].nbytes for each in given)
            graphs[-1] = outline(graph, plans), len(launches), nbytes

    recorders.append(record)
    with contextlib.ExitStack() as exits:
        exits.callback(recorders.remove, record)
        exits.enter_context(torch.random.fork_rng(devices=[]))
        torch.compiler.reset()
        exits.callback(torch.compiler.reset)
        exits.enter_context(inductor.generated_anew())
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        exits.callback(dist.destroy_process_group)
        with torch.device(on):
            model = training.model().to(on)
        batch = autograd.tree_map_only(torch.Tensor, lambda tensor: tensor.to(on), training.make_batch(0, 0))
        replicate_module(model, {}, config=config, needs_values=False, bucket_policy=training.bucket_policy)
        exits.callback(unreplicate, model)
        return _seen(training, config, model, batch, graphs)


def _seen(
    training: Training, config: ReplicateConfig, model: nn.Module, batch: Any, graphs: list[tuple[str, int, int]]
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
        hint = "Only a captured backward has a graph. TORCH_LOGS=dp_compile says why it was not captured."
        raise UnsupportedModuleError(f"the backward was not captured but ran as {', '.join(found.backwards)}. {hint}")
    unused = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    if unused and not config.may_be_unused:  # found by flags, which have no values on the meta device
        raise UnsupportedModuleError(
            f"parameters without a gradient: {', '.join(unused[:SHOWN])}. If intended, set find_unused_parameters."
        )
    texts, collectives, nbytes = zip(*graphs[-found.captures[-1].graphs :], strict=True)
    traced, graphs_made = (later - before for later, before in zip(end, start, strict=True))
    counts = Counts(sum(collectives), sum(nbytes), graphs_made, traced, sum(end) - sum(first))
    return SeenBackward(found.plan, plan_text(found.plan), "".join(texts), counts)


def plan_text(plan: BucketPlan) -> str:
    """Return a line per bucket: size, dtype and gradients, without the plan's reasons. Equal plans have equal texts."""
    gradients = [gradient for gradient in plan.gradients if gradient.name != UNUSED_FLAGS]
    lines = [f"{count(len(plan.buckets), 'bucket')}, {count(len(gradients), 'gradient')}, {plan.nbytes:,} bytes"]
    for number, bucket in enumerate(plan.buckets):
        key = f"{bucket.key.dtype} {bucket.key.reduction.reduce_op}"
        lines.append(f"{number}: {bucket.nbytes:,} bytes, {key}, {span(bucket)}")
    return "\n".join(lines) + "\n"
