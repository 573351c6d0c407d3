"""What people read: the text of records and reports."""

from __future__ import annotations

from expecttest import assert_expected_inline
from graphs import bucket_key

from dp_compile.engine.record import CaptureRecord, Placement
from dp_compile.insight.report import Report
from dp_compile.plan.buckets import GradientSpec, plan_single


def capture(**changes: object) -> CaptureRecord:
    facts: dict[str, object] = {
        "hooks": 4,
        "reductions": 5,
        "completed": 0,
        "collectives": 2,
        "graphs": 1,
        "deferred": False,
        "cached": False,
        "synced": True,
    }
    return CaptureRecord(**(facts | changes))  # type: ignore[arg-type]


def test_capture_record_with_members_apart() -> None:
    copied = "aten.convolution_backward.default writes with other strides, or does not take a factor"
    placements = (
        Placement("head.weight", 2 << 20, None),
        Placement("conv_2.weight", 1 << 20, None, apart=True),
        Placement("conv_1.weight", 1 << 20, copied, apart=True),
    )
    everything_apart = str(capture(placements=placements[1:])).splitlines()[1:]
    assert_expected_inline(
        "\n".join([str(capture(placements=placements)), *everything_apart]).replace(": aten", ":\n    aten"),
        """\
4 gradients + 1 flag word -> 2 collectives, 1 graph
  computed in their buckets: 50.0% of 4.0 MiB
  computed in their own memory: 25.0% of 4.0 MiB
  copied 1 gradient, 1.0 MiB, conv_1.weight:
    aten.convolution_backward.default writes with other strides, or does not take a factor
  computed in their own memory: 50.0% of 2.0 MiB
  copied 1 gradient, 1.0 MiB, conv_1.weight:
    aten.convolution_backward.default writes with other strides, or does not take a factor""",
    )


def test_capture_record_of_something_unusual() -> None:
    record = capture(hooks=1, reductions=1, collectives=1, completed=2, graphs=3, deferred=True, cached=True)
    assert_expected_inline(
        str(record).replace("; ", ";\n"),
        """\
1 gradient -> 1 collective, 3 graphs (2 parameters without one completed with zeros;
all reductions at the end of the backward;
code from the compiler's cache, so collectives are counted in the plan)""",
    )


def test_report() -> None:
    key = bucket_key("0", "avg", "bfloat16", "cuda")
    plan = plan_single([GradientSpec(0, "head.weight", (8, 4), (4, 1), 2, key)])
    text = str(Report("python hooks", 8, plan, (capture(), capture(synced=False)), {"captured": 12, "eager hooks": 1}))
    assert_expected_inline(
        text,
        """\
mode: python hooks, 8 ranks, backwards: 12 captured, 1 eager hooks
plan: 1 bucket, 1 gradient, 64 B
    0        64 B      1 gradient  bfloat16 cuda avg  head.weight  (no bucketing)
captured backward 0: 4 gradients + 1 flag word -> 2 collectives, 1 graph
captured backward 1: without synchronisation, 1 graph""",
    )
