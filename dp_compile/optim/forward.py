"""`torch.compile(model, backend="dp_compile")`: a forward that waits for each update in front of its first use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from dp_compile._torch import inductor
from dp_compile.engine.ranges import FORWARD, during
from dp_compile.errors import ConfigError
from dp_compile.optim.readers import note_forward
from dp_compile.passes.crossing import CompleteBeforeUse, in_flight, take_starts_out, wait_for_parameters
from dp_compile.replica.replica import Replica, owners


def compile_forward(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls with each graph. Compiles as the backend `inductor` does, or as the module's `config` says.

    Modules without an optimizer that overlaps the forward (`in_backward(..., overlap_forward=True)`) get the code that
    they would get from `inductor`, after a check whether anything is in flight.

    Args:
        graph_module: the graph, its parameters among the inputs.
        inputs: an example of each input.
        mode: as of `torch.compile(mode=...)`.
        options: as of `torch.compile(options=...)`.

    Raises:
        ConfigError: such an optimizer is there, and so are CUDA graphs, which would replay the forward without waiting.
    """
    parameters = {position: each for position, each in enumerate(inputs) if isinstance(each, nn.Parameter)}
    crossing = {position: found for position, each in parameters.items() if (found := _deferring_replica_of(each))}
    settings = {**({} if mode is None else inductor.list_mode_options(mode)), **(options or {})}
    broken: Any = getattr(graph_module, "compile_subgraph_reason", None)
    starts_here, part_starts = take_starts_out(graph_module)
    starts, breaks = starts_here or part_starts, broken is None or broken.graph_break
    if starts and not any(node.op.startswith("call_") for node in graph_module.graph.nodes):
        return _waiting_for_all(graph_module.forward, starts_here=starts_here)
    if not crossing:
        compiled = inductor.compile_forward_with_inductor(graph_module, inputs, None, settings)
        if starts and breaks:
            return _waiting_for_all(compiled, starts_here=starts_here)
        return _waiting_for_its_own(compiled, tuple(parameters)) if parameters else compiled
    if inductor.uses_cuda_graphs(settings):
        raise ConfigError(
            "CUDA graphs (mode='reduce-overhead', options={'triton.cudagraphs': True}) replay a forward without "
            "waiting for updates. Leave them out, or overlap_forward=True."
        )
    waits = inductor.Keyed(CompleteBeforeUse(tuple(crossing), len(inputs)))
    first = {replica: position for position, replica in reversed(crossing.items())}
    if next(iter(crossing.values())).config.backend == "aot_eager":
        compiled = inductor.compile_with_aot_eager(graph_module, inputs, waits)
    else:
        compiled = inductor.compile_forward_with_inductor(graph_module, inputs, waits, settings)
    if breaks:
        for replica in first:
            replica.wait_for_updates()  # code between the graphs may read any parameter, now too
    return _waiting_by_itself(compiled, tuple(first.values()), breaks=breaks, starts_here=starts_here)


def _deferring_replica_of(parameter: nn.Parameter) -> Replica | None:
    found = owners.find(parameter)
    return found[0] if found is not None and any(each.deferred for each in found[0].after.updates) else None


def _waiting_for_all(compiled: Callable[..., Any], *, starts_here: bool) -> Callable[..., Any]:
    """Code without parameters with which a forward in pieces starts: the pieces after it may read any."""

    def run(*args: Any) -> Any:
        for each in set(in_flight.values()):
            each.complete()
        note_forward(owners if starts_here else (), whole=False)
        return compiled(*args)

    return run


def _waiting_for_its_own(compiled: Callable[..., Any], parameters: tuple[int, ...]) -> Callable[..., Any]:
    """Code that does not wait by itself, as nothing of its module crosses a step.

    Dynamo may run it for another module of the class: it distinguishes parts by their hooks, but not by those that it
    does not look at (`skip_nnmodule_hook_guards`, torch 2.13).
    """

    def run(*args: Any) -> Any:
        if in_flight:
            wait_for_parameters([args[position] for position in parameters])
        return compiled(*args)

    return run


def _waiting_by_itself(
    compiled: Callable[..., Any], parameters: Sequence[int], *, breaks: bool, starts_here: bool
) -> Callable[..., Any]:
    """Code that waits for each parameter that it reads.

    `parameters`: the position of one parameter of each module among its inputs. Modules of one class share code.
    `breaks`: what follows it is not compiled, and may read anything. `starts_here`: the forward starts with it. A part
    of a forward does not show whether all of it is one graph.
    """

    def run(*args: Any) -> Any:
        replicas = [found[0] for found in (owners.find(args[position]) for position in parameters) if found is not None]
        with contextlib.ExitStack() as stack:
            for replica in replicas:
                if breaks:
                    replica.wait_for_updates()
                stack.enter_context(during(FORWARD, replica))
            if breaks or starts_here:
                note_forward(replicas, whole=not breaks)
            result = compiled(*args)
        for replica in replicas if starts_here else ():
            replica.wait_for_updates()  # what it has not read: the loss may, which has the weight of the head
        return result

    return run
