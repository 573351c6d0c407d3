"""Tables and curves of predictions, models that never ran, and the command `dp-compile whatif`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from steps import two_level_step
from test_prediction import KEY, STEP
from torch import nn

import dp_compile
from dp_compile.cli import main as cli
from dp_compile.errors import ConfigError
from dp_compile.insight.explanation import explanation_of
from dp_compile.insight.prediction import OPTIMIZERS, Scenario, extrapolated, predict
from dp_compile.insight.rehearsal import Subject, default_loss, load_subject, rehearse
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step
from dp_compile.insight.what_if import CURVE_RANKS, format_ms, what_if
from dp_compile.plan.backends import GLOO, NCCL
from dp_compile.plan.buckets import PACKED, UNUSED_FLAGS, BucketPlan, GradientSpec
from dp_compile.plan.cost import AllReduceCost, CostFit
from dp_compile.plan.devices import DEVICES, Device, device
from dp_compile.plan.links import LAUNCH_US, link
from dp_compile.plan.ready_times import ReadyTimes
from dp_compile.train.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=32, heads=2, context=16)


# --- the table and the curve ----------------------------------------------------------------------------------------


def test_the_table() -> None:
    found = what_if(
        STEP, ranks=(8, 64), links=("ethernet-25",), dtypes=("bfloat16",), strategies=("as planned", "fixed:1")
    )
    assert_expected_inline(
        str(found).partition("\nPredicted")[0],
        """\
step: 8 ranks (nccl), 4 gradients, 7.6 MiB, fixed: 3 buckets
all-reduce = 20 us + nbytes / (10 GB/s) (stated)

ranks  link         gradients  buckets      number  backward    exposed  to bound   memory
    8  ethernet-25  bfloat16   as planned        3   10.1 ms  0.0924 ms     1.000  3.8 MiB
    8  ethernet-25  bfloat16   fixed 1 MiB       2   11.2 ms    1.21 ms     1.111  3.8 MiB
   64  ethernet-25  bfloat16   as planned        3   10.2 ms   0.243 ms     1.007  3.8 MiB
   64  ethernet-25  bfloat16   fixed 1 MiB       2   11.4 ms    1.44 ms     1.124  3.8 MiB
""",
    )


def test_two_levels_beside_one() -> None:
    found = what_if(STEP, ranks=(64,), links=("ethernet-25",), ranks_inside=(1, 8), strategies=("as planned",))
    assert_expected_inline(
        str(found).partition("\nPredicted")[0].partition("\n\n")[2],
        """\
ranks  link         nodes  buckets     number  backward   exposed  to bound   memory
   64  ethernet-25      -  as planned       3   12.1 ms   2.13 ms     1.134  7.6 MiB
   64  ethernet-25  8 x 8  as planned       3   10.9 ms  0.861 ms     1.058  7.6 MiB
""",
    )
    one, two = found.rows
    assert one.cost == predict(STEP, Scenario(world_size=64, link="ethernet-25")).cost
    assert "two levels, 8 nodes of 8 ranks: nvlink4 inside, ethernet-25 between, nominal" in two.basis
    slower = what_if(STEP, ranks=(64,), links=("ethernet-25",), ranks_inside=(8,), link_inside="pcie4-x16").rows[0]
    assert slower.communication_s > two.communication_s


def test_a_cheaper_wire_on_two_levels_of_the_step_s_own_link() -> None:
    """By hand: 8 ranks as 2 nodes of 4; the last 2 MB and the flags wait for each other on the way."""
    (one, two, both) = (
        predict(STEP, scenario)
        for scenario in (Scenario(), Scenario(ranks_inside=4), Scenario(ranks_inside=4, gradient_dtype="bfloat16"))
    )
    assert two.cost.alpha_s == one.cost.alpha_s
    between = extrapolated(STEP.cost, from_ranks=8, to_ranks=2)
    assert two.cost.between == between
    inside = link("nvlink4").cost(4, launch_us=2 * LAUNCH_US)
    expected = sum(inside.seconds(each.nbytes) + between.seconds(each.nbytes / 4) for each in STEP.plan.buckets)
    assert two.communication_s == pytest.approx(expected, rel=1e-6)
    half = sum(inside.seconds(each.nbytes / 2) + between.seconds(each.nbytes / 8) for each in STEP.plan.buckets)
    assert both.communication_s == pytest.approx(half, rel=1e-6)
    assert "the step's cost between, stated" in both.basis
    assert "nvlink4 inside, nominal, not measured" in both.basis


def test_a_step_of_two_levels_keeps_them_on_other_ranks() -> None:
    step = two_level_step(4)
    more = predict(step, Scenario(world_size=64))
    assert more.cost.inside == step.cost.inside
    assert step.cost.between is not None
    assert more.cost.between == extrapolated(step.cost.between, from_ranks=4, to_ranks=8)
    assert more.plan is step.plan
    flat = predict(step, Scenario(ranks_inside=1))
    assert [len(bucket.key.reduction.stages) for bucket in flat.plan.buckets] == [1] * 4
    with pytest.raises(ConfigError, match="36 ranks do not fill two nodes"):
        predict(step, Scenario(world_size=36))
    assert Step.from_json(step.to_json()).communication_s == step.communication_s


def test_topologies() -> None:
    """By hand: all parameters are one bucket, which two ranks send each other whole."""
    found = what_if(
        STEP,
        ranks=(8,),
        links=("ethernet-25",),
        ranks_inside=(1, 4),
        strategies=("as planned", "optimal"),
        topologies=("ring", "alternating-exp-ring"),
        compute_scales=(0.1,),
        curve=False,
    )
    assert_expected_inline(
        found.topologies(),
        """\
ranks  link         nodes  compute  topology              period  edge     step   waiting  all-reduce    gap  halved
    8  ethernet-25      -     0.1x  ring                       2     2  2.60 ms   1.10 ms     5.55 ms  0.293       4
    8  ethernet-25      -     0.1x  alternating-exp-ring       6     2  2.05 ms  0.548 ms     5.55 ms      1       6
    8  ethernet-25  2 x 4     0.1x  ring                       2     2  2.05 ms  0.548 ms     1.91 ms  0.293       4
    8  ethernet-25  2 x 4     0.1x  alternating-exp-ring       2     8  3.04 ms   1.54 ms     1.91 ms      1       2""",
    )
    ring, alternating, ring_of_nodes, _ = found.mixed
    nbytes = sum(each.nbytes for each in STEP.plan.gradients if each.name != UNUSED_FLAGS)
    pair = link("ethernet-25").cost(2).seconds(nbytes)
    assert [each.nbytes for each in found.mixed] == [nbytes] * 4
    assert ring.times == pytest.approx((max(pair, 0.0015), 0.0015, pair))
    assert alternating.times.communication_s == pytest.approx(pair / 2)  # each rank is alone in every other step
    # On nodes of four every other step of the ring is inside of them.
    assert ring_of_nodes.times.communication_s == pytest.approx((pair + link("nvlink4").cost(2).seconds(nbytes)) / 2)
    assumed = "With the forward 0.5 times as long as the backward, assumed, the optimizer not counted."
    assert str(found).replace("\n", " ").endswith(assumed)
    assert json.loads(found.to_json())["topologies"][0]["step_s"] == ring.times.step_s


def test_topologies_of_measured_and_decentralized_steps() -> None:
    measured = MeasuredStep(0.012, (), "here", forward_s=0.004, optimizer_s=0.001)
    (row,) = what_if(dataclasses.replace(STEP, measured=measured), topologies=("ring",), curve=False).mixed
    assert row.times.compute_s == pytest.approx(0.015)
    assert row.told == ""
    (rehearsed,) = what_if(STEP, topologies=("ring",), curve=False, forward_s=0.007).mixed
    assert rehearsed.times.compute_s == pytest.approx(0.017)
    assert rehearsed.told == "the optimizer not counted"
    # Its buckets are of parameters already, and stay; those of gradients would be one.
    (kept,) = what_if(dataclasses.replace(STEP, mode="decentralized"), topologies=("ring",), curve=False).mixed
    assert (kept.buckets, rehearsed.buckets) == (len(STEP.plan.buckets), 1)
    # Parameters travel in their own dtype.
    (halved,) = what_if(STEP, dtypes=("bfloat16",), topologies=("ring",), curve=False).mixed
    assert halved.nbytes == rehearsed.nbytes


def test_topologies_on_many_ranks() -> None:
    """No matrix of 16,384 ranks, which would be 2 GiB."""
    (row,) = what_if(STEP, ranks=(16_384,), links=("ethernet-25",), topologies=("ring",), curve=False).mixed
    assert row.gap.low == row.gap.high == pytest.approx(2 * math.pi**2 / 16_384**2, rel=1e-6)
    assert row.halved_after == pytest.approx(2 * math.log(2) / row.gap.low, rel=1e-6)
    with pytest.raises(ConfigError, match="'one-peer-exp' needs world_size to be a power of two"):
        what_if(STEP, ranks=(12,), links=("ethernet-25",), topologies=("one-peer-exp",), curve=False)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"ranks_inside": 8}, "8 ranks do not fill two nodes or more of Scenario.ranks_inside=8"),
        ({"ranks_inside": 0}, "ranks_inside must be an integer >= 1, got 0"),
        ({"ranks_inside": 8, "link": "nvlink4"}, "8 ranks do not fill two nodes or more of Scenario.ranks_inside=8"),
        ({"ranks_inside": 3, "link": "nvlink4"}, "8 ranks do not fill two nodes"),
        ({"ranks_inside": 4, "link": "nvlink4", "link_inside": "rope"}, "link must be one of"),
        ({"ranks_inside": 4, "link": "nvlink4", "latency_us": 3.0}, "latency_us is of one link"),
    ],
)
def test_levels_that_cannot_be(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        predict(STEP, Scenario(**wishes))


def test_a_measured_backward_counts_as_it_does_in_an_explanation() -> None:
    ready = dataclasses.replace(STEP.ready, backward_s=None)
    bucket = MeasuredBucket(0.001, None, 0.001)
    measured = MeasuredStep(0.008, (bucket,) * len(STEP.plan.buckets), "clock", rank=1)
    step = dataclasses.replace(STEP, ready=ready, measured=measured)
    found = what_if(step, strategies=("as planned",), curve=False)
    explained = explanation_of(step)
    assert found.rows[0].backward_s == explained.backward_s == pytest.approx(0.005)
    assert found.rows[0].makespan_s == pytest.approx(explained.end_s)
    assert "the backward as measured on rank 1" in str(found)
    assert "assumed" not in str(found)


def test_the_curve() -> None:
    found = what_if(STEP, links=("ethernet-25",), compute_scales=(0.5,))
    assert [point.world_size for point in found.curves[0].points] == list(CURVE_RANKS)
    drawn = found.curve().replace("█", "#").replace("░", ".")
    assert_expected_inline(
        drawn,
        """\
over the ranks, ethernet-25, gradients as in the step, compute 0.5x, optimal buckets for each:
   ranks    backward     exposed  of compute
       1     5.00 ms        0 ms       1.00x  ##############################
       2     5.35 ms    0.353 ms       1.07x  ##############################..
       4     6.07 ms     1.07 ms       1.21x  ##############################......
       8     6.64 ms     1.64 ms       1.33x  ##############################.........
      16     6.96 ms     1.96 ms       1.39x  ##############################...........
      32     7.17 ms     2.17 ms       1.43x  ##############################.............
      64     7.31 ms     2.31 ms       1.46x  ##############################.............
     128     7.42 ms     2.42 ms       1.48x  ##############################..............
     256     7.52 ms     2.52 ms       1.50x  ##############################...............
     512     7.61 ms     2.61 ms       1.52x  ##############################...............
   1,024     8.41 ms     3.41 ms       1.68x  ##############################....................
   2,048     8.11 ms     3.11 ms       1.62x  ##############################..................
   4,096     8.17 ms     3.17 ms       1.63x  ##############################...................
   8,192     8.22 ms     3.22 ms       1.64x  ##############################...................
  16,384     8.28 ms     3.28 ms       1.66x  ##############################...................
                                              # compute  . exposed communication""",
    )


def test_columns_without_wishes_are_left_out() -> None:
    head = what_if(STEP, curve=False).table().splitlines()[0].split()
    assert head == ["ranks", "buckets", "number", "backward", "exposed", "to", "bound", "memory"]
    measured = MeasuredStep(0.012, (), "clock", forward_s=0.005, optimizer_s=0.001)
    wished = what_if(dataclasses.replace(STEP, measured=measured), latencies_us=(5,), compute_scales=(2,)).table()
    assert wished.splitlines()[0].split()[1:6] == ["latency", "compute", "buckets", "number", "step"]


def test_every_combination_in_order() -> None:
    found = what_if(STEP, ranks=(8, 16), latencies_us=(5, 20), strategies=("optimal", "coalesced"), curve=False)
    wishes = [(row.world_size, row.scenario.latency_us, row.scenario.strategy) for row in found.rows]
    assert wishes == [(n, us, name) for n in (8, 16) for us in (5, 20) for name in ("optimal", "coalesced")]
    assert found.curves == ()
    assert found.fastest.makespan_s == min(row.makespan_s for row in found.rows)


def test_rows_are_what_predict_says() -> None:
    (row,) = what_if(STEP, ranks=(64,), strategies=("fixed:1",), curve=False).rows
    assert row == predict(STEP, Scenario(world_size=64, strategy="fixed", bucket_cap_mb=1.0))


def test_a_cost_is_of_the_ranks_of_the_step() -> None:
    cost = AllReduceCost(1e-5, 1e-11)
    same, more = what_if(STEP, ranks=(8, 64), cost=cost, strategies=("as planned",), curve=False).rows
    assert dataclasses.astuple(same.cost)[:2] == pytest.approx((1e-5, 1e-11), rel=1e-9, abs=0)
    assert more.cost == extrapolated(cost, from_ranks=8, to_ranks=64)
    (late,) = what_if(STEP, cost=cost, latencies_us=(7,), strategies=("as planned",), curve=False).rows
    assert late.cost.alpha_s == pytest.approx(7e-6, rel=1e-9, abs=0)
    (linked,) = what_if(STEP, cost=cost, links=("nvlink4",), strategies=("as planned",), curve=False).rows
    assert linked.cost == predict(STEP, Scenario(link="nvlink4")).cost


def test_json() -> None:
    data = json.loads(what_if(STEP, ranks=(8, 64), links=("loopback",)).to_json())
    assert data["version"] == 1
    assert [row["ranks"] for row in data["rows"]] == [8, 8, 64, 64]
    assert data["rows"][0]["buckets"] == data["step"]["buckets"] == 3
    assert data["rows"][0]["plan_signature"] == STEP.plan.signature()
    assert len(data["curves"][0]["points"]) == len(CURVE_RANKS)


def test_one_rank_has_no_curve_without_a_link() -> None:
    alone = dataclasses.replace(STEP, world_size=1)
    assert what_if(alone).curves == ()
    assert len(what_if(alone, links=("nvlink4",)).curves) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (12.3456e-3, "12.3 ms"), (1.23456, "1,230 ms"), (4.2e-6, "0.00420 ms"), (0.1, "100 ms")],
)
def test_milliseconds(seconds: float, text: str) -> None:
    assert format_ms(seconds) == text


@pytest.mark.usefixtures("fake_group")
def test_a_model_that_has_trained_a_step() -> None:
    model = nn.Linear(16, 16)
    with pytest.raises(dp_compile.ModuleError, match="not replicated"):
        dp_compile.what_if(model)
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    torch.compile(model, backend="aot_eager")(torch.randn(5, 16)).sum().backward()
    assert dp_compile.what_if(model, ranks=(64,)).rows[0].world_size == 64


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"ranks": (0,)}, "world_size must be an integer >= 1"),
        ({"links": ("rope",)}, "link must be one of"),
        ({"dtypes": ("int8",)}, "gradient_dtype must be one of"),
        ({"strategies": ("fixed:x",)}, "behind the colon stands a cap in MiB, as in 'fixed:25', got 'fixed:x'"),
        ({"strategies": ("optimal:2",)}, "bucket_cap_mb belongs to strategy 'fixed'"),
        ({"strategies": ()}, "strategies and compute_scales must not be empty"),
        ({"latencies_us": (-1,)}, "latency_us must be >= 0"),
        ({"compute_scales": (0,)}, "compute_scale must be > 0"),
    ],
)
def test_refuses(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        what_if(STEP, **wishes)


def test_refuses_something_else() -> None:
    with pytest.raises(dp_compile.ConfigError, match="must be a Step or a replicated module, got int"):
        what_if(3)  # type: ignore[arg-type]
    with pytest.raises(dp_compile.ConfigError, match="the step ran on 1"):
        what_if(dataclasses.replace(STEP, world_size=1), cost=AllReduceCost(0.0, 0.0))


# --- devices --------------------------------------------------------------------------------------------------------


def test_the_roofline() -> None:
    h100 = device("h100-sxm")
    assert h100.seconds(989e12, 0, "bfloat16", efficiency=0.5) == pytest.approx(2.0)
    assert h100.seconds(67e12, 0, "float32", efficiency=1) == h100.seconds(67e12, 0, "float8", efficiency=1)
    assert h100.seconds(1, 3.35e12, "bfloat16") == pytest.approx(1.0)
    for wrong in (0, -1, 1.5, math.nan):
        with pytest.raises(dp_compile.ConfigError, match="efficiency"):
            h100.seconds(1, 1, "float32", efficiency=wrong)
    with pytest.raises(dp_compile.ConfigError, match=r"device must be one of h200-sxm, .*, got 'abacus'"):
        device("abacus")
    assert all(each.source for each in DEVICES)


# --- a model that never ran -----------------------------------------------------------------------------------------


def gpt_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return loss


def make_gpt() -> tuple[nn.Module, torch.Tensor, Any]:
    return GPT(SMALL), torch.zeros(2, 16, dtype=torch.int64), gpt_loss


def make_large() -> tuple[nn.Module, torch.Tensor]:
    """Two layers of 16 GiB each in float32, one on top of the other: more than this machine has."""
    return nn.Sequential(*(nn.Linear(65536, 65536, bias=False) for _ in range(2))), torch.zeros(4, 65536)


def make_nothing() -> int:
    return 3


def make_pair() -> tuple[int, int]:
    return 3, 4


def make_without_loss() -> tuple[nn.Module, torch.Tensor, int]:
    return nn.Linear(2, 2), torch.zeros(2, 2), 3


def make_from_values() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(2, int(torch.ones(()).item())), torch.zeros(2, 2)


class Untouched(nn.Module):
    """Its loss does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax()


HERE = Path(__file__).stem
H100 = device("h100-sxm")


@pytest.mark.usefixtures("fake_group")
def test_a_model_without_values() -> None:
    """Ready times and peak as in a backward that really ran; bytes as the model has them."""
    seen = rehearse(load_subject(f"{HERE}:make_gpt"), H100, ranks=64, link="infiniband-ndr")
    real = rehearse(load_subject(f"{HERE}:make_gpt", on="cpu"), H100, ranks=64, link="infiniband-ndr", on="cpu")
    names = {gradient.name for gradient in seen.step.plan.gradients} - {UNUSED_FLAGS}
    assert names == {name for name, _ in GPT(SMALL).named_parameters()}
    assert seen.gradient_nbytes == seen.parameter_nbytes == sum(each.nbytes for each in GPT(SMALL).parameters())
    assert (seen.step.world_size, seen.step.backend, seen.link) == (64, NCCL, "infiniband-ndr")
    assert 0 < seen.forward_s < seen.step.backward_s
    assert seen.step.backward_s == pytest.approx(real.step.backward_s, rel=0.5)
    assert seen.step.ready.shares.keys() == real.step.ready.shares.keys()
    for least_or_most in (min, max):
        places = [
            least_or_most(shares, key=shares.__getitem__) for shares in (seen.step.ready.shares, real.step.ready.shares)
        ]
        assert places[0] == places[1]
    assert seen.step.memory is not None
    assert {bucket.key.device for bucket in seen.step.plan.buckets} == {seen.step.device} == {"cuda"}
    assert Step.from_json(seen.step.to_json()).to_json() == seen.step.to_json()
    assert "roofline of h100-sxm at 40% of its peak (an assumption)" in what_if(seen.step, curve=False).rows[0].basis


@pytest.mark.usefixtures("fake_group")
def test_a_model_larger_than_memory() -> None:
    seen = rehearse(load_subject(f"{HERE}:make_large"), H100, ranks=8, link="nvlink4")
    assert seen.parameter_nbytes == 32 * 2**30
    assert seen.step.memory is not None
    assert seen.step.memory.nbytes > 48 * 2**30
    # Each matrix is read and its gradient written once: at least 3 x 16 GiB at 3.35 TB/s.
    assert seen.step.backward_s > 48 * 2**30 / 3.35e12


@pytest.mark.usefixtures("fake_group")
def test_by_hand_on_a_device_of_one_flop() -> None:
    """A product of 4x8 by 8x2: 128 FLOPs forward, for the weight's gradient 128 again; the input wants none."""
    slow = Device("slow", {"float32": 1.0}, 1e30, "stated", "cpu")
    subject = Subject(nn.Linear(8, 2, bias=False), torch.zeros(4, 8), lambda model, x: model(x).sum())
    seen = rehearse(subject, slow, ranks=2, link="loopback", efficiency=0.5)
    assert (seen.forward_s, seen.step.backward_s) == (pytest.approx(256), pytest.approx(256))
    assert (seen.step.backend, seen.step.device) == (GLOO, "cpu")


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (Subject(nn.Linear(2, 2), torch.zeros(1, 2), lambda model, x: model(x)), r"scalar .* of shape \[1, 2\]"),
        (Subject(nn.Linear(2, 2), torch.zeros(1, 2), lambda model, x: 3), "must return a scalar .*, got int"),
        (Subject(nn.Linear(2, 2), torch.zeros(1, 3), default_loss), "the forward of the model failed: RuntimeError"),
        (Subject(Untouched(), torch.zeros(3), default_loss), "returns no floating tensor to make a loss of"),
    ],
)
def test_models_that_cannot_be_rehearsed(subject: Subject, message: str) -> None:
    with pytest.raises(dp_compile.ModuleError, match=message):
        rehearse(subject, H100, ranks=2, link="nvlink4")


def test_how_a_rehearsal_is_asked_for() -> None:
    subject = Subject(nn.Linear(2, 2), torch.zeros(1, 2), default_loss)
    with pytest.raises(dp_compile.ConfigError, match="ranks must be an integer >= 2, got 1"):
        rehearse(subject, H100, ranks=1, link="nvlink4")
    with pytest.raises(dp_compile.ConfigError, match="on must be 'meta' or 'cpu', got 'cuda'"):
        rehearse(subject, H100, ranks=2, link="nvlink4", on="cuda")


def test_the_loss_without_one() -> None:
    class Out(dict[str, torch.Tensor]):
        loss = torch.tensor(5.0)

    class Gives(nn.Module):
        def forward(self, **given: Any) -> Any:
            return given["out"]

    assert default_loss(Gives(), {"out": Out()}) == 5
    assert default_loss(Gives(), {"out": torch.tensor(2.0)}) == 2
    several = {"a": torch.ones(3), "b": [torch.ones(2), torch.ones(2, dtype=torch.int64)]}
    assert default_loss(Gives(), {"out": several}) == 2
    assert default_loss(nn.Bilinear(2, 2, 1), (torch.ones(1, 2), torch.ones(1, 2))).dim() == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "the import path must be package.module:callable, got 'nowhere'"),
        (":make", "the import path must be package.module:callable"),
        ("no.such.module:make", "no.such.module cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:no_such_name", f"{HERE} has no 'no_such_name'. Defined there: "),
        (f"{HERE}:HERE", f"{HERE}:HERE is not callable, it is of type str"),
        (f"{HERE}:make_nothing", "must return .model, batch. or .model, batch, loss_fn. .*, got int"),
        (f"{HERE}:make_pair", r"with an nn.Module first, got \(int, int\)"),
        (f"{HERE}:make_without_loss", "the loss_fn .* must be callable, got int"),
        (f"{HERE}:make_from_values", "raised RuntimeError: .* --on cpu"),
        (f"{HERE}:gpt_loss", "raised TypeError: .* missing 2 required positional arguments"),
    ],
)
def test_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        load_subject(path)


def test_real_tensors_for_what_needs_values() -> None:
    assert load_subject(f"{HERE}:make_from_values", on="cpu").model.out_features == 1


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def step_file(tmp_path: Path) -> str:
    path = tmp_path / "step.json"
    path.write_text(STEP.to_json())
    return str(path)


def test_the_command(step_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    wishes = ["--ranks", "8,64", "--link", "nvlink4", "--strategy", "as planned,fixed:25"]
    assert cli.main(["whatif", step_file, *wishes, "--save-plan", str(plan)]) == 0
    found = what_if(STEP, ranks=(8, 64), links=("nvlink4",), strategies=("as planned", "fixed:25"), curve=False)
    assert capsys.readouterr().out == f"{found}\n"
    assert len(json.loads(plan.read_text())["buckets"]) == len(found.fastest.plan.buckets)
    levels = ["--ranks", "64", "--link", "ethernet-25", "--two-level", "8", "--link-inside", "pcie4-x16"]
    assert cli.main(["whatif", step_file, *levels]) == 0
    assert "8 nodes of 8 ranks: pcie4-x16 inside, ethernet-25 between" in capsys.readouterr().out
    assert cli.main(["whatif", step_file, *levels, "--wire", "fp32,bf16"]) == 0
    there = {"ranks": (64,), "links": ("ethernet-25",), "ranks_inside": (8,), "link_inside": "pcie4-x16"}
    wires = what_if(STEP, **there, dtypes=("float32", "bfloat16"), curve=False)
    assert capsys.readouterr().out == f"{wires}\n"
    assert cli.main(["whatif", step_file, *levels[:4], "--topology", "ring,one-peer-exp"]) == 0
    mixed = what_if(STEP, ranks=(64,), links=("ethernet-25",), topologies=("ring", "one-peer-exp"), curve=False)
    assert capsys.readouterr().out == f"{mixed}\n"
    assert cli.main(["whatif", step_file, "--curve"]) == 0
    assert "16,384" in capsys.readouterr().out


def test_the_command_in_json_with_a_calibration(
    step_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cost = tmp_path / "cost.json", AllReduceCost(1e-4, 1e-9)
    path.write_text(CostFit(cost, 0.01, 1, 2).to_json())
    assert cli.main(["whatif", step_file, "--calibration", str(path), "--ranks", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    wanted = extrapolated(cost, from_ranks=8, to_ranks=64)
    assert data["rows"][0]["cost"]["alpha_s"] == pytest.approx(wanted.alpha_s)
    assert data["curves"] == []


@pytest.mark.usefixtures("fake_group")
def test_the_command_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "step.json"
    model = ["--model", f"{HERE}:make_gpt", "--device", "l40s", "--efficiency", "0.3"]
    assert cli.main(["whatif", *model, "--ranks", "1,16", "--save-step", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "on l40s: forward 0." in out
    assert "infiniband-ndr" in out
    assert Step.from_json(saved.read_text()).world_size == 16
    assert cli.main(["whatif", *model, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["gradient_nbytes"] == data["rows"][0]["gradient_nbytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a step file or --model package.module:callable, one of the two"),
        (["STEP", "--model", "a:b"], "give a step file or --model"),
        (["nowhere.json"], "the step file 'nowhere.json' cannot be read"),
        ([__file__], "not a step file of dp_compile"),
        (["STEP", "--ranks", "8,x"], "--ranks must be whole numbers with commas between them, got '8,x'"),
        (["STEP", "--ranks", "2.5"], "--ranks must be whole numbers"),
        (["STEP", "--ranks", "0"], "world_size must be an integer >= 1"),
        (["STEP", "--link", "rope"], "link must be one of"),
        (["STEP", "--dtype", "int8"], "gradient_dtype must be one of"),
        (["STEP", "--strategy", "ddp"], "'ddp' cannot be planned from a step alone"),
        (["STEP", "--topology", "star"], "topology must be one of complete, ring, one-peer-exp, alternating-exp-ring"),
        (["STEP", "--latency-us", "soon"], "--latency-us must be numbers with commas between them, got 'soon'"),
        (["STEP", "--two-level", "8"], "8 ranks do not fill two nodes"),
        (["STEP", "--two-level", "eight"], "--two-level must be whole numbers"),
        (["STEP", "--compute-scale", "-1"], "compute_scale must be > 0"),
        (["STEP", "--calibration", "nowhere"], "--calibration 'nowhere' cannot be read"),
        (["STEP", "--calibration", "STEP"], "cost file"),
        (["STEP", "--save-plan", "/no/such/place"], "--save-plan '/no/such/place' cannot be written"),
        (["STEP", "--device", "l40s"], "--device belongs to --model"),
        (["STEP", "--save-step", "x"], "--save-step belongs to --model"),
        (["STEP", "--on", "cpu"], "--on belongs to --model"),
        (["STEP", "--efficiency", "1"], "--efficiency belongs to --model"),
        (["--model", "a:b", "--calibration", "x"], "--calibration belongs to a step file"),
        (["--model", "a:b", "--device", "abacus"], "device must be one of"),
        (["--model", "no_such_module:b"], "no_such_module cannot be imported"),
        (["--model", f"{HERE}:make_gpt", "--efficiency", "2"], "efficiency must be a share of the peak"),
        (["STEP", "--speed", "1"], "unrecognized arguments: --speed 1"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, step_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["whatif", *(step_file if each == "STEP" else each for each in arguments)])
    except SystemExit as stop:  # argparse's own refusals
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert printed.err.startswith("dp-compile: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


# --- where the optimizer updates --------------------------------------------------------------------------------------


def test_optimizers_by_hand() -> None:
    """Three buckets of 1 s each, ready at 1, 2 and 3 s of a backward of 3 s, and a forward of 1.5 s.

    All-reduced they end at 2, 3 and 4 s. Under the next forward the last may be on its way when that begins: it reads
    it first, at 3 s, and waits for it up to 4 s; the others are there. Scattered each takes 0.5 s, the last from 3 to
    3.5 s, and all are gathered in 1.5 s behind that. Gathered under the forward only the first read waits, 0.5 s: the
    second comes at 4.5 s, when the second bucket is there, the third at 5 s, when the third is.
    """
    step = three_seconds(backward_s=3.0)
    found = what_if(step, strategies=["as planned"], optimizers=OPTIMIZERS, overlap_forward=True, curve=False)
    seen = {(row.scenario.optimizer, row.scenario.overlap_forward): row for row in found.rows}
    assert {way: row.makespan_s for way, row in seen.items()} == pytest.approx(
        {
            ("plain", False): 4.0,
            ("in-backward", False): 4.0,
            ("in-backward", True): 4.0,
            ("sharded", False): 5.0,
            ("sharded", True): 4.0,
        }
    )
    assert [row.forward_s for row in found.rows] == [0.0, 0.0, 1.5, 0.0, 1.5]
    assert "max(T_forward + T_backward + T_optimizer, T_communication)" in " ".join(str(found).split())


def three_seconds(backward_s: float) -> Step:
    gradients = [GradientSpec(index, f"p{index}", (25,), (1,), 4, KEY) for index in range(3)]
    buckets = tuple(PACKED.bucket(KEY, [each], "stated") for each in reversed(gradients))
    flags = PACKED.bucket(KEY, [GradientSpec(3, UNUSED_FLAGS, (0,), (1,), 4, KEY)], "stated")
    ready = ReadyTimes({2: 1 / 3, 1: 2 / 3, 0: 1.0}, backward_s, "stated")
    cost = AllReduceCost(0.0, 0.01)
    return Step("python hooks", "fixed", 2, NCCL, "cuda", BucketPlan((*buckets, flags)), ready, cost, "stated")


def test_a_slow_network_is_hidden_under_both_halves() -> None:
    """A backward of 1.2 s: all-reduced in it, 3.4 s; with 0.6 s of forward beside it the network alone counts."""
    step = three_seconds(backward_s=1.2)
    (plain, _, crossing) = what_if(step, strategies=["as planned"], overlap_forward=True, curve=False).rows
    assert plain.makespan_s == pytest.approx(3.4)
    assert crossing.makespan_s + crossing.forward_s >= 3.0 - 1e-9  # no order beats the network
    assert crossing.bound_s == pytest.approx(3.0 - crossing.forward_s)
    assert crossing.makespan_s <= plain.makespan_s


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        ({"optimizer": "muon"}, "must be one of plain, in-backward, sharded, got 'muon'"),
        ({"overlap_forward": 1}, "must be True or False, got 1"),
        ({"optimizer": "plain", "overlap_forward": True}, "Scenario.optimizer is 'plain'"),
        ({"optimizer": "sharded", "ranks_inside": 4}, "one level of network"),
    ],
)
def test_wishes_of_optimizers_that_are_refused(wishes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Scenario(**wishes)
