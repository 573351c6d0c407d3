"""What a rank sends in one backward, stage by stage: on one level of network and on two, in another dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dp_compile
from dp_compile import testing
from dp_compile.plan.links import link
from dp_compile.testing.schedule import Launch, sent_by

WIDTH = 32


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def make_batch(rank: int, step: int) -> torch.Tensor:
    return torch.ones(4, WIDTH)


ONE_BUCKET = dp_compile.ReplicateConfig(bucket_cap_mb=1.0)
TRAINING = testing.Training(make_model=make_model, make_batch=make_batch, config=ONE_BUCKET)


def look_at(training: testing.Training, ranks_inside: int | None = None) -> testing.SeenBackward:
    return testing.backward_of(training, link="ethernet-25", ranks=4, ranks_inside=ranks_inside, on="meta")


def test_two_levels_hand_half_of_the_bytes_to_the_slow_link() -> None:
    """Four ranks, two in a node. On one level every rank sends one and a half buckets, over whatever link there is."""
    flat, two = look_at(TRAINING), look_at(TRAINING, ranks_inside=2)
    (bucket,) = flat.plan.buckets
    nbytes = 4 * bucket.numel
    assert flat.sent == (testing.Sent("all_reduce", "whole", "float32", 1, 2 * nbytes * 3 // 4, (0, 1, 2, 3)),)
    (bucket,) = two.plan.buckets
    padded = 4 * bucket.numel
    assert padded - nbytes < 128
    assert two.sent == (
        testing.Sent("all_to_all_single", "inside", "float32", 1, padded // 2, (0, 1)),
        testing.Sent("all_reduce", "between", "float32", 1, 2 * (padded // 2) // 2, (0, 2)),
        testing.Sent("all_gather_into_tensor", "inside", "float32", 1, padded // 2, (0, 1)),
    )
    # Given to the slow link: half. Sent there by each rank, which now has one partner instead of three: a third.
    handed = [each.nbytes for each in two.schedule.collectives]
    assert handed == [padded, padded // 2, padded // 2]
    assert two.sent_on("between") * 3 == pytest.approx(flat.sent_on("whole"), rel=0.02)
    assert two.sent_on("whole") == flat.sent_on("between") == 0
    assert two.schedule.end_s < flat.schedule.end_s
    assert "sent bytes: all_to_all_single inside float32" in str(two)


def test_a_cheaper_wire_halves_every_stage() -> None:
    cheap = replace(TRAINING, config=replace(ONE_BUCKET, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)))
    plain, half = look_at(TRAINING, ranks_inside=2), look_at(cheap, ranks_inside=2)
    assert [each.dtype for each in half.sent] == ["bfloat16"] * 3
    for one, other in zip(plain.sent, half.sent, strict=True):
        assert (one.collective, one.link, one.launches) == (other.collective, other.link, other.launches)
        assert other.nbytes == pytest.approx(one.nbytes / 2, rel=0.02)


@pytest.mark.nightly
def test_computing_in_a_narrow_dtype_takes_one_kernel_more() -> None:
    """Gradients are written into a bucket of half the bytes, none of them is copied; `.grad` is a cast of the sum."""
    plain, narrow = (
        testing.backward_of(
            replace(TRAINING, config=replace(ONE_BUCKET, mp_policy=MixedPrecisionPolicy(dtype, dtype))),
            link="ethernet-25",
            ranks=4,
            backend="inductor",
        )
        for dtype in (None, torch.bfloat16)
    )
    assert plain.counts.kernels is not None
    assert narrow.counts.kernels is not None
    assert narrow.counts.kernels <= plain.counts.kernels + 1
    assert (narrow.counts.copied_nbytes, plain.counts.copied_nbytes) == (0, 0)
    assert 2 * narrow.counts.reduced_nbytes <= plain.counts.reduced_nbytes


def test_what_collectives_send() -> None:
    def sent(collective: str, given: int, made: int) -> int:
        (found,) = sent_by([Launch("", given, collective, group=tuple(range(8)), whole_nbytes=made)])
        return found.nbytes

    assert sent("all_reduce_coalesced", 800, 800) == 1400
    assert sent("reduce_scatter_tensor", 800, 100) == 700
    assert sent("all_gather_into_tensor", 100, 800) == 700
    assert sent("all_to_all_single", 800, 800) == 700


def dp_slice() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]


def make_tp_model() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    )
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def test_collectives_of_tensor_parallel_are_counted_by_themselves() -> None:
    """One all-reduce over `tp` for the input of the second block; that of the first needs no gradient."""
    training = replace(TRAINING, make_model=make_tp_model, make_mesh=dp_slice)
    seen = testing.backward_of(training, link="ethernet-25", ranks=4)
    assert (seen.launches_in(0, 1), seen.launches_in(0, 2), seen.launches_in(0, 3)) == (1, len(seen.plan.buckets), 0)
    assert seen.counts.collectives == 1 + len(seen.plan.buckets)
    assert "of ranks [0, 1]" in str(seen)
    assert "of ranks [0, 2]" in str(seen)
    assert seen.schedule.basis.startswith("ethernet-25, 4 ranks, 2 of them reduce, the model's own on nvlink4, ")
    assert seen.counts.reduced_nbytes == sum(4 * bucket.numel for bucket in seen.plan.buckets)
    (own,) = [each for each in seen.sent if each.link == "model"]
    (sent,) = [each for each in seen.schedule.collectives if "(of the model)" in each.name]
    assert own == testing.Sent("all_reduce", "model", "float32", 1, sent.nbytes, (0, 1))  # of two ranks: all of it
    assert sent.finish_s - sent.start_s == pytest.approx(link("nvlink4").cost(2).seconds(sent.nbytes))
    assert sent.start_s == sent.launch_s  # no reduction is in its way
    assert seen.schedule.end_if_waited_last_s <= seen.schedule.end_s
    with pytest.raises(dp_compile.ConfigError, match="leave ranks_inside out"):
        testing.backward_of(training, link="ethernet-25", ranks=4, ranks_inside=2)
    with pytest.raises(dp_compile.ConfigError, match=r"leave Training\.make_mesh out"):
        testing.assert_same_training(training)
    with pytest.raises(dp_compile.ConfigError, match=r"Training\.make_mesh must be a function"):
        replace(training, make_mesh=3)


@pytest.mark.parametrize("ranks_inside", [1, 3, 4])
def test_ranks_that_do_not_fill_nodes(ranks_inside: int) -> None:
    with pytest.raises(dp_compile.ConfigError, match="do not fill two nodes"):
        look_at(TRAINING, ranks_inside)
