"""`torch.compile(model, backend="dp_compile")`: a forward that waits for each update before it reads the parameter."""

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
from dp_compile.replica.replica import owners


def compile_forward(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo with Inductor, or with `aot_eager` if the config says so and updates are deferred.

    Without deferred updates (`in_backward(..., overlap_forward=True)`), the code waits at its start if any work is in
    flight.

    Args:
        graph_module: the graph, whose inputs include the parameters.
        inputs: an example of each input.
        mode: as in `torch.compile(mode=...)`.
        options: as in `torch.compile(options=...)`.

    Raises:
        ConfigError: updates are deferred and CUDA graphs are on, which would replay the forward without waiting.
    """
    parameters = {position: each for position, each in enumerate(inputs) if isinstance(each, nn.Parameter)}
    owned = {position: found[0] for position, each in parameters.items() if (found := owners.find(each))}
    crossing = {position: each for position, each in owned.items() if any(one.deferred for one in each.after.updates)}
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
            "waiting for updates. Leave out CUDA graphs or overlap_forward=True."
        )
    waits = inductor.Keyed(CompleteBeforeUse(tuple(crossing), len(inputs)))
    first = {replica: position for position, replica in reversed(crossing.items())}
    if next(iter(crossing.values())).config.backend == "aot_eager":
        compiled = inductor.compile_with_aot_eager(graph_module, inputs, waits)
    else:
        compiled = inductor.compile_forward_with_inductor(graph_module, inputs, waits, settings)
    if breaks:
        for replica in first:
            replica.wait_for_updates()  # uncompiled code between the graphs may read any parameter, in this call too
    return _waiting_by_itself(compiled, tuple(first.values()), breaks=breaks, starts_here=starts_here)


def _waiting_for_all(compiled: Callable[..., Any], *, starts_here: bool) -> Callable[..., Any]:
    """Wrap code that starts a forward: complete all work in flight first, as later graphs may read any parameter."""

    def run(*args: Any) -> Any:
        for each in set(in_flight.values()):
            each.complete()
        note_forward(owners if starts_here else (), whole=False)
        return compiled(*args)

    return run


def _waiting_for_its_own(compiled: Callable[..., Any], parameters: tuple[int, ...]) -> Callable[..., Any]:
    """Wrap compiled code of a module without deferred updates: if any updates are in flight, wait for those it reads.

    Dynamo may run the code for another module of the same class, because its guards skip some hooks
    (`skip_nnmodule_hook_guards`, torch 2.13).
    """

    def run(*args: Any) -> Any:
        if in_flight:
            wait_for_parameters([args[position] for position in parameters])
        return compiled(*args)

    return run


def _waiting_by_itself(
    compiled: Callable[..., Any], parameters: Sequence[int], *, breaks: bool, starts_here: bool
) -> Callable[..., Any]:
    """Wrap compiled code that has ops to wait for each parameter that it reads.

    `parameters`: input position of one parameter of each module, to find the module: modules of one class share code.
    `breaks`: uncompiled code follows and may read any parameter. `starts_here`: the forward starts with this code; a
    later graph cannot tell whether the forward is one graph.
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
            replica.wait_for_updates()  # parameters not read so far: the loss may read the weight of the head
        return result

    return run
