"""Who looks after what: every element of every parameter is one rank's, and nobody has what lies between them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dp_compile.optim.shards import numel_of_part, pieces_of
from dp_compile.plan.backends import GLOO, Backend
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, BucketPlan, GradientSpec, Layout, plan_buckets
from dp_compile.plan.reduction import Averaging


def plan_of(numels: list[int], ranks: int, alignment_bytes: int, backend: Backend = GLOO) -> BucketPlan:
    keys = [
        BucketKey(Averaging(scattered=scattered).reduction("g", backend, ranks, "float32"), "float32", "cpu")
        for scattered in (True, False)
    ]
    specs = [GradientSpec(index, f"p{index}", (numel,), (1,), 4, keys[0]) for index, numel in enumerate(numels)]
    flags = GradientSpec(len(specs), UNUSED_FLAGS, (9,), (1,), 4, keys[1])
    layout = Layout(alignment_bytes)
    return plan_buckets([*specs, flags], bucket_cap_mb=2e-4, first_bucket_cap_mb=1e-4, layout=layout)


@given(st.lists(st.integers(0, 150), min_size=1, max_size=8), st.integers(1, 5), st.sampled_from([1, 16, 64]))
def test_every_element_is_one_rank_s(numels: list[int], ranks: int, alignment_bytes: int) -> None:
    plan = plan_of(numels, ranks, alignment_bytes)
    met = Counter[tuple[int, int]]()
    for rank in range(ranks):
        for piece in pieces_of(plan, rank):
            met.update((piece.index, element) for element in range(piece.start, piece.stop))
            bucket = plan.buckets[piece.bucket]
            (member,) = [each for each in bucket.members if each.gradient.index == piece.index]
            # Where the reduce-scatter puts it: parts follow each other.
            assert piece.offset == member.offset + piece.start
            first = rank * numel_of_part(plan, piece.bucket)
            assert first <= piece.offset
            assert piece.offset + piece.numel <= first + numel_of_part(plan, piece.bucket)
    assert met == Counter((index, element) for index, numel in enumerate(numels) for element in range(numel))
