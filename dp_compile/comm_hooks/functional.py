"""Comm hooks as pure functions: what they are given, how they are run, and the op that runs them in a graph.

A hook is a generator. It yields the tensor that each collective is given, and receives the collective's result:

    def reduce(self, bucket):
        mean = (yield torch.cat([gradient.flatten() for gradient in bucket.gradients])) / bucket.ranks
        ...
        return reduced, state

What follows the last round each rank computes for itself, and all must get the same bits, ranks whose backward was not
captured too. So in a graph these computations are ops that call the very function, with eager kernels; Inductor's own
code for it, which rounds otherwise, is never used:

    hook_step(gradients, state, [])       -> what is sent     -> all_reduce -> wait
    hook_step(gradients, state, [sum])    -> reduced gradients, and the new state

Each step names all that the function has seen, so that none of it is overwritten before the last one.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch.fx.node import has_side_effect

from dp_compile._torch import autograd, distributed
from dp_compile.config import has_address
from dp_compile.errors import ConfigError, ReductionError
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

        By default nothing. The same on every rank, with names without commas.
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
    """A key by which plans and graphs call a hook, the same in every process, and the hook that has it.

    Raises:
        ConfigError: its text does not say its options, or its source is not known; or it asks for no round, or for one
            that is not known.
    """
    kind, problem = type(hook), ""
    if has_address(hook):
        problem = (
            "has a repr that contains a memory address, which differs between ranks, so ranks cannot compare it. Make "
            "its class a frozen dataclass, with fields whose repr shows their value"
        )
    elif not isinstance(hook.rounds, tuple) or not hook.rounds or not set(hook.rounds) <= set(ROUNDS):
        problem = f"must have as rounds a tuple of some of {', '.join(ROUNDS)}, got {hook.rounds!r}"
    _refuse(hook, problem)
    try:
        source = "".join(inspect.getsource(each) for each in kind.__mro__ if issubclass(each, FunctionalHook))
    except (OSError, TypeError) as error:
        message = f"the source of comm hook {hook!r} cannot be found, so ranks cannot compare it. Import it."
        raise ConfigError(message) from error
    key = f"{kind.__module__}.{hook!r}#{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    return key, _hooks.setdefault(key, hook)


def _refuse(hook: object, problem: str) -> None:
    if problem:
        raise ConfigError(f"comm hook {hook} {problem}.")


def _hook_of(key: str) -> FunctionalHook:
    hook = _hooks.get(key)
    if hook is None:
        raise ReductionError(f"comm hook {key} is gone: no replicated module has it any more.")
    return hook


def sent_nbytes(reduction: Reduction, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """How many bytes of a gradient a hook hands out for each of its rounds; empty if it has to see values to say.

    It is run on a gradient without memory, as the only one of its bucket. The same on every rank.
    """
    # Of a group with the same name there may have been other ranks.
    return _sent_nbytes(reduction, shape, dtype, distributed.group_of_name(reduction.stages[0].group).size())


@functools.lru_cache(maxsize=4096)
def _sent_nbytes(reduction: Reduction, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> tuple[int, ...]:
    assert reduction.hook is not None
    hook, like = _hook_of(reduction.hook), torch.empty(shape, dtype=dtype, device="meta")
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
    steps: int = 0
    """How many were taken."""
    _reducing: Generator[torch.Tensor, torch.Tensor, Reduced] | None = None

    @property
    def given(self) -> list[torch.Tensor]:
        """The gradients and the state of each."""
        return [*self.bucket.gradients, *(each for state in self.bucket.state for each in state.values())]

    def step(self, received: Tensors) -> list[torch.Tensor]:
        """What is sent next; at the end the reduced gradients, then the state of each, by name.

        All in row order and in memory of their own: the sum is written over what is sent, which the hook may still
        have.

        Args:
            received: the results of all rounds before.

        Raises:
            ConfigError: the hook does not keep to what `FunctionalHook.reduce` says.
        """
        hook, given = _hook_of(self.key), [*self.given, *received]
        versions = list(map(autograd.version_of, given))
        # Autocast around backward() is not meant for this.
        with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
            try:
                if self._reducing is None:
                    self._reducing = hook.reduce(self.bucket)
                    found = [self._checked_sent(hook, next(self._reducing))]
                else:
                    found = [self._checked_sent(hook, self._reducing.send(received[-1]))]
            except StopIteration as end:
                found = self._checked_end(hook, end.value)
        _refuse(hook, _WROTE if versions != list(map(autograd.version_of, given)) else "")
        self.steps += 1
        return found

    def _checked_sent(self, hook: FunctionalHook, sent: Any) -> torch.Tensor:
        count, problem = len(hook.rounds), ""
        if self.steps >= count or not isinstance(sent, torch.Tensor):
            what = f"yields {type(sent).__name__}" if self.steps < count else "yields once more"
            problem = f"must yield {count} tensors, one per round, but {what}"
        elif hook.rounds[self.steps] == ALL_TO_ALL and sent.numel() % self.bucket.ranks:
            problem = (
                f"yields {sent.numel()} elements for all_to_all, which are not divisible by {self.bucket.ranks} ranks. "
                "Pad them to a multiple of the number of ranks"
            )
        _refuse(hook, problem)
        return _copied(sent if hook.rounds[self.steps] == ALL_REDUCE else sent.flatten())

    def _checked_end(self, hook: FunctionalHook, result: Any) -> list[torch.Tensor]:
        too_few = f"has {len(hook.rounds)} rounds, but yields {self.steps} tensors only"
        _refuse(hook, too_few if self.steps < len(hook.rounds) else "")
        try:
            reduced, states = map(list, result)
        except (TypeError, ValueError):
            message = f"comm hook {hook!r} must return the reduced gradients and the state of each, got {result!r}."
            raise ConfigError(message) from None
        names = [list(state) for state in self.bucket.state]
        others = f"must return state with the names that it was given: {names}"
        _refuse(hook, others if list(map(sorted, states)) != list(map(sorted, names)) else "")
        found = [*reduced, *(state[name] for state, own in zip(states, names, strict=True) for name in own)]
        before, after = ([(tuple(each.shape), each.dtype) for each in some] for some in (self.given, found))
        _refuse(hook, f"must return tensors of shapes and dtypes {before}, got {after}" if before != after else "")
        return [*map(_copied, reduced), *self._new_state(states, reduced)]

    def _new_state(self, states: Sequence[State], reduced: Tensors) -> Iterator[torch.Tensor]:
        """Of a gradient that is not finite the old state: a scaler skips this step, and the new one would spoil all
        that follow. All ranks have the same gradient, and decide alike."""
        for before, after, gradient in zip(self.bucket.state, states, reduced, strict=True):
            if before:
                # Not finite either if it is too large for a sum. One pass; to ask each element takes three.
                is_of_use = gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32)).isfinite()
                for name, tensor in before.items():
                    yield torch.where(is_of_use, after[name], tensor).contiguous()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


_WROTE: Final = "wrote to a tensor that it was given. Compute a new one"


# --- in a graph -------------------------------------------------------------------------------------------------------

_library = torch.library.Library("dp_compile", "FRAGMENT")
_library.define(
    "hook_step(Tensor[] gradients, Tensor[] state, Tensor[] received, str[] names, str hook, str group, str unit)"
    " -> Tensor[]"
)
_library.define("hook_state(Tensor[] state, str[] names, int index, int replica) -> Tensor[]")


@dataclass(slots=True)
class _Running(threading.local):
    runs: dict[str, HookRun] = field(default_factory=dict)
    """By bucket, what has not ended yet in the backward that this thread runs: a generator cannot be an argument."""


_running = _Running()


def bucket_of(gradients: Tensors, state: Sequence[State], group: str) -> HookBucket:
    """What a hook is given that reduces over a group, by its name."""
    ranks = distributed.group_of_name(group)
    return HookBucket(tuple(gradients), state, ranks.size(), ranks.rank())


def _new_run(gradients: Tensors, state: Tensors, names: Sequence[str], hook: str, group: str) -> HookRun:
    """`state`: tensors in a row; `names`: of each gradient those of its state, with commas."""
    tensors = iter(state)
    states = [{name: next(tensors) for name in each.split(",") if name} for each in names]
    return HookRun(hook, bucket_of(gradients, states, group))


def _step(
    gradients: Tensors, state: Tensors, received: Tensors, names: Sequence[str], hook: str, group: str, unit: str
) -> list[torch.Tensor]:
    if not received:  # what is there already is of a backward that was interrupted
        _running.runs[unit] = _new_run(gradients, state, names, hook, group)
    run = _running.runs.get(unit)
    if run is None or run.key != hook or run.steps != len(received):
        raise ReductionError(f"step {len(received)} of comm hook {hook} runs, but its previous step has not run.")
    if received and [each.data_ptr() for each in run.given] != [each.data_ptr() for each in (*gradients, *state)]:
        raise ReductionError(
            f"the compiler passes gradients to comm hook {hook} at other addresses than in its previous step. The "
            "memory that the hook still reads may have been overwritten. Use "
            'ReplicateConfig(backend="aot_eager") with this hook.'
        )
    found = run.step(received)
    if run.steps > len(_hook_of(hook).rounds):
        del _running.runs[unit]
    return found


def _fake_step(
    gradients: Tensors, state: Tensors, received: Tensors, names: Sequence[str], hook: str, group: str, unit: str
) -> list[torch.Tensor]:
    run = _new_run(gradients, state, names, hook, group)
    with _NoWrites(hook, [*gradients, *state, *received]):
        for count in range(len(received) + 1):
            found = run.step(received[:count])
    return found


class _NoWrites(autograd.TorchDispatchMode):
    """Inside, these tensors are not written to. Ops of compiled code run below autograd, where no versions count."""

    def __init__(self, hook: str, given: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hook, self._storages = hook, [each.untyped_storage() for each in given]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        arguments = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for written in (arguments.get(each.name) for each in func._schema.arguments if each.is_write):
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                is_given = isinstance(tensor, torch.Tensor) and tensor.untyped_storage() in self._storages
                _refuse(self._hook, _WROTE if is_given else "")
        return func(*args, **(kwargs or {}))


def _no_state(state: Tensors, names: Sequence[str], index: int, replica: int) -> list[torch.Tensor]:
    raise ReductionError(f"no pass has replaced {names} of gradient {index}.")


def _fake_state(state: Tensors, names: Sequence[str], index: int, replica: int) -> list[torch.Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in state]


_library.impl("hook_step", _step, "CompositeExplicitAutograd")
torch.library.register_fake("dp_compile::hook_step", _fake_step, lib=_library)
HOOK_STEP = torch.ops.dp_compile.hook_step.default

_library.impl("hook_state", _no_state, "CompositeExplicitAutograd")
torch.library.register_fake("dp_compile::hook_state", _fake_state, lib=_library)
# A copy into a tensor without elements is dropped from the graph, and with it this would go: the hook needs the state.
HOOK_STATE = has_side_effect(torch.ops.dp_compile.hook_state.default)
"""What a gradient's state becomes. It only says so: a pass puts in its place what the hook returns."""
