"""The fields of `ReplicateConfig` and the environment variables, each with its name, default, unit and check.

Sizes in `*_mb` are MiB (2**20 bytes), as in torch's DDP.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from dp_compile.errors import ConfigError, is_number, require
from dp_compile.plan.cost import AllReduceCost

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # loading it loads all of FSDP

HOOK_VARIABLE: Final = "DP_COMPILE_DDP_PYTHON_HOOK"
MONITOR_VARIABLE: Final = "DP_COMPILE_MONITOR_AFTER_S"
CHECK_VARIABLE: Final = "DP_COMPILE_CHECK_PARAMETERS_EVERY"
LINK_VARIABLE: Final = "DP_COMPILE_LINK"
REMEMBERED: Final = "remembered"
NOMINAL: Final = "nominal"
BACKENDS: Final = ("inductor", "aot_eager")
DEFAULT_CAP_MB: Final = 25.0  # as in torch's DDP

FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BY_PARAMETER: Final = "param_dtype_override_fn"  # a field of FSDP2's policy since torch 2.15
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})

_SWITCH: Final = (lambda value: isinstance(value, bool), "True or False")
_SWITCH_OR_NONE: Final = (lambda value: value is None or isinstance(value, bool), "True, False or None")

_ALLOWED: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "ddp_python_hook": _SWITCH_OR_NONE,
    "bucket_cap_mb": (lambda cap: cap is None or (is_number(cap) and cap > 0), "> 0 (math.inf: one bucket per key)"),
    "cost": (lambda cost: cost is None or isinstance(cost, AllReduceCost), "an AllReduceCost, as calibrate().cost"),
    "gradient_divide_factor": (
        lambda factor: factor is None or (is_number(factor) and 0 < factor < math.inf),
        "finite and > 0 (gradients are divided by it)",
    ),
    **dict.fromkeys(("find_unused_parameters", "static_graph", "broadcast_buffers"), _SWITCH),
    **dict.fromkeys(("gradient_as_bucket_view", "init_sync_buffers"), _SWITCH_OR_NONE),
    **dict.fromkeys(("check_reductions", "check_nan"), _SWITCH),
    "backend": (BACKENDS.__contains__, f"one of {', '.join(BACKENDS)}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateConfig:
    """The options with which a module is replicated. Must be equal on every rank: ranks compare them at the start.

    Args:
        ddp_python_hook: `bool | None`, default `None`. `True`: this package reduces the gradients. `False`: torch's own
            `replicate` or `DistributedDataParallel` reduces them. `None`: the value of the environment variable
            `DP_COMPILE_DDP_PYTHON_HOOK`, `True` if it is unset.
        bucket_cap_mb: `float | None`, MiB, default `None`. Bucket size, as in torch's DDP: a bucket is closed when it
            holds at least this much, the first one of each dtype and device at 1 MiB if that is less. `math.inf`: after
            the first, one bucket per dtype and device. `None`: a planner chooses the buckets for the shortest step.
        cost: `AllReduceCost | None`, default `None`. Latency and bandwidth of an all-reduce, from `calibrate().cost`,
            for the planner. `None`: measured once for these ranks, hosts, device and backend, and cached on disk.
        gradient_divide_factor: `float | None`, default `None`. Divisor of the sum of gradients, as FSDP2's
            `set_gradient_divide_factor`. `None`: the number of ranks. Gradients are divided before the sum; in float16,
            part of the factor is applied after it, as in FSDP. With `None`, NCCL averages dtypes other than float16.
        mp_policy: `torch.distributed.fsdp.MixedPrecisionPolicy | None`, default `None`. Has the semantics of
            `fully_shard` in the installed torch. `param_dtype`: floating parameters are cast to it for the forward and
            the backward; parameters, `.grad`, state dict and optimizer keep their dtype. `reduce_dtype`: gradients are
            reduced in it, each contribution divided first and rounded once. If it is `None`: `param_dtype`, since torch
            2.15 the parameters' dtype. `output_dtype`: dtype of floating outputs. `cast_forward_inputs`: cast floating
            inputs to `param_dtype`. For another policy in a part of the module, call `replicate` on the part first.
            `None`: no casts.
        find_unused_parameters: `bool`, default `False`. As in torch's DDP: gradients that no rank produced stay
            unchanged, those that some ranks produced become the average over all ranks. `False`: a parameter without a
            gradient raises an error on every rank, unless `check_reductions` is off. The error names the parameter.
        static_graph: `bool`, default `False`. Every backward uses the same parameters in the same way. Some may be
            unused, as with `find_unused_parameters`.
        gradient_as_bucket_view: `bool | None`, default `None`. Whether buckets keep their memory between backwards.
            `True`: all do. No step allocates a bucket, and forwards hold this memory too. `False`: none does. `None`:
            on CPUs, those above 32 MiB, which malloc would map in each backward, and all buckets of an optimizer with
            `shard=True`. Gradients are views of their buckets in any case. A gradient that the user keeps is never
            overwritten: its bucket gets other memory. The backend `aot_eager` allocates buckets in each backward.
        broadcast_buffers: `bool`, default `True`. Copy the first rank's buffers to all ranks at the start and after
            each synchronised backward. `False`: each rank keeps its own buffers, whose shapes may then differ.
        init_sync_buffers: `bool | None`, default `None`. Whether buffers are copied at the start. `None`: as
            `broadcast_buffers`. `True` with `broadcast_buffers=False`: copied at the start only.
        check_reductions: `bool`, default `True`. Check that each new graph reduces every gradient exactly once. In each
            synchronised backward, flags reduced with the gradients check that no rank left a parameter out, reduced
            another module or changed parameters too early. After 2, 4, 8, ... and every 1,024 synchronised backwards,
            check that parameters are equal on all ranks. The last check is off with a comm hook that is not captured,
            inside `join()`, and between different machines, where optimizers may round differently.
        check_nan: `bool`, default `False`. Raise on every rank if a reduced gradient is not finite. Blocks the host
            until the gradients are reduced. Leave it off with a `GradScaler`, which handles such gradients itself.
        backend: `str`, default `"inductor"`. Compiler of the backward. `"aot_eager"`: same graph and passes, no code
            generation.

    Raises:
        ConfigError: a value is not allowed.
    """

    ddp_python_hook: bool | None = None
    bucket_cap_mb: float | None = None
    cost: AllReduceCost | None = None
    gradient_divide_factor: float | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool = True
    init_sync_buffers: bool | None = None
    check_reductions: bool = True
    check_nan: bool = False
    backend: str = "inductor"

    def __post_init__(self) -> None:
        for name, (is_allowed, allowed) in _ALLOWED.items():
            require(is_allowed(getattr(self, name)), name, allowed, getattr(self, name))
        if self.mp_policy is None:
            return
        fsdp = sys.modules.get("torch.distributed.fsdp")  # loaded already if the user made a policy
        is_policy = fsdp is not None and isinstance(self.mp_policy, fsdp.MixedPrecisionPolicy)
        hint = " For another policy in a part of the module call replicate() on that part first."
        kind = "a torch.distributed.fsdp.MixedPrecisionPolicy"
        require(is_policy, "mp_policy", kind, type(self.mp_policy), hint)
        if getattr(self.mp_policy, _BY_PARAMETER, None) is not None:
            raise ConfigError(
                "mp_policy has a param_dtype_override_fn, by which FSDP2 casts each parameter to another dtype. Call "
                "replicate() first on the part that computes in another dtype, with its policy."
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self.mp_policy, name)
            allowed = f"one of {', '.join(map(str, FLOATING))}, or None"
            require(dtype is None or dtype in FLOATING, f"{name} of mp_policy", allowed, dtype)

    @property
    def copies_buffers_at_start(self) -> bool:
        """Whether the first rank's buffers are copied to all ranks at the start."""
        return self.broadcast_buffers if self.init_sync_buffers is None else self.init_sync_buffers

    @property
    def casts(self) -> bool:
        """Whether the policy casts parameters or outputs."""
        policy = self.mp_policy
        return policy is not None and not (policy.param_dtype is None and policy.output_dtype is None)

    def wire_dtype(self, parameters: Iterable[torch.Tensor]) -> torch.dtype | None:
        """Return the dtype in which gradients of these parameters are reduced, `None` for their own.

        Without a `reduce_dtype` FSDP2 reduced in `param_dtype` until torch 2.14. Since 2.15 it reduces in the promoted
        dtype of the parameters (pytorch#197203). The field `param_dtype_override_fn` (pytorch#196626) is in the same
        release and identifies it. Remove this with the last supported torch that lacks the field.
        """
        policy: Any = self.mp_policy
        if policy is None:
            return None
        if policy.reduce_dtype is not None or policy.param_dtype is None or not hasattr(policy, _BY_PARAMETER):
            return policy.reduce_dtype or policy.param_dtype
        dtypes = [each.dtype for each in parameters if each.requires_grad and each.dtype.is_floating_point]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    @property
    def may_be_unused(self) -> bool:
        """Whether a parameter without a gradient is allowed."""
        return self.find_unused_parameters or self.static_graph

    def chosen_strategy(self, *, has_policy: bool) -> str:
        """Return the strategy: `optimal` (the planner), `fixed` (`bucket_cap_mb`) or `per_module` (`bucket_policy`)."""
        asked = {"bucket_cap_mb": "fixed"} if self.bucket_cap_mb is not None else {}
        asked |= {"bucket_policy": "per_module"} if has_policy else {}
        asked |= {"cost": "optimal"} if self.cost is not None else {}
        if len(set(asked.values())) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} exclude each other: buckets end at a size (bucket_cap_mb), with modules "
                "(bucket_policy), or where the predicted end of the step is earliest (cost). Keep one."
            )
        return next(iter(asked.values()), "optimal")

    def uses_python_hook(self) -> bool:
        """Return the option `ddp_python_hook` or, if that is `None`, the value of its environment variable."""
        if self.ddp_python_hook is not None:
            return self.ddp_python_hook
        text = _variable(HOOK_VARIABLE) or "1"
        require(text in _TRUE | _FALSE, HOOK_VARIABLE, f"one of {', '.join(sorted(_TRUE | _FALSE))}", text)
        return text in _TRUE


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def link_source() -> str:
    """Return where a collective's cost comes from if no `cost` is given: the value of `DP_COMPILE_LINK`.

    `remembered`, the default: measured once for each combination of ranks, hosts, device and backend, and stored with
    torch's caches. `measured`: measured in each process and not stored. `nominal`: the backend's nominal figures.
    """
    text = _variable(LINK_VARIABLE) or REMEMBERED
    require(text in (REMEMBERED, "measured", NOMINAL), LINK_VARIABLE, "remembered, measured or nominal", text)
    return text


def check_parameters_every() -> int | None:
    """Return after how many synchronised backwards ranks compare parameters: `DP_COMPILE_CHECK_PARAMETERS_EVERY`.
    0: never. `None` (not set): after 2, 4, 8, ... and every 1,024."""
    text = _variable(CHECK_VARIABLE)
    require(not text or text.isdecimal(), CHECK_VARIABLE, "a number of backwards >= 0", text)
    return int(text) if text else None


def monitor_after_s() -> float | None:
    """Return after how many seconds in one backward a rank logs the ranks for which it waits.

    `DP_COMPILE_MONITOR_AFTER_S` sets this, 30 by default. Compilation does not count. The rank logs again when it has
    waited twice as long. `None` (set by `0` or `off`): no monitor, and errors have local information only.
    """
    text = _variable(MONITOR_VARIABLE) or "30"
    try:
        seconds = 0.0 if text in _FALSE else float(text)
    except ValueError:
        seconds = math.nan
    require(seconds >= 0, MONITOR_VARIABLE, "a number of seconds >= 0, or off", text)
    return seconds or None
