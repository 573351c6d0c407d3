"""The passes over a captured backward, in their order."""

from dp_compile.graph_pass import GraphPass as GraphPass
from dp_compile.passes.bucketing import BucketReductions as BucketReductions
from dp_compile.passes.overlap import ScheduleCollectives as ScheduleCollectives
from dp_compile.passes.pipeline import Pipeline as Pipeline

DEFAULT_PASSES: tuple[GraphPass, ...] = (BucketReductions(), ScheduleCollectives())
