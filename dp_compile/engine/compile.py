"""Compiled code of a captured backward, and the state that this code needs while it runs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from dp_compile._torch import autograd, dynamo, inductor
from dp_compile._torch.dtensors import local_tensor
from dp_compile.comm_hooks.functional import HookRun
from dp_compile.engine import dumps
from dp_compile.engine.flags import flags_to_send, read_flags, remember
from dp_compile.engine.graph import (
    CapturedGraph,
    GradientId,
    reductions_in,
    with_reductions,
)
from dp_compile.engine.guards import check_not_moved
from dp_compile.engine.plan_sync import meet_before_launch
from dp_compile.engine.ranges import BACKWARD, COMPILE, BucketRanges, during
from dp_compile.errors import DPCompileError, ReductionError
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.lowering import Written, observing
from dp_compile.passes.memory import Running
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.result import PassResult
from dp_compile.passes.updates import PlaceUpdates
from dp_compile.replica.gradients import lay_out
from dp_compile.replica.record import CaptureRecord, Placement
from dp_compile.replica.replica import Replica, warn

logger = logging.getLogger("dp_compile.compilation")

_code_numbers = itertools.count()
_NOTHING: Final = contextlib.nullcontext()

QUIET_BACKWARDS: Final = 10
"""A compilation after this many synchronised backwards without one logs a warning."""


class NotTraced(DPCompileError):
    """Dynamo did not trace the captured backward, of which nothing has run."""


class OtherMemory(DPCompileError):
    """Inputs of compiled code with updates alias differently than at compilation. Nothing of the code has run."""


class CompiledBackward:
    """Compiled code of a captured graph for one binding of inputs to parameters. Holds no model between runs."""

    def __init__(self, captured: CapturedGraph, replicas: tuple[Replica, ...]) -> None:
        self.has_begun = False  # its code has started to run and may have consumed its inputs
        self._graph = captured
        self._plans = tuple(replica.plan.for_code() for replica in replicas)
        self._number = next(_code_numbers)
        self._run: Callable[..., Any] | None = None
        self._assigned: tuple[int, ...] = ()
        self._record: CaptureRecord | None = None  # of the latest compilation
        # State of the running backward.
        self._replicas: tuple[Replica, ...] = ()
        self._reducing: tuple[Replica, ...] = ()
        self._hook_runs: dict[tuple[int, int], HookRun] = {}

    def __call__(self, replicas: tuple[Replica, ...], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        for ordinal, replica in enumerate(replicas):
            if not replica.state.sync:
                replica.state.step_guard.used.update(self._graph.used[ordinal])
        self.has_begun = False
        inputs.extend(self._extra_inputs(replicas))
        self._replicas, self._reducing = replicas, tuple(replicas[ordinal] for ordinal in self._graph.synced)
        try:
            with during(BACKWARD, *self._reducing):
                started, record = time.monotonic(), self._record
                if self._run is None:
                    module, self._assigned = with_reductions(self._graph, self._replicas)
                    # Not `GraphModule.__call__`: Dynamo would also trace its error handling, which hides the error.
                    options: dict[str, Any] = {"guard_filter_fn": self._needed_guards}
                    self._run = torch.compile(
                        module.forward, backend=self._compile_whole, fullgraph=True, options=options
                    )
                parameters = [inputs[position] for position in self._assigned]
                outputs, reduced, gradients = self._run(inputs, *rest)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                if self._record is not record:
                    _say_if_late(replicas, time.monotonic() - started)
        except dynamo.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, DPCompileError):
                raise error.inner_exception from None
            raise
        finally:
            self._replicas, self._reducing = (), ()
            hook_runs, self._hook_runs = self._hook_runs, {}
        if self._record is not None:
            for replica in replicas:
                replica.history.captures[self._number] = self._record
        self._hand_out(replicas, reduced, hook_runs)
        return outputs

    def _extra_inputs(self, replicas: Sequence[Replica]) -> Iterator[torch.Tensor]:
        """Yield each replica's flags and existing gradients of unused parameters, as the graph's last inputs."""
        for ordinal in self._graph.synced:
            for index in sorted(replicas[ordinal].module.dtensors.intersection(self._graph.unused[ordinal])):
                lay_out(replicas[ordinal].parameters[index])  # its gradient is of earlier, unsynchronised backwards
        for ordinal in self._graph.synced:
            replica, unused = replicas[ordinal], self._graph.unused[ordinal]
            used = self._graph.used[ordinal]
            if replica.state.step_guard.used:
                used = tuple(sorted({*used, *replica.state.step_guard.used}))
            yield flags_to_send(replica, unused, used)
            for index in unused:
                if (ordinal, index) in self._graph.binding.kept:
                    grad = replica.parameters[index].grad
                    assert grad is not None
                    # A copy. First, compiled autograd also passes this tensor if no gradient reaches the parameter's
                    # node, and Dynamo (torch 2.13) fails on a tensor that occurs twice in the list of inputs. Second,
                    # with dynamic shapes AOTAutograd cannot trace two views of a bucket if one is accumulated into.
                    yield local_tensor(grad).detach().clone()

    def _hand_out(
        self, replicas: Sequence[Replica], reduced: Sequence[torch.Tensor], hook_runs: Mapping[tuple[int, int], HookRun]
    ) -> None:
        remaining = iter(reduced)
        complaints: list[DPCompileError] = []
        for ordinal in self._graph.synced:
            replica, unused = replicas[ordinal], self._graph.unused[ordinal]
            flags = next(remaining)
            averages = [None if index in replica.after.scattered else next(remaining) for index in unused]
            replica.state.step_guard.used.clear()
            left_alone = replica.used_by_nobody(unused, flags)
            for number, bucket in enumerate(replica.plan.buckets):
                if bucket.key.reduction.hook is not None:
                    remember(replica, bucket, hook_runs[ordinal, number], flags, left_alone)
            try:
                replica.hand_out(unused, averages, left_alone)
                read_flags(replica, flags, unused)
            except DPCompileError as error:
                complaints.append(error)
        if complaints:
            raise complaints[0]

    # --- compilation

    def _needed_guards(self, guards: Sequence[Any]) -> list[bool]:
        """Return for each of Dynamo's guards whether to check it: guards of parameters are needless, because binding
        and compiled autograd's key (dtype, device, `requires_grad`) cover them, unless the memory format may change.
        With 500 parameters a backward of one rank took 6.0 ms with all guards, 5.4 ms with these (2 cores).
        """
        hooked = [
            self._replicas[ordinal].parameters[index] for ordinal, index in filter(None, self._graph.binding.hooked)
        ]
        known = {id(parameter) for parameter in hooked if parameter.dim() <= 2}
        return [each.guard_type != "TENSOR_MATCH" or id(each.value) not in known for each in guards]

    def _compile_whole(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile the whole backward. This is the backend that Dynamo calls."""
        found = reductions_in(graph_module.graph)
        self._check_reductions(found)
        logger.debug("compiling a graph of a backward, %d reductions in it", found.total())
        for replica in self._reducing:
            check_not_moved(replica)
        dump = dumps.Dump(self._plans) if dumps.are_wanted() else None
        with during(COMPILE, *self._reducing), inductor.generated_anew() if dump else _NOTHING:
            if dump is not None:
                dump.stage(dumps.CAPTURED, graph_module.graph)
            shares = self._memory_of(example_inputs)
            compiled = self._compile_with_passes(graph_module, example_inputs, dump, shares)
        dynamo.let_go_of_nodes(graph_module)
        return self._runs(compiled, shares)

    def _check_reductions(self, found: Counter[GradientId]) -> None:
        expected = Counter(
            (ordinal, gradient.index) for ordinal in self._graph.synced for gradient in self._plans[ordinal].gradients
        )
        if not found:
            raise NotTraced("Dynamo skipped the backward and compiles a function inside it")
        if found != expected:
            names = {(o, each.index): each.name for o, plan in enumerate(self._plans) for each in plan.gradients}
            wrong = [
                f"{names.get(place, place)} {found[place]} times" for place in (expected - found) + (found - expected)
            ]
            raise ReductionError(
                f"the captured backward reduces {', '.join(wrong[:8])}, expected once each. Does any op but "
                "nn.Embedding(sparse=True) make a sparse gradient? Use sparse=False there. Otherwise hooks were traced "
                "incorrectly; please report this error with the model."
            )

    def _compile_with_passes(
        self,
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Any],
        dump: dumps.Dump | None,
        shares: tuple[int, ...],
    ) -> Callable[..., Any]:
        results, placements = list[PassResult](), list[Placement]()

        def note_written(written: Written) -> None:
            replica, number = written.unit
            member = self._plans[replica].buckets[number].members[written.position]
            placements.append(Placement(member.gradient.name, member.gradient.nbytes, written.is_copied))

        passes = (*DEFAULT_PASSES, PlaceUpdates(shares)) if self._graph.updates else DEFAULT_PASSES
        held = [isinstance(value, nn.Parameter) for value in _flat(example_inputs)]
        on_stage = None if dump is None else dump.stage
        crosses = [[each.crosses for each in wanted] for wanted in self._graph.binding.wanted]
        pipeline = Pipeline(passes, self._plans, results.append, held, crosses, on_stage)
        is_inductor = self._replicas[0].config.backend == "inductor"
        compile_graph = inductor.compile_with_inductor if is_inductor else inductor.compile_with_aot_eager
        with observing(note_written):
            compiled = compile_graph(graph_module, example_inputs, pipeline, None if dump is None else dump.code)
        result = results[-1] if results else None  # cached code, of the same plans, has no graph to count in
        plans = [self._plans[ordinal] for ordinal in self._graph.synced]
        planned = sum(len(bucket.key.reduction.stages) for plan in plans for bucket in plan.buckets)
        # A new record if Dynamo restarts, because it discards the code compiled before.
        self._record = CaptureRecord(
            hooks=sum(len(self._graph.used[ordinal]) for ordinal in self._graph.synced),
            reductions=sum(len(plan.gradients) for plan in plans),
            completed=sum(len(self._graph.unused[ordinal]) for ordinal in self._graph.synced),
            collectives=planned if result is None else result.collectives or 0,
            graphs=1,
            cached=result is None,
            refusals=() if result is None else result.refusals,
            memory=None if result is None else result.memory,
            placements=tuple(placements),
            updated=sum(len(each.indices) for each in self._graph.updates),
        )
        return compiled

    def _runs(self, compiled: Callable[..., Any], shares: tuple[int, ...]) -> Callable[..., Any]:
        """Return compiled code wrapped to set the state that its ops read. `shares`: `_memory_of` at compilation."""

        def run(*args: Any) -> Any:
            if self._memory_of(args) != shares:
                raise OtherMemory("the inputs of a captured backward alias differently than at compilation")
            meet_before_launch(self._reducing)
            self.has_begun = True
            optimizers = [replica.after.updates for replica in self._replicas]
            plans = tuple(replica.plan for replica in self._replicas)
            memories = [replica.state.bucket_memory for replica in self._replicas]
            now = Running(plans, memories, optimizers, [replica.state_of_hook for replica in self._replicas])
            self._hook_runs = now.hook_runs
            with now, BucketRanges(self._reducing) if autograd.profiler_is_on() else _NOTHING:
                return compiled(*args)

        run._boxed_call = getattr(compiled, "_boxed_call", False)  # type: ignore[attr-defined]
        return run

    def _memory_of(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return for each input the number of the first updated parameter that shares its memory, -1 if none does."""
        if not self._graph.updates:
            return ()
        written = [
            self._replicas[each.replica].parameters[index] for each in self._graph.updates for index in each.indices
        ]
        numbers: dict[int, int] = {}
        for number, parameter in enumerate(written):
            numbers.setdefault(_memory_address(parameter), number)
        flat = _flat(inputs)
        return tuple(numbers.get(_memory_address(each), -1) if isinstance(each, torch.Tensor) else -1 for each in flat)


def _say_if_late(replicas: Sequence[Replica], seconds: float) -> None:
    """Warn of a compilation during training, which makes a step many times as long as other steps."""
    for replica in replicas:
        done = replica.history.synced_backwards
        quiet, replica.history.compiled_after = done - replica.history.compiled_after, done
        if (quiet >= QUIET_BACKWARDS or replica.state.is_warmed_up) and not replica.state.is_dry_run:
            warn(
                logger,
                "synchronised backward %d compiled new code, which added %.1f s to the step; a recompiled forward adds "
                "more. Causes: a new input size, a new set of used parameters, or a change of train()/eval(), autocast "
                "or accumulation. dp_compile.warmup() with such a batch compiles it before training.",
                done + 1,
                seconds,
            )


def _memory_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage or, if it has no memory, a negative number that no other tensor has."""
    return (tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0) or -id(tensor)


def _flat(values: Any) -> Iterator[Any]:
    """Yield inputs as AOTAutograd passes them on to compiled code: with lists and tuples flattened."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


_CONTEXT: Final = re.compile(r"^\s*Developer debug context: (.*\S.*)$", re.MULTILINE)
_EXPLANATION: Final = re.compile(r"^\s*Explanation: (.*)$", re.MULTILINE)
_OURS: Final = tuple(f"{directory}{os.sep}" for directory in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_USER_LINE: Final = re.compile(r'^\s*File "([^"<]+)", line (\d+), in (.+)$', re.MULTILINE)


def described(error: BaseException) -> str:
    """Return where and, in 100 characters, why a capture failed. The first line of Dynamo's error names no cause."""
    text = str(error)
    first_line, *_ = text.strip().split("\n")
    more = _CONTEXT.search(text) or _EXPLANATION.search(text)
    reason = f"{type(error).__name__}: {first_line}" + (f" ({more[1].strip()})" if more else "")
    reason = textwrap.shorten(reason, 100, placeholder=" ...")
    # If the text names no line of user code, use the line that called backward().
    called = [(each.filename, str(each.lineno), each.name) for each in traceback.extract_stack()]
    for file, line, function in reversed([*called, *_USER_LINE.findall(text)]):
        if not file.startswith(_OURS):
            return f"at {file}:{line} in {function}: {reason}"
    return reason
