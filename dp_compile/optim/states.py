"""State of an optimizer that is cut over ranks: from whole to pieces, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dp_compile.engine.gradients import dense_strides
from dp_compile.errors import ConfigError
from dp_compile.optim.shards import Piece

State = dict[str, Any]
"""Of one parameter, by the optimizer's own names."""

States = Mapping[int, State]
"""By a parameter's place in the module."""

_OF_ALL_ELEMENTS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""One number for a parameter, whatever its shape; all else in the state of an element-wise optimizer is its shape."""


def is_cut(key: str, value: object) -> bool:
    """Whether an entry of an element-wise optimizer's state has a value for each element."""
    return key not in _OF_ALL_ELEMENTS and isinstance(value, torch.Tensor)


def cut(state: State, parameter: nn.Parameter, piece: Piece, cuts: bool) -> State:
    """The state of a piece, in memory of its own.

    Raises:
        ConfigError: it is of a parameter of another shape.
    """
    found: State = {}
    for key, value in state.items():
        if cuts and is_cut(key, value):
            if value.shape != parameter.shape:
                raise ConfigError(
                    f"the state that is loaded has {key} of shape {list(value.shape)} for a parameter of shape "
                    f"{list(parameter.shape)}. Load what an optimizer over the same parameters has saved."
                )
            value = in_memory_order(value, parameter)[piece.start : piece.stop]
        found[key] = value.clone() if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) and value.dim():
            found[key] = found[key].to(parameter.device)
    return found


def in_memory_order(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A tensor of a parameter's shape as its elements lie in the parameter's memory."""
    laid = torch.empty_strided(value.shape, dense_strides(parameter), dtype=value.dtype, device=value.device)
    return laid.copy_(value).as_strided((value.numel(),), (1,))


class _Kind(NamedTuple):
    """What one rank has of an entry: a value, or elements of a tensor that are put together of all ranks' pieces.

    `shape`: of the whole tensor; `None`: that of the parameter, in its memory order.
    """

    value: Any
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None


def gathered(
    own: States,
    pieces: Mapping[int, Piece],
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    device: torch.device,
    cuts: bool,
    to: int | None,
) -> States:
    """The whole of states of which each rank has pieces, on the CPU. Every rank of the group calls it.

    Args:
        own: of this rank's `pieces`.
        device: where tensors travel.
        cuts: whether parameters are cut.
        to: the only rank of the group that gets it; the others get nothing. `None`: all.
    """
    said = {index: {key: _kind_of(key, value, cuts) for key, value in state.items()} for index, state in own.items()}
    everybody: list[dict[int, dict[str, _Kind]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everybody, said, group=group)
    kinds: dict[int, dict[str, _Kind]] = {}
    for each in everybody:
        for index, own_kinds in each.items():
            kinds.setdefault(index, {}).update(own_kinds)
    found: dict[int, State] = {}
    keeps = to is None or group.rank() == to
    for index in sorted(kinds):
        state: State = {}
        for key, kind in kinds[index].items():
            value = kind.value if kind.dtype is None else _put_together(
                own.get(index, {}).get(key), kind, pieces.get(index), parameters[index], group, device
            )  # fmt: skip
            if keeps:
                state[key] = value.cpu() if isinstance(value, torch.Tensor) else value
        if keeps:
            found[index] = state
    return found


def _kind_of(key: str, value: Any, cuts: bool) -> _Kind:
    if not isinstance(value, torch.Tensor):
        return _Kind(value)
    if cuts and is_cut(key, value):
        return _Kind(None, value.dtype)
    return _Kind(None, value.dtype, tuple(value.shape)) if value.dim() else _Kind(value.detach().cpu())


def _put_together(
    mine: torch.Tensor | None,
    kind: _Kind,
    piece: Piece | None,
    parameter: nn.Parameter,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Bytes are added up, of which all but one are zeros: what comes out has the bits that went in."""
    shape = tuple(parameter.shape) if kind.shape is None else kind.shape
    stride = dense_strides(parameter) if kind.shape is None else None
    whole = torch.zeros(torch.Size(shape).numel(), dtype=kind.dtype, device=device)
    if mine is not None:
        assert piece is not None
        first = piece.start if kind.shape is None else 0
        whole[first : first + mine.numel()] = mine.detach().flatten()
    dist.all_reduce(whole.view(torch.uint8), group=group)
    return whole.view(shape) if stride is None else whole.as_strided(shape, stride).clone()
