"""One captured backward of a training, on the fake process group: what a suite can hold against it.

Training -> replicate -> backward, captured and compiled -> two more, which must compile nothing
                              |
                              '-> plan, graph, counts, predicted times, simulated memory
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dp_compile.config import ReplicateConfig
from dp_compile.engine.record import Placement
from dp_compile.errors import ConfigError
from dp_compile.insight.predict import LINK_INSIDE
from dp_compile.insight.rehearsal import CPU, META, check_ranks, fake_group
from dp_compile.passes.result import PeakMemory
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan
from dp_compile.plan.cost import EITHER, AllReduceCost
from dp_compile.plan.devices import EFFICIENCY, Device, check_efficiency
from dp_compile.plan.devices import device as device_of
from dp_compile.plan.links import link as link_of
from dp_compile.plan.links import with_levels
from dp_compile.plan.words import count
from dp_compile.testing.generated_code import read_code
from dp_compile.testing.recording import (
    INDUCTOR,
    Recorder,
    SeenGraph,
    Steps,
    fresh_compiler,
    kernels_called,
    run_steps,
)
from dp_compile.testing.schedule import MODEL, Launch, Schedule, Sent, schedule, sent_by
from dp_compile.testing.training import Training


@dataclass(frozen=True, slots=True)
class Counts:
    """What one backward costs, in whole numbers.

    Args:
        collectives: in the graph that the passes leave, those of the model too.
        reduced_nbytes: bytes that reductions carry, flags of unused parameters and gaps between gradients included.
        captures: backwards that compiled autograd traced, in all steps; 1 if nothing changes between them.
        recompiles: captures and graphs, of forward and backward, in identical later steps; 0 if all is well.
        graph_breaks: of the backward. With one, all reductions stand at its end.
        copied_nbytes: bytes of gradients that generated code does not compute in their place; `None`: not asked for,
            without Inductor there is no such code.
        kernels: calls of generated kernels in the backward; `None`: the same.
    """

    collectives: int
    reduced_nbytes: int
    captures: int
    recompiles: int
    graph_breaks: int
    copied_nbytes: int | None = None
    kernels: int | None = None


@dataclass(frozen=True, slots=True)
class SeenBackward:
    """A captured backward as tests see it; `print` shows what there is to expect.

    Args:
        plan: which gradients are reduced together.
        plan_text: the plan, a line for each bucket.
        graph_text: the graph that the passes leave: gradients, collectives and waits by name, in their order.
        counts: whole numbers.
        schedule: predicted times on the stated link.
        memory: the simulated peak, and that of torch's DDP; `None` if no pass of this training simulates it.
        copied: gradients that are copied, and why; empty without Inductor.
        touched: what generated code does with memory that the network has at that time, a line each; empty if all is
            well, `None` without Inductor.
        sent: what this rank sends, by kind of collective, link, dtype and group.
    """

    plan: BucketPlan
    plan_text: str
    graph_text: str
    counts: Counts
    schedule: Schedule
    memory: PeakMemory | None
    copied: tuple[Placement, ...] = ()
    touched: tuple[str, ...] | None = None
    sent: tuple[Sent, ...] = ()

    def sent_on(self, link: str) -> int:
        """Bytes that this rank sends on a link: `whole`, or of two levels `inside` a node or `between` nodes."""
        return sum(each.nbytes for each in self.sent if each.link == link)

    def launches_in(self, *group: int) -> int:
        """How many collectives the ranks of a group launch; those of tensor parallel have another one than ours."""
        return sum(each.launches for each in self.sent if each.group == group)

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {value:,}" for name, value in asdict(self.counts).items() if value is not None)
        several = len({each.group for each in self.sent}) > 1
        sent = ", ".join(
            f"{each.collective} {each.link} {each.dtype} {each.nbytes:,}{f' of ranks {list(each.group)}' * several}"
            for each in self.sent
        )
        known = [
            counts,
            f"sent bytes: {sent}",
            str(self.schedule),
            *([] if self.memory is None else [str(self.memory)]),
        ]
        return "\n".join([self.plan_text, self.graph_text, *known])


def backward_of(
    training: Training,
    *,
    link: str,
    ranks: int,
    ranks_inside: int | None = None,
    link_inside: str = LINK_INSIDE,
    device: str | Device = "h100-sxm",
    efficiency: float = EFFICIENCY,
    backend: str = "aot_eager",
    on: str = CPU,
) -> SeenBackward:
    """Capture the backward of a training on this rank alone, and write down what came of it. Seconds, on a CPU.

    The process group is torch's fake one: nothing is sent, and gradients are summed and divided as with gloo. If a
    strategy plans with a cost and `training.config` has none, it plans for the link that is stated here. Dynamo's
    state in this process is thrown away before and after. Only rank 0's batch of step 0 is used.

    Args:
        training: what is trained, and how it is replicated.
        link: between the ranks: a name of `links.LINKS`.
        ranks: of the group, at least 2.
        ranks_inside: ranks of a node, where gradients are reduced on two levels of network; `link` is between nodes
            then, and `link_inside` inside them.
        link_inside: as `link`. What the model itself sends, as with tensor parallel, is on it too.
        device: what it would compute on, a name of `devices.DEVICES` or a `Device`.
        efficiency: which share of the device's peak matrix products reach.
        backend: what compiles here. `inductor` generates code, so that kernels and copies can be counted: it takes
            longer and needs a C++ compiler.
        on: `cpu`, where the model really computes, or `meta`, for models that are too large for that.

    Raises:
        ConfigError: a value is not allowed, or a process group with other ranks is up.
        ModuleError: the model cannot be replicated, or its backward was not captured.
    """
    device = device_of(device) if isinstance(device, str) else device
    _check(ranks, efficiency, backend, on)
    if training.make_mesh is not None and ranks_inside is not None:
        raise ConfigError(
            "Training.make_mesh says which ranks there are, on one level of network: leave ranks_inside out."
        )
    recorder = Recorder(device, efficiency)
    with torch.random.fork_rng(devices=[]), fake_group(ranks), fresh_compiler():
        if dist.get_world_size() != ranks:
            raise ConfigError(
                f"a fake process group of {dist.get_world_size()} ranks is up, but ranks={ranks}. Destroy it first."
            )
        mesh = None if training.make_mesh is None else training.make_mesh()
        cost = _cost(link, ranks if mesh is None else mesh.size(), link_inside, ranks_inside)
        config = _planning_for(training, replace(training.config, backend=backend), cost, on)
        if ranks_inside is not None:
            mesh = init_device_mesh("cpu", (ranks // ranks_inside, ranks_inside))
        steps = run_steps(replace(training, config=config), recorder, on, mesh)
    graphs = recorder.graphs[-steps.record.graphs :]
    nodes = "" if ranks_inside is None else f" ({ranks_inside} in a node, {link_inside})"
    if training.make_mesh is not None and mesh is not None:
        nodes = f", {mesh.size()} of them reduce, the model's own on {link_inside}"
    basis = f"{link}, {ranks} ranks{nodes}, {device.name} at {efficiency:.0%} of its peak"
    events = [event for graph in graphs for event in graph.events]
    return SeenBackward(
        plan=steps.plan,
        plan_text=plan_text(steps.plan),
        graph_text=_graph_text(graphs),
        counts=_counts(steps, graphs),
        schedule=schedule(events, cost, basis, link_of(link_inside)),
        memory=steps.record.memory,
        copied=tuple(each for each in _placements(steps, graphs) if each.copied),
        touched=None if steps.codes is None else tuple(line for code in steps.codes for line in read_code(code).faults),
        sent=sent_by(events),
    )


def _cost(link: str, ranks: int, link_inside: str, ranks_inside: int | None) -> AllReduceCost:
    whole = link_of(link).cost(ranks, formula=EITHER)
    if ranks_inside is None:
        return whole
    if not 1 < ranks_inside < ranks or ranks % ranks_inside:
        raise ConfigError(f"{ranks} ranks do not fill two nodes or more of ranks_inside={ranks_inside}.")
    links = link_of(link_inside), link_of(link)
    return with_levels(whole, *links, ranks_inside=ranks_inside, nodes=ranks // ranks_inside)


def _check(ranks: int, efficiency: float, backend: str, on: str) -> None:
    check_ranks(ranks)
    check_efficiency(efficiency)
    if on not in (CPU, META):
        raise ConfigError(f"on must be 'cpu' or 'meta', got {on!r}.")
    if on == META and backend == INDUCTOR:
        raise ConfigError("on 'meta' no code can be generated: backend must be 'aot_eager' there, got 'inductor'.")


def _planning_for(training: Training, config: ReplicateConfig, cost: AllReduceCost, on: str) -> ReplicateConfig:
    """With the stated link's cost, if the strategy reads one and nothing else was given."""
    if not config.uses_python_hook():
        raise ConfigError("ddp_python_hook is off: torch's reducer would reduce, and nothing is captured to look at.")
    if config.replan_after is not None:
        raise ConfigError(
            f"replan_after={config.replan_after} plans from measured times, which are others in each run. Leave it out "
            "of the training that tests look at."
        )
    strategy = config.chosen_strategy(has_policy=training.bucket_policy is not None, has_plan=training.plan is not None)
    if strategy in ("optimal", "coalesced") and config.cost is None:
        config = replace(config, cost=cost)
    return replace(config, check_reductions=False) if on == META else config


def plan_text(plan: BucketPlan) -> str:
    """A line for each bucket: what is in it, not why. The same plan gives the same text on every machine."""
    gradients = [gradient for gradient in plan.gradients if gradient.name != UNUSED_FLAGS]
    head = f"{count(len(plan.buckets), 'bucket')}, {count(len(gradients), 'gradient')}, {plan.nbytes:,} bytes"
    return "\n".join([head, *(f"{number}: {_bucket_text(each)}" for number, each in enumerate(plan.buckets))]) + "\n"


def _bucket_text(bucket: Bucket) -> str:
    labels = [member.label for member in bucket.members if member.gradient.name != UNUSED_FLAGS]
    span = " .. ".join(dict.fromkeys((labels[0], labels[-1]))) if labels else "no gradient"
    flags = " + flags" if len(labels) < len(bucket.members) else ""
    apart = sum(member.offset is None for member in bucket.members)
    notes = f", {apart} in memory of their own" if apart else ""
    key = f"{bucket.key.dtype} {bucket.key.reduction.reduce_op}"
    return f"{bucket.nbytes:,} bytes, {count(len(labels), 'gradient')}, {key}, {span}{flags}{notes}"


def _graph_text(graphs: Sequence[SeenGraph]) -> str:
    if len(graphs) == 1:
        return graphs[0].text
    return "".join(f"graph {number} of {len(graphs)}\n{each.text}" for number, each in enumerate(graphs))


def _counts(steps: Steps, graphs: Sequence[SeenGraph]) -> Counts:
    launches = [event for graph in graphs for event in graph.events if isinstance(event, Launch)]
    return Counts(
        collectives=len(launches),
        reduced_nbytes=sum(each.nbytes for each in launches if each.link != MODEL),
        captures=steps.captures,
        recompiles=steps.recompiles,
        graph_breaks=len(graphs) - 1,
        copied_nbytes=None if steps.codes is None else _copied_nbytes(steps, graphs),
        kernels=None if steps.codes is None else sum(map(kernels_called, steps.codes)),
    )


def _placements(steps: Steps, graphs: Sequence[SeenGraph]) -> Iterator[Placement]:
    """Of gradients; of a clone the record says where the clone is computed, or what it was cloned from."""
    cloned = frozenset[str]().union(*(graph.cloned for graph in graphs))
    for each in steps.record.placements:
        if each.gradient in cloned:
            yield replace(each, copied="a clone stands before its bucket")
        elif each.gradient != UNUSED_FLAGS:
            yield each


def _copied_nbytes(steps: Steps, graphs: Sequence[SeenGraph]) -> int:
    """Of all gradients, what is not known to be computed where it is reduced."""
    in_place = sum(each.nbytes for each in _placements(steps, graphs) if each.copied is None)
    members = (member for bucket in steps.plan.buckets for member in bucket.members)
    return sum(member.nbytes for member in members if member.gradient.name != UNUSED_FLAGS) - in_place
