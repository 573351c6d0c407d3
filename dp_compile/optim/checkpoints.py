"""The state of a sharded optimizer for checkpoints: all of it, or each rank's part for `torch.distributed.checkpoint`.

Everything goes by the names of parameters, so it fits another number of ranks, and other buckets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dp_compile._torch.stand_in import StandIn
from dp_compile.errors import ConfigError
from dp_compile.optim.in_backward import known
from dp_compile.optim.shard import Sharded
from dp_compile.optim.states import State, is_cut

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import StorageReader


def full_state_dict(optimizer: torch.optim.Optimizer, to: int | None = None) -> dict[str, Any]:
    """What `optimizer.state_dict()` would give if the optimizer were not sharded, with tensors on the CPU.

    It loads into any optimizer over these parameters, sharded or not, with `load_state_dict()`. Every rank calls this.

    Args:
        optimizer: one that was given to `in_backward(..., shard=True)`; for any other this is its `state_dict()`.
        to: the only rank of the module's group that gets it, the others get `{}`. `None`: all.

    Raises:
        ConfigError: `to` is no rank of the group.
    """
    sharded = known(optimizer)
    if not isinstance(sharded, Sharded):
        return optimizer.state_dict()
    if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < sharded.ranks):
        raise ConfigError(f"to must be a rank of the module's group, 0 to {sharded.ranks - 1}, or None, got {to!r}.")
    states = sharded.full_states(to)
    if to not in (None, sharded.rank):
        return {}
    with sharded.as_whole(states):
        return optimizer.state_dict()


def sharded_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of the state, for `torch.distributed.checkpoint.save`: `{"optimizer": sharded_state_dict(...)}`.

    `{"state": {parameter: {name: tensor}}, "param_groups": JSON, "orders": JSON}` with the names of parameters in the
    module. Of a parameter that is cut, each tensor is saved as one of one dimension, put together of the ranks' parts,
    in the order of the parameter's memory; `orders` says which, where it is not row by row. No communication; the
    tensors are those of the optimizer, not copies.

    Raises:
        ConfigError: the optimizer is not sharded.
    """
    sharded = _sharded(optimizer)
    state: dict[str, State] = {}
    for index, own in sharded.own_states().items():
        name, piece = sharded.names[index], sharded.pieces[index]
        state[name] = {
            key: StatePart.of(value, piece.start, sharded.parameters[index].numel()) if is_cut(key, value) else value
            for key, value in own.items()
            if value is not None
        }
    said = {"param_groups": json.dumps(_groups(sharded, optimizer)), "orders": json.dumps(_orders(sharded))}
    return {"state": state, **said}


def load_sharded_state_dict(
    optimizer: torch.optim.Optimizer, checkpoint: str | os.PathLike[str] | StorageReader, key: str = "optimizer"
) -> None:
    """Go on from what `torch.distributed.checkpoint.save` has saved of `sharded_state_dict`, on any number of ranks.

    Each rank reads its own part only. Every rank calls it.

    Args:
        optimizer: one that was given to `in_backward(..., shard=True)`, over parameters with the same names.
        checkpoint: the directory, or a reader of `torch.distributed.checkpoint`.
        key: under which it was saved.

    Raises:
        ConfigError: the optimizer is not sharded, or the checkpoint is of another one, or of parameters in another
            memory format.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes a while to load
    from torch.distributed.checkpoint.state_dict_loader import load

    sharded = _sharded(optimizer)
    reader = FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    stored = reader.read_metadata().state_dict_metadata
    groups = _groups(sharded, optimizer)
    if f"{key}.param_groups" not in stored:
        raise ConfigError(f"the checkpoint has no sharded optimizer under '{key}'. Give the key= it was saved under.")
    wanted = {
        index: _room_for(sharded, index, _entries(stored, f"{key}.state.{sharded.names[index]}."))
        for index in sharded.pieces
    }
    given: dict[str, Any] = {
        "state": {sharded.names[index]: state for index, state in wanted.items() if state},
        "param_groups": "",
        "orders": "",
    }
    known_names = {name for group in groups for name in group["params"]}
    foreign = {
        name.removeprefix(f"{key}.state.").rpartition(".")[0] for name in stored if name.startswith(f"{key}.state.")
    } - known_names
    if foreign:
        raise ConfigError(
            f"the checkpoint has state of {', '.join(sorted(foreign)[:8])}, which this optimizer does not have. Load "
            "it into an optimizer over the same parameters."
        )
    whole = {key: given}
    load(whole, storage_reader=reader, process_group=sharded.group)
    _check_orders(_orders(sharded), json.loads(whole[key]["orders"]))
    _take_groups(optimizer, groups, json.loads(whole[key]["param_groups"]))
    sharded.hold_own({
        index: {name: value.part if isinstance(value, StatePart) else value for name, value in state.items()}
        for index, state in wanted.items()
        if state
    })  # fmt: skip


def _sharded(optimizer: torch.optim.Optimizer) -> Sharded:
    sharded = known(optimizer)
    if not isinstance(sharded, Sharded):
        raise ConfigError(
            f"this {type(optimizer).__name__} is not sharded. Use its state_dict() and load_state_dict(), or "
            "in_backward(..., shard=True) before."
        )
    return sharded


def _groups(sharded: Sharded, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Options of the groups, as plain values, and the names of their parameters."""
    name_of = {id(parameter): name for parameter, name in zip(sharded.parameters, sharded.names, strict=True)}
    return [
        {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        | {"params": [name_of[id(each)] for each in group["params"] if id(each) in name_of]}
        for group in optimizer.param_groups
    ]


def _orders(sharded: Sharded) -> dict[str, list[int]]:
    """The strides of parameters that are cut and do not lie row by row, by name."""
    return {
        sharded.names[index]: list(sharded.parameters[index].stride())
        for index in sharded.covered
        if not sharded.parameters[index].is_contiguous()
    }


def _check_orders(mine: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]) -> None:
    if other := [name for name in sorted({*mine, *saved}) if mine.get(name) != saved.get(name)]:
        raise ConfigError(
            f"the checkpoint has the elements of {', '.join(other[:8])} in another order than this module: its memory "
            "format was another one. Call to(memory_format=...) before replicate(), as it was when it was saved, or "
            "save and load full_state_dict(optimizer)."
        )


def _take_groups(
    optimizer: torch.optim.Optimizer, mine: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> None:
    if [group["params"] for group in mine] != [group["params"] for group in given]:
        raise ConfigError(
            "the checkpoint's parameter groups hold other parameters than this optimizer's. Make its groups as they "
            f"were: {[list(group['params'])[:4] for group in given]}."
        )
    for group, saved in zip(optimizer.param_groups, given, strict=True):
        for name, value in saved.items():
            if name == "params":
                continue
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _entries(stored: Mapping[str, Any], prefix: str) -> dict[str, TensorStorageMetadata]:
    """What was saved of one parameter; names of others may begin with its name."""
    return {
        name.removeprefix(prefix): what
        for name, what in stored.items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    }


def _room_for(sharded: Sharded, index: int, entries: Mapping[str, TensorStorageMetadata]) -> State:
    """Tensors without values yet for this rank's part of a parameter's state."""
    parameter, piece, state = sharded.parameters[index], sharded.pieces[index], dict[str, Any]()
    for key, what in entries.items():
        dtype = what.properties.dtype
        if len(what.size) == 0:
            state[key] = torch.empty((), dtype=dtype)
        elif tuple(what.size) != (parameter.numel(),):
            raise ConfigError(
                f"the checkpoint has {key} of {sharded.names[index]} for {tuple(what.size)} elements, the parameter "
                f"has {parameter.numel()}. Load what was saved with this model."
            )
        else:
            part = torch.empty(piece.numel, dtype=dtype, device=parameter.device)
            state[key] = StatePart.of(part, piece.start, parameter.numel())
    return state


class StatePart(StandIn):
    """A rank's elements of a tensor of one dimension that all ranks have together, as
    `torch.distributed.checkpoint` asks for them."""

    why: ClassVar[str] = (
        "a part of a sharded optimizer's state is for torch.distributed.checkpoint.save only, which saves it from "
        "where it is. For tensors to look at, use dp_compile.optim.full_state_dict(optimizer)."
    )
    part: torch.Tensor
    """The elements that this rank has."""
    start: int
    """The number of the first of them."""

    @staticmethod
    def of(part: torch.Tensor, start: int, numel: int) -> StatePart:
        made: StatePart = StatePart((numel,), (1,), part.dtype, part.device)
        made.part, made.start = part, start
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size([self.start]), self.part.shape)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk, properties, self.size()))
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.part
