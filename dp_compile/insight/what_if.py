"""What a step would take on other ranks, links, dtypes, buckets: a table, and a curve over the ranks. Predictions."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

from torch import nn

from dp_compile.engine.record import IN_BACKWARD, SHARDED
from dp_compile.errors import ConfigError
from dp_compile.insight.explanation.exposure import with_measured_backward
from dp_compile.insight.neighbours import BUCKET_MB, Mixed, mixed
from dp_compile.insight.observe import step_of
from dp_compile.insight.prediction import (
    AS_PLANNED,
    PLAIN,
    Prediction,
    Scenario,
    band_for,
    cost_for,
    extrapolated,
    predict,
)
from dp_compile.insight.step import Step
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.words import count, format_bytes

WHAT_IF_VERSION: Final = 1
CURVE_RANKS: Final = tuple(2**power for power in range(15))
"""1 to 16,384."""

BAR_WIDTH: Final = 50


@dataclass(frozen=True, slots=True)
class Curve:
    """One link and dtype over the ranks, `optimal` buckets for each. `points` in the order of `CURVE_RANKS`."""

    name: str
    points: tuple[Prediction, ...]

    def __str__(self) -> str:
        longest = max(point.makespan_s for point in self.points)
        lines = [
            f"over the ranks, {self.name}, optimal buckets for each:",
            f"{'ranks':>8}  {'backward':>10}  {'exposed':>10}  {'of compute':>10}",
        ]
        for point in self.points:
            share = point.makespan_s / point.backward_s if point.backward_s else math.nan
            lines.append(
                f"{point.world_size:>8,}  {format_ms(point.makespan_s):>10}  {format_ms(point.exposed_s):>10}  "
                f"{share:>9.2f}x  {_bar(point, longest)}"
            )
        return "\n".join([*lines, f"{'':44}  █ compute  ░ exposed communication"])


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Predictions for one step. `rows` in the order asked for; the first of `curves` is of the first link.

    `mixed`: with parameters mixed over topologies in place of gradients that are reduced.
    """

    step: Step
    rows: tuple[Prediction, ...]
    curves: tuple[Curve, ...]
    mixed: tuple[Mixed, ...] = ()

    @property
    def fastest(self) -> Prediction:
        """The row whose backward ends first; of equal ones the first."""
        return min(self.rows, key=lambda row: row.makespan_s)

    def table(self) -> str:
        """One line for each prediction. Columns in which no row wants anything are left out."""
        return _table(self.rows, _COLUMNS)

    def topologies(self) -> str:
        """The same for topologies; empty if none was asked for."""
        return _table(self.mixed, _MIXED_COLUMNS) if self.mixed else ""

    def curve(self) -> str:
        """The curves as text, one below the other."""
        return "\n\n".join(map(str, self.curves))

    def to_json(self) -> str:
        """Times in seconds, sizes in bytes; without the plans."""
        curves = [{"name": each.name, "points": [_data(point) for point in each.points]} for each in self.curves]
        rows = [_data(row) for row in self.rows]
        data = {"version": WHAT_IF_VERSION, "step": _step_data(self.step), "rows": rows, "curves": curves}
        if self.mixed:
            data["topologies"] = [_mixed_data(each) for each in self.mixed]
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        lines = [*_head(self.step), "", self.table(), "", *_notes(self.step, self.rows)]
        if self.mixed:
            lines += ["", "parameters mixed with neighbours in place of reduced gradients:", "", self.topologies(), ""]
            lines += _mixed_notes(self.mixed)
        return "\n".join(lines)


def what_if(
    step_or_model: Step | nn.Module,
    *,
    ranks: Sequence[int] = (),
    links: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    strategies: Sequence[str] = (AS_PLANNED, "optimal"),
    latencies_us: Sequence[float] = (),
    compute_scales: Sequence[float] = (1.0,),
    ranks_inside: Sequence[int] = (),
    link_inside: str | None = None,
    optimizers: Sequence[str] = (),
    overlap_forward: bool = False,
    cost: AllReduceCost | None = None,
    curve: bool = True,
    topologies: Sequence[str] = (),
    forward_s: float | None = None,
) -> WhatIf:
    """Predict a step for every combination of the wishes. What is left out stays as it is in the step.

    Nothing runs: it needs neither the hardware nor the model, only the step. How a prediction is made, and how the
    cost of a collective follows from the ranks: `dp_compile.prediction`.

    Args:
        step_or_model: a `Step` (`dp_compile.observe.step_of`, `Step.from_json`), or a replicated module that has
            trained a step.
        ranks: numbers of ranks.
        links: names of `dp_compile.links.LINKS`.
        dtypes: of all floating gradients: `bfloat16`, `float16`, `float32`.
        strategies: `as planned` (the step's buckets), `optimal`, `coalesced`, `fixed`, `fixed:25` (with the cap in
            MiB).
        latencies_us: of one collective, in microseconds.
        compute_scales: forward and backward take so many times as long.
        ranks_inside: ranks of a node, for reductions on two levels, whose slower one is of `links`; 1: one level.
        link_inside: what joins the ranks of a node then: `nvlink4` if not given.
        optimizers: where the optimizer updates: `plain`, `in-backward`, `sharded`.
        overlap_forward: each of them, if it updates in the backward, also with what may end under the next forward;
            without `optimizers` that is `plain` beside `in-backward`.
        cost: what a collective costs on the step's ranks, in place of what the step says: `calibrate().cost`.
        curve: also predict 1 to 16,384 ranks with `optimal` buckets, for each link, dtype and length
            of compute; latencies are left as they are.
        topologies: names of `dp_compile.plan.topologies`: also predict steps in which ranks mix parameters over them,
            for each number of ranks, of ranks in a node, link and length of compute.
        forward_s: for these: how long the forward takes, if the step does not know.

    Raises:
        ConfigError: a wish is not allowed.
        ModuleError: the module is not replicated, or has not trained a step.
    """
    step = with_measured_backward(step_or_model if isinstance(step_or_model, Step) else _step_of(step_or_model))
    if cost is not None and step.world_size == 1:
        raise ConfigError("cost is of a collective over the step's ranks, but the step ran on 1. Give links instead.")
    predictions = _Predictions(step, cost)
    rows = [
        predictions.of(
            Scenario(
                world_size=n,
                link=link,
                gradient_dtype=dtype,
                latency_us=latency_us,
                compute_scale=scale,
                ranks_inside=inside,
                link_inside=link_inside if inside not in (None, 1) else None,
                optimizer=optimizer,
                overlap_forward=overlaps,
                **_strategy(strategy),
            )
        )
        for n, link, inside, dtype, latency_us, scale, strategy, (optimizer, overlaps) in itertools.product(
            ranks or (None,),
            links or (None,),
            ranks_inside or (None,),
            dtypes or (None,),
            latencies_us or (None,),
            compute_scales,
            strategies,
            _ways(optimizers, overlap_forward),
        )
    ]
    if not rows:
        raise ConfigError("strategies and compute_scales must not be empty.")
    return WhatIf(
        step,
        tuple(rows),
        tuple(_curves(predictions, links, dtypes, compute_scales)) if curve else (),
        tuple(
            mixed(
                step,
                name,
                wished,
                reduced=predictions.of(replace(wished, strategy="optimal")),
                cost_on=predictions.cost_on,
                forward_s=forward_s,
            )
            for wished in dict.fromkeys(_for_topologies(row.scenario) for row in rows)
            for name in topologies
        ),
    )


def _ways(optimizers: Sequence[str], overlap_forward: bool) -> list[tuple[str | None, bool]]:
    """Each optimizer without overlap of the next forward, and with it, if it can be."""
    if not optimizers:
        return _ways((PLAIN, IN_BACKWARD), overlap_forward) if overlap_forward else [(None, False)]
    ways = [(name, overlaps) for name in optimizers for overlaps in (False, True)]
    return [(name, overlaps) for name, overlaps in ways if not overlaps or (overlap_forward and name != PLAIN)]


def _for_topologies(scenario: Scenario) -> Scenario:
    """What of the wishes counts there."""
    return replace(
        scenario, gradient_dtype=None, strategy=None, bucket_cap_mb=None, optimizer=None, overlap_forward=False
    )


def _step_of(model: object) -> Step:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"step_or_model must be a Step or a replicated module, got {type(model).__name__}.")
    return step_of(model)


def _strategy(text: str) -> dict[str, Any]:
    """`fixed:25` is `fixed` with a cap of 25 MiB."""
    name, colon, cap = text.partition(":")
    if not colon:
        return {"strategy": text}
    try:
        return {"strategy": name, "bucket_cap_mb": float(cap)}
    except ValueError as error:
        raise ConfigError(
            f"strategies: behind the colon stands a cap in MiB, as in 'fixed:25', got {text!r}."
        ) from error


class _Predictions:
    """Predictions for a step, each made once: a row of the table can also be a point of a curve."""

    def __init__(self, step: Step, cost: AllReduceCost | None) -> None:
        self.step = step
        self.cost = cost
        self._made: dict[Scenario, Prediction] = {}

    def of(self, scenario: Scenario) -> Prediction:
        if scenario not in self._made:
            self._made[scenario] = predict(self.step, self._with_cost(scenario))
        return replace(self._made[scenario], scenario=scenario)

    def cost_on(self, scenario: Scenario) -> AllReduceCost:
        return cost_for(self.step, self._with_cost(scenario))[0]

    def _with_cost(self, scenario: Scenario) -> Scenario:
        """The cost that was given for the step's ranks, on the scenario's."""
        if self.cost is None or scenario.link is not None:
            return scenario
        ranks = scenario.world_size or self.step.world_size
        cost = extrapolated(self.cost, from_ranks=self.step.world_size, to_ranks=ranks)
        if scenario.latency_us is not None:
            cost = replace(cost, alpha_s=scenario.latency_us * 1e-6)
        return replace(scenario, cost=cost, latency_us=None)


def _curves(
    predictions: _Predictions, links: Sequence[str], dtypes: Sequence[str], scales: Sequence[float]
) -> Iterator[Curve]:
    """For each link, dtype and length of compute. Nothing if the step ran on one rank and no link is named."""
    if predictions.step.world_size == 1 and not links:
        return
    for link, dtype, scale in itertools.product(links or (None,), dtypes or (None,), scales):
        wishes: dict[str, Any] = {"link": link, "gradient_dtype": dtype, "compute_scale": scale}
        points = [predictions.of(Scenario(world_size=ranks, strategy="optimal", **wishes)) for ranks in CURVE_RANKS]
        parts = [link or "the link of the step", f"gradients {dtype or 'as in the step'}"]
        parts += [] if scale == 1 else [f"compute {scale:g}x"]
        yield Curve(", ".join(parts), tuple(points))


# --- text -----------------------------------------------------------------------------------------------------------


def format_ms(seconds: float) -> str:
    """Milliseconds with three significant digits: `12.3 ms`."""
    ms = seconds * 1e3
    if ms <= 0:
        return "0 ms"
    digits = 2 - math.floor(math.log10(ms))
    return f"{round(ms, digits):,.{min(6, max(0, digits))}f} ms"


def _cell_link(row: Prediction) -> str:
    return row.scenario.link or "-"


def _nodes(world_size: int, scenario: Scenario) -> str:
    inside = scenario.ranks_inside
    return f"{world_size // inside:,} x {inside}" if inside is not None and scenario.has_levels else "-"


def _cell_latency(row: Prediction) -> str:
    return "-" if row.scenario.latency_us is None else f"{row.scenario.latency_us:g} us"


def _cell_strategy(row: Prediction) -> str:
    cap = row.scenario.bucket_cap_mb
    return row.scenario.chosen_strategy if cap is None else f"{row.scenario.chosen_strategy} {cap:g} MiB"


def _cell_optimizer(row: Prediction) -> str:
    name = row.scenario.optimizer or "-"
    return f"{name}, overlap" if row.scenario.overlap_forward else name


def _cell_step(row: Prediction) -> str:
    return "-" if row.step_s is None else format_ms(row.step_s)


_COLUMNS: Final[tuple[tuple[str, Callable[[Prediction], str]], ...]] = (
    ("ranks", lambda row: f"{row.world_size:,}"),
    ("link", _cell_link),
    ("nodes", lambda row: _nodes(row.world_size, row.scenario)),
    ("latency", _cell_latency),
    ("gradients", lambda row: row.scenario.gradient_dtype or "-"),
    ("compute", lambda row: "-" if row.scenario.compute_scale == 1 else f"{row.scenario.compute_scale:g}x"),
    ("buckets", _cell_strategy),
    ("optimizer", _cell_optimizer),
    ("number", lambda row: f"{len(row.plan.buckets):,}"),
    ("step", _cell_step),
    ("backward", lambda row: format_ms(row.makespan_s)),
    ("exposed", lambda row: format_ms(row.exposed_s)),
    ("to bound", lambda row: f"{row.ratio:.3f}"),
    ("memory", lambda row: format_bytes(row.gradient_nbytes + row.padding_nbytes)),
)


def _cell_gap(row: Mixed) -> str:
    return f"{row.gap.low:.3g}" if row.gap.low == row.gap.high else f"{row.gap.low:.3g} to {row.gap.high:.3g}"


def _cell_halved(row: Mixed) -> str:
    return "never" if math.isinf(row.halved_after) else f"{math.ceil(row.halved_after - 1e-9):,}"


_MIXED_COLUMNS: Final[tuple[tuple[str, Callable[[Mixed], str]], ...]] = (
    ("ranks", lambda row: f"{row.world_size:,}"),
    ("link", lambda row: row.scenario.link or "-"),
    ("nodes", lambda row: _nodes(row.world_size, row.scenario)),
    ("latency", lambda row: "-" if row.scenario.latency_us is None else f"{row.scenario.latency_us:g} us"),
    ("compute", lambda row: "-" if row.scenario.compute_scale == 1 else f"{row.scenario.compute_scale:g}x"),
    ("topology", lambda row: row.topology),
    ("period", lambda row: f"{row.period:,}"),
    ("edge", lambda row: f"{row.ranks_of_an_edge:,}"),
    ("step", lambda row: format_ms(row.times.step_s)),
    ("waiting", lambda row: format_ms(row.exposed_s)),
    ("all-reduce", lambda row: format_ms(row.all_reduce_s)),
    ("gap", _cell_gap),
    ("halved", _cell_halved),
)
_OPTIONAL: Final = frozenset({"link", "nodes", "latency", "gradients", "compute", "optimizer", "step"})
_LEFT: Final = frozenset({"link", "buckets", "gradients", "optimizer", "topology"})
Row = TypeVar("Row")


def _table(rows: Sequence[Row], columns: Sequence[tuple[str, Callable[[Row], str]]]) -> str:
    """A line for each row. Optional columns in which no row wants anything are left out."""
    cells = [(name, [cell(row) for row in rows]) for name, cell in columns]
    shown = [(name, each) for name, each in cells if name not in _OPTIONAL or any(cell != "-" for cell in each)]
    widths = [max(len(name), *map(len, each)) for name, each in shown]
    lines = [[name for name, _ in shown], *zip(*(each for _, each in shown), strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for (name, _), cell, width in zip(shown, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _head(step: Step) -> Iterator[str]:
    gradients = sum(gradient.name != UNUSED_FLAGS for gradient in step.plan.gradients)
    yield (
        f"step: {count(step.world_size, 'rank')} ({step.backend}), {count(gradients, 'gradient')}, "
        f"{format_bytes(step.plan.nbytes)}, {step.strategy}: {count(len(step.plan.buckets), 'bucket')}"
    )
    yield f"all-reduce = {step.cost} ({step.cost_source})"


def _notes(step: Step, rows: Sequence[Prediction]) -> Iterator[str]:
    yield "Predicted, not measured. Backward: until its last gradient is reduced; to bound: over what no plan can beat;"
    yield "memory: of gradients with what their buckets need."
    if any(row.scenario.optimizer is not None for row in rows):
        yield from _notes_on_optimizers(rows)
    if any(row.scenario.chosen_strategy in ("optimal", "coalesced") for row in rows):
        band = band_for(step)
        off = f"{min(band):g}x to {max(band):g}x"
        yield f"Optimal and coalesced buckets are for speeds that may be off by {off}; if they are just as believed,"
        yield "other buckets can end earlier."
    yield "From:"
    bases = [row.cost_basis for row in rows] + [row.backward_basis for row in rows]
    bases += [row.forward_basis for row in rows]
    for basis in dict.fromkeys(filter(None, bases)):
        yield textwrap.fill(basis, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _notes_on_optimizers(rows: Sequence[Prediction]) -> Iterator[str]:
    text = "Updates are in the column step only, if that is there."
    if any(row.scenario.optimizer == SHARDED for row in rows):
        text += " Sharded: with the all-gathers; for an optimizer that goes element by element."
    if any(row.scenario.overlap_forward for row in rows):
        text += (
            " Overlap: backward is with all that the next forward waits; to bound: over the longer of forward and "
            "backward together and all communication, max(T_forward + T_backward + T_optimizer, T_communication), "
            "where T_optimizer counts as 0."
        )
    yield textwrap.fill(text, 110, break_on_hyphens=False)


def _mixed_notes(rows: Sequence[Mixed]) -> Iterator[str]:
    told = [row.told for row in rows if row.told][:1]
    text = (
        f"Steps of a long training, in buckets of {BUCKET_MB:g} MiB. Edge: ranks of the largest; waiting: for "
        "neighbours; all-reduce: the step with gradients reduced over all ranks, in optimal buckets; gap: of a period, "
        "1 minus the largest singular value of its mixing beside that of the average; halved: steps until ranks are "
        "half as far from their average, at most, if nothing moves them."
    )
    text += f" With {told[0]}." if told else ""
    yield textwrap.fill(text, 110, break_on_hyphens=False)


def _bar(point: Prediction, longest_s: float) -> str:
    if not longest_s:
        return ""
    whole = round(BAR_WIDTH * point.makespan_s / longest_s)
    compute = min(whole, round(BAR_WIDTH * point.backward_s / longest_s))
    return "█" * compute + "░" * (whole - compute)


# --- data -----------------------------------------------------------------------------------------------------------


def _step_data(step: Step) -> dict[str, Any]:
    names = ("strategy", "world_size", "device", "backward_s", "cost_source")
    return {name: getattr(step, name) for name in names} | {
        "backend": step.backend.name,
        "cost": asdict(step.cost),
        "buckets": len(step.plan.buckets),
        "plan_signature": step.plan.signature(),
    }


def _data(row: Prediction) -> dict[str, Any]:
    wishes = (
        *("link", "latency_us", "gradient_dtype", "compute_scale", "bucket_cap_mb", "ranks_inside", "link_inside"),
        *("optimizer", "overlap_forward"),
    )
    numbers = ("backward_s", "communication_s", "makespan_s", "exposed_s", "bound_s", "ratio", "step_s", "forward_s")
    return {
        "ranks": row.world_size,
        "strategy": row.scenario.chosen_strategy,
        **{name: getattr(row.scenario, name) for name in wishes},
        "cost": asdict(row.cost),
        "buckets": len(row.plan.buckets),
        **{name: getattr(row, name) for name in numbers},
        "gradient_nbytes": row.gradient_nbytes,
        "padding_nbytes": row.padding_nbytes,
        "plan_signature": row.plan.signature(),
        "basis": row.basis,
    }


def _mixed_data(row: Mixed) -> dict[str, Any]:
    wishes = ("link", "latency_us", "compute_scale", "ranks_inside", "link_inside")
    return {
        "topology": row.topology,
        "ranks": row.world_size,
        **{name: getattr(row.scenario, name) for name in wishes},
        "period": row.period,
        "ranks_of_an_edge": row.ranks_of_an_edge,
        "buckets": row.buckets,
        "nbytes": row.nbytes,
        **row.times._asdict(),
        "all_reduce_s": row.all_reduce_s,
        "gap": asdict(row.gap),
        "told": row.told,
    }
