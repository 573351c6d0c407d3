"""The compiled form of a captured backward: its graph with our reductions in it, and what one run of it needs.

    compiled autograd's graph               what is compiled
      accumulate_grad(p, g)                   accumulate_grad(p, g)
      call_hook(GradHook, p)          ->      reduce_accumulated(p, ...)      in the hook's place
      ...                                     ...
      return []                               reduce the gradients that are missing, and the flags
                                              return [], (reduced flags, reduced missing gradients ...)

Every graph holds one reduction for each gradient of the plan, whatever this rank's backward produced, so every rank
runs the same collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from dp_compile import _torch
from dp_compile.binding import Binding, Place, Sites
from dp_compile.dumps import CAPTURED, Dump, dumps_wanted
from dp_compile.errors import DPCompileError, ReductionError
from dp_compile.grad_reduction import REDUCE_GRAD, ReductionTag, emit
from dp_compile.intact import check_not_moved
from dp_compile.launch_clock import LaunchClock
from dp_compile.lowering import Written, observing
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.ready_times import ready_shares
from dp_compile.ready_times import ASSUMED, Estimate, estimated_times
from dp_compile.replica import Replica, Revision, owners
from dp_compile.report import CaptureRecord, PassRecord, Placement
from dp_compile.settling import Shares, settle

logger = logging.getLogger(__name__)

_code_numbers = itertools.count()


class NotTraced(DPCompileError):
    """Dynamo did not trace the captured backward; nothing of it has run."""


@dataclass(slots=True)
class CompileLog:
    """What happened while code was made; emptied into a `CaptureRecord`."""

    graphs: int = 0
    reductions: int = 0
    passes_ran: bool = False
    passes: tuple[PassRecord, ...] = ()
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph, what its sites mean in one backward, and how many tensors it takes."""

    graph_module: fx.GraphModule
    sites: Sites
    binding: Binding
    input_count: int


class CompiledBackward:
    """The compiled form of a captured graph for one binding."""

    def __init__(self, captured: CapturedGraph, replicas: tuple[Replica, ...]) -> None:
        self.gave_up = False
        self._has_code = False
        self._captured, self._binding = captured, captured.binding
        self._plans = tuple(replica.plan for replica in replicas)
        self._passes = replicas[0].passes
        self._backend, self._dump_dir = replicas[0].config.backend, replicas[0].config.dump_directory()
        self._world_size = max(replica.group.world_size for replica in replicas)
        self._synced = tuple(ordinal for ordinal, replica in enumerate(replicas) if replica.sync)
        got = {place for place in self._binding.hooked if place is not None}
        self._used = {o: tuple(i for r, i in sorted(got) if r == o) for o in range(len(replicas))}
        self._unused = {
            ordinal: tuple(index for index in range(len(replica.parameters)) if (ordinal, index) not in got)
            for ordinal, replica in enumerate(replicas)
        }
        self._number = next(_code_numbers)
        self._latest: CaptureRecord | None = None
        self._log = CompileLog()
        self._clock: LaunchClock | None = None
        self._settling: tuple[Replica, ...] = ()
        self.shares: dict[int, Shares] = {}
        """What the graph says of ready times, by the replica's position."""
        makes_buckets = any(graph_pass.realises_plan for graph_pass in self._passes)
        self._deferred = not makes_buckets
        self._run = self._compile(replicas, whole=True)

    def __call__(self, replicas: tuple[Replica, ...], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        for ordinal, replica in enumerate(replicas):
            if not replica.sync:
                replica.used_without_sync.update(self._used[ordinal])
        inputs.extend(self._extra_inputs(replicas))
        self._clock = self._clock_for(replicas)
        self._settling = tuple(replicas[ordinal] for ordinal in self._synced)
        try:
            outputs, reduced = self._run_whole_or_broken(replicas, inputs, rest)
            self._keep_time()
        finally:
            self._clock, self._settling = None, ()
        self._has_code = True
        self._record(replicas)
        self._settle(replicas, reduced)
        return outputs

    def _clock_for(self, replicas: Sequence[Replica]) -> LaunchClock | None:
        """A clock if this backward is to be measured. With several modules it is not told whose compute is whose."""
        if not self._has_code or self._deferred or len(replicas) > 1 or not self._synced:
            return None
        return LaunchClock(replicas[0].device) if replicas[0].awaits(Revision.FROM_LAUNCHES) else None

    def _keep_time(self) -> None:
        seen = None if self._clock is None else self._clock.result()
        if seen is not None and not self._log.graphs:  # else it has the time of a compilation in it
            self._settling[0].seen_launches.append(seen)

    def _extra_inputs(self, replicas: Sequence[Replica]) -> Iterator[torch.Tensor]:
        """In the order of `_add_completion`: per replica the flags, then old gradients of unused parameters."""
        for ordinal in self._synced:
            replica, unused = replicas[ordinal], self._unused[ordinal]
            used = sorted({*self._used[ordinal], *replica.used_without_sync})
            yield replica.unused_flags(unused, used)
            for index in unused:
                if (ordinal, index) in self._binding.kept:
                    grad = replica.parameters[index].grad
                    assert grad is not None
                    yield grad

    def _run_whole_or_broken(self, replicas: tuple[Replica, ...], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        try:
            return self._call(inputs, rest)
        except _torch.CAPTURE_ERRORS as error:
            if self._has_code or self._log.graphs:
                raise  # Not from tracing: the code was running, and its inputs are used up.
            logger.warning(
                "the backward cannot be captured as one graph, so its reductions all run at its end: %s",
                first_line(error),
            )
            self._deferred = True
            self._log = CompileLog()
            self._run = self._compile(replicas, whole=False)
            return self._call(inputs, rest)

    def _call(self, inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        try:
            return self._run(inputs, *rest)
        except _torch.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, DPCompileError):
                raise error.inner_exception from None
            raise

    def _settle(self, replicas: Sequence[Replica], reduced: Sequence[torch.Tensor]) -> None:
        remaining = iter(reduced)
        complaints: list[ReductionError] = []
        for ordinal in self._synced:
            replica, unused = replicas[ordinal], self._unused[ordinal]
            flags, averages = next(remaining), [next(remaining) for _ in unused]
            replica.used_without_sync.clear()
            try:
                replica.settle_unused(flags, unused, averages)
            except ReductionError as error:
                complaints.append(error)
        if complaints:
            raise complaints[0]

    # --- making the graph

    def _compile(self, replicas: tuple[Replica, ...], *, whole: bool) -> Callable[..., Any]:
        graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        outputs = graph.graph_copy(self._captured.graph_module.graph, nodes)
        copied = {old.name: new for old, new in nodes.items()}
        hooked = self._place_reductions(graph, copied, replicas)
        reduced = self._add_completion(graph, copied["inputs"], hooked, replicas)
        graph.output((outputs, tuple(reduced)))
        graph.lint()
        module = fx.GraphModule(self._captured.graph_module, graph, "CapturedBackward")
        _torch.set_locals_to_steal(module, ["inputs"])
        # The plain method: a module's call wraps errors in a way that Dynamo would try to trace, and hide.
        return torch.compile(module.forward, backend=self._compile_dynamo_graph, fullgraph=whole)

    def _place_reductions(
        self, graph: fx.Graph, copied: dict[str, fx.Node], replicas: Sequence[Replica]
    ) -> dict[Place, tuple[fx.Node, bool]]:
        """Replace each call of one of our hooks by the reduction itself, or only take it out if all come at the end."""
        hooked: dict[Place, tuple[fx.Node, bool]] = {}
        for call, place, existing in zip(
            self._captured.sites.hook_calls, self._binding.hooked, self._binding.into_existing, strict=True
        ):
            if place is None:
                continue
            node = copied[call.node]
            parameter = node.args[1]
            assert isinstance(parameter, fx.Node)
            if replicas[place[0]].sync:
                hooked[place] = (parameter, existing)
                if not self._deferred:
                    with graph.inserting_before(node):
                        graph.call_function(reduce_accumulated, (parameter, existing, *_tag(replicas, place)))
            node.replace_all_uses_with(parameter)
            graph.erase_node(node)
        return hooked

    def _add_completion(
        self,
        graph: fx.Graph,
        inputs: fx.Node,
        hooked: dict[Place, tuple[fx.Node, bool]],
        replicas: Sequence[Replica],
    ) -> list[fx.Node]:
        """Reduce what no hook reduces: flags, unused parameters, and everything if reductions come at the end."""
        position = self._captured.input_count
        start = next(node for node in graph.nodes if node.op != "placeholder")
        results: list[fx.Node] = []
        for ordinal in self._synced:
            replica = replicas[ordinal]
            sources: dict[int, fx.Node] = {}
            for index in (len(replica.parameters), *self._unused[ordinal]):
                if index == len(replica.parameters) or (ordinal, index) in self._binding.kept:
                    # Early: compiled code empties the list, and if the backward breaks the rest runs after that.
                    with graph.inserting_before(start):
                        sources[index] = graph.call_function(operator.getitem, (inputs, position))
                    position += 1
                else:
                    sources[index] = _zeros(graph, replica.parameters[index])
            done: dict[int, fx.Node] = {}
            after: fx.Node | None = None
            for index in (gradient.index for gradient in replica.plan.gradients):
                tag = _tag(replicas, (ordinal, index))
                if index in sources:
                    after = done[index] = graph.call_function(emit, (sources[index], *tag, after))
                elif self._deferred:
                    parameter, existing = hooked[ordinal, index]
                    after = graph.call_function(reduce_accumulated, (parameter, existing, *tag, after))
                after = after if self._deferred else None
            results += [done[index] for index in sources]
        return results

    # --- compiling it

    def _compile_dynamo_graph(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """The backend that Dynamo calls with what it captured, for the whole backward or a piece of it."""
        if not self._deferred:
            self._log = CompileLog()  # Dynamo has started anew: it threw away what it compiled before
        found = _reductions_in(graph_module.graph)
        expected = self._expected_reductions()
        if expected and not found and not self._deferred:
            raise NotTraced("Dynamo skipped the backward and compiles a function inside it")
        if found != expected and (found or not self._deferred):
            wrong = [f"{self._name(place)} {found[place]} times" for place in (expected - found) + (found - expected)]
            raise ReductionError(
                f"the captured backward reduces {', '.join(wrong[:8])}, expected once. Is a gradient sparse? That is "
                "not supported, compute it with sparse=False. If not, something traced the hooks wrongly; please "
                "report it with the model."
            )
        self._log.graphs += 1
        self._log.reductions += sum(found.values())
        if found:
            for replica in self._settling:
                check_not_moved(replica)
        if found:
            self._look_at_ready_times(graph_module.graph)
        if not dumps_wanted(self._dump_dir):
            return self._timed(self._compile_with_passes(graph_module, example_inputs))
        with self._dump(example_inputs) as dump:
            for replica in self._settling:
                replica.dumped_to = dump.directory
            dump.stage(CAPTURED, graph_module.graph)
            return self._timed(self._compile_with_passes(graph_module, example_inputs, dump))

    def _compile_with_passes(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], dump: Dump | None = None
    ) -> Callable[..., Any]:
        held = [isinstance(value, nn.Parameter) for value in _flat(example_inputs)]
        on_stage, on_code = (None, None) if dump is None else (dump.stage, dump.code)
        pipeline = Pipeline(self._passes, self._plans, self._note_passes, held, on_stage)
        compile_graph = _torch.inductor if self._backend == "inductor" else _torch.aot_eager
        with observing(self._note_written):
            return compile_graph(graph_module, example_inputs, pipeline, on_code)

    def _dump(self, example_inputs: Sequence[Any]) -> Dump:
        ordinals = dict(zip(self._settling, self._synced, strict=True))
        inputs: list[str | None] = []
        for value in _flat(example_inputs):
            found = owners.find(value) if isinstance(value, nn.Parameter) else None
            inputs.append(None if found is None else _name_in(found[0], found[1], ordinals, len(self._plans)))
        return Dump(self._dump_dir, self._plans, self._passes, inputs, self._world_size, self._backend)

    def _look_at_ready_times(self, graph: fx.Graph) -> None:
        """What a graph says of them. Where all reductions stand at its end it says nothing."""
        awaited = any(replica.awaits(Revision.FROM_GRAPH) for replica in self._settling)
        shares: dict[int, dict[int, Estimate]] = {}
        if not self._deferred and (awaited or any(replica.ready.basis == ASSUMED for replica in self._settling)):
            for (ordinal, index), share in ready_shares(graph).items():
                shares.setdefault(self._synced.index(ordinal), {})[index] = share
        if awaited:
            self._settle_plans(shares)
        for place, estimates in shares.items():
            if self._settling[place].ready.basis == ASSUMED:  # its plan needs none; they tell people more
                self._settling[place].ready = estimated_times(estimates)

    def _settle_plans(self, shares: Mapping[int, Shares]) -> None:
        """The plans of a first backward."""
        self.shares.update(shares)
        settle(self._settling, self.shares)
        plans = dict(zip(self._synced, (replica.plan for replica in self._settling), strict=True))
        self._plans = tuple(plans.get(ordinal, plan) for ordinal, plan in enumerate(self._plans))

    def _timed(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self._clock or contextlib.nullcontext():
                return compiled(*args)

        run._boxed_call = getattr(compiled, "_boxed_call", False)  # type: ignore[attr-defined]
        return run

    def _name(self, place: Place) -> str:
        names = {gradient.index: gradient.name for gradient in self._plans[place[0]].gradients}
        return names.get(place[1], f"gradient {place[1]}")

    def _expected_reductions(self) -> Counter[Place]:
        return Counter(
            (ordinal, gradient.index) for ordinal in self._synced for gradient in self._plans[ordinal].gradients
        )

    def _note_passes(self, records: tuple[PassRecord, ...]) -> None:
        self._log.passes_ran = True
        self._log.passes += records

    def _note_written(self, written: Written) -> None:
        replica, number = map(int, written.unit.split("."))
        member = self._plans[replica].buckets[number].members[written.position]
        apart = member.offset is None
        self._log.placements += (Placement(member.label, member.nbytes, written.copied, apart),)

    def _record(self, replicas: Sequence[Replica]) -> None:
        """Note on each replica what it runs; made anew after each compilation."""
        if self._log.graphs:
            log, self._log = self._log, CompileLog()
            self._latest = CaptureRecord(
                hooks=sum(place is not None and place[0] in self._synced for place in self._binding.hooked),
                reductions=log.reductions,
                completed=sum(len(self._unused[ordinal]) for ordinal in self._synced),
                collectives=sum(len(self._plans[ordinal].buckets) for ordinal in self._synced),
                graphs=log.graphs,
                deferred=self._deferred,
                cached=not log.passes_ran,
                synced=bool(self._synced),
                passes=log.passes,
                placements=log.placements,
            )
        if self._latest is not None:
            for replica in replicas:
                replica.captures[self._number] = self._latest


def reduce_accumulated(
    parameter: nn.Parameter,
    existing: bool,
    index: int,
    replica: int,
    group: str,
    reduce_op: str,
    scale: float,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Traced in a hook's place: reduce the gradient that was just accumulated. A gradient that existed stays itself."""
    grad = parameter.grad
    assert grad is not None
    reduced = emit(grad, index, replica, group, reduce_op, scale, after)
    if existing:
        grad.copy_(reduced)
    else:
        parameter.grad = reduced
    return reduced


def _tag(replicas: Sequence[Replica], place: Place) -> tuple[int, int, str, str, float]:
    tag: ReductionTag = replicas[place[0]].tag(place[1], place[0])
    return (tag.index, tag.replica, tag.group, tag.reduce_op, tag.scale)


def _name_in(replica: Replica, index: int, ordinals: Mapping[Replica, int], replicas: int) -> str:
    """A parameter's name; with several modules in a backward, with the number of its module."""
    prefix = f"{ordinals[replica]}:" if replicas > 1 and replica in ordinals else ""
    return prefix + replica.names[index]


def _zeros(graph: fx.Graph, parameter: nn.Parameter) -> fx.Node:
    options: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
    return graph.call_function(torch.zeros, (list(parameter.shape),), options)


def _reductions_in(graph: fx.Graph) -> Counter[Place]:
    """The reductions in a graph as Dynamo leaves it: index and replica are the op's second and third argument."""
    found: Counter[Place] = Counter()
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        index, replica = node.args[1:3]
        assert isinstance(index, int)
        assert isinstance(replica, int)
        found[replica, index] += 1
    return found


def _flat(values: Any) -> Iterator[Any]:
    """The order in which AOTAutograd hands inputs on: those in lists one by one."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
