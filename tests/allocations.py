"""How much memory a backward on the CPU really takes, from the profiler's record of every allocation."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WARM_UP_STEPS = 3
MEASURED = "the measured backward"

Step = Callable[[], torch.Tensor]
"""Clears gradients, runs the forward and returns the loss."""


def peak_of_backward(make_step: Callable[[], Step]) -> int:
    """The most bytes that are allocated during a backward after warm-up, over those from before `make_step`.

    For a process group without threads, such as the fake one. The profiler knows allocations that it saw: it is on from
    before the model is made. And it is on in this thread only: what one of gloo's threads frees would stay in its
    totals for good.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make_step()
        for _ in range(WARM_UP_STEPS):
            step().backward()
        loss = step()
        with record_function(MEASURED):
            loss.backward()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    (backward,) = (event for event in events if event.get("name") == MEASURED and event.get("ph") == "X")
    memory = sorted(
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
    )
    _, total, nbytes = memory[0]
    end = backward["ts"] + backward["dur"]
    return max(now for time, now, _ in memory if backward["ts"] <= time <= end) - (total - nbytes)
