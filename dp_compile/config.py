"""Every option of `dp_compile`, declared once: name, default, unit, check.

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
DEFAULT_CAP_MB: Final = 25.0
"""Of torch's DDP."""

FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BY_PARAMETER: Final = "param_dtype_override_fn"
"""Of FSDP2's policy since torch 2.15."""
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
    """How a module is replicated. The same on every rank: ranks compare it at the start.

    Args:
        ddp_python_hook: `bool | None`, default `None`. `True`: hooks, which a captured backward replaces by reductions.
            `False`: torch's own `replicate` or `DistributedDataParallel` gets the module. `None`: the environment
            variable `DP_COMPILE_DDP_PYTHON_HOOK`, and without it `True`.
        bucket_cap_mb: `float | None`, MiB, default `None`. Buckets by size, as torch's DDP: one is closed when it holds
            at least this much, the first of each key at 1 MiB; `math.inf`: one bucket for each key after the first.
            `None`: buckets end where the predicted end of the step is earliest.
        cost: `AllReduceCost | None`, default `None`. What an all-reduce costs, from `calibrate().cost`, for that
            prediction. `None`: measured when a group of such ranks is first replicated on, and remembered.
        gradient_divide_factor: `float | None`, default `None`. What the sum of the gradients is divided by, as FSDP2's
            `set_gradient_divide_factor`. `None`: the number of ranks. NCCL then averages in the collective; else all is
            divided before the sum, in float16 by a power of two near the square root, as FSDP does.
        mp_policy: `torch.distributed.fsdp.MixedPrecisionPolicy | None`, default `None`. As `fully_shard` of the
            installed torch reads it. `param_dtype`: the forward sees floating parameters cast, and the backward
            computes in it; parameters, `.grad`, state dict and optimizer keep their dtype. `reduce_dtype`: gradients
            travel and are added up in it, each contribution divided first and rounded once; without it in
            `param_dtype`, since torch 2.15 in the parameters' dtype. `output_dtype`: of floating outputs.
            `cast_forward_inputs`: with `param_dtype`, floating inputs are cast. Another policy for a part: call
            `replicate` on the part first. `None`: everything in the parameters' own dtype.
        find_unused_parameters: `bool`, default `False`. As torch's DDP: gradients that no rank produced stay untouched,
            those that some ranks produced become the average over all ranks. `False`: a parameter without a gradient is
            an error on every rank, which names it.
        static_graph: `bool`, default `False`. Every backward uses the same parameters in the same way, and some may be
            left out, as with `find_unused_parameters`.
        gradient_as_bucket_view: `bool | None`, default `None`. Whether the memory of buckets lives from one backward to
            the next, at the same addresses. `True`: of all, so that no step allocates one; forwards then hold it, also
            where gradients are `None`. `False`: of none. `None`: on CPUs of buckets above 32 MiB, which malloc would
            map in each backward, and of all those of an optimizer with `shard=True`. Gradients are views of their
            buckets in any case, and a gradient that the user keeps is never written over: its bucket gets other memory.
            `aot_eager` allocates them in any case.
        broadcast_buffers: `bool`, default `True`. Copy the first rank's buffers to all ranks at the start and after
            each synchronised backward. `False`: each rank keeps its own from the start on; shapes may differ then.
        init_sync_buffers: `bool | None`, default `None`. Whether buffers are copied at the start. `None`: as
            `broadcast_buffers`. torch's `forward_sync_buffers=False` is `broadcast_buffers=False` and this.
        check_reductions: `bool`, default `True`. Check when a graph is new that every gradient is reduced exactly once;
            in each synchronised backward, by flags that travel with the gradients, that no rank left a parameter out,
            reduced another module or changed parameters too early; and, after 2, 4, 8, ... and each 1,024 of them, that
            parameters are equal on all ranks: not with a comm hook, or on different machines, whose optimizers may
            round differently.
        check_nan: `bool`, default `False`. Raise on every rank if a reduced gradient is not finite. The host waits for
            the gradients. Leave it off with a `GradScaler`, which handles such gradients itself.
        backend: `str`, default `"inductor"`. What compiles the backward; `"aot_eager"`: same graph and passes, no code
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
        fsdp = sys.modules.get("torch.distributed.fsdp")  # loaded by the code that made a policy
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
        """Whether all ranks start with the buffers of the first."""
        return self.broadcast_buffers if self.init_sync_buffers is None else self.init_sync_buffers

    @property
    def casts(self) -> bool:
        """Whether the forward sees anything in another dtype."""
        policy = self.mp_policy
        return policy is not None and not (policy.param_dtype is None and policy.output_dtype is None)

    def wire_dtype(self, parameters: Iterable[torch.Tensor]) -> torch.dtype | None:
        """The dtype in which gradients of these parameters travel; `None`: their own.

        Without a `reduce_dtype` FSDP2 reduced in `param_dtype` until torch 2.14. Since 2.15 it reduces in the dtype of
        the parameters, in the promoted one where they differ (pytorch#197203, in one release with pytorch#196626, whose
        field tells). May go with the last torch that lacks the field.
        """
        policy: Any = self.mp_policy
        if policy is None:
            return None
        if policy.reduce_dtype is not None or policy.param_dtype is None or not hasattr(policy, _BY_PARAMETER):
            return policy.reduce_dtype or policy.param_dtype  # type: ignore[no-any-return]
        dtypes = [each.dtype for each in parameters if each.requires_grad and each.dtype.is_floating_point]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    @property
    def may_be_unused(self) -> bool:
        """Whether parameters may have no gradient."""
        return self.find_unused_parameters or self.static_graph

    def chosen_strategy(self, *, has_policy: bool) -> str:
        """Where buckets end: `optimal`, or as `bucket_cap_mb` or `bucket_policy` says."""
        asked = {"bucket_cap_mb": "fixed"} if self.bucket_cap_mb is not None else {}
        asked |= {"bucket_policy": "per_module"} if has_policy else {}
        asked |= {"cost": "optimal"} if self.cost is not None else {}
        if len(set(asked.values())) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} exclude each other: buckets end at a size (bucket_cap_mb), with modules "
                "(bucket_policy), or where the predicted end of the step is earliest (cost)."
            )
        return next(iter(asked.values()), "optimal")

    def uses_python_hook(self) -> bool:
        """The value of `ddp_python_hook`, or of its environment variable."""
        if self.ddp_python_hook is not None:
            return self.ddp_python_hook
        text = _variable(HOOK_VARIABLE) or "1"
        require(text in _TRUE | _FALSE, HOOK_VARIABLE, f"one of {', '.join(sorted(_TRUE | _FALSE))}", text)
        return text in _TRUE


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def link_source() -> str:
    """Where the cost of a collective is from, where no `cost` is given; the environment variable says.

    `remembered`, the default: measured once for such ranks, and kept with torch's caches. `measured`: in each process,
    and not kept. `nominal`: the backend's figures.
    """
    text = _variable(LINK_VARIABLE) or REMEMBERED
    require(text in (REMEMBERED, "measured", NOMINAL), LINK_VARIABLE, "remembered, measured or nominal", text)
    return text


def check_parameters_every() -> int | None:
    """After how many synchronised backwards ranks compare their parameters; 0: never. For debugging: the environment
    variable says. `None`: after 2, 4, 8, ... and each 1,024."""
    text = _variable(CHECK_VARIABLE)
    require(not text or text.isdecimal(), CHECK_VARIABLE, "a number of backwards >= 0", text)
    return int(text) if text else None


def monitor_after_s() -> float | None:
    """After how many seconds in one backward a rank asks the others how far they are and logs which it waits for.

    Compilation is not counted; again each time the wait has doubled. The environment variable says, by default 30.
    `None`, as `0` and `off` mean: no monitor, and errors have only what this rank knows.
    """
    text = _variable(MONITOR_VARIABLE) or "30"
    try:
        seconds = 0.0 if text in _FALSE else float(text)
    except ValueError:
        seconds = math.nan
    require(seconds >= 0, MONITOR_VARIABLE, "seconds >= 0 or off", text)
    return seconds or None
