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
from dp_compile.plan.strategies import WITH_OPTIONS, Fixed, Optimal, Strategy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # loading it loads all of FSDP

HOOK_VARIABLE: Final = "DP_COMPILE_DDP_PYTHON_HOOK"
DUMP_VARIABLE: Final = "DP_COMPILE_DUMP_DIR"
CACHE_VARIABLE: Final = "DP_COMPILE_CACHE"
BACKENDS: Final = ("inductor", "aot_eager")
TWO_LEVELS: Final = ("always", "auto")
UNUSED: Final = ("error", "zeros", "find")
STRATEGIES: Final = ("fixed", "per_module", "optimal", "coalesced", "ddp", "explicit")
FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEFAULT_CAP_MB: Final = 25.0
DEFAULT_FIRST_CAP_MB: Final = 1.0

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
    """How a module is replicated. The same on every rank, but for `dump_dir`; ranks compare it at the start.

    Sizes in `*_mb` are MiB, times in `*_s` seconds. The text at each field, in the source, says more.

    Args:
        ddp_python_hook: `bool | None`, default `None`. `True`: hooks, traced with the backward. `False`: torch's
            C++ reducer. `None`: the environment variable `DP_COMPILE_DDP_PYTHON_HOOK`, and without it `True`.
        strategy: `str | Strategy | None`, default `None`. Where buckets end: `"optimal"`, `"fixed"`, `"per_module"`,
            `"coalesced"`, `"ddp"`, `"explicit"`, or a value of `dp_compile.plan.strategies`, or your own. `None`: what
            the other options ask for, else `"optimal"`.
        bucket_cap_mb: `float | None`, MiB, default `None`. For `fixed` and `ddp`: a bucket is closed when it holds at
            least this much, 25 if not given; `math.inf`: one bucket.
        first_bucket_cap_mb: `float | None`, MiB, default `None`. For `fixed`: the same for the first bucket, 1 if not
            given.
        cost: `AllReduceCost | None`, default `None`. For `optimal`, `coalesced` and `two_levels="auto"`: what an
            all-reduce costs, from `calibrate().cost`. `None`: a nominal link.
        two_levels: `str`, default `"always"`. On a `device_mesh` with two dimensions: reduce every bucket on both
            levels, or with `"auto"` on one where that is predicted to be sooner.
        mp_policy: `torch.distributed.fsdp.MixedPrecisionPolicy | None`, default `None`. FSDP2's policy, as
            there: the dtypes of compute, of gradients on the wire, and of outputs. `None`: the parameters' own.
        gradient_divide_factor: `float | None`, default `None`. What the sum of the gradients is divided by. `None`: the
            number of ranks.
        gradient_predivide_factor: `float | None`, default `None`. The part of it by which each rank divides before the
            sum. `None`: all of it, or what the dtype wants.
        alignment_bytes: `int`, bytes, default 64. Gradients start in their bucket at multiples of this power of two.
        replan_after: `int | None`, backwards, default `None`. For `optimal` and `coalesced`: plan once more, from so
            many measured backwards. `None`: never.
        unused_parameters: `str | None`, default `None`. What a parameter without a gradient means: `"error"`, `"zeros"`
            (it takes part with zeros) or `"find"` (as torch's DDP). `None`: what `find_unused_parameters` says.
        find_unused_parameters: `bool`, default `False`. torch's name: `True` means `unused_parameters="find"`, `False`
            means `"error"`.
        static_graph: `bool`, default `False`. torch's name: every backward uses the same parameters in the same way,
            and some may be left out.
        gradient_as_bucket_view: `bool | None`, default `None`. torch's name: whether the memory of buckets lives from
            one backward to the next. `None`: on CPUs of buckets above 32 MiB, and of those of a sharded optimizer.
        broadcast_buffers: `bool`, default `True`. Copy the first rank's buffers to all ranks at the start and after
            each synchronised backward. `False`: each rank keeps its own.
        init_sync_buffers: `bool | None`, default `None`. Whether buffers are copied at the start. `None`: as
            `broadcast_buffers` says.
        check_reductions: `bool`, default `True`. Check that gradients are reduced once, with those of all ranks.
        check_nan: `bool`, default `False`. Raise on every rank if a reduced gradient is not finite; waits for it.
        compare_parameters_every: `int | None`, synchronised backwards, default `None`. How often ranks compare their
            parameters, bit by bit. `None`: as often as costs 0.1 % of the time. 0: never.
        backend: `str`, default `"inductor"`. What compiles the backward; `"aot_eager"`: no code generation.
        timeout_s: `float`, seconds, default 300. How long a rank waits for the others when ranks compare.
        monitor_after_s: `float | None`, seconds, default 30. After how long in one backward the log says who is waited
            for. `None`: no monitor.
        dump_dir: `str | None`, default `None`. Directory for what becomes of each captured backward. `None`: the
            environment variable `DP_COMPILE_DUMP_DIR`, and without it nothing is written.

    Raises:
        ConfigError: a value is not allowed.
    """

    ddp_python_hook: bool | None = None
    """One Python hook per parameter, traced with the backward. `None`: the environment variable
    `DP_COMPILE_DDP_PYTHON_HOOK` decides, and without it the answer is yes. `False`: torch's C++ reducer."""

    strategy: str | Strategy | None = None
    """Where buckets end: `fixed`, `per_module`, `optimal`, `coalesced`, `ddp` or `explicit`, see
    `dp_compile.plan.strategies`. A value, `Optimal(replan_after=20)`, is its name and its options. Anything else with
    `name`, `plans_anew` and `plan` is asked for the plan. `None`: what the other options ask for (`fixed` with a cap,
    `per_module` with a policy, `explicit` with a plan), else `optimal`."""

    bucket_cap_mb: float | None = None
    """For `fixed` and `ddp`: a bucket is closed when it holds at least this many MiB, 25 by default. `math.inf`: one
    bucket for each key, in `fixed` behind a first one, see below."""

    first_bucket_cap_mb: float | None = None
    """For `fixed`: the same for the first bucket of each key, 1 by default, if it is less: communication then starts
    early."""

    cost: AllReduceCost | None = None
    """For `optimal` and `coalesced`: what an all-reduce costs on the group, from `calibrate`. `None`: a nominal
    link."""

    two_levels: str = "always"
    """Of buckets on a `device_mesh` with two dimensions: `always`, each is reduced inside nodes and between them;
    `auto`, or over all ranks at once where its stages are predicted to take longer than that. The prediction is as good
    as `cost`: `calibrate(device_mesh=mesh).cost`, or what `replan_after` measures; nominal links before."""

    mp_policy: MixedPrecisionPolicy | None = None
    """FSDP2's, as `fully_shard` of the installed torch reads it. `param_dtype`: the forward of the replicated module
    sees its floating parameters cast, and the backward computes in it; parameters, `.grad`, state dict and optimizer
    keep their dtype. `reduce_dtype`: gradients travel and are added up in it, each contribution divided first and
    rounded once; without it in `param_dtype`, since torch 2.15 in the parameters' dtype. `output_dtype`: of floating
    outputs. `cast_forward_inputs`: with `param_dtype`, floating inputs are cast. Complex parameters stay as they are.
    Another policy for a part: call `replicate` on the part first."""

    gradient_divide_factor: float | None = None
    """What the sum of the gradients is divided by, as FSDP2's `set_gradient_divide_factor`. `None`: the number of
    ranks."""

    gradient_predivide_factor: float | None = None
    """As Horovod's: each rank divides by this before the sum, and by the rest of `gradient_divide_factor` behind it.
    `None`: NCCL averages in the collective; else all is divided before the sum, but in float16 a power of two near the
    square root, as FSDP does."""

    alignment_bytes: int = 64
    """Gradients start in their bucket at multiples of this many bytes, a power of two; smaller ones at multiples of
    their own size. 64: a cache line, and more than the 16 that vectorised loads want. 1: no gaps."""

    replan_after: int | None = None
    """For `optimal` and `coalesced`: measure so many backwards, the first one not counted, and then plan once more,
    from measured ready times and, without `cost`, a measured link. The backward is then compiled once more. `None`:
    never."""

    unused_parameters: str | None = None
    """What a parameter without a gradient means. `error`: an error on every rank that names it. `zeros`: it takes part
    with zeros, or with the gradient that it has kept, and gets the average on every rank, also if no rank used it.
    `find`: as torch's DDP, gradients that no rank produced stay untouched, gradients that some ranks produced become
    the average over all ranks. `None`: what `find_unused_parameters` says."""

    find_unused_parameters: bool = False
    """torch's name: `True` means `unused_parameters="find"`, `False` the same as not given, `error`."""

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
    reduced the same module, and none changed parameters before their gradients were reduced."""

    check_nan: bool = False
    """After each synchronised backward, raise on every rank if a reduced gradient is not finite. Stops the host until
    the gradients are there. Leave it off with a `GradScaler`, which handles such gradients itself."""

    compare_parameters_every: int | None = None
    """After how many synchronised backwards ranks compare their parameters, by sums over the bits: an error on every
    rank names the first one that differs. 0: never. `None`: as often as it costs 0.1 % of the time, and not with a comm
    hook, with `check_reductions=False`, or where ranks run on different machines, whose optimizers may round
    differently."""

    backend: str = "inductor"
    """What compiles the backward: `inductor`, or `aot_eager` (same graph and passes, no code generation)."""

    timeout_s: float = 300.0
    """How long a rank waits for the others when they compare what they replicate, at the start. Inside a backward it
    waits as long as the process group waits for a collective."""

    monitor_after_s: float | None = 30.0
    """After how long in one backward, compilation not counted, a rank asks the others how far they are and logs whom
    it waits for; again each time the wait has doubled. `None`: no monitor, and errors tell only what this rank
    knows."""

    dump_dir: str | None = None
    """Where to write what becomes of each captured backward: short texts, whole graphs, differences and a repro, in
    `rank<k>/capture<n>`. The only option that ranks may give differently. `None`: the environment variable
    `DP_COMPILE_DUMP_DIR` says where, and without it nothing is written."""

    def __post_init__(self) -> None:
        if type(self.strategy) in WITH_OPTIONS:  # not one of the user's that is made from one of them
            assert isinstance(self.strategy, WITH_OPTIONS)
            self._take_options_of(self.strategy)
        _check_path("dump_dir", self.dump_dir)
        for name in ("bucket_cap_mb", "first_bucket_cap_mb"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name), "Use math.inf for one bucket per key.")
        _check_positive("timeout_s", self.timeout_s, "It is in seconds.")
        _check_power_of_two("alignment_bytes", self.alignment_bytes)
        if self.monitor_after_s is not None:
            _check_positive("monitor_after_s", self.monitor_after_s, "It is in seconds; None switches it off.")
        for name in SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in MAY_BE_NONE):
                raise ConfigError(f"{name} must be True or False, got {value!r}.")
        self._check_unused()
        self._check_policy()
        self._check_factors()
        self._check_strategy()
        if self.cost is not None and not isinstance(self.cost, AllReduceCost):
            raise ConfigError(f"cost must be an AllReduceCost, got {type(self.cost).__name__}. See calibrate().")
        if self.replan_after is not None and (type(self.replan_after) is not int or self.replan_after < 1):
            raise ConfigError(f"replan_after must be a number of backwards >= 1, or None, got {self.replan_after!r}.")
        _check_every("compare_parameters_every", self.compare_parameters_every)
        _check_one_of("backend", self.backend, BACKENDS)
        _check_one_of("two_levels", self.two_levels, TWO_LEVELS)

    def _check_unused(self) -> None:
        if self.unused_parameters is not None and self.unused_parameters not in UNUSED:
            raise ConfigError(f"unused_parameters must be one of {', '.join(UNUSED)}, got {self.unused_parameters!r}.")
        if self.find_unused_parameters and self.unused_parameters not in (None, "find"):
            raise ConfigError(
                f"find_unused_parameters=True means unused_parameters='find', but that is '{self.unused_parameters}'. "
                "Give one of the two."
            )

    def _take_options_of(self, strategy: Fixed | Optimal) -> None:
        for option, value in strategy.options().items():
            if getattr(self, option) is not None:
                raise ConfigError(f"{option} is given beside strategy={strategy!r}. Give it to the strategy.")
            object.__setattr__(self, option, value)
        object.__setattr__(self, "strategy", strategy.name)

    def _check_strategy(self) -> None:
        if self.strategy is None or (isinstance(self.strategy, str) and self.strategy in STRATEGIES):
            return
        if isinstance(self.strategy, str) or not isinstance(self.strategy, Strategy):
            raise ConfigError(
                f"strategy must be one of {', '.join(STRATEGIES)}, or a value with name, plans_anew and plan(), got "
                f"{self.strategy!r}."
            )
        if self.strategy.name in STRATEGIES:
            raise ConfigError(
                f"strategy {self.strategy!r} has the name '{self.strategy.name}', which is one of dp_compile's. "
                "Give it a name of its own."
            )
        if has_address(self.strategy):
            raise ConfigError(
                f"strategy {self.strategy!r} has an address in its repr, which is another one on each rank, and ranks "
                "compare strategies by it. Make it a frozen dataclass."
            )

    @property
    def copies_buffers_at_start(self) -> bool:
        """Whether all ranks start with the buffers of the first."""
        return self.broadcast_buffers if self.init_sync_buffers is None else self.init_sync_buffers

    @property
    def own_strategy(self) -> Strategy | None:
        """The user's strategy, if one was given."""
        return None if self.strategy is None or isinstance(self.strategy, str) else self.strategy

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

    def _check_factors(self) -> None:
        for name in ("gradient_divide_factor", "gradient_predivide_factor"):
            value = getattr(self, name)
            if value is not None:
                _check_positive(name, value, "Gradients are divided by it.")
                if math.isinf(value):
                    raise ConfigError(f"{name} must be finite, got {value!r}. Gradients are divided by it.")

    @property
    def casts(self) -> bool:
        """Whether the forward sees anything in another dtype."""
        policy = self.mp_policy
        return policy is not None and not (policy.param_dtype is None and policy.output_dtype is None)

    def wire_dtype(self, parameters: Iterable[torch.Tensor]) -> torch.dtype | None:
        """The dtype in which gradients of these parameters travel; `None`: their own."""
        return None if self.mp_policy is None else distributed.reduce_dtype_of(self.mp_policy, parameters)

    @property
    def unused(self) -> str:
        """What a parameter without a gradient means: `error`, `zeros` or `find`."""
        return self.unused_parameters or ("find" if self.find_unused_parameters or self.static_graph else "error")

    def caps_mb(self) -> tuple[float, float]:
        """The caps of `fixed` in MiB: of any bucket, and of the first of its key."""
        cap_mb = DEFAULT_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb
        first_cap_mb = DEFAULT_FIRST_CAP_MB if self.first_bucket_cap_mb is None else self.first_bucket_cap_mb
        return cap_mb, min(first_cap_mb, cap_mb)

    def chosen_strategy(self, *, has_policy: bool, has_plan: bool) -> str:
        """The strategy that the options ask for.

        Raises:
            ConfigError: options of different strategies are given, or one that the chosen strategy does not read.
        """
        given = {
            "bucket_cap_mb": ("ddp" if self.strategy == "ddp" else "fixed", self.bucket_cap_mb is not None),
            "first_bucket_cap_mb": ("fixed", self.first_bucket_cap_mb is not None),
            "bucket_policy": ("per_module", has_policy),
            "plan": ("explicit", has_plan),
            # Whatever the strategy is, levels are chosen by it.
            "cost": (
                "coalesced" if self.strategy == "coalesced" else "optimal",
                self.cost is not None and self.two_levels != "auto",
            ),
            "replan_after": ("coalesced" if self.strategy == "coalesced" else "optimal", self.replan_after is not None),
        }
        asked = {option: strategy for option, (strategy, is_given) in given.items() if is_given}
        own = self.own_strategy
        chosen = own.name if own is not None else str(self.strategy or next(iter(asked.values()), "optimal"))
        for option, strategy in asked.items():
            if strategy != chosen:
                raise ConfigError(f"{option} belongs to strategy '{strategy}', but the strategy is '{chosen}'.")
        if chosen in ("per_module", "explicit") and chosen not in asked.values():
            wanted = "bucket_policy" if chosen == "per_module" else "plan"
            raise ConfigError(f"strategy '{chosen}' needs {wanted}. Pass it to replicate().")
        return chosen

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

    def dump_directory(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The value of `dump_dir` after the environment variable was asked; `None`: nothing is to be dumped."""
        return self.dump_dir or (os.environ if environ is None else environ).get(DUMP_VARIABLE) or None


def keeps_compiled(device_types: Iterable[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether compiled backwards are kept for later processes, and found again; the environment variable says.

    By default (`auto`) those whose tensors are all on CPUs are: it was never tried on a GPU.

    Args:
        device_types: where the tensors of a backward are.
        environ: in the place of the process's environment.

    Raises:
        ConfigError: the variable holds something that is neither yes nor no, nor `auto`.
    """
    text = (os.environ if environ is None else environ).get(CACHE_VARIABLE, "auto").strip().lower()
    if text == "auto":
        return all(each == "cpu" for each in device_types)
    if text not in _TRUE | _FALSE:
        allowed = ", ".join(sorted(_TRUE | _FALSE | {"auto"}))
        raise ConfigError(f"environment variable {CACHE_VARIABLE} must be one of {allowed}, got {text!r}.")
    return text in _TRUE


def has_address(value: object) -> bool:
    """Whether the repr of a value says where it lies in memory, which is another place on each rank."""
    return re.search(r" at 0x[0-9a-f]+", repr(value)) is not None


def _check_positive(name: str, value: object, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number > 0, got {value!r}. {hint}")
    if math.isnan(value) or value <= 0:
        raise ConfigError(f"{name} must be > 0, got {value!r}. {hint}")


def _check_every(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 0):
        raise ConfigError(f"{name} must be a number of backwards >= 0, or None, got {value!r}. 0 switches it off.")


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def _check_path(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(f"{name} must be the path of a directory as text, got {value!r}.")


def _check_power_of_two(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ConfigError(f"{name} must be a power of two of bytes, got {value!r}. Use {name}=1 for no padding.")
