"""What has to stay true of the training of `my_model`."""

from pathlib import Path

import pytest
from my_model import loss_fn, make_batch, make_model

from dp_compile import testing

TRAINING = testing.Training(make_model=make_model, make_batch=make_batch, loss_fn=loss_fn)


@pytest.fixture(scope="module")
def seen() -> testing.SeenBackward:
    return testing.backward_of(TRAINING, link="ethernet-25", ranks=8)


def test_which_gradients_are_reduced_together(seen: testing.SeenBackward, dp_golden: Path) -> None:
    testing.assert_plan(seen, dp_golden / "plan.txt")


def test_where_collectives_are_launched_and_waited_for(seen: testing.SeenBackward, dp_golden: Path) -> None:
    testing.assert_graph(seen, dp_golden / "graph.txt")


def test_one_graph_and_nothing_compiled_twice(seen: testing.SeenBackward) -> None:
    testing.assert_counts(seen, graphs=2, captures=1, recompiles=0)


def test_trains_as_with_ddp(dp_ranks: testing.Ranks) -> None:
    testing.assert_same_training(TRAINING, ranks=dp_ranks, steps=4)
