"""torch's PowerSGD as a functional hook: gradients as products of thin matrices, with what that loses sent later.

    M = gradient + error             P = sum of M Q, orthogonalised         Q = mean of M^T P
    what the gradient becomes: P Q^T          error = M - P Q^T             Q is where the next backward starts

The same numbers as `powerSGD_hook` of torch's DDP with one bucket. Before its start iteration gradients are averaged as
they are: then a plan has no hook. What it remembers lies in the user's own `PowerSGDState`, by parameter name.

Source: torch's `distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from dp_compile._torch.distributed import orthogonalize, should_compress
from dp_compile.engine.hook_state import Agree, check_alike
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.passes.functional_hook import FunctionalHook, HookBucket, Reduced, State, register
from dp_compile.plan.reduction import Averaging

PLAIN: Final = Averaging(in_collective=False, all_before=True)
"""Before the start iteration."""

_memories: Final[weakref.WeakSet[PowerSGDMemory]] = weakref.WeakSet()


@dataclass(frozen=True)
class PowerSGD(FunctionalHook):
    """The options of a `PowerSGDState` that say what is computed."""

    matrix_approximation_rank: int
    min_compression_rate: float
    use_error_feedback: bool
    orthogonalization_epsilon: float
    batch_tensors_with_same_shape: bool
    rounds: ClassVar[tuple[str, ...]] = ("all_reduce", "all_reduce")

    def initial_state(self, gradient: torch.Tensor) -> State:
        shape = self.q_shape(gradient.shape)
        if shape is None:
            # Of what is averaged as it is nothing is lost: torch remembers there what adds up to zero over the ranks.
            return {}
        error = {"error": torch.zeros_like(gradient)} if self.use_error_feedback else {}
        return {**error, "q": gradient.new_zeros(shape)}

    def q_shape(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Of the matrix Q of a gradient with this shape; `None` if it is not worth compressing."""
        if not shape or 0 in shape:
            return None
        rows, columns = _matrix(shape)
        rank = min(rows, columns, self.matrix_approximation_rank)
        return (columns, rank) if should_compress(rows, columns, rank, self.min_compression_rate)[0] else None

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Reduced]:
        numbers = range(len(bucket.gradients))
        plain = [number for number in numbers if not bucket.state[number]]
        whole = [
            gradient + state["error"] if "error" in state else gradient
            for gradient, state in zip(bucket.gradients, bucket.state, strict=True)
        ]
        batches = self._batches([number for number in numbers if bucket.state[number]], whole)
        matrices = [_stacked([whole[each].reshape(_matrix(whole[each].shape)) for each in one]) for one in batches]
        qs = [torch.stack([bucket.state[each]["q"] for each in one]) for one in batches]
        for q in qs:
            orthogonalize(q, self.orthogonalization_epsilon)
        ps = list(map(torch.bmm, matrices, qs))
        sent = [whole[number] for number in plain]
        received = _like((yield _flat([*sent, *ps], bucket.gradients[0])), [*sent, *ps])
        means, ps = [each / bucket.ranks for each in received[: len(plain)]], received[len(plain) :]
        for p in ps:
            orthogonalize(p, self.orthogonalization_epsilon)
        qs = [torch.bmm(matrix.transpose(1, 2), p) for matrix, p in zip(matrices, ps, strict=True)]
        qs = [each / bucket.ranks for each in _like((yield _flat(qs, bucket.gradients[0])), qs)]
        reduced, states = dict(zip(plain, means, strict=True)), dict[int, State]()
        for one, p, q in zip(batches, ps, qs, strict=True):
            for number, product, own_q in zip(one, torch.bmm(p, q.transpose(1, 2)), q, strict=True):
                reduced[number] = product.reshape(whole[number].shape)
                error = {"error": whole[number] - reduced[number]} if self.use_error_feedback else {}
                states[number] = {**error, "q": own_q}
        return [reduced[number] for number in numbers], [states.get(number, {}) for number in numbers]

    def _batches(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        """Which gradients are multiplied together."""
        if not self.batch_tensors_with_same_shape:
            return [[number] for number in numbers]
        shape = {number: _matrix(tensors[number].shape) for number in numbers}
        return [list(one) for _, one in groupby(sorted(numbers, key=shape.__getitem__), key=shape.__getitem__)]


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


def _stacked(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(list(matrices))


def _flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors]) if tensors else like.new_empty(0)


def _like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a tensor, as copies: what was received must not be written to."""
    parts = flat.split([each.numel() for each in tensors])
    return [part.clone().view(each.shape) for part, each in zip(parts, tensors, strict=True)]


class PowerSGDMemory:
    """What PowerSGD remembers, in the user's own state: `error_dict` and `q_memory_dict`, by parameter name.

    Raises:
        ConfigError: the state was changed to what torch refuses to make: it compresses from the first steps on.
    """

    def __init__(self, state: PowerSGDState) -> None:
        if state.start_powerSGD_iter <= 1 and (state.use_error_feedback or state.warm_start):
            raise ConfigError(
                f"PowerSGDState.start_powerSGD_iter is {state.start_powerSGD_iter}: with use_error_feedback or "
                "warm_start it has to be above 1."
            )
        self.state = state
        key, hook = register(
            PowerSGD(
                int(state.matrix_approximation_rank),
                state.min_compression_rate,
                bool(state.use_error_feedback),
                state.orthogonalization_epsilon,
                bool(state.batch_tensors_with_same_shape),
            )
        )
        assert isinstance(hook, PowerSGD)
        self.hook = hook
        self._averaging = Averaging(hook=key, rounds=self.hook.rounds)
        self._is_on = False
        self._drawn_for: int | None = None
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._fresh: Callable[[], dict[str, dict[str, torch.Tensor]]] = dict
        self._numels = 0, 0
        self._agree: Agree | None = None
        self._rows: dict[str, int] = {}

    @property
    def said(self) -> str:
        state = self.state
        numbers = zlib.crc32(repr(state.rng.get_state()).encode())
        return (
            f"{self.hook!r}, warm_start={state.warm_start}, from iteration {state.start_powerSGD_iter} on, now at "
            f"{state.iter}, random numbers {numbers}"
        )

    def bind(self, names: Sequence[str], parameters: Sequence[nn.Parameter], agree: Agree) -> None:
        if any(each is not self and each.state is self.state and each._agree is not None for each in _memories):
            raise ModuleError("this PowerSGDState belongs to a replicated module already. Make one for each module.")
        odd = [name for name in (*self.state.error_dict, *self.state.q_memory_dict) if not isinstance(name, str)]
        if odd:
            raise ConfigError(
                f"this PowerSGDState has what torch's DDP remembers, by bucket, as of bucket {odd[0]}: nobody knows of "
                "which parameters that is. Give a new PowerSGDState; set its iter to go on from there."
            )
        like = {
            name: torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape)
            for name, each in zip(names, parameters, strict=True)
            if not each.is_complex()
        }

        def fresh() -> dict[str, dict[str, torch.Tensor]]:
            return {name: dict(self.hook.initial_state(each)) for name, each in like.items()}

        shapes = {name: self.hook.q_shape(each.shape) for name, each in like.items()}
        compressed = {name: shape for name, shape in shapes.items() if shape is not None}
        found = self._remembered()
        if found:
            check_alike(found, {name: state for name, state in fresh().items() if state})
        self._fresh = fresh
        self._rows = {name: like[name].shape[0] for name in compressed}
        self._numels = (
            sum(each.numel() for each in like.values()),
            sum(
                (each.shape[0] + compressed[name][0]) * compressed[name][1] if name in compressed else each.numel()
                for name, each in like.items()
            ),
        )
        self._agree = agree
        _memories.add(self)

    def unbind(self) -> None:
        self._agree = None

    def of(self, name: str) -> State:
        return self._tensors.get(name, {}) if self._is_on else {}

    def begin(self) -> Averaging | None:
        was, self._is_on = self._is_on, self.state.iter >= self.state.start_powerSGD_iter
        if was != self._is_on:
            assert self._agree is not None
            # A rank that has counted otherwise would run other collectives.
            self._agree(self.said, "backward()")
        if self._is_on:
            if not self._tensors:
                self._start()
            if not self.state.warm_start and self._drawn_for != self.state.iter:
                self._draw()
        if was == self._is_on:
            return None
        return self._averaging if self._is_on else PLAIN

    def ended(self) -> None:
        if self._is_on:
            self.state.total_numel_before_compression += self._numels[0]
            self.state.total_numel_after_compression += self._numels[1]
        self.state.iter += 1

    def snapshot(self) -> Any:
        tensors = {name: {key: each.clone() for key, each in one.items()} for name, one in self._remembered().items()}
        state = self.state
        counts = state.iter, state.total_numel_before_compression, state.total_numel_after_compression
        return counts, state.rng.get_state(), tensors

    def restore(self, snapshot: Any) -> None:
        counts, numbers, tensors = snapshot
        state = self.state
        state.iter, state.total_numel_before_compression, state.total_numel_after_compression = counts
        state.rng.set_state(numbers)
        self._drawn_for = None
        state.error_dict.clear()
        state.q_memory_dict.clear()
        for name, one in tensors.items():
            self._show(name, one)
        if not tensors:  # it had not begun: it begins anew
            self._tensors = {}
        for name, one in self._tensors.items():
            for key, tensor in one.items():
                tensor.copy_(tensors[name][key])
            self._show(name, one)

    def _start(self) -> None:
        found, self._tensors = self._remembered(), self._fresh()
        for name, one in self._tensors.items():
            for key, tensor in one.items():
                if found:
                    tensor.copy_(found[name][key])
            self._show(name, one)
        if not found:
            self._draw()

    def _draw(self) -> None:
        """The Qs of all gradients, last parameter first: as torch does in one bucket, whatever the buckets are here."""
        self._drawn_for = self.state.iter
        qs = [one["q"] for one in reversed(self._tensors.values()) if one]
        shapes: dict[Any, list[torch.Tensor]] = {}
        names = [name for name in reversed(self._tensors) if self._tensors[name]]
        for name, q in zip(names, qs, strict=True):
            shapes.setdefault((self._rows[name], tuple(q.shape)), []).append(q)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.state.rng.randint(1_000_000_000))
            for together in shapes.values():
                batched = self.state.batch_tensors_with_same_shape
                for some in [together] if batched else [[q] for q in together]:
                    drawn = torch.randn(len(some), *some[0].shape, device="cpu", dtype=some[0].dtype)
                    for q, value in zip(some, drawn, strict=True):
                        q.copy_(value)

    def _remembered(self) -> Mapping[str, dict[str, torch.Tensor]]:
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, held in self._held():
            for name, tensor in held.items():
                found.setdefault(name, {})[key] = tensor
        return found

    def _held(self) -> tuple[tuple[str, dict[str, torch.Tensor]], ...]:
        """Where the user saves them; torch's own annotation is of its own keys."""
        state: Any = self.state
        return ("error", state.error_dict), ("q", state.q_memory_dict)

    def _show(self, name: str, one: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors where the user saves them."""
        for key, held in self._held():
            if key in one:
                held[name] = one[key]
