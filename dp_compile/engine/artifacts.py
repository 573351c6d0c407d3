"""Compiled backwards that run without Dynamo: in later backwards, and in later processes, which find them again.

A captured graph whose code is kept skips Dynamo, AOTAutograd, the passes and Inductor. In each backward, what Dynamo
would have checked is checked here (`Fits`), and what its bytecode does around the compiled graph, putting gradients
where they belong, is done here (`Ready`), as it was seen to be done in the backward that compiled. Both take a part of
the time that they take Dynamo.

How could that be wrong without a word? By a key that does not tell two backwards apart. So everything that is traced
has to have a text (`fx/canonical.py`): a graph that runs code of the user's, or anything else whose source is not in
the key, is never kept. The rank is not in the key: what ranks do differs in nothing that is compiled.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from dp_compile._torch import artifacts, distributed, dynamo, inductor
from dp_compile._torch.artifacts import Fits as Fits
from dp_compile._torch.artifacts import NotKept as NotKept
from dp_compile._torch.artifacts import Taken
from dp_compile.config import has_address
from dp_compile.engine.artifact_files import GRAPH, Key, read, write
from dp_compile.engine.artifact_files import Miss as Miss
from dp_compile.engine.binding import Binding
from dp_compile.engine.reduced_graph import CapturedGraph, ToReduce
from dp_compile.engine.replica import Replica
from dp_compile.fx.canonical import NoText, digest, name_of_function, text_of
from dp_compile.fx.collectives import is_collective
from dp_compile.fx.printer import is_op
from dp_compile.passes.pipeline import SOURCES

_NAMESPACES: Final = ("aten", "prims", "_c10d_functional", "dp_compile")
_HOMES: Final = ("dp_compile", "torch", "_operator", "math")


used: Final[set[str]] = set()
"""The files that this process has read or written, below `directory`."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a compiled backward.

    `places` belong to what the code returns, in its order: the position of the parameter in the inputs whose gradient
    it is, or, below zero, `-1 - n` for the `n`th of what is returned. `log` is what the process that compiled noted.
    """

    code: bytes
    places: tuple[int, ...]
    log: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """Code of a backward that needs no Dynamo. `places`: see `Kept`; `constants`: what it takes behind the inputs."""

    code: Callable[..., Sequence[Any]]
    fits: Callable[[Sequence[Any]], bool]
    places: tuple[int, ...]
    constants: tuple[torch.Tensor, ...] = ()

    def run(self, inputs: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """One backward, whose inputs fit; empties their list."""
        parameters = {place: inputs[place] for place in self.places if place >= 0}
        return [], self._put(parameters, self.code(inputs, *self.constants))

    def _put(self, parameters: Mapping[int, torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What Dynamo's bytecode does with the outputs: gradients to their parameters; the rest is returned."""
        returned: dict[int, torch.Tensor] = {}
        for place, output in zip(self.places, outputs, strict=True):
            if place >= 0:
                parameters[place].grad = output
            else:
                returned[-1 - place] = output
        return [returned[number] for number in sorted(returned)]


@dataclass(slots=True)
class Found:
    """A kept backward. `log`: what the process that compiled it noted; `seconds`: what finding it took."""

    code: Callable[[list[Any]], Sequence[Any]]
    places: tuple[int, ...]
    log: Any
    seconds: float


def directory() -> Path:
    """Where backwards are kept: beside what torch keeps."""
    return artifacts.directory() / "dp_compile" / "backwards"


def why_off(backend: str) -> str:
    """Why nothing is kept, whatever the graph; empty if something may be."""
    return artifacts.why_caches_are_off() if backend == "inductor" else f"the backend {backend} generates no code"


@contextlib.contextmanager
def taking(graph_module: fx.GraphModule) -> Iterator[Taken]:
    """Around the compilation of a graph that Dynamo made: what can be kept of it, if it takes one list of tensors."""
    with artifacts.taking() as taken:
        yield taken
    why = _why_not_one_list(graph_module.graph)
    if why and not taken.why_not:
        taken.why_not = why


def takes_list_first(graph: fx.Graph) -> bool:
    """Whether a graph that Dynamo made of a plain one takes a list of tensors, and then nothing but constants."""
    first, *others = [each.meta.get("example_value") for each in graph.find_nodes(op="placeholder")] or [None]
    are_tensors = all(isinstance(each, torch.Tensor) for each in [*(first or ()), *others])
    return isinstance(first, list) and are_tensors and not graph.find_nodes(op="get_attr")


def _why_not_one_list(graph: fx.Graph) -> str:
    given = graph.find_nodes(op="placeholder")
    example = given[0].meta.get("example_value") if given else None
    if len(given) != 1 or not isinstance(example, list) or graph.find_nodes(op="get_attr"):
        return "it takes more than one list of tensors"
    sizes = [size for each in example if isinstance(each, torch.Tensor) for size in (*each.shape, *each.stride())]
    if not all(isinstance(each, torch.Tensor) for each in example) or any(type(size) is not int for size in sizes):
        return "its shapes are dynamic"
    return ""


def find(key: Key) -> Found:
    """A kept backward.

    Raises:
        Miss: there is none, or it does not work.
    """
    start = time.perf_counter()
    content = read(directory(), key)
    try:
        kept = pickle.loads(content)
        if type(kept) is not Kept:
            raise Miss("the entry is one of something else")
        run = artifacts.load(kept.code)
    except Miss:
        raise
    except Exception as error:  # whatever a cache of torch, a pickle or a file that is gone have against it
        raise Miss(f"the entry cannot be loaded: {type(error).__name__} {str(error).strip()[:80]}".rstrip()) from error
    used.add(key.file().as_posix())
    return Found(run, kept.places, kept.log, time.perf_counter() - start)


def keep(key: Key, kept: Kept) -> str:
    """Keep a backward. What happened, in words."""
    try:
        write(directory(), key, pickle.dumps(kept))
    except (OSError, pickle.PicklingError, TypeError, AttributeError) as error:
        return f"not kept: {str(error).strip()[:80]}"
    used.add(key.file().as_posix())
    return "kept now"


def places_of(
    parameters: Mapping[int, torch.Tensor], outputs: Sequence[Any], returned: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Where the outputs of code went, as was seen in a backward that it just ran.

    Raises:
        NotKept: some went nowhere, or something did not come from there.
    """
    gradients = {id(each.grad): position for position, each in parameters.items() if each.grad is not None}
    others = {id(each): number for number, each in enumerate(returned)}
    places = []
    for output in outputs:
        if id(output) not in gradients and id(output) not in others:
            raise NotKept("one of its results goes to neither a gradient nor to us")
        places.append(gradients[id(output)] if id(output) in gradients else -1 - others[id(output)])
    if len({*places}) != len(places) or len(places) != len(gradients) + len(others):
        raise NotKept("some of its gradients are none of its results")
    return tuple(places)


def remembered(key: Key, compute: Callable[[], Any]) -> Any:
    """Something small that follows from a key: found, or computed and kept."""
    with contextlib.suppress(Exception):  # a miss, of whatever kind
        value = pickle.loads(read(directory(), key))
        used.add(key.file().as_posix())
        return value
    value = compute()
    with contextlib.suppress(OSError):
        write(directory(), key, pickle.dumps(value))
        used.add(key.file().as_posix())
    return value


def key_of_estimates(graph: fx.Graph, binding: Binding, inputs: Sequence[Any], rest: Sequence[Any]) -> Key:
    """All that a captured graph's estimates of ready times depend on.

    Raises:
        NotKept: it has no text.
    """
    sent = filter(is_collective, graph.nodes)
    return Key(
        {
            GRAPH: digest("estimates", text_of_captured(graph)),
            "inputs": digest(*map(_text_of_input, inputs), repr(rest)),
            "groups": digest(*(str(distributed.group_of_name(str(each.args[-1])).size()) for each in sent)),
            "binding": digest(repr(binding)),
            "dp_compile": inductor.source_hash(SOURCES),
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "Python": sys.version,
        }
    )


# --- the key ------------------------------------------------------------------------------------------------------


def key_of(
    captured: CapturedGraph,
    replicas: Sequence[Replica],
    wanted: ToReduce,
    inputs: Sequence[Any],
    graph_pass: inductor.CustomGraphPass,
) -> Key:
    """All that the code of a backward depends on.

    Args:
        captured: the graph of compiled autograd. What `with_reductions` makes of it follows from the rest.
        replicas: the modules in it.
        wanted: what is reduced.
        inputs: of this backward, with ours.
        graph_pass: what Inductor runs last.

    Raises:
        NotKept: it cannot be kept.
    """
    check_plain(captured, replicas, wanted)
    graph = text_of_captured(captured.graph_module.graph)
    passes = graph_pass.uuid()
    if passes is None:
        raise NotKept("the source of a pass is not known")
    devices = sorted({each.device for each in inputs if isinstance(each, torch.Tensor)}, key=str)
    surroundings = artifacts.surroundings(inductor.patches_of(graph_pass), devices)
    return Key(
        {
            GRAPH: digest(graph),
            "inputs": digest(*map(_text_of_input, inputs)),
            "ranks": ", ".join(str(replica.group.world_size) for replica in replicas),
            "plans": digest(*(repr(replica.plan.for_code()) for replica in replicas)),
            "options": digest(*map(_options_of, replicas)),
            "what is reduced": repr((wanted.synced, wanted.deferred)),
            "what is unused": digest(*_texts_of_unused(replicas, wanted)),
            "binding": digest(repr(captured.binding.hooked), str(captured.input_count)),
            "passes": digest(repr(passes)),
            "dp_compile": inductor.source_hash(SOURCES),
            "Python": f"{platform.python_implementation()} {sys.version}",
            "machine": platform.machine(),
            **surroundings,
        }
    )


def check_plain(captured: CapturedGraph, replicas: Sequence[Replica], wanted: ToReduce) -> None:
    """Whether `Fits` and `Ready` know all that Dynamo does with a captured graph in each backward.

    Raises:
        NotKept: there is more to it: code of the user's runs in it, or it takes something else than tensors.
    """
    if any(captured.binding.into_existing) or captured.binding.kept or captured.sites.unhooked:
        raise NotKept("gradients are added to those of before")
    if None in captured.binding.hooked:
        raise NotKept("a hook of the user's runs in it")
    if wanted.updates or any(replica.after.scattered or replica.is_mixed for replica in replicas):
        raise NotKept("an optimizer takes part in it")
    if any(replica.dtensors for replica in replicas):
        raise NotKept("a DTensor takes part in it")
    if any(replica.comm_hook is not None for replica in replicas):
        raise NotKept("a comm hook takes part in it")
    graph = captured.graph_module.graph
    _check_inputs(graph)
    try:
        for node in graph.nodes:
            if node.op == "call_function" and not is_op(node.target):
                _name_of(node)
            elif node.op in ("call_method", "call_module"):
                raise NoText(f"a {node.op} node")
    except NoText as error:
        raise NotKept(f"it has {error}") from error


def text_of_captured(graph: fx.Graph) -> str:
    """A text of a captured graph, in which calls of hooks behind an accumulation stand for whatever these do.

    Raises:
        NotKept: it has none, or runs code of the user's in it.
    """
    _check_inputs(graph)
    _check_ops(graph)
    try:
        return text_of(graph, _name_of)
    except NoText as error:
        raise NotKept(f"it has {error}") from error


def _texts_of_unused(replicas: Sequence[Replica], wanted: ToReduce) -> Iterator[str]:
    for ordinal, indices in sorted(wanted.unused.items()):
        for index in indices:
            parameter = replicas[ordinal].parameters[index]
            yield repr((ordinal, index, tuple(parameter.shape), parameter.dtype, parameter.device))


def _options_of(replica: Replica) -> str:
    # The divisor is in the plan, as far as code depends on it.
    options = repr(replace(replica.config, gradient_divide_factor=None))
    if has_address(options):
        raise NotKept("an option has an address in its repr")
    return options


def _text_of_input(value: Any) -> str:
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
        raise NotKept(f"an input is a {type(value).__name__}")
    if value.is_conj() or value.is_neg() or value.is_quantized:
        raise NotKept("an input is a view that is computed when it is read")
    sizes = (tuple(value.shape), value.stride(), value.storage_offset())
    return repr((type(value).__name__, value.dtype, value.device, value.requires_grad, value.is_leaf, *sizes))


def _name_of(node: fx.Node) -> str | None:
    """A name for what a captured graph calls, if all that it does is in some key.

    Raises:
        NoText: it runs code that is not known, of the user's or of another package.
    """
    if artifacts.is_prologue(node):
        try:
            return f"prologue {artifacts.text_of_prologue(node)}"
        except NotKept as error:
            raise NoText(str(error)) from error
    if _is_hook_behind(node):
        return "hook"
    named = artifacts.name_of_op(node.target)
    if named is not None:
        return named
    function = name_of_function(node.target)
    if function is not None and function.partition(":")[0].partition(".")[0] in _HOMES and _runs_no_other(node):
        return function
    raise NoText(f"a call of {getattr(node.target, '__name__', node.target)!s}, whose source is in no key")


def _check_inputs(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="placeholder"):
        reads = [user for user in node.users if user.users or user.target is not operator.getitem]
        if node.target == "hooks":
            reads = [read for read in reads if not all(map(_is_hook_behind, read.users))]
        if node.target != "inputs" and reads:
            raise NotKept(f"it takes {node.target}, beside tensors")


def _is_hook_behind(node: fx.Node) -> bool:
    """Whether a call is of a hook behind an accumulation: ours, which are taken out, or one that the binding tells."""
    return node.target is dynamo.call_hook and node.kwargs.get("hook_type") == "post_acc_grad_hook"


def _check_ops(graph: fx.Graph) -> None:
    """Refuse ops that are not torch's own, or ours: what they do may change, and their names do not.

    Raises:
        NotKept: there is one.
    """
    for node in graph.nodes:
        if is_op(node.target) and str(node.target).partition(".")[0] not in _NAMESPACES:
            raise NotKept(f"it has an op of another package, {node.target}")


def _runs_no_other(node: fx.Node) -> bool:
    """Whether a function of torch's calls none that it is given: a hook, or an autograd function of the user's."""
    return node.target not in (dynamo.call_hook, dynamo.call_backward)
