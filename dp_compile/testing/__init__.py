"""Guard your own model in your own test suite: plan, graph, counts, predicted times, and the same training as DDP.

Imported by name, as `torch.testing` is: `from dp_compile import testing`.
"""

from dp_compile.testing.checks import assert_counts as assert_counts
from dp_compile.testing.checks import assert_end_below as assert_end_below
from dp_compile.testing.checks import assert_exposed_below as assert_exposed_below
from dp_compile.testing.checks import assert_graph as assert_graph
from dp_compile.testing.checks import assert_peak_below as assert_peak_below
from dp_compile.testing.checks import assert_plan as assert_plan
from dp_compile.testing.checks import assert_untouched_in_flight as assert_untouched_in_flight
from dp_compile.testing.ranks import RankError as RankError
from dp_compile.testing.ranks import Ranks as Ranks
from dp_compile.testing.same_training import Difference as Difference
from dp_compile.testing.same_training import assert_same_training as assert_same_training
from dp_compile.testing.schedule import Schedule as Schedule
from dp_compile.testing.schedule import Sent as Sent
from dp_compile.testing.seen import Counts as Counts
from dp_compile.testing.seen import SeenBackward as SeenBackward
from dp_compile.testing.seen import backward_of as backward_of
from dp_compile.testing.training import Training as Training

__all__ = [
    "Counts",
    "Difference",
    "RankError",
    "Ranks",
    "Schedule",
    "SeenBackward",
    "Sent",
    "Training",
    "assert_counts",
    "assert_end_below",
    "assert_exposed_below",
    "assert_graph",
    "assert_peak_below",
    "assert_plan",
    "assert_same_training",
    "assert_untouched_in_flight",
    "backward_of",
]
