"""What an all-reduce costs: formulas as sympy expressions, a fit to samples.

Two levels. A `Formula` knows the algorithm: a symbolic expression over latency, bandwidth, ranks and bytes. For a
given group it is a straight line in the bytes, an `AllReduceCost`, and that line is all that a planner needs.

Units: `_s` seconds, `_us` microseconds, `busbw` bytes per second in the meaning of nccl-tests (time of a large
all-reduce = 2(n-1)/n * nbytes / busbw), `busbw_gb_s` the same in 1e9 bytes per second.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import sympy  # type: ignore[import-untyped]
from sympy.codegen.cfunctions import log2  # type: ignore[import-untyped]

from dp_compile.errors import ConfigError
from dp_compile.plan.reduction import BETWEEN, INSIDE

COST_VERSION: Final = 1

_nbytes, _busbw = sympy.symbols("nbytes busbw", positive=True)
_alpha_0, _alpha_hop = sympy.symbols("alpha_0 alpha_hop", positive=True)
_n = sympy.Symbol("n", positive=True, integer=True)


def check_number(name: str, value: object, *, zero_allowed: bool) -> None:
    """Raises:
    ConfigError: `value` is not a finite number above zero (or zero, if that is allowed).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}.")
    if value < 0 or (value == 0 and not zero_allowed):
        raise ConfigError(f"{name} must be {'>=' if zero_allowed else '>'} 0, got {value!r}.")


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """`alpha_s + beta_s_per_byte * nbytes` seconds: what one all-reduce costs on one group.

    On two levels of network also what one costs `inside` a node and `between` nodes. Inside, that is a reduce-scatter
    and an all-gather, or what the backend has in their place.

    Raises:
        ConfigError: a value is negative or not finite.
    """

    alpha_s: float
    beta_s_per_byte: float
    inside: AllReduceCost | None = None
    between: AllReduceCost | None = None

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte"):
            check_number(name, getattr(self, name), zero_allowed=True)

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def on(self, link: str) -> AllReduceCost:
        """What one costs on a link that a stage names; where nothing is known of it, what one costs on the group."""
        found = self.inside if link == INSIDE else self.between if link == BETWEEN else None
        return found or self

    def scaled(self, factor: float, latency: float = 1.0) -> AllReduceCost:
        """The cost on a network that is `factor` times as slow as believed, and its latency `latency` times more."""
        levels = [None if each is None else each.scaled(factor, latency) for each in (self.inside, self.between)]
        return AllReduceCost(self.alpha_s * factor * latency, self.beta_s_per_byte * factor, *levels)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> AllReduceCost:
        """What `asdict` made of one."""
        levels = {name: data.get(name) for name in (INSIDE, BETWEEN)}
        known = {name: AllReduceCost.from_dict(each) for name, each in levels.items() if each is not None}
        return AllReduceCost(**{**data, **levels, **known})

    def __str__(self) -> str:
        rate = f"{1e-9 / self.beta_s_per_byte:.4g} GB/s" if self.beta_s_per_byte else "no time per byte"
        line = f"{self.alpha_s * 1e6:.4g} us + nbytes / ({rate})"
        if self.inside is None or self.between is None:
            return line
        return f"{line}; on two levels {self.inside} inside a node and {self.between} between nodes"


@dataclass(frozen=True, slots=True)
class Formula:
    """A symbolic expression with its source. Evaluated through a compiled function, which the instance keeps."""

    name: str
    expression: sympy.Expr
    source: str
    _compiled: dict[tuple[sympy.Expr, str], Callable[..., Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(sorted(symbol.name for symbol in self.expression.free_symbols))

    def evaluate(self, **values: Any) -> Any:
        """The value for numbers or numpy arrays, one for each of `symbols`.

        Raises:
            ConfigError: a symbol is missing, unknown, or has a value that is not positive.
        """
        return self._evaluate(self.expression, values, "numpy")

    def cost(self, **values: float) -> AllReduceCost:
        """The straight line in the bytes: `alpha` at zero bytes, `beta` the slope.

        Raises:
            ConfigError: as in `evaluate`.
        """
        line = values | {"nbytes": 1.0}
        # Of numbers with `math`: for numpy, sympy imports all of it, which takes 0.1 to 0.3 s, and every start pays it.
        return AllReduceCost(
            float(self._evaluate(self.expression.subs(_nbytes, 0), line, "math")),
            float(self._evaluate(sympy.diff(self.expression, _nbytes), line, "math")),
        )

    def _evaluate(self, expression: sympy.Expr, values: Mapping[str, Any], modules: str) -> Any:
        names = self.symbols
        if set(values) != set(names):
            raise ConfigError(f"{self.name} needs values for {', '.join(names)}, got {', '.join(sorted(values))}.")
        for name, value in values.items():
            _check_positive(name, value)
        if (expression, modules) not in self._compiled:
            symbols = sorted(self.expression.free_symbols, key=lambda symbol: symbol.name)
            self._compiled[expression, modules] = sympy.lambdify(symbols, expression, modules=modules)
        return self._compiled[expression, modules](*(values[name] for name in names))

    def __str__(self) -> str:
        return f"{self.name} = {sympy.sstr(self.expression)}"


RING: Final = Formula(
    "ring all-reduce",
    _alpha_0 + 2 * (_n - 1) * _alpha_hop + 2 * (_n - 1) / _n * _nbytes / _busbw,
    "Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009: reduce-scatter and all-gather, n-1 steps "
    "each; alpha_0 is paid once (launch and rendezvous)",
)
TREE: Final = Formula(
    "double binary tree all-reduce",
    _alpha_0 + 2 * sympy.ceiling(log2(_n)) * _alpha_hop + 2 * _nbytes / _busbw,
    "Sanders, Speck, Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009: up and down, "
    "pipelined, each rank sends every byte twice",
)
EITHER: Final = Formula(
    "ring or double binary tree all-reduce",
    _alpha_0 + 2 * sympy.ceiling(log2(_n)) * _alpha_hop + 2 * (_n - 1) / _n * _nbytes / _busbw,
    "as libraries choose by the size: the tree where latency counts, the ring where bytes do. A straight line that is "
    "below both, by the most where they meet, and that no rank more makes faster: a choice by the ranks alone would",
)


@dataclass(frozen=True, slots=True)
class CostFit:
    """A cost fitted to measurements. `residual` is the mean of |fitted - measured| / measured over the sizes."""

    cost: AllReduceCost
    residual: float
    smallest_nbytes: int
    largest_nbytes: int

    def to_json(self) -> str:
        return json.dumps({"version": COST_VERSION} | asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> CostFit:
        """What `to_json` wrote.

        Raises:
            ConfigError: not JSON, of another version, a field is missing, unknown or not allowed.
        """
        try:
            data = dict(json.loads(text))
            version = data.pop("version")
            if version != COST_VERSION:
                raise ConfigError(
                    f"this cost file is of version {version!r}, readable is {COST_VERSION}. Calibrate again."
                )
            return CostFit(**data | {"cost": AllReduceCost.from_dict(data["cost"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a cost file of dp_compile: {error!r}. Calibrate again.") from error


class TimesDoNotGrow(ConfigError):
    """Samples that a constant fits as well as any line."""


def fit(samples: Iterable[tuple[int, float]]) -> CostFit:
    """The line with the least sum of relative deviations from `(nbytes, seconds)` samples.

    Several samples of a size count as their median. Relative, so that small messages fix alpha and large ones beta;
    absolute values, not squares, so that a minority of outliers changes little. The best line passes through two of
    the points, or through one with alpha = 0, so trying all of them is exact (least absolute deviations, a linear
    programme whose optimum is a vertex).

    Raises:
        ConfigError: fewer than two sizes, or a value that is not finite and positive.
        TimesDoNotGrow: a `ConfigError`: no line with a slope fits better than a constant.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in samples:
        check_number("nbytes of a sample", nbytes, zero_allowed=False)
        check_number("seconds of a sample", seconds, zero_allowed=False)
        times[nbytes].append(seconds)
    if len(times) < 2:
        raise ConfigError(f"a fit needs samples of at least 2 sizes, got {len(times)}.")
    x = np.array(sorted(times), dtype=float)
    y = np.array([np.median(times[int(size)]) for size in x])
    first, second = np.array(list(itertools.combinations(range(len(x)), 2))).T
    slopes = np.concatenate([(y[second] - y[first]) / (x[second] - x[first]), y / x])
    offsets = np.concatenate([y[first], y]) - slopes * np.concatenate([x[first], x])
    offsets[-len(x) :] = 0.0
    allowed = (slopes > 0) & (offsets >= 0)
    slopes, offsets = slopes[allowed], offsets[allowed]
    deviations = np.abs((offsets[:, None] + slopes[:, None] * x) / y - 1).mean(axis=1)
    best = int(deviations.argmin())
    if len(x) > 1 and float(np.abs(np.median(y) / y - 1).mean()) <= float(deviations[best]):
        raise TimesDoNotGrow("the times do not grow with the size, so there is no bandwidth. Measure larger sizes.")
    cost = AllReduceCost(float(offsets[best]), float(slopes[best]))
    return CostFit(cost, float(deviations[best]), int(x[0]), int(x[-1]))


def _check_positive(name: str, value: Any) -> None:
    array = np.asarray(value, dtype=float)
    if not bool(np.all(np.isfinite(array) & (array > 0))):
        raise ConfigError(f"{name} must be > 0 and finite, got {value!r}.")
    if name == "n" and not bool(np.all(array == np.floor(array))):
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
