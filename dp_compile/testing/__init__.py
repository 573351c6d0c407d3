"""Tools for the test suite of a user's model: golden plan and graph, counts, and a comparison with torch's DDP."""

from dp_compile.testing.backward import Counts as Counts
from dp_compile.testing.backward import SeenBackward as SeenBackward
from dp_compile.testing.backward import Training as Training
from dp_compile.testing.backward import assert_counts as assert_counts
from dp_compile.testing.backward import assert_graph as assert_graph
from dp_compile.testing.backward import assert_plan as assert_plan
from dp_compile.testing.backward import backward_of as backward_of
from dp_compile.testing.ranks import RankError as RankError
from dp_compile.testing.ranks import Ranks as Ranks
from dp_compile.testing.same_training import assert_same_training as assert_same_training
