"""Every option of `dp_compile`, declared once: name, default, unit, check.

Sizes in `*_mb` are MiB (2**20 bytes), as in torch's DDP. Times in `*_s` are seconds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dp_compile._torch import distributed
from dp_compile.errors import ConfigError
from dp_compile.plan.cost import AllReduceCost

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
    "cast_forward_inputs",
    "full_precision_in_eval",
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
        reduce_dtype: `torch.dtype | None`, default `None`. Floating dtype in which gradients travel and are added up.
            `None`: `param_dtype`, and without it their own.
        reduce_dtypes: `Mapping[type[nn.Module] | str | policy, torch.dtype | None]`, default empty. Exceptions from
            `reduce_dtype`: submodules by class, name or a policy as for `bucket_policy`, with all below them. `None`:
            the gradients' own dtype.
        gradient_divide_factor: `float | None`, default `None`. What the sum of the gradients is divided by. `None`: the
            number of ranks.
        param_dtype: `torch.dtype | None`, default `None`. Floating dtype in which forward and backward compute;
            parameters, gradients and the state dict keep theirs. `None`: the parameters' own.
        output_dtype: `torch.dtype | None`, default `None`. Floating dtype of what the forward returns. `None`: as it
            comes.
        buffer_dtype: `torch.dtype | None`, default `None`. Floating dtype of the buffers that the forward sees. `None`:
            their own.
        cast_forward_inputs: `bool`, default `True`. With `param_dtype`: cast floating inputs of the forward to it.
        full_precision_modules: `tuple[type[nn.Module] | str | policy, ...]`, default `()`. Classes, or names, of
            submodules that compute in their own dtype, with all below them; or policies as for `bucket_policy`.
        full_precision_in_eval: `bool`, default `False`. Cast neither parameters, buffers nor inputs while the module is
            in evaluation mode.
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

    reduce_dtype: torch.dtype | None = None
    """Floating dtype in which gradients travel and are added up; `.grad` keeps the parameter's. Each contribution is
    divided first and rounded once. What is complex, or has this dtype already, travels as it is. `None`: `param_dtype`,
    and without it their own."""

    reduce_dtypes: Mapping[Any, torch.dtype | None] | tuple[tuple[Any, torch.dtype | None], ...] = ()
    """Exceptions from `reduce_dtype`: norms in float32, embeddings in float16. Submodules by class, by fully qualified
    name, or by a policy as for `bucket_policy` (torch's `ModuleWrapPolicy`, `size_based_auto_wrap_policy`), with all
    below them. `None`: their own dtype."""

    gradient_divide_factor: float | None = None
    """What the sum of the gradients is divided by, as FSDP2's `set_gradient_divide_factor`. `None`: the number of
    ranks. NCCL then averages in the collective; else all is divided before the sum, but in float16 a power of two near
    the square root, as FSDP does."""

    param_dtype: torch.dtype | None = None
    """FSDP2's: the forward of the replicated module sees its floating parameters cast to it, and the backward computes
    in it. Nobody else sees that: parameters, `.grad`, state dict and optimizer keep their dtype. A parameter that has
    it already is not touched, nor are integers and complex numbers."""

    output_dtype: torch.dtype | None = None
    """FSDP2's: floating tensors that the forward returns are cast to it."""

    buffer_dtype: torch.dtype | None = None
    """FSDP1's: the forward sees floating buffers cast to it. They keep their own dtype; elements that the forward
    changes go back into them."""

    cast_forward_inputs: bool = True
    """FSDP2's: with `param_dtype`, floating tensors among the inputs of the forward are cast to it."""

    full_precision_modules: tuple[Any, ...] = ()
    """Submodules that compute in their own dtype, with all below them, by class, by fully qualified name, or by a
    policy as for `bucket_policy`: norms, a loss. As BatchNorm with FSDP1, their floating inputs are cast up, and what
    they return is cast back. Their gradients travel as all others: say `reduce_dtype=torch.float32` if they should not
    be rounded."""

    full_precision_in_eval: bool = False
    """FSDP1's FSDP_USE_FULL_PREC_IN_EVAL: in evaluation mode only outputs are cast."""

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
        self._check_averaging()
        self._check_reduce_dtypes()
        self._check_full_precision()
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

    def _check_averaging(self) -> None:
        for name in ("reduce_dtype", "param_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATING):
                allowed = ", ".join(map(str, FLOATING))
                raise ConfigError(f"{name} must be one of {allowed}, or None, got {dtype!r}.")
        factor = self.gradient_divide_factor
        if factor is not None:
            _check_positive("gradient_divide_factor", factor, "Gradients are divided by it.")
            if math.isinf(factor):
                raise ConfigError(
                    f"gradient_divide_factor must be finite, got {factor!r}. Gradients are divided by it."
                )

    def _check_reduce_dtypes(self) -> None:
        given = self.reduce_dtypes
        pairs = tuple(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, tuple) or not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
            raise ConfigError(f"reduce_dtypes must map module classes, names or policies to dtypes, got {given!r}.")
        object.__setattr__(self, "reduce_dtypes", pairs)  # a value that can be compared and hashed
        for module, dtype in pairs:
            _check_means_modules("reduce_dtypes", module)
            if dtype is not None and dtype not in FLOATING:
                allowed = ", ".join(map(str, FLOATING))
                raise ConfigError(f"reduce_dtypes must hold dtypes of {allowed}, or None, got {dtype!r} for {module}.")

    def _check_full_precision(self) -> None:
        given = self.full_precision_modules
        if isinstance(given, (str, type)) or not isinstance(given, Iterable):
            raise ConfigError(
                f"full_precision_modules must hold module classes, names or policies, got {given!r}. Pass a tuple."
            )
        object.__setattr__(self, "full_precision_modules", tuple(given))
        for each in self.full_precision_modules:
            _check_means_modules("full_precision_modules", each)

    @property
    def casts(self) -> bool:
        """Whether the forward sees anything in another dtype."""
        return not (self.param_dtype is None and self.output_dtype is None and self.buffer_dtype is None)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients travel; `None`: their own."""
        return self.param_dtype if self.reduce_dtype is None else self.reduce_dtype

    @property
    def wire_exceptions(self) -> tuple[tuple[Any, torch.dtype | None], ...]:
        """`reduce_dtypes` as pairs."""
        assert isinstance(self.reduce_dtypes, tuple)
        return self.reduce_dtypes

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


def _check_means_modules(name: str, given: object) -> None:
    """A class, a name, or a policy, which is asked once there is a module."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        return
    is_policy = distributed.is_wrap_policy(given) or (callable(given) and not isinstance(given, (type, nn.Module)))
    if not isinstance(given, str) and not is_policy:
        raise ConfigError(
            f"{name} must be of module classes, names or policies, got {type(given).__name__}. A module is given by "
            "its name in named_modules()."
        )
