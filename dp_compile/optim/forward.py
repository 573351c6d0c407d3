"""`torch.compile(model, backend="dp_compile")`: a forward that waits for each update in front of its first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from dp_compile._torch import inductor
from dp_compile.engine.owners import owners
from dp_compile.engine.replica import Replica
from dp_compile.errors import ConfigError
from dp_compile.passes.crossing import ArriveBeforeUse


def compile_forward(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls with each graph. Compiles as the backend `inductor` does, or as the module's `config` says.

    Modules without an optimizer that overlaps the forward (`in_backward(..., overlap_forward=True)`) get the code that
    they would get from `inductor`.

    Args:
        graph_module: the graph, its parameters among the inputs.
        inputs: an example of each input.
        mode: as of `torch.compile(mode=...)`.
        options: as of `torch.compile(options=...)`.

    Raises:
        ConfigError: such an optimizer is there, and so are CUDA graphs, which would replay the forward without waiting.
    """
    crossing = [(position, found) for position, each in enumerate(inputs) if (found := _crossing_replica_of(each))]
    settings = {**({} if mode is None else inductor.options_of_mode(mode)), **(options or {})}
    if not crossing:
        return inductor.compile_forward_with_inductor(graph_module, inputs, None, settings)
    if inductor.uses_cuda_graphs(settings):
        raise ConfigError(
            "CUDA graphs (mode='reduce-overhead', options={'triton.cudagraphs': True}) replay a forward without "
            "waiting for updates. Leave them out, or overlap_forward=True."
        )
    waits = inductor.Keyed(ArriveBeforeUse(tuple(position for position, _ in crossing), len(inputs)))
    if crossing[0][1].config.backend == "aot_eager":
        compiled = inductor.compile_forward_with_aot_eager(graph_module, inputs, waits)
    else:
        compiled = inductor.compile_forward_with_inductor(graph_module, inputs, waits, settings)
    broken: Any = getattr(graph_module, "compile_subgraph_reason", None)
    is_whole = broken is not None and not broken.graph_break
    if not is_whole:
        crossing[0][1].arrive()  # what is between the graphs may read what it likes, now too
    return _noting(compiled, crossing[0][0], is_whole=is_whole)


def _crossing_replica_of(value: Any) -> Replica | None:
    found = owners.find(value) if isinstance(value, nn.Parameter) else None
    return found[0] if found is not None and any(each.crossing for each in found[0].updates) else None


def _noting(compiled: Callable[..., Any], parameter: int, *, is_whole: bool) -> Callable[..., Any]:
    """Code of a forward that says of itself when it runs.

    Args:
        compiled: the code.
        parameter: the position of a parameter among its inputs. Modules of one class share code.
        is_whole: it is all of a frame; else what is between it and the next graph is not compiled.
    """

    def run(*args: Any) -> Any:
        found = owners.find(args[parameter])
        if found is not None:
            if not is_whole:
                found[0].arrive()
            for each in found[0].updates:
                if each.crossing is not None:
                    each.crossing.forward_runs(whole=is_whole)
        return compiled(*args)

    return run
