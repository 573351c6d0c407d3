"""Buckets of which each rank keeps a part: the update is given the part, and what is done to it is followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import Changed, Grad, run_passes, trace
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx.collectives import WAIT, is_collective
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.bucket_ops import FLAT_BUCKET
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, PlaceUpdates, read_update
from dp_compile.plan.backends import GLOO, NCCL, Backend
from dp_compile.plan.buckets import BucketPlan, Layout, plan_buckets
from dp_compile.plan.reduction import Averaging

pytestmark = pytest.mark.usefixtures("fake_group")
aten = torch.ops.aten
GRADS = [Grad(index=index, shape=shape) for index, shape in enumerate([(4,), (2, 3), (40,), (5,)])]


def plan(backend: Backend = GLOO, wire: str | None = None, divide_by: float | None = None) -> BucketPlan:
    """Two buckets."""
    averaging = Averaging(scattered=True, wire=wire, divide_by=divide_by)
    reduction = averaging.reduction("0", backend, 2, "float32")
    specs = [replace(grad.spec, key=grad.spec.key._replace(reduction=reduction)) for grad in GRADS]
    layout = Layout(16)
    return plan_buckets(specs, bucket_cap_mb=1.7e-4, first_bucket_cap_mb=3e-5, layout=layout)


def backward(*values: torch.Tensor) -> torch.Tensor:
    parameters, sources = values[: len(GRADS)], values[len(GRADS) :]
    reduced = [grad.reduce(source.sin()) for grad, source in zip(GRADS, sources, strict=True)]
    for bucket, indices in enumerate(([0, 1], [2, 3])):
        UPDATE_LATER([parameters[each] for each in indices], [reduced[each] for each in indices], indices, 0, 0, bucket)
    return sources[0].cos()


def run(*edits: Callable[[fx.Graph], Any], chosen: BucketPlan | None = None) -> fx.Graph:
    values = [grad.values() for grad in GRADS * 2]
    place = PlaceUpdates((0, 1, 2, 3, -1, -1, -1, -1))
    passes = (*DEFAULT_PASSES, *map(Changed, edits), place)
    return run_passes(trace(backward, *values), chosen or plan(), passes=passes).graph


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize("backend", [GLOO, NCCL])
@pytest.mark.parametrize(("wire", "divide_by"), [(None, None), ("bfloat16", None), (None, 3.0), ("float16", 3.0)])
def test_an_update_is_given_the_part_of_its_bucket(backend: Backend, wire: str | None, divide_by: float | None) -> None:
    graph = run(chosen=plan(backend, wire, divide_by))
    launches = [node for node in graph.nodes if is_collective(node)]
    assert [launch.args[0].target for launch in launches] == [FLAT_BUCKET, FLAT_BUCKET]  # type: ignore[union-attr]
    for update in map(read_update, calls(graph, UPDATE)):
        (part,) = set(update.gradients)
        assert part.meta["val"].shape == (32 if update.bucket else 16,)
        assert part.meta["val"].dtype == torch.float32


def another_bucket_s_part(graph: fx.Graph) -> None:
    first, second = calls(graph, UPDATE_LATER)
    first.args = (first.args[0], second.args[1], *first.args[2:])


def another_factor(graph: fx.Graph) -> None:
    wait = calls(graph, WAIT)[0]
    with graph.inserting_after(wait):
        made = graph.call_function(aten.mul.Tensor, (wait, 2.0))
    made.meta["val"] = wait.meta["val"]
    wait.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


@pytest.mark.parametrize("edit", [another_bucket_s_part, another_factor])
def test_what_changes_a_part_is_refused(edit: Callable[[fx.Graph], None]) -> None:
    with pytest.raises(InvalidGraphError):
        run(edit, chosen=plan(NCCL))
