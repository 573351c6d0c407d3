"""Comm hooks as pure functions: what they are given and remember, and how they are run.

A hook is a generator. It yields the tensor that each collective is given, and receives the collective's result:

    def reduce(self, bucket):
        mean = (yield torch.cat([gradient.flatten() for gradient in bucket.gradients])) / bucket.ranks
        ...
        return reduced, state

What follows the last round each rank computes for itself, and all must get the same bits, ranks whose backward was not
captured too. So in a graph an op calls the very function, with eager kernels (`passes/reduction.py`, `hook_step`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from dp_compile._torch import autograd, distributed
from dp_compile.errors import ConfigError, ReductionError, UnsupportedModuleError
from dp_compile.plan.reduction import ALL_REDUCE, ALL_TO_ALL, ROUNDS, Reduction

Tensors = Sequence[torch.Tensor]
State = Mapping[str, torch.Tensor]
"""What a hook remembers of one gradient, by the hook's names."""

Reduced = tuple[Sequence[torch.Tensor], Sequence[State]]
"""The reduced gradients of a bucket, and what is remembered of each."""


class HookBucket(NamedTuple):
    """What a functional hook is given.

    Args:
        gradients: this rank's gradients of a bucket, not divided, each in the shape of its parameter.
        state: of each gradient what was remembered, as the hook's `initial_state` or its last call gave it.
        ranks: how many ranks there are.
        rank: which of them this one is.
    """

    gradients: Sequence[torch.Tensor]
    state: Sequence[State]
    ranks: int
    rank: int


class FunctionalHook:
    """Base of comm hooks as pure functions: a frozen dataclass whose fields are its options, the same on every rank.

    `rounds`: the collectives that it asks for, one after the other, in every bucket:

    - `all_reduce`: what comes back is the sum over all ranks of what each hands out, in any dtype that has sums.
    - `all_to_all`: what is handed out is cut into as many equal parts as there are ranks, part r goes to rank r. What
      comes back are the parts for this rank, in the order of the ranks that sent them.
    - `all_gather`: what comes back is what all ranks have handed out, in their order.

    What comes back of the last two has one dimension. Tensors travel in the dtype in which they are handed out; gloo
    knows no float8: view it as `uint8`. Which gradients are in a bucket may change from one backward to the next: what
    has to last is remembered for each gradient by itself.
    """

    rounds: ClassVar[tuple[str, ...]] = (ALL_REDUCE,)

    def initial_state(self, gradient: torch.Tensor) -> State:
        """What is remembered of a gradient before the first backward, for one with this shape, dtype and device.

        By default nothing. The same on every rank.
        """
        return {}

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Reduced]:
        """Reduce a bucket: `received = yield tensor` is what the next of `rounds` makes of what each rank hands out.

        Returns the reduced gradients, in the bucket's order, with their shapes and dtype, and the new state of each:
        tensors with the names, shapes and dtypes of before. Tensors that were given must not be written to. The reduced
        gradients have to be the same on every rank; state may be a rank's own. Shapes of what is handed out follow from
        shapes of what is given, and are the same on every rank.
        """
        raise NotImplementedError


_hooks: weakref.WeakValueDictionary[str, FunctionalHook] = weakref.WeakValueDictionary()


def register(hook: FunctionalHook) -> tuple[str, FunctionalHook]:
    """A key by which plans and graphs call a hook, the same in every process, and the hook that has it."""
    kind = type(hook)
    _require(
        re.search(r" at 0x[0-9a-f]+", repr(hook)) is None,
        hook,
        "has a repr that contains a memory address, which differs between ranks, so ranks cannot compare it. Make its "
        "class a frozen dataclass, with fields whose repr shows their value",
    )
    has_rounds = isinstance(hook.rounds, tuple) and hook.rounds and set(hook.rounds) <= set(ROUNDS)
    _require(has_rounds, hook, f"must have as rounds a tuple of some of {', '.join(ROUNDS)}, got {hook.rounds!r}")
    try:
        source = "".join(inspect.getsource(each) for each in kind.__mro__ if issubclass(each, FunctionalHook))
    except (OSError, TypeError) as error:
        message = f"the source of comm hook {hook!r} cannot be found, so ranks cannot compare it. Import it."
        raise ConfigError(message) from error
    key = f"{kind.__module__}.{hook!r}#{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    return key, _hooks.setdefault(key, hook)


def _require(condition: object, hook: FunctionalHook, problem: str) -> None:
    if not condition:
        raise ConfigError(f"comm hook {hook} {problem}.")


def hook_of(key: str) -> FunctionalHook:
    hook = _hooks.get(key)
    if hook is None:
        raise ReductionError(f"comm hook {key} is gone: no replicated module has it any more.")
    return hook


# --- what it remembers ---------------------------------------------------------------------------------------------


class HookState:
    """The state of a `FunctionalHook`: `model.register_comm_hook(dp_compile.HookState(), hook)`. For one module.

    Each rank has its own, and saves and loads its own: what was not sent yet differs from rank to rank. It is kept by
    parameter name, so it may be loaded whichever buckets there are.
    """

    is_used = False
    """By a module."""

    def __init__(self) -> None:
        self.backwards = 0
        """Synchronised backwards so far."""
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        """By parameter, then by the hook's own name."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of all tensors: `{"backwards": int, "tensors": {parameter: {name: tensor}}}`."""
        return {"backwards": self.backwards, "tensors": _copies(self._tensors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank; before `register_comm_hook()`, which compares ranks.

        Raises:
            ConfigError: it is no such state.
            UnsupportedModuleError: a module uses this one already.
        """
        self.check_free()
        try:
            self.restore(state_dict)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"state_dict is not the state of a comm hook: {error!r}. Pass the result of HookState.state_dict()."
            ) from error

    # --- for the engine

    def check_free(self) -> None:
        """An error if a module uses it."""
        if self.is_used:
            raise UnsupportedModuleError(
                "this HookState belongs to a replicated module already. Make one for each module, and load it before "
                "register_comm_hook()."
            )

    def prepare(self, hook: FunctionalHook, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Begin with what was loaded, else with the hook's initial state, for a module with these parameters."""
        pairs = zip(names, parameters, strict=True)
        fresh = {name: _initial_state(hook, name, each) for name, each in pairs if not each.is_complex()}
        if self._tensors:
            _check_alike(self._tensors, fresh)
            for name, state in fresh.items():
                for key, tensor in state.items():
                    tensor.copy_(self._tensors[name][key])
        self._tensors = fresh

    def of(self, name: str) -> State:
        return self._tensors.get(name, {})

    def restore(self, state_dict: Mapping[str, Any]) -> None:
        """Take copies of what `state_dict` gave."""
        self.backwards, self._tensors = state_dict["backwards"], _copies(state_dict["tensors"])

    __getstate__, __setstate__ = state_dict, restore


def _copies(tensors: Mapping[str, State]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {key: each.clone() for key, each in state.items()} for name, state in tensors.items()}


def _initial_state(hook: FunctionalHook, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a hook remembers at first of a gradient, in new memory."""
    # The shape without the memory.
    like = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    with torch.no_grad():
        state = dict(hook.initial_state(like))
    for key, tensor in state.items():
        is_state = isinstance(key, str) and isinstance(tensor, torch.Tensor)
        got = f"{key!r}: {type(tensor).__name__}"
        _require(is_state, hook, f"must return tensors by name as the initial state for {name}, got {got}")
    return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}


def _check_alike(given: Mapping[str, State], wanted: Mapping[str, State]) -> None:
    """An error if a state that is loaded has other tensors than a hook has."""
    for name in sorted({*given, *wanted}):
        found, expected = (_kinds(state[name]) if name in state else None for state in (given, wanted))
        if found != expected:
            raise ConfigError(
                f"the loaded comm hook state does not match {name}: it has {found or 'nothing'}, the hook expects "
                f"{expected or 'nothing'}. Load a state that was saved with this model and this hook."
            )


def _kinds(tensors: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}


# --- a run of it ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def sent_nbytes(reduction: Reduction, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> tuple[int, ...]:
    """How many bytes of a gradient a hook hands out for each of its rounds; empty if it has to see values to say. It is
    run on a gradient without memory, as the only one of its bucket."""
    assert reduction.hook is not None
    hook, like = hook_of(reduction.hook), torch.empty(shape, dtype=dtype, device="meta")
    try:
        with torch.no_grad():
            reducing = hook.reduce(HookBucket((like,), (hook.initial_state(like),), ranks, 0))
            sent = [next(reducing)]
            for stage in reduction.stages[:-1]:
                size = sent[-1].shape if stage.op == ALL_REDUCE else (stage.numel_behind(sent[-1].numel()),)
                sent.append(reducing.send(sent[-1].new_empty(size)))
            return tuple(each.nbytes for each in sent)
    except Exception:  # what is wrong with a hook is raised where it reduces
        return ()


@dataclass(eq=False, slots=True)
class HookRun:
    """One call of a hook, from one round to the next."""

    key: str
    bucket: HookBucket
    new_state: Sequence[State] = ()
    """After the last step, when the gradients are let go: what is remembered of each from now on."""
    _reducing: Generator[torch.Tensor, torch.Tensor, Reduced] | None = None

    def step(self, received: Tensors) -> list[torch.Tensor]:
        """What is sent next, after the results `received` of all rounds before; at the end the reduced gradients.

        All in row order and in memory of their own: the sum is written over what is sent, which the hook may still
        have.

        Raises:
            ConfigError: the hook does not keep to what `FunctionalHook.reduce` says.
        """
        hook, states = hook_of(self.key), self.bucket.state
        given = [*self.bucket.gradients, *(each for state in states for each in state.values()), *received]
        versions = list(map(autograd.version_of, given))
        # Autocast around backward() is not meant for this.
        with autograd.counting_versions(), torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
            try:
                self._reducing = self._reducing or hook.reduce(self.bucket)
                sent = self._reducing.send(received[-1]) if received else next(self._reducing)
                found = [self._checked_sent(hook, sent, len(received))]
            except StopIteration as end:
                found = self._checked_end(hook, end.value, len(received))
        is_whole = versions == list(map(autograd.version_of, given))
        _require(is_whole, hook, "wrote to a tensor that it was given. Compute a new one")
        return found

    def _checked_sent(self, hook: FunctionalHook, sent: Any, steps: int) -> torch.Tensor:
        count, ranks = len(hook.rounds), self.bucket.ranks
        what = type(sent).__name__ if steps < count else "once more"
        is_due = steps < count and isinstance(sent, torch.Tensor)
        _require(is_due, hook, f"must yield {count} tensors, one per round, but yields {what}")
        if hook.rounds[steps] == ALL_REDUCE:
            return _copied(sent)
        _require(
            hook.rounds[steps] != ALL_TO_ALL or sent.numel() % ranks == 0,
            hook,
            f"yields {sent.numel()} elements for all_to_all, which are not divisible by {ranks} ranks. Pad them to a "
            "multiple of the number of ranks",
        )
        return _copied(sent.flatten())

    def _checked_end(self, hook: FunctionalHook, result: Any, steps: int) -> list[torch.Tensor]:
        count = len(hook.rounds)
        _require(steps == count, hook, f"has {count} rounds, but yields {steps} tensors only")

        def kinds(gradients: Tensors, states: Sequence[State]) -> list[Any]:
            return [_kinds({"": each, **state}) for each, state in zip(gradients, states, strict=True)]

        before, after = kinds(self.bucket.gradients, self.bucket.state), None
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            reduced, states = map(list, result)
            after = kinds(reduced, states)
        _require(after is not None, hook, f"must return the reduced gradients and the state of each, got {result!r}")
        _require(before == after, hook, f"must return tensors of names, shapes and dtypes {before}, got {after}")
        self.new_state = list(map(_state_after, self.bucket.state, states, reduced))
        self.bucket = self.bucket._replace(gradients=())
        return list(map(_copied, reduced))


def _state_after(old: State, new: State, reduced: torch.Tensor) -> State:
    """The new state, in memory of its own; of a gradient that is not finite the old one: a scaler skips this step, and
    the new one would spoil all that follow. All ranks have the same gradient, and decide alike."""
    if not old:
        return old
    # Not finite either if it is too large for a sum. One pass; to ask each element takes three.
    is_of_use = reduced.sum(dtype=torch.promote_types(reduced.dtype, torch.float32)).isfinite()
    return {name: torch.where(is_of_use, new[name], tensor) for name, tensor in old.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def bucket_of(gradients: Tensors, state: Sequence[State], group: str) -> HookBucket:
    """What a hook is given that reduces over a group, by its name."""
    ranks = distributed.group_of_name(group)
    return HookBucket(tuple(gradients), state, ranks.size(), ranks.rank())


def fake_step(gradients: Tensors, received: Tensors, key: str, group: str) -> list[torch.Tensor]:
    """The step of a hook that follows these results, on fake tensors."""
    # New ones: a hook may hand out a tensor that it has, which is not fake.
    state = [
        {name: torch.empty(each.shape, dtype=each.dtype, device=each.device) for name, each in one.items()}
        for one in map(hook_of(key).initial_state, gradients)
    ]
    run = HookRun(key, bucket_of(gradients, state, group))
    for count in range(len(received) + 1):
        found = run.step(received[:count])
    return found
