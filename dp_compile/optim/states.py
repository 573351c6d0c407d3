"""State of an optimizer that is cut over ranks: from whole to pieces, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
"""One number for a parameter; every other tensor in the state of an element-wise optimizer has its shape."""


def is_cut(key: str, value: object) -> bool:
    """Whether an entry of an optimizer's state has a value for each element."""
    return key not in _OF_ALL_ELEMENTS and isinstance(value, torch.Tensor)


def cut(state: State, parameter: nn.Parameter, piece: Piece) -> State:
    """The state of a piece, in new memory.

    Raises:
        ConfigError: it is of a parameter of another shape.
    """
    found: State = {}
    for key, value in state.items():
        if is_cut(key, value):
            if value.shape != parameter.shape:
                raise ConfigError(
                    f"the state that is loaded has {key} of shape {list(value.shape)} for a parameter of shape "
                    f"{list(parameter.shape)}. Load what an optimizer over the same parameters has saved."
                )
            laid = torch.empty_strided(value.shape, dense_strides(parameter), dtype=value.dtype, device=value.device)
            value = laid.copy_(value).as_strided((value.numel(),), (1,))[piece.start : piece.stop].to(parameter.device)
        found[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return found


def gathered(
    own: States,
    pieces: Mapping[int, Piece],
    parameters: Mapping[int, nn.Parameter],
    group: dist.ProcessGroup,
    to: int | None,
) -> States:
    """The whole of states of which each rank has pieces, on the CPU. Every rank of the group calls it.

    Args:
        own: of this rank's `pieces`.
        parameters: all that may have state, by place in the module.
        to: the only rank of the group that gets it; the others get nothing. `None`: all.
    """
    states: dict[int, State] = {}
    # One parameter at a time: with NCCL what is sent is on the GPU, which has no room for all of the state.
    for index, parameter in parameters.items():
        mine = own.get(index, {})
        start = pieces[index].start if mine else 0
        sent = start, {key: v.detach().cpu() if isinstance(v, torch.Tensor) else v for key, v in mine.items()}
        received = [sent] * group.size()
        if to is None:
            dist.all_gather_object(received, sent, group=group)
        else:
            dist.gather_object(sent, received if group.rank() == to else None, group=group, group_dst=to)
        if to not in (None, group.rank()):
            continue
        state: State = {}
        for first, part in received:
            for key, value in part.items():
                if is_cut(key, value):
                    whole = torch.zeros(parameter.numel(), dtype=value.dtype)
                    whole = state.setdefault(key, whole.as_strided(parameter.shape, dense_strides(parameter)))
                    whole.as_strided((parameter.numel(),), (1,))[first : first + value.numel()] = value
                else:
                    state[key] = value
        if state:
            states[index] = state
    return states
