"""How near plans for real models come to the bound: `python docs/plan_table.py docs/plan_table.md`.

Every number is predicted by the model of `timeline`, none is measured. A gradient is ready when the backward, run
from the last weight to the first at `FLOPS_PER_S` and `MEMORY_BYTES_PER_S` (roofline), has passed its weight; the
products of attention that have no weight, and what overlaps on the device, are left out.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_shapes import MODELS, Weight

from dp_compile.plan.certificate import MEASURED_BAND, certify, robust_partition
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import (
    Buckets,
    ReadyGradient,
    finish_time,
    fixed_partition,
    jobs_of,
    launches,
    release_time_bound,
)
from dp_compile.plan.partition import optimal_partition
from dp_compile.plan.words import BYTES_PER_MB

FLOPS_PER_S: Final = 400e12
"""About 40% of an H100's dense bf16 peak (vendor: 989e12), a common utilisation of large matrix products."""

MEMORY_BYTES_PER_S: Final = 3.35e12
"""An H100 SXM's HBM3, vendor's figure."""

RANKS: Final = (8, 64, 1024)
BUSBW_GB_S: Final = (10, 25, 50, 100, 200, 400)
ALPHA_US: Final = (5, 20, 50, 100, 200)
GOAL: Final = 1.01
EFFICIENCY: Final = 0.9


@dataclass(frozen=True, slots=True)
class Backward:
    """A model's gradients in launch order, the flags last, and how long its backward takes."""

    gradients: tuple[ReadyGradient, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one network: makespan over bound for each strategy, and what the optimal one pays for."""

    model: str
    n_ranks: int
    busbw_gb_s: float
    alpha_us: float
    ratios: Mapping[str, float]
    robust_worst: float
    optimal_worst: float
    n_buckets: int
    n_in_row: int
    """Buckets of the optimal partition that the network carries without a break at the end."""
    above_s: float
    """Time of the optimal partition above the bound."""


def backward_of(weights: Sequence[Weight], itemsize: int) -> Backward:
    """Run the backward from the last weight to the first."""
    now, gradients = 0.0, []
    for weight in reversed(weights):
        moved = weight.moved_bytes(itemsize)
        now += max(weight.backward_flops / FLOPS_PER_S, moved / MEMORY_BYTES_PER_S)
        if weight.has_gradient:
            gradients.append(ReadyGradient(weight.numel * itemsize, now))
    flags = ReadyGradient(len(gradients) * itemsize, now)
    return Backward((*gradients, flags), now)


def strategies(backward: Backward, cost: AllReduceCost) -> Iterator[tuple[str, Buckets]]:
    """The optimum, and the rules of others."""
    gradients = backward.gradients
    yield "optimal", optimal_partition(gradients, cost=cost, backward_s=backward.seconds)
    cap, first = 25.0 * BYTES_PER_MB, 1.0 * BYTES_PER_MB
    yield "25 MiB, first 1", fixed_partition(gradients, cap_nbytes=cap, first_cap_nbytes=first)
    size = cost.alpha_s / cost.beta_s_per_byte * EFFICIENCY / (1 - EFFICIENCY)
    yield "90% efficient", fixed_partition(gradients, cap_nbytes=size, first_cap_nbytes=size)
    yield "one bucket", (tuple(range(len(gradients))),)
    yield "each gradient", tuple((position,) for position in range(len(gradients)))


def cell(model: str, backward: Backward, *, n_ranks: int, busbw_gb_s: float, alpha_us: float) -> Cell:
    """One model on one network."""
    cost = AllReduceCost(alpha_us * 1e-6, 2 * (n_ranks - 1) / n_ranks / (busbw_gb_s * 1e9))
    gradients, seconds = backward.gradients, backward.seconds
    bound = release_time_bound(gradients, cost=cost, backward_s=seconds)
    partitions = dict(strategies(backward, cost))
    ends = {name: finish_time(jobs_of(gradients, buckets, cost)) for name, buckets in partitions.items()}
    ratios = {name: max(seconds, end) / bound for name, end in ends.items()}
    robust = robust_partition(gradients, cost=cost, backward_s=seconds).certificate
    measured = robust_partition(gradients, cost=cost, backward_s=seconds, band=MEASURED_BAND).certificate
    timeline = list(launches(jobs_of(gradients, partitions["optimal"], cost)))
    in_row = itertools.takewhile(lambda launch: launch.start_s > launch.ready_s, reversed(timeline))
    return Cell(
        model,
        n_ranks,
        busbw_gb_s,
        alpha_us,
        {"optimal": ratios.pop("optimal"), "measured": measured.ratio, "robust": robust.ratio, **ratios},
        robust.worst_ratio,
        certify(gradients, partitions["optimal"], cost=cost, backward_s=seconds, strategy="").worst_ratio,
        len(partitions["optimal"]),
        min(len(timeline), 1 + sum(1 for _ in in_row)),
        max(seconds, ends["optimal"]) - bound,
    )


def all_cells(models: Mapping[str, Backward]) -> Iterator[Cell]:
    """Every model on every network of the grid."""
    for (name, backward), n_ranks, busbw, alpha in itertools.product(models.items(), RANKS, BUSBW_GB_S, ALPHA_US):
        yield cell(name, backward, n_ranks=n_ranks, busbw_gb_s=busbw, alpha_us=alpha)


def models_table(models: Mapping[str, Backward]) -> Iterator[str]:
    """What the models are."""
    yield "| model | parameters | gradients | gradient bytes | positions a rank | backward |"
    yield "|---|---|---|---|---|---|"
    for name, backward in models.items():
        model = MODELS[name]
        yield (
            f"| {name} | {sum(w.numel for w in model.weights if w.has_gradient) / 1e6:.1f} M "
            f"| {len(backward.gradients) - 1} + flags | {backward.nbytes / 1e9:.2f} GB, {model.itemsize} each "
            f"| {model.positions} | {backward.seconds * 1e3:.1f} ms |"
        )


def summary_table(cells: Sequence[Cell]) -> Iterator[str]:
    """One row for each model and number of ranks: median and worst ratio of each strategy over the grid."""
    names = list(cells[0].ratios)
    yield f"| model | n | optimal <= {GOAL} | {' | '.join(names)} | optimal, speed off | robust, speed off |"
    yield "|---|---|---|" + "---|" * (len(names) + 2)
    for (model, n_ranks), group in itertools.groupby(cells, key=lambda each: (each.model, each.n_ranks)):
        rows = list(group)
        reached = sum(each.ratios["optimal"] <= GOAL for each in rows)
        columns = [_spread([each.ratios[name] for each in rows]) for name in names]
        columns.append(_spread([each.optimal_worst for each in rows]))
        columns.append(_spread([each.robust_worst for each in rows]))
        yield f"| {model} | {n_ranks} | {reached} of {len(rows)} | {' | '.join(columns)} |"


def open_table(cells: Sequence[Cell], n_ranks: int) -> Iterator[str]:
    """The cells where even the optimum is above the goal, and what it pays for there."""
    yield "| model | busbw GB/s | alpha us | optimal | robust | 25 MiB, first 1 | buckets | in a row | over the bound |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for each in cells:
        if each.n_ranks == n_ranks and each.ratios["optimal"] > GOAL:
            ratios = " | ".join(f"{each.ratios[name]:.4f}" for name in ("optimal", "robust", "25 MiB, first 1"))
            yield (
                f"| {each.model} | {each.busbw_gb_s} | {each.alpha_us} | {ratios} "
                f"| {each.n_buckets} | {each.n_in_row} | {each.above_s * 1e6:.0f} us |"
            )


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} / {max(ratios):.3f}"


def document() -> str:
    """The whole file."""
    models = {name: backward_of(model.weights, model.itemsize) for name, model in MODELS.items()}
    cells = list(all_cells(models))
    reached = sum(each.ratios["optimal"] <= GOAL for each in cells)
    beaten = Counter(each.ratios["optimal"] < each.ratios["25 MiB, first 1"] / GOAL for each in cells)[True]
    robust, measured = (sum(each.ratios[name] <= GOAL for each in cells) for name in ("robust", "measured"))
    plain = sum(each.ratios["25 MiB, first 1"] <= GOAL for each in cells)
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    parts = [
        "# Predicted end of the backward over the release-time bound",
        f"Made by `python docs/plan_table.py` on {datetime.date.today()}, {machine}. Nothing here is measured.",
        (__doc__ or "").partition("\n\n")[2].strip(),
        f"{FLOPS_PER_S / 1e12:g} TFLOP/s, {MEMORY_BYTES_PER_S / 1e12:g} TB/s; busbw {BUSBW_GB_S} GB/s, "
        f"alpha {ALPHA_US} us, n {RANKS}.",
        f"Of {len(cells)} cells the optimum is within {GOAL} in {reached}, the choice for measured speeds "
        f"(`replan_after`: off by 0.9x to 1.1x) in {measured}, the robust choice (off by 0.5x to 2x, what is used "
        f"before anything is measured) in {robust}, 25 MiB buckets in {plain}. The optimum "
        "is exact (equal to brute force on every small case), so above that the bound itself is out of reach: it "
        "counts one latency and no waiting. "
        f"25 MiB buckets end more than {GOAL - 1:.0%} later than the optimum in {beaten} cells.",
        "## Models",
        "\n".join(models_table(models)),
        "## Median / worst ratio over the grid",
        "`90% efficient`: a cap of 9 alpha/beta, the size rule of Inductor. `speed off`: the largest ratio "
        "when the network is 0.5 to 2 times as slow as believed.",
        "\n".join(summary_table(cells)),
        "## Where the goal is out of reach, n = 64",
        "`in a row`: the buckets at the end that the network carries without a break. Each of them but one costs an "
        "alpha that the bound does not count, and the first of them waits until it is full; fewer or more buckets "
        "in a row cost more, else the optimum would have them.",
        "\n".join(open_table(cells, 64)),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them to the file that is named."""
    if arguments:
        path = Path(arguments[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document())
    else:
        sys.stdout.write(document())


if __name__ == "__main__":
    main(sys.argv[1:])
