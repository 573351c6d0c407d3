"""Records and draws a step: `PYTHONPATH=docs python docs/timeline.py docs/timeline.svg docs/step.json`.

Compiled DDP and dp_compile train the GPT of the benchmark, both with default options, on a shaped network where one
all-reduce of all gradients takes as long as the compute. torch.profiler records 15 steps of rank 0 of each; the median
step is drawn. Needs root, as every shaped network does, and an idle machine.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import dp_compile
from dp_compile.bench import workers
from dp_compile.bench.networks import Network, open_network
from dp_compile.bench.runner import Runner
from dp_compile.bench.suites import Suite

WORKLOAD, STEPS = "gpt-6l", 15
NAMES = {"ddp_compiled": "compiled DDP, default options", "ours": "dp_compile, default options"}
Span = tuple[float, float]


class Recorded(NamedTuple):
    """One step of rank 0, in seconds from its start."""

    seconds: float
    compute: list[Span]
    network: list[Span]


def record(is_ours: bool) -> tuple[list[Recorded], str]:
    """Record steps of this rank. For dp_compile, then measure some, and return them as a step file, else ""."""
    trainer, batches = workers.this.trainer, [next(workers.this.batches) for _ in range(STEPS)]
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for batch in batches:
            with torch.profiler.record_function("timeline::step"):
                trainer.step(batch)
    events = [
        (each.name(), each.start_ns() * 1e-9, each.end_ns() * 1e-9, each.start_thread_id())
        for each in profiled.profiler.kineto_results.events()
    ]
    steps = [recorded(events, *each[1:]) for each in events if each[0] == "timeline::step"]
    if not is_ours:
        return steps, ""
    with dp_compile.measure(trainer.model):
        for batch in batches:
            trainer.step(batch)
    return steps, dp_compile.step_of(trainer.model).to_json()


def recorded(events: Iterable[tuple[str, float, float, int]], start_s: float, end_s: float, thread: int) -> Recorded:
    here = [(name, begin - start_s, end - start_s, of) for name, begin, end, of in events if start_s <= begin < end_s]
    network = [(begin, end) for name, begin, end, _ in here if name.startswith("gloo:")]
    waits = [(begin, end) for name, begin, end, _ in here if name.startswith("dp_compile::") and name.endswith("wait")]
    ours = ("dp_compile::", "timeline::")
    ops = [(begin, end) for name, begin, end, of in here if of == thread and not name.startswith(ours)]
    return Recorded(end_s - start_s, without(joined(ops), joined(waits)), joined(network))


def joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + 1e-3:  # closer than a pixel
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(spans: Iterable[Span], holes: list[Span]) -> list[Span]:
    found = []
    for begin, end in spans:
        for start, stop in holes:
            if begin < stop and start < end:
                found.append((begin, start))
                begin = max(begin, stop)
        found.append((begin, end))
    return [each for each in found if each[1] - each[0] > 1e-4]


STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
.compute { fill: #8c959f } .waits { fill: #bf4b00 } .network { fill: #0969da }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 } .network { fill: #4493f8 } }
</style>"""
WIDTH, LEFT, BAR = 830, 80, 22


def drawn(steps: dict[str, Recorded]) -> Iterator[str]:
    scale = (WIDTH - LEFT - 10) / max(each.seconds for each in steps.values())
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {40 + 96 * len(steps)}" role="img">{STYLE}'
    yield "<title>One step of compiled DDP and one of dp_compile on the same time axis: compute, waits, network</title>"
    for number, (mode, step) in enumerate(steps.items()):
        y = 30 + 96 * number
        yield f'<text x="10" y="{y - 8}">{NAMES[mode]}: {step.seconds * 1e3:,.0f} ms</text>'
        spans = {
            "compute": step.compute,
            "waits": without([(0.0, step.seconds)], step.compute),
            "network": step.network,
        }
        for lane, (kind, of_kind) in zip((0, 0, 1), spans.items(), strict=True):
            top = y + (BAR + 6) * lane
            if kind != "waits":
                yield f'<text class="small" x="10" y="{top + 15}">{kind}</text>'
            for begin, end in of_kind:
                place = f'x="{LEFT + begin * scale:.1f}" width="{(end - begin) * scale:.1f}"'
                about = f"{(end - begin) * 1e3:.1f} ms"
                yield f'<rect class="{kind}" {place} y="{top}" height="{BAR}"><title>{about}</title></rect>'
    y = 26 + 96 * len(steps)
    legend = {
        "compute": "forward, backward, optimizer",
        "waits": "compute waits",
        "network": "all-reduce on the network",
    }
    for number, (kind, text) in enumerate(legend.items()):
        yield f'<rect class="{kind}" x="{LEFT + 220 * number}" y="{y - 10}" width="12" height="12"/>'
        yield f'<text class="small" x="{LEFT + 220 * number + 18}" y="{y}">{text}</text>'
    yield "</svg>\n"


if __name__ == "__main__":
    network, found, kept = Network("shaped", comm_over_compute=1.0), dict[str, Recorded](), ""
    with tempfile.TemporaryDirectory() as scratch:
        cell = Runner(Suite("timeline", (WORKLOAD,), tuple(NAMES), (network,), "ours"), Path(scratch)).probe(WORKLOAD)
        rate_mbit = 8e-6 * cell.gradient_nbytes / cell.compute_s
        with open_network(network, ranks=2, rate_mbit=rate_mbit) as place:
            for mode in NAMES:
                with workers.ranks_of(place, {}) as ranks:
                    ranks.run(workers.start, WORKLOAD, mode, "", 12, timeout_s=workers.START_TIMEOUT_S)
                    steps, file = ranks.run(record, mode == "ours", timeout_s=workers.START_TIMEOUT_S)[0]
                found[mode] = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
                kept = file or kept
                print(NAMES[mode], found[mode].seconds, file=sys.stderr)
    Path(sys.argv[1]).write_text("\n".join(drawn(found)))
    Path(sys.argv[2]).write_text(kept + "\n")
