"""Random models, options and training loops on two ranks and on four, next to torch's DDP.

`DP_COMPILE_FUZZ_EXAMPLES` says how many cases, `DP_COMPILE_FUZZ_SEED` draws other ones. One that fails is shrunk and
printed as a value, which `fuzzing.run_case` runs again.
"""

import itertools
import os
from collections import Counter
from dataclasses import replace

import fuzzing
import pytest
from fuzzing import BlockSpec, Failure, FuzzCase, Micro, Step
from hypothesis import Phase, given, note, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner

EXAMPLES = int(os.environ.get("DP_COMPILE_FUZZ_EXAMPLES", "3"))
SEED = os.environ.get("DP_COMPILE_FUZZ_SEED")
CASES_PER_POOL = 500
"""Torch keeps 1.6 MiB of every captured backward, without this package too (2.13, compiled autograd alone: 1.56). In a
run of 3,000 cases the same processes grew to 6 GiB and went from 35 cases a minute to 22."""

# Compiling these takes three times as long as the others.
COSTLY = {"mlp", "checkpointed", "graph break", "opaque function", "recomputed"}
NEEDS_TWO_ROWS = {"batch norm"}
NEEDS_A_ROW = {"attention", "conv"}
# What is computed again in a backward would be computed without the casts of the plain twin; torch's BatchNorm for CPUs
# takes no mixture of dtypes.
NOT_CAST = {"batch norm", "checkpointed", "recomputed"}


@st.composite
def block_specs(draw):
    kind = draw(st.sampled_from([*fuzzing.KINDS, *(kind for kind in fuzzing.KINDS if kind not in COSTLY)]))
    # A function that nothing which needs a gradient goes into has no backward, so no inner one either.
    frozen = ["nothing"] if kind == "recomputed" else ["nothing"] * 6 + ["first", "all"]
    return BlockSpec(
        kind,
        draw(st.integers(1, 6)),
        draw(st.sampled_from(["float32"] * 8 + ["float64", "bfloat16"])),
        draw(st.sampled_from(frozen)),
    )


@st.composite
def failures(draw, fails, micros, *, voids):
    if not draw(st.sampled_from([False] * 5 + [True])):
        return None
    where, micro = draw(st.sampled_from(fails)), draw(st.integers(0, micros - 1))
    # A rank that does not come to a synchronised backward leaves the others waiting, with torch's DDP too.
    alone = micro + 1 < micros or "step" in where or (voids and "hook" in where)
    ranks = draw(st.sampled_from([(True, True), (True, False), (False, True)][: 3 if alone else 1]))
    return Failure(where, ranks, micro, draw(st.integers(0, 5)))


@st.composite
def train_steps(draw, *, fewest_rows, ways, deep, edits, fails, voids, transforms):
    """What loops may do. What varies is drawn for the run first: a new batch size or pattern costs a compilation.

    `deep`: blocks may be called several times. `edits`: `.grad` is the loop's before `step()`. `voids`: an exception in
    a synchronised backward of one rank ends that of the others.
    """
    sizes = draw(st.sampled_from([1, 1, 2]))
    batches = draw(st.lists(st.tuples(*[st.integers(fewest_rows, 5)] * 2), min_size=sizes, max_size=sizes))
    cleared = draw(st.sampled_from([[True], [True], [False], [True, False]])) if edits else [True]
    counts = draw(st.sampled_from([[1], [1], [2], [1, 2, 3]]))
    depths = draw(st.sampled_from([[1]] * 5 + [[1, 2, 3]])) if deep else [1]
    losses = draw(st.sampled_from([[""]] * 4 + [[each] for each in fuzzing.LOSSES] + [[*fuzzing.LOSSES]]))
    # torch's DDP remembers that a local micro-batch used a parameter, and fails on its gradient if that was dropped.
    kinds = [each for each in fuzzing.EDITS if each != "remove" or ways == 1]
    edited = draw(st.sampled_from([[""]] * 2 + [["", *kinds]])) if edits else [""]
    way = st.integers(0, ways - 1)
    eager = st.sampled_from([(False, False)] * 4 + [(True, False), (False, True)])
    other = st.sampled_from([(False, False)] * 6 + [(True, False), (True, True)])
    drawn = [st.sampled_from(each) for each in (depths, losses, edited)]
    micros = st.builds(Micro, st.sampled_from(batches), st.tuples(way, way), eager, other, *drawn)
    steps = []
    for _ in range(draw(st.sampled_from([2, 2, 2, 2, 3, 4]))):
        count = draw(st.sampled_from(counts))
        failure = draw(failures(fails, count, voids=voids))
        transform = draw(st.sampled_from([""] * 9 + [*transforms]))
        drawn_micros = tuple(draw(micros) for _ in range(count))
        steps.append(Step(drawn_micros, draw(st.sampled_from(cleared)), failure, transform))
    return tuple(steps)


@st.composite
def reductions(draw, blocks, world_size, *, find_unused):
    """Dtypes, divisors, levels of network and hooks that go together."""
    is_cast = not {block.kind for block in blocks} & NOT_CAST
    computes = st.sampled_from(["", "bfloat16"] if is_cast else [""])
    levels = world_size == 4 and draw(st.booleans())
    # A module that is left out as a whole, on one rank, is an error; and the whole has to have something left.
    trained = [f"blocks.{number}" for number, block in enumerate(blocks) if block.frozen == "nothing"]
    parts = st.sampled_from([""] if find_unused or not trained else [""] * 3 + ["head", *trained])
    # Hooks reduce the buckets of a plan, in one dtype, and say what is divided by. Few cases are run on four ranks.
    has_hook = st.sampled_from([False] * (1 if world_size == 4 else 3) + [True])
    if not levels and draw(has_hook):
        # Casts less often: what they round is more than what eight bits lose, and hides it.
        compute = draw(st.sampled_from(["", "", "bfloat16"])) if is_cast else ""
        hook, per_scale = draw(st.sampled_from(["rounded", "int8"])), draw(st.sampled_from([2, 4, 7, 64]))
        return {"comm_hook": hook, "per_scale": per_scale, "compute": compute, "part": draw(parts)}
    if not levels and draw(st.sampled_from([False] * 9 + [True])):
        return {"comm_hook": draw(st.sampled_from(fuzzing.TORCH_HOOKS)), "compute": draw(computes), "part": draw(parts)}
    if (part := draw(parts)) and draw(st.booleans()):
        by = draw(st.sampled_from(fuzzing.WIRES if levels else ["hook", "hook", *fuzzing.WIRES]))
        divisors = {} if by == "hook" else {"divides": draw(st.sampled_from([(), (3.0,), (0.7, 5.0)]))}
        wire = draw(st.sampled_from(["", *(each for each in fuzzing.WIRES if each != by)]))
        return {"levels": levels, "part": part, "part_by": by, "wire": wire, "compute": draw(computes), **divisors}
    can_shard = not levels and "layouts" not in {block.kind for block in blocks}  # which has gaps in memory
    update = draw(st.sampled_from(["", "", "in_backward", "shard"][: 4 if can_shard else 3]))
    return {
        "levels": levels,
        "wire": draw(st.sampled_from(["", "", "", *fuzzing.WIRES])),
        "compute": draw(st.sampled_from([""] * 6 + ["bfloat16"])) if is_cast else "",
        "divides": draw(st.sampled_from([()] * 4 + [(3.0,), (0.7, 5.0), (2.0, 3.0, 0.3)])),
        "adamw": draw(st.booleans()),
        "update": update,
        "max_norm": draw(st.sampled_from([None, 0.05])) if update == "shard" else None,
        "part": "" if update else part,
    }


@st.composite
def cases(draw, world_size=2):
    blocks = tuple(draw(block_specs()) for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 2, 3]))))
    kinds = {block.kind for block in blocks}
    # torch's DDP takes what only an inner backward reaches for unused, and this package takes a gradient that a hook
    # dropped for used.
    find_unused = "recomputed" not in kinds and draw(st.sampled_from([False, False, True]))
    hook = draw(st.sampled_from([""] * 3 + [each for each in fuzzing.HOOKS if each != "drop" or not find_unused]))
    some_blocks = st.sets(st.integers(0, len(blocks) - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    ways = ((), *draw(st.lists(some_blocks, max_size=2, unique=True))) if find_unused else ((),)
    fewest_rows = 2 if kinds & NEEDS_TWO_ROWS else 1 if kinds & NEEDS_A_ROW else draw(st.sampled_from([1, 1, 0]))
    buckets = draw(st.sampled_from(list(fuzzing.BUCKETS)))
    reduction = draw(reductions(blocks, world_size, find_unused=find_unused))
    wrapper = buckets != "per module" and not reduction.get("levels") and draw(st.booleans())
    compiled = draw(st.sampled_from(["model", "model", "head", "nothing", *fuzzing.COMPILED]))
    broadcast_buffers = draw(st.sampled_from([True, True, False]))
    in_backward = bool(reduction.get("update"))
    # torch's DDP copies buffers before each forward, this package after a synchronised backward that succeeded.
    late_buffers = broadcast_buffers and "running scale" in kinds
    loops = train_steps(
        fewest_rows=fewest_rows,
        ways=len(ways),
        deep="recomputed" not in kinds,  # torch's DDP knows one inner backward of each parameter
        edits=not in_backward,
        fails=fuzzing.FAILS[3:] if late_buffers else fuzzing.FAILS,
        voids=not in_backward,  # updates in a backward that is void later need a checkpoint
        # An inner backward accumulates gradients in `torch.autograd.grad` too, which two of the transforms call.
        transforms=[] if late_buffers else [*fuzzing.TRANSFORMS][: 2 if "recomputed" in kinds else 4],
    )
    return FuzzCase(
        blocks=blocks,
        width=draw(st.integers(1, 6)),
        steps=draw(loops),
        ways=ways,
        compiled=compiled,
        # Dynamo 2.13 does not trace a checkpoint that is called twice with symbolic sizes, without this package too.
        dynamic=draw(st.sampled_from([None] * 5 + [True, False] * ("checkpointed" not in kinds))),
        buckets=buckets,
        wrapper=wrapper,
        find_unused=find_unused,
        broadcast_buffers=broadcast_buffers,
        check_reductions=draw(st.sampled_from([True, True, True, False])),
        # What is computed again in a backward is computed without autocast.
        autocast="recomputed" not in kinds and draw(st.sampled_from([False] * 7 + [True])),
        hook=hook,
        hooks_late=draw(st.booleans()),
        **reduction,
        seed=draw(st.integers(0, 99)),
    )


@pytest.fixture(autouse=True)
def _no_mutations(monkeypatch):
    """Hypothesis follows each example with five that repeat a part of it; here those cost as much and say little."""
    monkeypatch.setattr(ConjectureRunner, "generate_mutations_from", lambda runner, data: None)


def run_cases(ranks, examples):
    """Run so many random cases. At least a third of their runs have captured backwards."""
    met = Counter()
    numbers = itertools.count(1)

    @settings(max_examples=examples, phases=(Phase.explicit, Phase.generate, Phase.shrink))
    @given(cases(ranks.world_size))
    def run(case):
        note(repr(case))
        outcomes = ranks.run(fuzzing.run_case, case)
        assert not any(outcome.difference for outcome in outcomes), [outcome.difference for outcome in outcomes]
        met.update({outcomes[0].mode, *outcomes[0].backwards})
        if next(numbers) % CASES_PER_POOL == 0:
            ranks.stop()  # the next case starts new processes

    (seed(int(SEED))(run) if SEED else run)()
    print(f"met in {examples} runs: {dict(sorted(met.items()))}")
    assert met["captured"] > examples // 3 or examples < 100


@pytest.mark.timeout(max(600, 10 * EXAMPLES))
def test_random_training_runs(ranks2):
    run_cases(ranks2, EXAMPLES)


@pytest.mark.timeout(max(600, 10 * EXAMPLES))
def test_random_training_runs_on_4_ranks(ranks4):
    """Fewer, for four processes share the machine's cores."""
    run_cases(ranks4, max(2, EXAMPLES // 10))


PLAIN = FuzzCase(
    blocks=(BlockSpec("linear"), BlockSpec("embedding")),
    width=4,
    steps=(Step((Micro((2, 3)),)), Step((Micro((3, 2)), Micro((1, 1))), set_to_none=False)),
)
PAIR = (Micro((2, 3)), Micro((3, 2)))
DRAWS = {
    "errors on one rank": (
        Step(PAIR, failure=Failure("hook", (True, False), micro=1)),
        Step(PAIR, failure=Failure("tensor hook", (False, True), micro=1, parameter=3)),
        Step(PAIR, failure=Failure("hook", (False, True))),
    ),
    "transforms": tuple(Step(PAIR[:1], transform=each) for each in fuzzing.TRANSFORMS),
}
SAMPLES = {name: replace(PLAIN, steps=steps) for name, steps in DRAWS.items()} | {
    "shard": replace(PLAIN, steps=(Step(PAIR),) * 2, update="shard", adamw=True, max_norm=0.05),
}
USED, UNUSED = Micro((2, 2)), Micro((2, 2), way=(1, 1))


def with_ways(kind, *steps, width=2, **options):
    """A block that the second way leaves out."""
    blocks = (BlockSpec(kind, options.pop("hidden", 3)),)
    return FuzzCase(blocks=blocks, width=width, steps=steps, ways=((), (0,)), find_unused=True, **options)


USED_OF_ONE_RANK = replace(UNUSED, way=(1, 0))
LATE = (Step((USED,)), Step((UNUSED, USED_OF_ONE_RANK)), Step((USED,)))
CASTS = {"hidden": 2, "compute": "bfloat16"}
BIG, NONE = Step((Micro((3, 4)),)), Step((Micro((3, 4), way=(1, 1)),))
EIGHT = {"width": 6, "comm_hook": "int8", "per_scale": 64}
FOUND = {
    # It was contiguous, whichever the parameter's memory order.
    "layout of a gradient that only another rank produced": with_ways(
        "layouts", Step((Micro((2, 2), way=(0, 1)),)), Step((Micro((2, 2), way=(1, 0)),))
    ),
    "a forward is compiled late in an accumulation": FuzzCase(
        blocks=(BlockSpec("linear"),) * 2,
        width=4,
        steps=(Step((Micro((1, 1), way=(1, 1)), Micro((1, 1)))), Step((Micro((1, 1)), Micro((1, 1), way=(1, 1))))),
        ways=((), (0,)),
        compiled="late",
        find_unused=True,
    ),
    "used in a local micro-batch only": with_ways("linear", *[Step((USED, UNUSED))] * 2, compiled="nothing"),
    # What an empty state becomes has no user: it was taken out of the graph, and the hook asked for it.
    "a hook with state of a parameter without elements": FuzzCase(
        blocks=(BlockSpec("layouts", hidden=2, dtype="float64"),),
        width=1,
        steps=(Step((Micro((3, 2)),)),),
        comm_hook="rounded",
    ),
    # After a cast the node of an unused parameter is in the graph, and gets nothing: the old gradient stood twice among
    # the inputs, which Dynamo takes for a bug in itself.
    "a gradient that is kept and not added to": with_ways(
        "tied", Step((USED,)), Step((UNUSED,), set_to_none=False), width=3, compute="bfloat16"
    ),
    # Casts of all parameters are in the compiled forward. Hooks heard of those that it does not use, the user's had no
    # gradient to work on, and what no rank used became zeros where torch's DDP leaves nothing.
    "casts that are not used, a hook": with_ways(
        "linear", Step((UNUSED, replace(USED_OF_ONE_RANK, eager=(True, False)))), Step((USED,)), hook="squash", **CASTS
    ),
    # Compiled late: a local backward comes before anything asks whether hooks reduce.
    "casts that are not used, a hook, late": with_ways("linear", *LATE, compiled="late", hook="squash", **CASTS),
    # It was sent with zeros for a gradient, in an average that no rank was given, and forgotten.
    "still to be sent of an unused parameter": with_ways("linear", *[BIG, NONE] * 4, **EIGHT),
    # Errors are there from the second step on; what is done to them adds up to more than one loss can be.
    "eight bits lose no more than two roundings": FuzzCase(blocks=(BlockSpec("linear"),), steps=(BIG,) * 4, **EIGHT),
}
"""What the fuzzer found, each in its smallest form."""


@pytest.mark.parametrize("sample", SAMPLES | FOUND)
def test_a_sample_is_equal(ranks2, sample):
    for outcome in ranks2.run(fuzzing.run_case, (SAMPLES | FOUND)[sample]):
        assert outcome.difference == ""
        assert sample in FOUND or outcome.backwards["captured"] >= 2
