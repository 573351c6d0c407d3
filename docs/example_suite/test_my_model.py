"""What has to stay true of the training of `my_model`."""

from __future__ import annotations

from pathlib import Path

import my_model
import pytest

from dp_compile import testing

SMALL = testing.Training(
    make_model=my_model.small_model,
    make_batch=my_model.make_batch,
    loss_fn=my_model.loss_fn,
)
REAL = testing.Training(
    make_model=my_model.real_model,
    make_batch=my_model.make_batch,
    loss_fn=my_model.loss_fn,
)


@pytest.fixture(scope="module")
def seen() -> testing.SeenBackward:
    """The model in its real size: on the meta device it needs no memory, and nothing is computed."""
    return testing.backward_of(REAL, link="infiniband-ndr", ranks=8, device="h100-sxm", on="meta")


def test_which_gradients_are_reduced_together(seen: testing.SeenBackward, dp_golden: Path) -> None:
    testing.assert_plan(seen, dp_golden / "plan.txt")


def test_where_collectives_are_launched_and_waited_for(seen: testing.SeenBackward, dp_golden: Path) -> None:
    testing.assert_graph(seen, dp_golden / "graph.txt")


def test_one_graph_and_nothing_compiled_twice(seen: testing.SeenBackward) -> None:
    testing.assert_counts(seen, collectives=12, captures=1, recompiles=0, graph_breaks=0)


def test_predicted_times(seen: testing.SeenBackward) -> None:
    testing.assert_exposed_below(seen, ms=9.0)
    testing.assert_end_below(seen, ms=12.0)


def test_memory(seen: testing.SeenBackward) -> None:
    testing.assert_peak_below(seen, nbytes=600 * 2**20)
    testing.assert_peak_below(seen)  # not more than torch's DDP


def test_generated_code_leaves_alone_what_the_network_has() -> None:
    seen = testing.backward_of(SMALL, link="infiniband-ndr", ranks=8, device="h100-sxm", backend="inductor")
    testing.assert_untouched_in_flight(seen)


def test_trains_as_with_ddp(dp_ranks: testing.Ranks) -> None:
    testing.assert_same_training(SMALL, ranks=dp_ranks, steps=4)
