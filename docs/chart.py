"""Draws the chart of the README: `python docs/chart.py RESULT.json docs/step_time.svg`.

`dp-compile bench run docs/chart.toml --out RESULT.json` writes `RESULT.json`. Bars are median ratios of step time to
the ideal (mode `oracle`) in the same turn, whiskers +-1.96 standard errors (`dp_compile.bench.results.ratio`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dp_compile.bench.contract import Batch, Mode, Trainer, Workload
from dp_compile.bench.modes import Loop
from dp_compile.bench.results import Ratio, load, ratios


def _fsdp2_replicate(workload: Workload) -> Trainer:
    """FSDP2's `replicate` of each block and of the whole model, each block compiled."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))

    def wrap(model: nn.Module) -> nn.Module:
        for blocks in (each for each in model.modules() if isinstance(each, nn.ModuleList)):
            for block in blocks:
                block.compile()
                replicate(block, mesh=mesh)
        return replicate(model, mesh=mesh)

    return _OfDTensors(workload, wrap)


class _OfDTensors(Loop):
    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        found = super().gradients(batch)
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def fsdp2_replicate() -> Mode:
    """The mode `chart:fsdp2_replicate` of `chart.toml`."""
    return Mode("fsdp2_replicate", _fsdp2_replicate)


NAMES = {
    "ddp_compiled": "compiled DDP",
    "ddp_compiled:5": "compiled DDP, 5 MiB",
    "python_reducer": "python_reducer",
    "python_reducer:1": "python_reducer, 1 MiB",
    "chart:fsdp2_replicate": "FSDP2 replicate",
    "ours": "dp_compile, default options",
}
WIDTH, LEFT, RIGHT, BAR, GAP = 830, 210, 60, 15, 34
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
.bar { fill: #8c959f } .ours { fill: #0969da } .ideal { stroke: #1a7f37; stroke-width: 2 } .whisker { stroke: #1f2328 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .bar { fill: #656c76 } .ours { fill: #4493f8 }
  .ideal { stroke: #3fb950 } .whisker { stroke: #f0f6fc }
}
</style>"""


def bars(times: dict[str, Ratio], y: int, scale: float) -> Iterator[str]:
    for mode, name in NAMES.items():
        if (ratio := times.get(mode)) is None:
            continue
        end, error = LEFT + ratio.value * scale, 1.96 * ratio.log_error * ratio.value * scale
        kind, middle = "ours" if mode == "ours" else "bar", y + BAR / 2
        yield f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{name}</text>'
        yield f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}"/>'
        yield f'<line class="whisker" x1="{end - error:.1f}" x2="{end + error:.1f}" y1="{middle}" y2="{middle}"/>'
        yield f'<text class="small" x="{end + error + 5:.1f}" y="{middle + 4}">{ratio.value:.2f}</text>'
        y += BAR + 5


def chart(path: Path) -> str:
    """The SVG of a result: a group of bars for each network, light or dark as the reader's system is."""
    results = load(path)
    found = {
        cell.network: {mode: ratio for (mode, what), ratio in ratios(cell, "oracle").items() if what == "step"}
        for cell in results.cells
    }
    longest = max(found[network][mode].value for network in found for mode in NAMES if mode in found[network])
    scale, height = (WIDTH - LEFT - RIGHT) / longest, 30 + len(found) * (len(NAMES) * (BAR + 5) + GAP)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">', STYLE]
    lines += ["<title>Step time over that of an ideal, which starts all communication first. Lower is better.</title>"]
    y = GAP
    for network, times in found.items():
        times_x = network.rpartition(" ")[2].rstrip("x")
        lines.append(f'<text class="small" x="{LEFT}" y="{y - 8}">all-reduce takes {times_x} times the compute</text>')
        lines += bars(times, y, scale)
        y += len(NAMES) * (BAR + 5) + GAP
    at = LEFT + scale
    lines.append(f'<line class="ideal" x1="{at:.1f}" x2="{at:.1f}" y1="{GAP - 6}" y2="{height - 30}"/>')
    lines.append(f'<text class="small" x="{at:.1f}" y="{height - 14}" text-anchor="middle">ideal = 1</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    result, out = map(Path, sys.argv[1:3])
    out.write_text(chart(result))
