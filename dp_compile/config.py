"""Every option of `dp_compile`, declared once: name, default, unit, check.

Sizes in `*_mb` are MiB (2**20 bytes), as in torch's DDP. Times in `*_s` are seconds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from dp_compile._torch import distributed
from dp_compile.errors import ConfigError
from dp_compile.plan.cost import AllReduceCost

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # loading it loads all of FSDP

HOOK_VARIABLE: Final = "DP_COMPILE_DDP_PYTHON_HOOK"
DUMP_VARIABLE: Final = "DP_COMPILE_DUMP_DIR"
MONITOR_VARIABLE: Final = "DP_COMPILE_MONITOR_AFTER_S"
CHECK_VARIABLE: Final = "DP_COMPILE_CHECK_PARAMETERS_EVERY"
BACKENDS: Final = ("inductor", "aot_eager")
DEFAULT_CAP_MB: Final = 25.0
"""Of torch's DDP."""

FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

SWITCHES: Final = (
    "ddp_python_hook",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "init_sync_buffers",
    "check_reductions",
    "check_nan",
)
MAY_BE_NONE: Final = ("ddp_python_hook", "gradient_as_bucket_view", "init_sync_buffers")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateConfig:
    """How a module is replicated. The same on every rank: ranks compare it at the start.

    Sizes in `*_mb` are MiB, times in `*_s` seconds. The text at each field, in the source, says more.

    Args:
        ddp_python_hook: `bool | None`, default `None`. `True`: hooks, traced with the backward. `False`: torch's
            C++ reducer. `None`: the environment variable `DP_COMPILE_DDP_PYTHON_HOOK`, and without it `True`.
        bucket_cap_mb: `float | None`, MiB, default `None`. Buckets by size, as torch's DDP: one is closed when it holds
            at least this much, the first of its kind at 1 MiB; `math.inf`: one bucket after the first. `None`: buckets
            end where the predicted end of the step is earliest.
        cost: `AllReduceCost | None`, default `None`. What an all-reduce costs, from `calibrate().cost`, for that
            prediction. `None`: a nominal link.
        gradient_divide_factor: `float | None`, default `None`. What the sum of the gradients is divided by. `None`: the
            number of ranks.
        mp_policy: `torch.distributed.fsdp.MixedPrecisionPolicy | None`, default `None`. FSDP2's policy, as
            there: the dtypes of compute, of gradients on the wire, and of outputs. `None`: the parameters' own.
        replan_after: `int | None`, backwards, default `None`. Plan once more, from so many measured backwards. `None`:
            never.
        find_unused_parameters: `bool`, default `False`. torch's name: a parameter without a gradient is left out where
            no rank used it, as in torch's DDP. `False`: it is an error on every rank, which names it.
        static_graph: `bool`, default `False`. torch's name: every backward uses the same parameters in the same way,
            and some may be left out.
        gradient_as_bucket_view: `bool | None`, default `None`. torch's name: whether the memory of buckets lives from
            one backward to the next. `None`: on CPUs of buckets above 32 MiB, and of those of a sharded optimizer.
        broadcast_buffers: `bool`, default `True`. Copy the first rank's buffers to all ranks at the start and after
            each synchronised backward. `False`: each rank keeps its own.
        init_sync_buffers: `bool | None`, default `None`. Whether buffers are copied at the start. `None`: as
            `broadcast_buffers` says.
        check_reductions: `bool`, default `True`. Check that gradients are reduced once, with those of all ranks, and
            now and then that parameters are equal on all ranks.
        check_nan: `bool`, default `False`. Raise on every rank if a reduced gradient is not finite; waits for it.
        backend: `str`, default `"inductor"`. What compiles the backward; `"aot_eager"`: no code generation.

    Raises:
        ConfigError: a value is not allowed.
    """

    ddp_python_hook: bool | None = None
    """One Python hook per parameter, traced with the backward. `None`: the environment variable
    `DP_COMPILE_DDP_PYTHON_HOOK` decides, and without it the answer is yes. `False`: torch's C++ reducer."""

    bucket_cap_mb: float | None = None
    """A bucket is closed when it holds at least this many MiB, the first of each key at 1, as in torch's DDP.
    `math.inf`: one bucket for each key after the first. `None`: where the predicted end of the step is earliest."""

    cost: AllReduceCost | None = None
    """What an all-reduce costs on the group, from `calibrate`, for that prediction. `None`: a nominal link."""

    gradient_divide_factor: float | None = None
    """What the sum of the gradients is divided by, as FSDP2's `set_gradient_divide_factor`. `None`: the number of
    ranks. NCCL then averages in the collective; else all is divided before the sum, but in float16 a power of two near
    the square root, as FSDP does."""

    mp_policy: MixedPrecisionPolicy | None = None
    """FSDP2's, as `fully_shard` of the installed torch reads it. `param_dtype`: the forward of the replicated module
    sees its floating parameters cast, and the backward computes in it; parameters, `.grad`, state dict and optimizer
    keep their dtype. `reduce_dtype`: gradients travel and are added up in it, each contribution divided first and
    rounded once; without it in `param_dtype`, since torch 2.15 in the parameters' dtype. `output_dtype`: of floating
    outputs. `cast_forward_inputs`: with `param_dtype`, floating inputs are cast. Complex parameters stay as they are.
    Another policy for a part: call `replicate` on the part first."""

    replan_after: int | None = None
    """Measure so many backwards, the first one not counted, and then plan once more, from measured ready times and,
    without `cost`, a measured link. The backward is then compiled once more. `None`: never."""

    find_unused_parameters: bool = False
    """As torch's DDP: gradients that no rank produced stay untouched, gradients that some ranks produced become the
    average over all ranks. `False`: a parameter without a gradient is an error on every rank, which names it."""

    static_graph: bool = False
    """torch's name: every backward uses the same parameters in the same way. Then some may be left out, as with
    `find_unused_parameters`, and where torch's reducer reduces, which then learns the graph from the first backward,
    layers may be checkpointed twice and backwards run inside backwards."""

    gradient_as_bucket_view: bool | None = None
    """torch's name, for what its buckets then do: whether their memory is there for the whole training, at the same
    addresses. `None`: on CPUs that of buckets above 32 MiB is, which malloc would take anew in each backward, and of
    all buckets of an optimizer with `shard=True`: parameters travel in the memory of their gradients. `True`: of all
    buckets, so that none is allocated in a step; forwards then run beside it, also where gradients are `None`. `False`:
    of none. Gradients are views of their buckets anyway. Not as in torch: one that somebody has kept stays what it was,
    and its bucket gets other memory. torch's reducer keeps its buckets, and what `aot_eager` compiles allocates them,
    whatever is said."""

    broadcast_buffers: bool = True
    """Copy the buffers of the group's first rank to all ranks at the start and after each synchronised backward.
    `False`: each rank keeps its own, from the start on, as with torch's DDP; shapes may differ then."""

    init_sync_buffers: bool | None = None
    """Whether the buffers of the first rank are copied at the start. `None`: as `broadcast_buffers`.
    torch's `forward_sync_buffers=False` is `broadcast_buffers=False, init_sync_buffers=True`."""

    check_reductions: bool = True
    """Check that gradients are those of all ranks. When a graph is new: every gradient is reduced exactly once. In each
    synchronised backward, by flags that travel with the gradients: no parameter was left out on some rank, all ranks
    reduced the same module, and none changed parameters before their gradients were reduced. Ranks also compare their
    parameters, by sums over the bits, as often as it costs 0.1 % of the time: an error on every rank names the first
    one that differs. Not with a comm hook, or where ranks run on different machines, whose optimizers may round
    differently."""

    check_nan: bool = False
    """After each synchronised backward, raise on every rank if a reduced gradient is not finite. Stops the host until
    the gradients are there. Leave it off with a `GradScaler`, which handles such gradients itself."""

    backend: str = "inductor"
    """What compiles the backward: `inductor`, or `aot_eager` (same graph and passes, no code generation)."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None:
            _check_positive("bucket_cap_mb", self.bucket_cap_mb, "Use math.inf for one bucket per key.")
        for name in SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in MAY_BE_NONE):
                raise ConfigError(f"{name} must be True or False, got {value!r}.")
        self._check_policy()
        self._check_factor()
        if self.cost is not None and not isinstance(self.cost, AllReduceCost):
            raise ConfigError(f"cost must be an AllReduceCost, got {type(self.cost).__name__}. See calibrate().")
        if self.replan_after is not None and (type(self.replan_after) is not int or self.replan_after < 1):
            raise ConfigError(f"replan_after must be a number of backwards >= 1, or None, got {self.replan_after!r}.")
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}.")

    @property
    def copies_buffers_at_start(self) -> bool:
        """Whether all ranks start with the buffers of the first."""
        return self.broadcast_buffers if self.init_sync_buffers is None else self.init_sync_buffers

    def _check_policy(self) -> None:
        if self.mp_policy is None:
            return
        if not distributed.is_mixed_precision_policy(self.mp_policy):
            raise ConfigError(
                "mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, got "
                f"{type(self.mp_policy).__name__}. For another policy in a part of the module call replicate() on that "
                "part first."
            )
        if distributed.is_by_parameter(self.mp_policy):
            raise ConfigError(
                "mp_policy has a param_dtype_override_fn, by which FSDP2 casts each parameter to another dtype. Call "
                "replicate() first on the part that computes in another dtype, with its policy."
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self.mp_policy, name)
            if dtype is not None and dtype not in FLOATING:
                allowed = ", ".join(map(str, FLOATING))
                raise ConfigError(f"{name} of mp_policy must be one of {allowed}, or None, got {dtype!r}.")

    def _check_factor(self) -> None:
        factor = self.gradient_divide_factor
        if factor is not None:
            _check_positive("gradient_divide_factor", factor, "Gradients are divided by it.")
            if math.isinf(factor):
                raise ConfigError(
                    f"gradient_divide_factor must be finite, got {factor!r}. Gradients are divided by it."
                )

    @property
    def casts(self) -> bool:
        """Whether the forward sees anything in another dtype."""
        policy = self.mp_policy
        return policy is not None and not (policy.param_dtype is None and policy.output_dtype is None)

    def wire_dtype(self, parameters: Iterable[torch.Tensor]) -> torch.dtype | None:
        """The dtype in which gradients of these parameters travel; `None`: their own."""
        return None if self.mp_policy is None else distributed.reduce_dtype_of(self.mp_policy, parameters)

    @property
    def may_be_unused(self) -> bool:
        """Whether parameters may have no gradient."""
        return self.find_unused_parameters or self.static_graph

    def chosen_strategy(self, *, has_policy: bool) -> str:
        """Where buckets end: `optimal`, or as `bucket_cap_mb` or `bucket_policy` says.

        Raises:
            ConfigError: options of different rules are given.
        """
        given = {
            "bucket_cap_mb": ("fixed", self.bucket_cap_mb is not None),
            "bucket_policy": ("per_module", has_policy),
            "cost": ("optimal", self.cost is not None),
            "replan_after": ("optimal", self.replan_after is not None),
        }
        asked = {option: strategy for option, (strategy, is_given) in given.items() if is_given}
        if len(set(asked.values())) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} exclude each other: buckets end at a size (bucket_cap_mb), with modules "
                "(bucket_policy), or where the predicted end of the step is earliest (cost, replan_after)."
            )
        return next(iter(asked.values()), "optimal")

    def uses_python_hook(self, environ: Mapping[str, str] | None = None) -> bool:
        """The value of `ddp_python_hook` after the environment variable was asked.

        Raises:
            ConfigError: the variable holds something that is neither yes nor no.
        """
        if self.ddp_python_hook is not None:
            return self.ddp_python_hook
        text = (os.environ if environ is None else environ).get(HOOK_VARIABLE, "1").strip().lower()
        if text not in _TRUE | _FALSE:
            allowed = ", ".join(sorted(_TRUE | _FALSE))
            raise ConfigError(f"environment variable {HOOK_VARIABLE} must be one of {allowed}, got {text!r}.")
        return text in _TRUE


def dump_directory(environ: Mapping[str, str] | None = None) -> str | None:
    """Where to write what becomes of each captured backward; the environment variable says, `None`: nowhere."""
    return (os.environ if environ is None else environ).get(DUMP_VARIABLE) or None


def check_parameters_every(environ: Mapping[str, str] | None = None) -> int | None:
    """After how many synchronised backwards ranks compare their parameters; 0: never.

    For debugging: the environment variable says. `None`: as often as it costs 0.1 % of the time.

    Raises:
        ConfigError: the variable holds something else than a number of backwards.
    """
    text = (os.environ if environ is None else environ).get(CHECK_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ConfigError(f"environment variable {CHECK_VARIABLE} must be a number of backwards >= 0, got {text!r}.")
    return int(text) if text else None


def monitor_after_s(environ: Mapping[str, str] | None = None) -> float | None:
    """After how many seconds in one backward a rank asks the others how far they are and logs whom it waits for.

    Compilation is not counted; again each time the wait has doubled. The environment variable says, by default 30.
    `None`, as `0` and `off` mean: no monitor, and errors say only what this rank knows.

    Raises:
        ConfigError: the variable holds no number of seconds.
    """
    text = (os.environ if environ is None else environ).get(MONITOR_VARIABLE, "").strip().lower() or "30"
    try:
        seconds = 0.0 if text in _FALSE else float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(f"environment variable {MONITOR_VARIABLE} must be seconds >= 0 or off, got {text!r}.")
    return seconds or None


def has_address(value: object) -> bool:
    """Whether the repr of a value says where it lies in memory, which is another place on each rank."""
    return re.search(r" at 0x[0-9a-f]+", repr(value)) is not None


def _check_positive(name: str, value: object, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number > 0, got {value!r}. {hint}")
    if math.isnan(value) or value <= 0:
        raise ConfigError(f"{name} must be > 0, got {value!r}. {hint}")
