"""The state of a sharded optimizer for checkpoints: all of it, or each rank's part for `torch.distributed.checkpoint`.

Everything goes by the names of parameters, so it fits another number of ranks, and other buckets.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dp_compile._torch.stand_in import StandIn
from dp_compile.errors import ConfigError
from dp_compile.optim.in_backward import known
from dp_compile.optim.shard import Shard
from dp_compile.optim.shards import State, is_cut
from dp_compile.optim.update import Update

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
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
    update = known(optimizer)
    if update is None or not isinstance(update.part, Shard):
        return optimizer.state_dict()
    shard = update.part
    if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < shard.ranks):
        raise ConfigError(f"to must be a rank of the module's group, 0 to {shard.ranks - 1}, or None, got {to!r}.")
    states = shard.full_states(to)
    if to not in (None, shard.rank):
        return {}
    with shard.as_whole(states):
        return optimizer.state_dict()


def sharded_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of the state, for `torch.distributed.checkpoint.save`: `{"optimizer": sharded_state_dict(...)}`.

    `{"state": {parameter: {name: tensor}}, "param_groups": JSON, "orders": JSON}` with the names of parameters in the
    module. Of a parameter that is cut, each tensor is saved as one of one dimension, put together of the ranks' parts,
    in the order of the parameter's memory; `orders` has that where it is not row by row. No communication; the tensors
    are those of the optimizer, not copies.

    Raises:
        ConfigError: the optimizer is not sharded.
    """
    _, shard = _shard_of(optimizer)
    state: dict[str, State] = {}
    for index, own in shard.own_states().items():
        name, piece = shard.names[index], shard.pieces[index]
        state[name] = {
            key: StatePart.of(value, piece.start, shard.parameters[index].numel()) if is_cut(key, value) else value
            for key, value in own.items()
            if value is not None
        }
    return {"state": state, "param_groups": json.dumps(_groups(shard)), "orders": json.dumps(_orders(shard))}


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

    update, shard = _shard_of(optimizer)
    reader = FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    stored = reader.read_metadata().state_dict_metadata
    if f"{key}.param_groups" not in stored:
        raise ConfigError(f"the checkpoint has no sharded optimizer under '{key}'. Give the key= it was saved under.")
    place, prefix = {shard.names[index]: index for index in shard.covered}, f"{key}.state."
    state: dict[str, State] = {}
    foreign = set[str]()
    for entry, what in stored.items():
        name, _, slot = entry.removeprefix(prefix).rpartition(".")
        if entry.startswith(prefix) and name not in place:
            foreign.add(name)
        elif entry.startswith(prefix) and place[name] in shard.pieces:
            state.setdefault(name, {})[slot] = _room_for(shard, place[name], slot, what)
    if foreign:
        raise ConfigError(
            f"the checkpoint has state of {', '.join(sorted(foreign)[:8])}, which this optimizer does not have. Load "
            "it into an optimizer over the same parameters."
        )
    whole: dict[str, Any] = {key: {"state": state, "param_groups": "", "orders": ""}}
    load(whole, storage_reader=reader, process_group=shard.group)
    mine, saved = _orders(shard), json.loads(whole[key]["orders"])
    if other := [name for name in sorted({*mine, *saved}) if mine.get(name) != saved.get(name)]:
        raise ConfigError(
            f"the checkpoint has the elements of {', '.join(other[:8])} in another order than this module: its memory "
            "format was another one. Call to(memory_format=...) before replicate(), as it was when it was saved, or "
            "save and load full_state_dict(optimizer)."
        )
    _take_groups(shard, json.loads(whole[key]["param_groups"]))
    shard.hold({
        place[name]: {slot: value.part if isinstance(value, StatePart) else value for slot, value in each.items()}
        for name, each in state.items()
    })  # fmt: skip
    update.has_another_state()


def _shard_of(optimizer: torch.optim.Optimizer) -> tuple[Update, Shard]:
    update = known(optimizer)
    if update is None or not isinstance(update.part, Shard):
        raise ConfigError(
            f"this {type(optimizer).__name__} is not sharded. Use its state_dict() and load_state_dict(), or "
            "in_backward(..., shard=True) before."
        )
    return update, update.part


def _groups(shard: Shard) -> list[dict[str, Any]]:
    """Options of the groups, as plain values, and the names of their parameters."""
    name_of = {id(parameter): name for parameter, name in zip(shard.parameters, shard.names, strict=True)}
    return [
        {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        | {"params": [name_of[id(each)] for each in group["params"] if id(each) in name_of]}
        for group in shard.setup.optimizer.param_groups
    ]


def _take_groups(shard: Shard, given: list[dict[str, Any]]) -> None:
    if [group["params"] for group in _groups(shard)] != [group["params"] for group in given]:
        raise ConfigError(
            "the checkpoint's parameter groups hold other parameters than this optimizer's. Make its groups as they "
            f"were: {[list(group['params'])[:4] for group in given]}."
        )
    for group, saved in zip(shard.setup.optimizer.param_groups, given, strict=True):
        for name, value in saved.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            elif name != "params":
                group[name] = tuple(value) if isinstance(value, list) else value


def _orders(shard: Shard) -> dict[str, list[int]]:
    """The strides of parameters that are cut and do not lie row by row, by name."""
    parameters = {shard.names[index]: shard.parameters[index] for index in shard.covered}
    return {name: list(each.stride()) for name, each in parameters.items() if not each.is_contiguous()}


def _room_for(shard: Shard, index: int, slot: str, what: Any) -> torch.Tensor:
    """A tensor without values yet for this rank's part of an entry of a parameter's state."""
    parameter, piece, dtype = shard.parameters[index], shard.pieces[index], what.properties.dtype
    if len(what.size) == 0:
        return torch.empty((), dtype=dtype)
    if tuple(what.size) != (parameter.numel(),):
        raise ConfigError(
            f"the checkpoint has {slot} of {shard.names[index]} for {tuple(what.size)} elements, the parameter has "
            f"{parameter.numel()}. Load what was saved with this model."
        )
    return StatePart.of(torch.empty(piece.numel, dtype=dtype, device=parameter.device), piece.start, parameter.numel())


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

        (chunk,), properties = self.__create_chunk_list__(), TensorProperties.create_from_tensor(self.part)
        data = TensorWriteData(chunk, properties, self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.part
