"""What the fuzzer found, each in its smallest form."""

from __future__ import annotations

import fuzzing
from fuzzing import BlockSpec, FuzzCase, Micro, Step
from ranks import Ranks

SAME = Step((Micro((2, 2)),))


def assert_equal(ranks: Ranks, case: FuzzCase) -> None:
    for outcome in ranks.run(fuzzing.run_case, case):
        assert outcome.difference == ""


def test_one_bucket_with_torchs_reducer(ranks2: Ranks) -> None:
    """`bucket_cap_mb=math.inf` ended in an OverflowError of torch's DDP as soon as its reducer was needed."""
    assert_equal(
        ranks2, FuzzCase(blocks=(BlockSpec("linear"),), width=2, steps=(SAME,), compiled="nothing", buckets="one")
    )


def test_layout_of_a_gradient_that_only_another_rank_produced(ranks2: Ranks) -> None:
    """It was contiguous, whatever the parameter's memory order."""
    case = FuzzCase(
        blocks=(BlockSpec("layouts"),),
        width=2,
        steps=(Step((Micro((2, 2), way=(0, 1)),)), Step((Micro((2, 2), way=(1, 0)),))),
        ways=((), (0,)),
        find_unused=True,
    )
    assert_equal(ranks2, case)
