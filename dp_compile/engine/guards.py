"""Guards of a module between backwards: is it the one that was replicated, equal on all ranks, with finite gradients?

- Intact: parameters may be replaced, added, unfrozen or moved. A captured backward is looked at when its graph or the
  tensors in it are new (`hooks.check_gradients_have_hooks`, `compilation`), every other one before it runs. A walk
  through a large module takes milliseconds, so it is done when a short look finds other objects than at the last one.
- Equal: a rank that loads weights alone, or sets gradients by hand, trains another model without an error. After a
  synchronised backward a sum over the bits of each parameter is all-reduced (maximum and minimum); the next one looks
  at the result. How often is agreed from what it costs: at most `SHARE` of the time.
- Finite: with `check_nan`.
"""

from __future__ import annotations

import logging
import math
import platform
import statistics
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch.dtensors import groups_that_shard, own_part
from dp_compile.config import CHECK_VARIABLE, check_parameters_every
from dp_compile.engine.gradients import dense_strides, own_view
from dp_compile.engine.module_names import fully_qualified
from dp_compile.engine.owners import owners
from dp_compile.engine.plan_sync import decide, exchange, meeting, table_in_backward
from dp_compile.engine.replica import Replica
from dp_compile.errors import DesyncError, ReductionError

_FROZEN: Final = (
    "It was frozen (requires_grad=False) when replicate() was called, so it has no hook. Unfreeze before replicate()."
)
_REPLACED: Final = (
    "The parameter was replaced after replicate() was called, so the new one has no hook. Copy values into the old one "
    "(parameter.data.copy_()), or replace it before replicate()."
)
_ADDED: Final = (
    "The parameter was added after replicate() was called, so it has no hook. Add it before replicate(), or call "
    "unreplicate() and replicate() again."
)
_SHARE: Final = 1e-3
"""The part of its time that a process may spend on looking at parameters that were met before."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What a module holds at one moment. Equal looks: nothing that is checked here has changed between them."""

    modules: tuple[weakref.ref[nn.Module], ...] = field(compare=False)
    held: list[int]
    """How many modules are alive, which makes identities safe; parameters and submodules by identity."""
    trainable: list[bool]
    kinds: list[Any]
    """Dtypes and devices of the parameters that were replicated."""
    replicas: int


@dataclass(slots=True)
class _Others:
    """Parameters that were met in backwards, and are not of the module."""

    known: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    look: _Look | None = None
    look_again_at: float = 0.0

    def add(self, tensors: Collection[torch.Tensor]) -> None:
        self.known = {key: ref for key, ref in self.known.items() if ref() is not None}
        self.known.update((id(tensor), weakref.ref(tensor)) for tensor in tensors)


_intact: Final[weakref.WeakKeyDictionary[Replica, _Look]] = weakref.WeakKeyDictionary()
"""The look at each module when it was found intact."""
_others: Final[weakref.WeakKeyDictionary[Replica, _Others]] = weakref.WeakKeyDictionary()


def check_intact(replica: Replica) -> None:
    """Compare the module with what was replicated.

    Raises:
        ReductionError: a parameter was replaced, added, unfrozen or moved.
    """
    if not replica.config.check_reductions:
        return
    before = _intact.get(replica)
    if before is not None and _look(replica, before.modules) == before:
        return
    _check(replica)
    _intact[replica] = _look(replica, _modules(replica))


def _modules(replica: Replica) -> tuple[weakref.ref[nn.Module], ...]:
    root = replica.outline.root()
    modules = [] if root is None else list(root.modules())
    modules += [owner for place in replica.parameter_places if (owner := place.owner()) is not None]
    return tuple(map(weakref.ref, dict.fromkeys(modules)))


def _look(replica: Replica, modules: tuple[weakref.ref[nn.Module], ...]) -> _Look:
    """Half a millisecond for a thousand modules."""
    alive = [module for ref in modules if (module := ref()) is not None]
    parameters = [each for module in alive for each in module._parameters.values() if each is not None]
    children = [id(child) for module in alive if (below := module._modules) for child in below.values()]
    held = [len(alive), *map(id, parameters), *children]
    kinds = [*map(attrgetter("dtype"), replica.parameters), *map(attrgetter("is_cpu"), replica.parameters)]
    return _Look(modules, held, list(map(attrgetter("requires_grad"), parameters)), kinds, len(owners))


def _check(replica: Replica) -> None:
    check_not_moved(replica)
    _refuse(_FROZEN, [name for name, parameter in replica.frozen if parameter.requires_grad])
    _refuse(_REPLACED, [name for name, _ in _strangers(replica)])
    _refuse(_ADDED, [name for name, _ in _added(replica)])


def check_not_moved(replica: Replica) -> None:
    """Compare dtypes and devices with those of the plan.

    Raises:
        ReductionError: a parameter has another dtype, or is on another type of device.
    """
    for gradient in replica.plan.gradients:
        if gradient.index == len(replica.parameters):
            continue
        parameter = replica.parameters[gradient.index]
        dtype, device = str(parameter.dtype.to_real()).removeprefix("torch."), parameter.device.type
        if (dtype, device) != (gradient.key.dtype, gradient.key.device):
            change = (
                f"{gradient.name} is on {device}, it was on {gradient.key.device}"
                if device != gradient.key.device
                else f"{gradient.name} is {dtype}, it was {gradient.key.dtype}"
            )
            raise ReductionError(
                f"{change} when replicate() was called. Move or convert the module before replicate(), or call "
                "unreplicate(), change it, and call replicate() again."
            )


def refuse_unreduced(replica: Replica, accumulated: Collection[torch.Tensor]) -> None:
    """Refuse gradients of the module that no hook reduces.

    Args:
        accumulated: tensors that get a gradient and have no hook of the replica.

    Raises:
        ReductionError: one of them was frozen when the module was replicated, or replaced a parameter since, or was
            added since.
    """
    others = _others.get(replica) or _others.setdefault(replica, _Others())
    known, start_s = others.known, time.monotonic()
    new = [tensor for tensor in accumulated if (ref := known.get(id(tensor))) is None or ref() is not tensor]
    if not new and start_s < others.look_again_at:
        return
    look = _look(replica, _modules(replica))
    if look != others.look:
        new = list(accumulated)
    ours = {*look.held, *(id(parameter) for _, parameter in replica.frozen)}
    _refuse_those(replica, {id(tensor) for tensor in new} & ours)
    others.look = look
    others.add(new)
    others.look_again_at = start_s + (time.monotonic() - start_s) / _SHARE


def _refuse_those(replica: Replica, present: Collection[int]) -> None:
    """Refuse gradients of tensors with these identities."""
    if not present:
        return
    _refuse(_FROZEN, [name for name, parameter in replica.frozen if id(parameter) in present])
    _refuse(_REPLACED, [name for name, parameter in _strangers(replica) if id(parameter) in present])
    _refuse(_ADDED, [name for name, parameter in _added(replica) if id(parameter) in present])


def _refuse(why: str, names: Sequence[str]) -> None:
    if names:
        raise ReductionError(f"not reduced: {', '.join(names[:8])}. {why}")


def _strangers(replica: Replica) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters that stand where others stood when the module was replicated."""
    known = _known(replica)
    for place in replica.parameter_places:
        parameter = place.find()
        if parameter is not None and parameter.requires_grad and id(parameter) not in known:
            yield place.name, parameter


def _added(replica: Replica) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters under new names, as adapters bring them. Not those that somebody else keeps in step."""
    outline, known = replica.outline, _known(replica)
    root = outline.root()
    left_alone = {id(module) for each in outline.left_alone for module in each.modules()}
    for prefix, owner in () if root is None else root.named_modules():
        for attribute, parameter in () if id(owner) in left_alone else owner.named_parameters(recurse=False):
            name = fully_qualified(f"{prefix}.{attribute}" if prefix else attribute)
            is_new = name not in outline.names and id(parameter) not in known
            if is_new and parameter.requires_grad and owners.find(parameter) is None:
                yield name, parameter


def _known(replica: Replica) -> set[int]:
    return {id(parameter) for parameter in (*replica.parameters, *(parameter for _, parameter in replica.frozen))}


logger = logging.getLogger("dp_compile.guards")

SHARE: Final = 1e-3
"""Of the training time, for all comparisons together."""
TRIED_AFTER: Final = (3, 5)
"""The first synchronised backwards compile; the first comparison loads kernels, so the better one of two counts."""
DECIDED_AFTER: Final = 8
"""Backends whose all-reduce leaves the same bits on every rank."""
_WORDS_IN_A_ROW: Final = 1024
_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, and without a pattern: Fibonacci hashing


def compare_first_step(replica: Replica, tell: Callable[[Replica, str], None]) -> None:
    """Compare parameters once at the end of the second synchronised backward, when the first step has been.

    Not at the end of the step itself: nobody knows what belongs to it, a sharded optimizer sends its part afterwards.

    Args:
        replica: whose parameters.
        tell: is called with it then, and with what was found, in words. It must not hold the replica.
    """
    _first_steps[replica] = tell


def check_parameters(replica: Replica) -> None:
    """Called after each synchronised backward, on every rank after the same ones.

    Raises:
        DesyncError: on every rank, parameters differ; the text names the first one and the ranks.
    """
    if replica in _first_steps and replica.history.synced_backwards >= 2 and not replica.rehearses:
        tell = _first_steps.pop(replica)
        tell(replica, _first_step_in_words(replica))
    if not _is_wanted(replica):
        return
    if (comparisons := _comparisons.get(replica)) is None:
        comparisons = _comparisons[replica] = _Comparisons(check_parameters_every())
    comparisons.after_backward(replica)


def _is_wanted(replica: Replica) -> bool:
    """Not where ranks have run out of inputs: those do not step. Unasked only where nothing else may be meant."""
    every = check_parameters_every()
    checks = replica.config.check_reductions and replica.group.has_others
    if every == 0 or replica.uneven is not None or not checks:
        return False
    return every is not None or (replica.called_hook is None and replica.group.backend.equal_bits)


@dataclass(eq=False, slots=True)
class _Flight:
    """Sums on their way: those of this rank, and the largest and the inverse of the smallest of all ranks."""

    after: int
    indices: tuple[int, ...]
    own: torch.Tensor
    reduced: torch.Tensor
    work: dist.Work | None
    events: tuple[torch.Event, ...]
    host_s: float

    def read(self) -> tuple[list[int], float]:
        """Which places of `own` are not the same on all ranks, and the seconds that all of it has taken."""
        start_s = time.perf_counter()
        if self.work is not None:
            self.work.wait()
        device_s = 0.0
        if self.events:
            self.events[-1].synchronize()
            device_s = self.events[0].elapsed_time(self.events[1]) / 1e3
        largest, smallest = self.reduced.cpu()[0], ~self.reduced.cpu()[1]
        differing: list[int] = (largest != smallest).nonzero().flatten().tolist()
        return differing, self.host_s + device_s + time.perf_counter() - start_s


@dataclass(eq=False, slots=True)
class _Comparisons:
    """The comparisons of one replica, which is not held. `every`: `None` until that is decided, 0 if they are off."""

    every: int | None
    backwards: int = 0
    """A count that never goes back, unlike `synced_backwards`: the same on every rank."""
    flight: _Flight | None = None
    costs_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def after_backward(self, replica: Replica) -> None:
        self.backwards += 1
        if self.every == 0:
            return
        if self.flight is not None:
            flight, self.flight = self.flight, None
            self._read(flight, replica)
        if self.every is None:
            self._measure(replica)
        if self.backwards in TRIED_AFTER if self.every is None else self.every and self.backwards % self.every == 0:
            self.flight = _launch(replica, self.backwards)

    def _read(self, flight: _Flight, replica: Replica) -> None:
        differing, cost_s = flight.read()
        self.costs_s.append(cost_s)
        if differing[:1] == [0] and check_parameters_every() is None:
            self.every = 0
            logger.warning(
                "parameters are not compared between ranks: machines, numbers of threads or builds of torch differ, so "
                f"optimizers may round differently. {CHECK_VARIABLE}=100 compares them nevertheless."
            )
        elif parameters := [place - 1 for place in differing if place]:
            raise DesyncError(_describe(replica, flight, parameters))

    def _measure(self, replica: Replica) -> None:
        self.ends_s.append(time.perf_counter())
        if self.backwards < DECIDED_AFTER:
            return
        ends_s = self.ends_s[TRIED_AFTER[0] - 1 :]
        step_s = statistics.median(after - before for before, after in pairwise(ends_s))
        often = how_often(min(self.costs_s), step_s)
        self.every = int(decide(table_in_backward(replica), meeting(replica, "comparisons"), often))
        self.ends_s.clear()
        logger.info("parameters are compared between ranks after each %d synchronised backwards", self.every)


def how_often(cost_s: float, step_s: float) -> int:
    """After how many steps to do something once, so that it takes `SHARE` of the time."""
    return max(1, math.ceil(cost_s / (SHARE * max(step_s, 1e-6))))


_comparisons: Final[weakref.WeakKeyDictionary[Replica, _Comparisons]] = weakref.WeakKeyDictionary()
_first_steps: Final[weakref.WeakKeyDictionary[Replica, Callable[[Replica, str], None]]] = weakref.WeakKeyDictionary()


def _first_step_in_words(replica: Replica) -> str:
    """Compare now, and wait for it; where no rank may expect equal bits, only say why.

    Raises:
        DesyncError: as `check`.
    """
    if why := _no_equal_bits(replica):
        return f"parameters were not compared between ranks: {why}"
    flight = _launch(replica, replica.history.synced_backwards)
    differing, _ = flight.read()
    if differing[:1] == [0]:
        return "parameters were not compared between ranks: machines, numbers of threads or builds of torch differ"
    if differing:
        raise DesyncError(_describe(replica, flight, [place - 1 for place in differing]))
    return f"parameters are equal on {replica.group.world_size} ranks"


def _no_equal_bits(replica: Replica) -> str:
    reasons = {
        f"{CHECK_VARIABLE} is 0": check_parameters_every() == 0,
        "there is one rank": not replica.group.has_others,
        "inputs may be uneven": replica.uneven is not None,
        "only the comm hook knows what they should be": replica.called_hook is not None,
        f"{replica.group.backend} may leave other bits on each rank": not replica.group.backend.equal_bits,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _launch(replica: Replica, after: int) -> _Flight:
    start_s, device = time.perf_counter(), replica.device
    events = tuple(torch.Event(device, enable_timing=True) for _ in range(2)) if device.type != "cpu" else ()
    for event in events[:1]:
        event.record()
    indices = _compared(replica)
    with torch.no_grad():
        sums = fingerprints([replica.parameters[index] for index in indices])
        own = torch.cat([torch.tensor([_facts(device)], device=device), sums])
        reduced = torch.stack([own, ~own])
        work = dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=replica.group.process_group, async_op=True)
        if events and replica.group.backend.on_stream:
            assert work is not None
            work.wait()  # on the device, not here
            work, on_host = None, torch.empty(reduced.shape, dtype=reduced.dtype, pin_memory=True)
            reduced = on_host.copy_(reduced, non_blocking=True)
    for event in events[1:]:
        event.record()
    return _Flight(after, indices, own, reduced, work, events, time.perf_counter() - start_s)


def _compared(replica: Replica) -> tuple[int, ...]:
    """All trainable parameters but embeddings with a largest norm: a forward shortens the rows that its rank uses.

    Tensors of classes of their own may not have bits that could be looked at.
    """
    owners = [owner for place in replica.parameter_places if (owner := place.owner()) is not None]
    shortened = {
        id(owner.weight)
        for owner in owners
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None
    }
    return tuple(
        index
        for index, parameter in enumerate(replica.parameters)
        if id(parameter) not in shortened and type(own_part(parameter).detach()) is torch.Tensor
    )


def _facts(device: torch.device) -> int:
    """What decides how an optimizer rounds, beside its inputs."""
    of_device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    of_host = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    return zlib.crc32(repr((torch.__version__, torch.version.git_version, of_device, of_host)).encode())


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number for each tensor, `(len(tensors),)` int64 on their device: equal for equal bits, else next to never.

    Integers are added up, so the order of additions does not matter. Sums of rows and of columns count with factors of
    their own: values that changed places change the number.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    words = [_words(tensor.detach()) for tensor in tensors]
    longest = max(map(len, words)) // _WORDS_IN_A_ROW + 2 * _WORDS_IN_A_ROW
    factors = (2 * torch.arange(longest, device=tensors[0].device) + 1) * _FACTOR
    return torch.stack([_fingerprint(each, factors) for each in words])


def _fingerprint(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    whole = len(words) - len(words) % _WORDS_IN_A_ROW
    sums = words
    if whole:
        rows = words[:whole].view(-1, _WORDS_IN_A_ROW)
        sums = torch.cat([rows.sum(1), rows.sum(0), words[whole:]])
    return (sums * factors[: len(sums)]).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor in its memory order, as int64: the only integers that torch adds up at memory's speed."""
    tensor = own_view(tensor)  # no integer is as wide as a complex128
    if dense_strides(tensor) != tensor.stride():
        tensor = tensor.contiguous()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(bits)
    in_a_word = 8 // tensor.element_size()
    if len(flat) % in_a_word or flat.storage_offset() % in_a_word:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % in_a_word))
    return flat.view(torch.int64)


def _describe(replica: Replica, flight: _Flight, places: Sequence[int]) -> str:
    """Which parameter, on which ranks: asked in the store, for it is said once in a run."""
    first, own = flight.indices[places[0]], int(flight.own[places[0] + 1])
    said = exchange(table_in_backward(replica), meeting(replica, "differing parameters"), own)
    usual = Counter(said).most_common(1)[0][0]
    others = [rank for rank, each in enumerate(said) if each != usual]
    same = [rank for rank, each in enumerate(said) if each == usual]
    more = f", and {len(places) - 1} more" if len(places) > 1 else ""
    return (
        f"parameters differ between ranks after {flight.after} synchronised backwards: {replica.names[first]} on "
        f"{_ranks(others)} is not what it is on {_ranks(same)}{more}. Something changed parameters on some ranks only, "
        "or differently: weights that one rank loaded or edited alone, gradients that were set by hand "
        "(torch.autograd.grad) and so not reduced, a step that some ranks skipped. Load on every rank, reduce such "
        f"gradients with torch.distributed.all_reduce, or set {CHECK_VARIABLE}=0 if that is meant."
    )


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


def check_finite(replica: Replica, reduced: Mapping[str, torch.Tensor], outputs: Sequence[Any]) -> None:
    """Raise on every rank if a reduced gradient holds a NaN or an infinity. Reads one number back from the device.

    The sum of a bucket is not finite on all ranks as soon as one rank's contribution was not, so all ranks decide the
    same without a word. Only then they tell each other through the store what their backwards started from.

    Ranks that hold other parts of DTensors have other sums, and are asked: those that went on would wait for the others
    in the next collective of theirs.

    Raises:
        ReductionError: names the parameters, and the ranks whose loss was not finite.
    """
    if _all_finite(replica, list(reduced.values())):
        return
    names = [f"{name} ({_kind(grad)})" for name, grad in reduced.items() if _kind(grad)]
    names = names or ["parts of DTensors that other ranks hold"]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise ReductionError(f"reduced gradients are not finite: {', '.join(names[:8])}{more}. {_origin(replica, outputs)}")


def _all_finite(replica: Replica, grads: Sequence[torch.Tensor]) -> bool:
    checks = [grad.isfinite().all() for grad in grads]
    finite = torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=replica.device)
    beside = dict.fromkeys(group for parameter in replica.parameters for group in groups_that_shard(parameter))
    if not beside:
        return bool(finite)
    said = finite.int()
    for group in beside:
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=group)
    return bool(said)


def _kind(grad: torch.Tensor) -> str:
    """Empty for a finite tensor."""
    return "nan" if bool(grad.isnan().any()) else "inf" if bool(grad.isinf().any()) else ""


def _origin(replica: Replica, outputs: Sequence[Any]) -> str:
    finite = all(bool(each.isfinite().all()) for each in outputs if isinstance(each, torch.Tensor))
    said = exchange(table_in_backward(replica), meeting(replica, "finite"), finite)
    culprits = [rank for rank, each in enumerate(said) if not each]
    if culprits:
        return f"The loss was not finite on rank(s) {', '.join(map(str, culprits))} of the group."
    wire = replica.config.wire_dtype(replica.parameters)
    sent = f", or a gradient is too large for {str(wire).removeprefix('torch.')}, in which they travel" if wire else ""
    return (
        f"The loss was finite on every rank: a backward made them, or their sum is too large for the dtype{sent}. "
        "torch.autograd.set_detect_anomaly(True) names the operation, if a backward did."
    )
