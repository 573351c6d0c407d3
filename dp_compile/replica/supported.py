"""One table of all unsupported combinations of ways to average gradients, kinds of gradients, and their consumers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dp_compile.errors import ConfigError, UnsupportedModuleError
from dp_compile.replica.replica import Replica

AVERAGING: Final = "how gradients are averaged"
CALLED_HOOK: Final = "a comm hook that is called with each bucket"
CHECK_NAN: Final = "check_nan"
COMM_HOOK: Final = "a comm hook"
DIVIDE_FACTOR: Final = "gradient_divide_factor"
DTENSORS: Final = "DTensors"
FUNCTIONAL_HOOK: Final = "a functional comm hook"
HAS_RUN: Final = "a backward has run"
HOOK_OF_VALUES: Final = "a comm hook that does more than cast"
OPTIMIZER: Final = "an optimizer that updates in the backward"
JOIN: Final = "join()"
NO_REDUCTION: Final = "gradients are not reduced"
REDUCE_DTYPE: Final = "reduce_dtype"
SHARD: Final = "an optimizer with shard=True"
SPARSE: Final = "sparse gradients"
TWO_LEVELS: Final = "a device_mesh with two dimensions"

_IS_THERE: Final[Mapping[str, Callable[[Replica], bool]]] = {
    CHECK_NAN: lambda replica: replica.config.check_nan,
    COMM_HOOK: lambda replica: replica.planning.comm_hook is not None,
    DIVIDE_FACTOR: lambda replica: replica.config.gradient_divide_factor is not None,
    DTENSORS: lambda replica: bool(replica.module.dtensors),
    HAS_RUN: lambda replica: replica.history.backwards.total() > 0,
    JOIN: lambda replica: replica.state.uneven is not None,
    NO_REDUCTION: lambda replica: not replica.state.reduces_gradients,
    OPTIMIZER: lambda replica: bool(replica.after.updates),
    REDUCE_DTYPE: lambda replica: getattr(replica.config.mp_policy, "reduce_dtype", None) is not None,
    SHARD: lambda replica: replica.after.parts_to is not None,
    SPARSE: lambda replica: bool(replica.module.sparse),
    TWO_LEVELS: lambda replica: replica.group.levels is not None,
}

_TWO_AVERAGES: Final = "a comm hook would average gradients differently. Use one of the two."

_IS_SPARSE: Final = (
    "the gradient of {sparse} is sparse, and {added} does not support sparse gradients. Build its module with "
    "sparse=False, or leave {added} out."
)
_NOT_SHARDED: Final = "the optimizer of this module cannot be sharded: %s. Use shard=False."

_CALLS: Final = NO_REDUCTION, OPTIMIZER, SHARD, COMM_HOOK, HAS_RUN  # due to earlier calls, not to options or gradients
_TABLE: Final[Mapping[tuple[str, str], str]] = {
    (AVERAGING, NO_REDUCTION): "no gradient of {module} is reduced, so their averaging cannot be configured.",
    (DIVIDE_FACTOR, COMM_HOOK): "{module} has comm hook {hook}, which determines the divisor of gradients.",
    (COMM_HOOK, SHARD): (
        "{added} needs whole gradients, but {module} has a sharded optimizer, so gradients are reduce-scattered. "
        "Use in_backward() without shard=True."
    ),
    (COMM_HOOK, COMM_HOOK): "{module} has a comm hook already, {hook}. Only one may be registered.",
    (COMM_HOOK, HAS_RUN): "a backward of {module} has run already. Register comm hooks before the first one.",
    (FUNCTIONAL_HOOK, TWO_LEVELS): (
        "{added} reduces each bucket over all ranks at once, but the device_mesh of {module} has two dimensions. Use "
        "one dimension, or a hook of torch's that only casts."
    ),
    (CALLED_HOOK, TWO_LEVELS): (
        "{added} reduces over one group, but the device_mesh of {module} has two dimensions. Use a hook of torch's "
        "that only casts, or one dimension."
    ),
    (COMM_HOOK, REDUCE_DTYPE): "{module} has a reduce_dtype in its mp_policy: " + _TWO_AVERAGES,
    (COMM_HOOK, DIVIDE_FACTOR): "{module} has gradient_divide_factor: " + _TWO_AVERAGES,
    (HOOK_OF_VALUES, DTENSORS): (
        "{added} would receive local shards of gradients, because {dtensor} is a DTensor, and its result would depend "
        "on the sharding. Use a hook of torch's that only casts, with the module's group as its state, or "
        "mp_policy=MixedPrecisionPolicy(reduce_dtype=...)."
    ),
    (COMM_HOOK, SPARSE): _IS_SPARSE,
    (REDUCE_DTYPE, SPARSE): _IS_SPARSE,
    (TWO_LEVELS, SPARSE): _IS_SPARSE,
    (JOIN, OPTIMIZER): (
        "{module} has an optimizer that updates in the backward, and join() may rescale gradients after it. Use the "
        "optimizer without in_backward()."
    ),
    (OPTIMIZER, NO_REDUCTION): "no gradient of this module is reduced: an optimizer steps in its backward already.",
    (OPTIMIZER, CHECK_NAN): "check_nan looks at gradients after the backward. Leave out check_nan or in_backward().",
    (OPTIMIZER, JOIN): "join() may rescale gradients after the backward. Use the optimizer without in_backward().",
    (SHARD, SHARD): "the module has a sharded optimizer already. Pass that one all parameters, as parameter groups.",
    (SHARD, TWO_LEVELS): _NOT_SHARDED % "its device_mesh has two levels of network",
    (SHARD, COMM_HOOK): _NOT_SHARDED % "it has a comm hook, which needs whole gradients",
}


def check_supported(replica: Replica, kinds: tuple[str, ...], *, added: str = "", module: str = "") -> None:
    """Raise if the module has a feature that cannot be combined with a new feature of these kinds.

    `added`, `module`: names for the message, by default the kind and the first parameter.

    Raises:
        UnsupportedModuleError: the conflict is with an earlier call for this module.
        ConfigError: the conflict is with an option or a kind of gradients, or an optimizer is added.
    """
    for (kind, found), sentence in _TABLE.items():
        if kind in kinds and _IS_THERE[found](replica):
            is_of_module = kind not in (OPTIMIZER, SHARD) and found in _CALLS
            names = {
                "added": added or kind,
                "module": module or f"the module of {replica.names[0]}",
                "hook": replica.planning.comm_hook and replica.planning.comm_hook.name,
                "dtensor": replica.names[min(replica.module.dtensors, default=0)],
                "sparse": replica.names[min(replica.module.sparse, default=0)],
            }
            raise (UnsupportedModuleError if is_of_module else ConfigError)(sentence.format(**names))
