"""Checks that a module is unchanged since `replicate`, equal on all ranks, and has finite gradients.

- Unchanged: no parameter was replaced, added, unfrozen or moved. A captured backward is checked when its graph or its
  tensors are new (`check_gradients_have_hooks`, `compile.py`), an eager one before it runs. A walk through a large
  module takes milliseconds, so it happens only if a quick snapshot of the module's objects has changed.
- Equal: if one rank alone loads weights or sets gradients by hand, the ranks train different models without an error.
  At intervals a checksum of each parameter is all-reduced (maximum and minimum). The next synchronised backward reads
  the result, which is ready by then.
- Finite: reduced gradients have no NaN or infinity. Checked only with the option `check_nan`.
"""

from __future__ import annotations

import logging
import platform
import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch.dtensors import groups_that_shard, local_tensor
from dp_compile.config import CHECK_VARIABLE, check_parameters_every
from dp_compile.errors import DesyncError, ReductionError
from dp_compile.plan.words import ranks_in_words
from dp_compile.replica.gradients import dense_strides, local_view
from dp_compile.replica.module_names import fully_qualified
from dp_compile.replica.replica import Replica, owners, warn
from dp_compile.replica.store_channel import all_gather_object, channel_of, unique_topic

logger = logging.getLogger("dp_compile.guards")

# --- unchanged --------------------------------------------------------------------------------------------------------

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

_Modules = tuple[weakref.ref[nn.Module], ...]
_checked: Final[weakref.WeakKeyDictionary[Replica, tuple[_Modules, list[object]]]] = weakref.WeakKeyDictionary()
"""The modules of each replica and their snapshot, as of the last check that passed."""


def check_module(replica: Replica) -> None:
    """Raise `ReductionError` if a parameter was replaced, added, unfrozen or moved since `replicate`."""
    if replica.config.check_reductions and not _looks_as_before(replica):
        check_not_moved(replica)
        _refuse(_without_hook(replica))
        _remember(replica)


def check_gradients_have_hooks(replica: Replica, hooked: Sequence[int], accumulated: Sequence[torch.Tensor]) -> None:
    """Raise `ReductionError` if a parameter gets a gradient that is not reduced.

    `hooked`: indices of the parameters whose hook runs in this backward; `accumulated`: tensors that get a gradient.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(replica.parameters)}
    if unhooked := sorted({index_of[id(each)] for each in accumulated if id(each) in index_of}.difference(hooked)):
        raise ReductionError(
            f"not reduced: {replica.name_list(unhooked)}. The gradient arrived but its hook did not run: it was "
            "probably removed, or the parameter's hooks were replaced. Call replicate() again on a fresh module."
        )
    foreign = [tensor for tensor in accumulated if id(tensor) not in index_of]
    if foreign:
        refuse_unreduced(replica, foreign)


def refuse_unreduced(replica: Replica, accumulated: Collection[torch.Tensor]) -> None:
    """Raise `ReductionError` if `accumulated` has parameters without a hook: frozen, replaced or added ones."""
    present = set(map(id, accumulated))
    _refuse((_FROZEN, name, parameter) for name, parameter in replica.module.frozen if id(parameter) in present)
    if not _looks_as_before(replica):
        changed = list(_without_hook(replica))
        _refuse(each for each in changed if id(each[2]) in present)
        if not (changed or _moved(replica)):
            _remember(replica)


def check_not_moved(replica: Replica) -> None:
    """Raise `ReductionError` if the dtype or device type of a parameter differs from the plan."""
    if change := _moved(replica):
        raise ReductionError(
            f"{change} when replicate() was called. Move or convert the module before replicate(), or call "
            "unreplicate(), change it, and call replicate() again."
        )


def _moved(replica: Replica) -> str:
    for gradient in replica.plan.gradients:
        if gradient.index == len(replica.parameters):
            continue
        parameter = replica.parameters[gradient.index]
        dtype, device = str(parameter.dtype.to_real()).removeprefix("torch."), parameter.device.type
        if device != gradient.key.device:
            return f"{gradient.name} is on {device}, it was on {gradient.key.device}"
        if dtype != gradient.key.dtype:
            return f"{gradient.name} is {dtype}, it was {gradient.key.dtype}"
    return ""


def _looks_as_before(replica: Replica) -> bool:
    found = _checked.get(replica)
    return found is not None and _look(replica, found[0]) == found[1]


def _remember(replica: Replica) -> None:
    root = replica.module.root()
    modules = [*(() if root is None else root.modules()), *replica.owning_modules()]
    refs = tuple(map(weakref.ref, dict.fromkeys(modules)))
    _checked[replica] = refs, _look(replica, refs)


def _look(replica: Replica, modules: _Modules) -> list[object]:
    """Return a snapshot, by id, of the objects to check: valid while all modules live. 0.5 ms per 1,000 modules."""
    alive = [module for ref in modules if (module := ref()) is not None]
    parameters = [each for module in alive for each in module._parameters.values() if each is not None]
    children = [id(child) for module in alive if (below := module._modules) for child in below.values()]
    return [
        len(alive), len(owners), *map(id, parameters), *children, *map(attrgetter("requires_grad"), parameters),
        *map(attrgetter("dtype"), replica.parameters), *map(attrgetter("is_cpu"), replica.parameters),
    ]  # fmt: skip


def _without_hook(replica: Replica) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the trainable parameters of the module that have no hook, as (reason, name, parameter)."""
    yield from ((_FROZEN, name, each) for name, each in replica.module.frozen if each.requires_grad)
    known = {id(each) for each in (*replica.parameters, *(parameter for _, parameter in replica.module.frozen))}
    for place in replica.module.parameter_refs:
        found = place.find()
        if found is not None and found.requires_grad and id(found) not in known:
            yield _REPLACED, place.name, found
    root = replica.module.root()
    left_alone = {id(module) for each in replica.module.left_alone for module in each.modules()}
    for prefix, owner in () if root is None else root.named_modules():
        for attribute, parameter in () if id(owner) in left_alone else owner.named_parameters(recurse=False):
            name = fully_qualified(f"{prefix}.{attribute}" if prefix else attribute)
            is_new = name not in replica.module.all_names and id(parameter) not in known
            if is_new and parameter.requires_grad and owners.find(parameter) is None:
                yield _ADDED, name, parameter


def _refuse(found: Iterable[tuple[str, str, torch.Tensor]]) -> None:
    """Raise `ReductionError` unless `found` is empty: with its first reason and all parameters of this reason."""
    names: dict[str, list[str]] = {}
    for why, name, _ in found:
        names.setdefault(why, []).append(name)
    for why, of_reason in names.items():
        raise ReductionError(f"not reduced: {', '.join(of_reason[:8])}. {why}")


# --- equal on all ranks -----------------------------------------------------------------------------------------------

EVERY: Final = 1024
"""Backwards per comparison. A comparison takes 0.002 (transformer) to 0.43 (500 small layers) of an AdamW step (CPU,
torch 2.13), so below 0.1 % of the time. Most mistakes occur at the start: compare also after 2, 4, 8, ... backwards."""
_WORDS_IN_A_ROW: Final = 1024
_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, without a bit pattern: Fibonacci hashing


@dataclass(eq=False, slots=True)
class _Sums:
    """Checksums of parameters, and the all-reduce of these checksums."""

    after: int  # number of backwards before the comparison
    local: bool
    """Whether local gradients changed the parameters, as in the first half of a SAM step. Equal on every rank:
    otherwise the flags raise."""
    indices: tuple[int, ...]
    own: torch.Tensor  # checksums of this rank
    reduced: torch.Tensor  # over all ranks: the maximum, and the bitwise inverse of the minimum
    work: dist.Work | None


@dataclass(eq=False, slots=True)
class _Comparisons:
    """State of the comparisons between ranks for one replica."""

    backwards: int = 0  # never decreases, unlike `synced_backwards`: equal on every rank
    sums: _Sums | None = None
    is_off: bool = False


_comparisons: Final[weakref.WeakKeyDictionary[Replica, _Comparisons]] = weakref.WeakKeyDictionary()


def check_parameters(replica: Replica) -> None:
    """Compare parameters between ranks at intervals. Every rank calls it after the same synchronised backwards.

    Skipped under `join`, because ranks without inputs do not step. By default, compares only if gradients are sure to
    be equal on all ranks. Raises `DesyncError` on every rank.
    """
    every, group = check_parameters_every(), replica.group
    is_asked, equal_gradients = every is not None, replica.called_hook is None and group.backend.equal_bits
    if every == 0 or not (group.has_others and replica.config.check_reductions and (is_asked or equal_gradients)):
        return
    if replica.state.uneven is not None:
        return
    this = _comparisons.get(replica) or _comparisons.setdefault(replica, _Comparisons())
    this.backwards += 1
    sums, this.sums = this.sums, None
    if sums is not None:
        differing = _differing(sums)
        if differing[:1] == [0] and not is_asked:
            this.is_off = True
            what = "machines, numbers of threads or builds of torch differ, so optimizers may round differently"
            warn(logger, f"parameters are not compared between ranks: {what}. {CHECK_VARIABLE}=100 compares them.")
        elif places := [place - 1 for place in differing if place]:
            raise DesyncError(_describe(replica, sums, places))
    number = this.backwards
    is_power_of_two = number > 1 and number & (number - 1) == 0
    if not this.is_off and (number % (every or EVERY) == 0 or (not is_asked and number < EVERY and is_power_of_two)):
        this.sums = _launch(replica, number)


def forget_comparison(replica: Replica) -> None:
    """Drop the comparison in flight: a checkpoint has replaced the partially updated parameters that it compares."""
    if (this := _comparisons.get(replica)) is not None:
        this.sums = None


def start_again(replica: Replica) -> None:
    """Restart comparisons when the group has new ranks, whose counts of backwards differ."""
    _comparisons.pop(replica, None)


def _differing(sums: _Sums) -> list[int]:
    """Return the positions of checksums that differ between ranks. Blocks the host on a GPU, once in many backwards."""
    if sums.work is not None:
        sums.work.wait()
    if sums.local:
        return []
    reduced = sums.reduced.cpu()
    return (reduced[0] != ~reduced[1]).nonzero().flatten().tolist()


def _launch(replica: Replica, after: int) -> _Sums:
    """Launch the all-reduce of checksums. Skips tensor subclasses, whose bits may not be readable, and embeddings with
    `max_norm`, of which each rank's forward rescales only the rows that it uses."""
    local = replica.state.step_guard
    indices = tuple(
        index
        for index, parameter in enumerate(replica.parameters)
        if index not in local.exempt and type(local_tensor(parameter).detach()) is torch.Tensor
    )
    device = replica.device
    # Everything that affects an optimizer's rounding, other than its inputs.
    of_device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    of_host = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    facts = zlib.crc32(repr((torch.__version__, torch.version.git_version, of_device, of_host)).encode())
    with torch.no_grad():
        sums = fingerprints([replica.parameters[index] for index in indices]).to(device)
        own = torch.cat([torch.tensor([facts], device=device), sums])
        reduced = torch.stack([own, ~own])
        work = dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=replica.group.process_group, async_op=True)
    return _Sums(after, local.moved or local.was_moved, indices, own, reduced, work)


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a checksum per tensor, int64 on the tensors' device: equal for equal bits, else almost certainly not.

    Integer sums do not depend on the order of additions. Each row and column sum has another factor, so swapped values
    change the checksum. A factor for each 8 bytes would need a product as large as the tensor: 126 ms instead of 17 ms
    for 226 MB (one core). `torch.hash_tensor` is the XOR of all elements (torch 2.15). It is 0 for an even number of
    equal elements, and the same for any order of the elements.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    words = [_words(tensor.detach()) for tensor in tensors]
    longest = max(map(len, words)) // _WORDS_IN_A_ROW + 2 * _WORDS_IN_A_ROW
    factors = (2 * torch.arange(longest, device=tensors[0].device) + 1) * _FACTOR
    found = []
    for sums in words:
        whole = len(sums) - len(sums) % _WORDS_IN_A_ROW
        if whole:
            rows = sums[:whole].view(-1, _WORDS_IN_A_ROW)
            sums = torch.cat([rows.sum(1), rows.sum(0), sums[whole:]])
        found.append((sums * factors[: len(sums)]).sum())
    return torch.stack(found)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits in memory order as int64, the only integer dtype that torch sums at memory bandwidth."""
    tensor = local_view(tensor)  # real, because no integer dtype is as wide as complex128
    if dense_strides(tensor) != tensor.stride():
        tensor = tensor.contiguous()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(bits)
    in_a_word = 8 // tensor.element_size()
    if len(flat) % in_a_word or flat.storage_offset() % in_a_word:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % in_a_word))
    return flat.view(torch.int64)


def _describe(replica: Replica, sums: _Sums, places: Sequence[int]) -> str:
    """Return a text that names a differing parameter and the ranks. Gathers over the store, but once in a training."""
    first, own = sums.indices[places[0]], int(sums.own[places[0] + 1])
    stated = all_gather_object(channel_of(replica), unique_topic(replica, "differing parameters"), own)
    usual = Counter(stated).most_common(1)[0][0]
    others, same = ([rank for rank, each in enumerate(stated) if (each == usual) is wanted] for wanted in (False, True))
    more = f"; more that differ: {len(places) - 1}" if len(places) > 1 else ""
    return (
        f"parameters differ between ranks after {sums.after} synchronised backwards: {replica.names[first]} on "
        f"{ranks_in_words(others)} has different values than on {ranks_in_words(same)}{more}. Possible causes: weights "
        "loaded or edited on some ranks only; gradients set by hand (torch.autograd.grad), which are not reduced; a "
        "step skipped on some ranks; different optimizers or optimizer options. Load weights on every rank, reduce "
        f"such gradients with torch.distributed.all_reduce, or set {CHECK_VARIABLE}=0 if the difference is intended."
    )


# --- finite -----------------------------------------------------------------------------------------------------------


def check_finite(replica: Replica, reduced: Mapping[str, torch.Tensor] | None, outputs: Sequence[Any]) -> None:
    """Raise `ReductionError` on every rank if a reduced gradient has a NaN or an infinity. Copies a number to the host.

    `reduced`: gradients by name; `None`: those in `.grad`. `outputs`: the roots of this rank's backward.

    A non-finite contribution of one rank makes the reduced gradient non-finite on every rank, so all ranks take the
    same branch. Only if it is non-finite do they exchange whether their loss was finite.
    """
    if reduced is None:
        grads = [(name, each.grad) for name, each in zip(replica.names, replica.parameters, strict=True)]
        reduced = {
            name: grad.coalesce().values() if grad.is_sparse else local_tensor(grad)
            for name, grad in grads
            if grad is not None
        }
    if _all_finite(replica, list(reduced.values())):
        return
    kinds = {name: "nan" if bool(grad.isnan().any()) else "inf" for name, grad in reduced.items() if _is_bad(grad)}
    names = [f"{name} ({kind})" for name, kind in kinds.items()] or ["parts of DTensors that other ranks hold"]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    finite = not any(_is_bad(each) for each in outputs if isinstance(each, torch.Tensor))
    stated = all_gather_object(channel_of(replica), unique_topic(replica, "finite"), finite)
    origin = (
        "The loss was finite on every rank, so an operation of the backward produced them, or a gradient or a sum "
        "overflowed its wire dtype. torch.autograd.set_detect_anomaly(True) names the operation in the first case."
    )
    if culprits := [rank for rank, each in enumerate(stated) if not each]:
        origin = f"The loss was not finite on {ranks_in_words(culprits)} of the group."
    raise ReductionError(f"reduced gradients are not finite: {', '.join(names[:8])}{more}. {origin}")


def _all_finite(replica: Replica, grads: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients are finite on all ranks. Ranks with different DTensor shards combine their results."""
    checks = [grad.isfinite().all() for grad in grads]
    finite = torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=replica.device)
    sharding = dict.fromkeys(group for parameter in replica.parameters for group in groups_that_shard(parameter))
    if not sharding:
        return bool(finite)
    finite_everywhere = finite.int()
    for group in sharding:
        dist.all_reduce(finite_everywhere, op=dist.ReduceOp.MIN, group=group)
    return bool(finite_everywhere)


def _is_bad(tensor: torch.Tensor) -> bool:
    return not tensor.isfinite().all()
