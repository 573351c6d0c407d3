"""Comm hooks as pure functions: their inputs, their state, and their execution.

A hook is a generator. It yields the input of each collective, and receives the collective's result:

    def reduce(self, bucket):
        mean = (yield torch.cat([gradient.flatten() for gradient in bucket.gradients])) / bucket.ranks
        ...
        return reduced, state

After the last collective each rank computes alone, and all ranks must get the same bits, also if only some backwards
were captured. So in a captured graph an op runs the hook with eager kernels (`passes/reduction.py`, `hook_step`).
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
State = Mapping[str, torch.Tensor]  # a hook's state of one gradient, by the hook's names
Reduced = tuple[Sequence[torch.Tensor], Sequence[State]]  # the reduced gradients of a bucket, and the state of each


class HookBucket(NamedTuple):
    """The input of a functional hook.

    Args:
        gradients: this rank's gradients of a bucket, not divided by `ranks`, each in its parameter's shape and dtype.
        state: the state of each gradient, which the hook's `initial_state` or its last `reduce` returned.
        ranks: number of ranks in the module's group.
        rank: this rank's number in that group.
    """

    gradients: Sequence[torch.Tensor]
    state: Sequence[State]
    ranks: int
    rank: int


class FunctionalHook:
    """Base class of comm hooks as pure functions. A subclass is a frozen dataclass of options, equal on all ranks.

    `rounds`: the collectives of every bucket, in order. `reduce` yields the input of each and receives its result:

    - `all_reduce`: the sum of the inputs of all ranks, in any dtype that the backend can sum.
    - `all_to_all`: each input is cut into one equal part per rank, and part r is sent to rank r. The result is the
      parts for this rank, in the order of the sending ranks.
    - `all_gather`: the inputs of all ranks, in rank order.

    Results of `all_to_all` and `all_gather` have one dimension. Tensors are sent in the dtype in which `reduce` yields
    them. gloo does not support float8: view it as `uint8`. Gradients in a bucket may change from one backward to the
    next, so state is kept per gradient.
    """

    rounds: ClassVar[tuple[str, ...]] = (ALL_REDUCE,)

    def initial_state(self, gradient: torch.Tensor) -> State:
        """Return the first state of a gradient of this shape, dtype and device: by default `{}`; equal on all ranks."""
        return {}

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Reduced]:
        """Reduce a bucket: `received = yield tensor` runs the next collective of `rounds` on each rank's `tensor`.

        Returns the reduced gradients, with the bucket's order, shapes and dtypes, and the new state of each, with
        unchanged names, shapes and dtypes. Input tensors must not be written to. The reduced gradients must be equal on
        all ranks; states may differ. Shapes of yielded tensors must depend on input shapes only, and be equal on all
        ranks. If a reduced gradient is not finite, the old state of this gradient is kept.
        """
        raise NotImplementedError


_hooks: weakref.WeakValueDictionary[str, FunctionalHook] = weakref.WeakValueDictionary()


def register(hook: FunctionalHook) -> tuple[str, FunctionalHook]:
    """Return a hook's key in plans and graphs, equal in every process, and the hook first registered with this key."""
    kind = type(hook)
    _require(
        re.search(r" at 0x[0-9a-f]+", repr(hook)) is None,
        hook,
        "has a repr that contains a memory address, which differs between ranks, so ranks cannot compare it. Make its "
        "class a frozen dataclass, with fields whose repr shows their value",
    )
    has_rounds = isinstance(hook.rounds, tuple) and hook.rounds and set(hook.rounds) <= set(ROUNDS)
    _require(has_rounds, hook, f"must define rounds, a tuple of any of {', '.join(ROUNDS)}, got {hook.rounds!r}")
    try:
        source = "".join(inspect.getsource(each) for each in kind.__mro__ if issubclass(each, FunctionalHook))
    except (OSError, TypeError) as error:
        message = f"the source of comm hook {hook!r} was not found, so ranks cannot compare it. Define it in a file."
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


# --- state ---------------------------------------------------------------------------------------------------------


class HookState:
    """The state of a `FunctionalHook`: `model.register_comm_hook(dp_compile.HookState(), hook)`. One per module.

    Each rank saves and loads its own state, because values that were not sent yet differ between ranks. States are
    kept by parameter name, so they can be loaded under any plan of buckets.
    """

    is_used = False  # by a module

    def __init__(self) -> None:
        self.backwards = 0  # synchronised backwards so far
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}  # by parameter, then by the hook's own name

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all tensors: `{"backwards": int, "tensors": {parameter: {name: tensor}}}`."""
        return {"backwards": self.backwards, "tensors": _copies(self._tensors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's `state_dict()`. Call it before `register_comm_hook()`, which compares ranks.

        Raises:
            ConfigError: `state_dict` is not the state of a hook.
            UnsupportedModuleError: a module already uses this `HookState`.
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
        """Raise if a module uses this state."""
        if self.is_used:
            raise UnsupportedModuleError(
                "this HookState belongs to a replicated module already. Make one for each module, and load it before "
                "register_comm_hook()."
            )

    def prepare(self, hook: FunctionalHook, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Start from the loaded state, else from the hook's initial state, for a module with these parameters."""
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
        """Replace this state by a copy of a `state_dict()`."""
        self.backwards, self._tensors = state_dict["backwards"], _copies(state_dict["tensors"])

    __getstate__, __setstate__ = state_dict, restore


def _copies(tensors: Mapping[str, State]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {key: each.clone() for key, each in state.items()} for name, state in tensors.items()}


def _initial_state(hook: FunctionalHook, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the hook's initial state of a gradient, in new memory."""
    # A tensor of the shape, with the memory of one element.
    like = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    with torch.no_grad():
        state = dict(hook.initial_state(like))
    for key, tensor in state.items():
        is_state = isinstance(key, str) and isinstance(tensor, torch.Tensor)
        got = f"{key!r}: {type(tensor).__name__}"
        _require(is_state, hook, f"must return a dict of tensors as the initial state for {name}, got {got}")
    return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}


def _check_alike(given: Mapping[str, State], wanted: Mapping[str, State]) -> None:
    for name in sorted({*given, *wanted}):
        found, expected = (_kinds(state[name]) if name in state else None for state in (given, wanted))
        if found != expected:
            raise ConfigError(
                f"the loaded comm hook state does not match {name}: it has {found or 'nothing'}, the hook expects "
                f"{expected or 'nothing'}. Load a state that was saved with this model and this hook."
            )


def _kinds(tensors: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}


# --- execution -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def sent_nbytes(reduction: Reduction, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> tuple[int, ...]:
    """Return the bytes that a hook sends in each round for a bucket of one gradient, found by a run on a meta tensor;
    `()` if the hook raises, as when sizes depend on values."""
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
    except Exception:  # an error of the hook is raised when it reduces
        return ()


@dataclass(eq=False, slots=True)
class HookRun:
    """One execution of a hook on a bucket, round by round."""

    key: str
    bucket: HookBucket
    new_state: Sequence[State] = ()  # of each gradient, after the last step, which frees the gradients
    _reducing: Generator[torch.Tensor, torch.Tensor, Reduced] | None = None

    def step(self, received: Tensors) -> list[torch.Tensor]:
        """Return a list: the next tensor to send or, after the last round, the reduced gradients.

        `received`: the results of all earlier rounds. The returned tensors are contiguous copies, because an
        all-reduce overwrites the sent tensor, to which the hook may still refer. Raises a `ConfigError` if the hook
        violates the contract of `FunctionalHook.reduce`.
        """
        hook, states = hook_of(self.key), self.bucket.state
        given = [*self.bucket.gradients, *(each for state in states for each in state.values()), *received]
        versions = list(map(autograd.version_of, given))
        # Autocast around backward() must not affect the hook.
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
        what = f"a value of type {type(sent).__name__}" if steps < count else "one more"
        is_due = steps < count and isinstance(sent, torch.Tensor)
        _require(is_due, hook, f"must yield one tensor per round ({count}), but yields {what}")
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
        _require(steps == count, hook, f"must yield one tensor per round ({count}), but yields only {steps}")

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
    """Return a copy of the new state, or of the old one if the reduced gradient is not finite: a scaler skips such a
    step, and the new state would spoil all later steps. All ranks decide alike: they have the same reduced gradient."""
    if not old:
        return old
    # A sum that overflows counts as not finite. The sum takes one pass; a test of each element takes three.
    is_of_use = reduced.sum(dtype=torch.promote_types(reduced.dtype, torch.float32)).isfinite()
    return {name: torch.where(is_of_use, new[name], tensor) for name, tensor in old.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def bucket_of(gradients: Tensors, state: Sequence[State], group: str) -> HookBucket:
    """Return the input of a hook that reduces over the group of this name."""
    ranks = distributed.group_of_name(group)
    return HookBucket(tuple(gradients), state, ranks.size(), ranks.rank())


def fake_step(gradients: Tensors, received: Tensors, key: str, group: str) -> list[torch.Tensor]:
    """Return what a hook's step gives after the results `received`, on fake tensors: all earlier steps run again."""
    # New states: `initial_state` may return a tensor that the hook keeps, which is not fake.
    state = [
        {name: torch.empty(each.shape, dtype=each.dtype, device=each.device) for name, each in one.items()}
        for one in map(hook_of(key).initial_state, gradients)
    ]
    run = HookRun(key, bucket_of(gradients, state, group))
    for count in range(len(received) + 1):
        found = run.step(received[:count])
    return found
