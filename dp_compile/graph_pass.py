"""What a pass is. Replicas carry passes, the pipeline runs them, users may write their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from torch import fx

from dp_compile.plan import BucketPlan
from dp_compile.report import PassResult


@runtime_checkable
class GraphPass(Protocol):
    """A frozen value whose fields are its options, with a pure call.

    Valid graph in, valid graph out. No communication, no rank, no state. `realises_plan` says that every reduction
    of a plan leaves this pass in the plan's buckets and order.
    """

    name: ClassVar[str]
    realises_plan: ClassVar[bool]

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult: ...
