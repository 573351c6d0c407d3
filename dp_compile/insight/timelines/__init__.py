"""A step's timeline, planned and measured: as a page, as a trace for Perfetto, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dp_compile.insight.step import Step
from dp_compile.insight.timelines.events import timeline_of
from dp_compile.insight.timelines.page import page
from dp_compile.insight.timelines.picture import picture
from dp_compile.insight.timelines.trace_events import trace_events

__all__ = ["timeline_page", "timeline_picture", "timeline_trace"]


def timeline_page(step: Step) -> str:
    """One HTML page that needs no network: zoom, members on hover, a table; light and dark as the reader's system."""
    return page(timeline_of(step))


def timeline_picture(step: Step) -> str:
    """One static SVG for documents."""
    return picture(timeline_of(step))


def timeline_trace(
    step: Step, *, into: Mapping[str, Any] | None = None, backward_at_us: float | None = None
) -> dict[str, Any]:
    """Plain data of Chrome's trace event format, for Perfetto or chrome://tracing.

    Args:
        step: as `observe.step_of` gave it.
        into: a trace of torch.profiler that gets our lanes beside its own.
        backward_at_us: when the backward starts on the clock of `into`, in us. Without it our first event stands
            where the first one of `into` does.

    Raises:
        ConfigError: `into` is not a trace, or `backward_at_us` not a time.
    """
    return trace_events(timeline_of(step), into=into, backward_at_us=backward_at_us)
