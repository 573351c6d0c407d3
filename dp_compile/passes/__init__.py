"""The passes over the graph of a captured backward, in the order in which they run."""

from dp_compile.passes.bucketing import BucketReductions as BucketReductions
from dp_compile.passes.overlap import ScheduleCollectives as ScheduleCollectives
from dp_compile.passes.result import GraphPass as GraphPass

DEFAULT_PASSES: tuple[GraphPass, ...] = (BucketReductions(), ScheduleCollectives())
