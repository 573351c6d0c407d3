"""The experiments G1 to G9 of `on_a_gpu.py`: what one process of each does. `python experiments.py TASK`, JSON.

Models are small and share shapes: compile time is the budget, and the second part finds what the first compiled. With
`task.rehearse` the same functions run on a CPU with smaller sizes, and only what needs a device says so.
"""

import ctypes
import faulthandler
import importlib
import json
import logging
import os
import re
import shutil
import signal
import statistics
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from on_a_gpu import MEASURED, NEEDS_A_GPU, NOT_RUN, Task
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import dp_compile
from dp_compile.bench import simulated_group, workers
from dp_compile.bench.contract import Workload
from dp_compile.bench.modes import Loop, wrap
from dp_compile.bench.modes import mode as mode_of
from dp_compile.config import MONITOR_VARIABLE
from dp_compile.insight.profile import measured_step
from dp_compile.insight.step import Step
from dp_compile.insight.timeline import timeline_picture
from dp_compile.plan.cost import AllReduceCost
from dp_compile.train.gpt import GPT, GPTConfig

GPT_ON_A_GPU = GPTConfig(vocabulary=50304, context=1024, width=768, layers=4, heads=12)
"""GPT-2's shapes with a third of its layers: a layer more costs seconds of compilation and shows nothing new."""
GPT_REHEARSED = GPTConfig(vocabulary=128, context=32, width=32, layers=1, heads=2)
MAIN_FEATURES = ("default", "bucket_cap_mb", "bf16 on the wire", "in_backward", "shard=True")
"""Features of G2 that Inductor compiles too, on a GPU; and those rehearsed with gloo, on which all other tests run."""
GROUP_TIMEOUT_S = 60.0
FEATURE_S = 35.0
"""A process whose feature takes longer ends with all stacks; the runner starts it for the features that are left."""
PR_SET_PDEATHSIG = 1
PLANT = "DP_COMPILE_GPU_PLANT"
"""The variable with which a test plants a fault: `module:function`, called before the experiment."""
FREE = AllReduceCost(1e-6, 0.0)


def device_of(task):
    """This rank's GPU; all ranks have the same one if there is only one."""
    if task.rehearse:
        return torch.device("cpu")
    torch.cuda.set_device(task.rank % task.gpus)
    return torch.device("cuda", task.rank % task.gpus)


def open_group(task, backend="", timeout_s=GROUP_TIMEOUT_S):
    """The group of this role's ranks, with `device_id`: from torch 2.15 on NCCL would take the global rank's device."""
    device, backend = device_of(task), backend or ("stand-in" if task.rehearse else "nccl")
    if backend == "stand-in":
        import nccl_stand_in

        nccl_stand_in.register(backend)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{task.scratch}/store.{task.role}", task.ranks),
        rank=task.rank,
        world_size=task.ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=None if task.rehearse else device,
    )
    return device


def open_simulated_group(task, ranks):
    """This process is one of so many ranks, and a collective takes next to no time."""
    os.environ.update(simulated_group.environment(FREE), TORCH_DIST_INIT_BARRIER="0")
    dist.init_process_group("fabric", store=dist.HashStore(), rank=0, world_size=ranks)
    return device_of(task)


def set_cost(cost):
    """What a collective of the simulated network takes from now on."""
    dist.group.WORLD.cost = cost


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gpt(task, losses):
    """A GPT in bfloat16; `losses` gets the loss of each batch, computed in float32."""
    config = GPT_REHEARSED if task.rehearse else GPT_ON_A_GPU

    def loss(call, batch):
        inputs, targets = batch
        found = F.cross_entropy(call(inputs).float().flatten(0, -2), targets.flatten())
        losses.append(found.detach())
        return found

    def batch(generator):
        shape = 2 if task.rehearse else 4, config.context + 1
        tokens = torch.randint(0, config.vocabulary, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload("gpt", lambda: GPT(config).bfloat16(), batch, loss)


class Training:
    """That GPT, trained by a mode of `dp_compile.bench`, or by what `prepare` makes of its workload."""

    def __init__(self, task, mode, prepare=None):
        self._losses = []
        workload = gpt(task, self._losses)
        if prepare is None:
            made = mode_of(mode)
            # A rehearsal generates no code: that takes a CPU half a minute for each mode, and tests do it.
            quick = task.rehearse and made.takes("backend")
            prepare = partial(made.prepare, backend="aot_eager") if quick else made.prepare
        self.trainer = prepare(workload)
        self.model = getattr(self.trainer, "model", nn.Module())
        self._batches = workers.batches(workload, task.rank)

    def steps(self, count):
        """Seconds a step."""
        batches = [next(self._batches) for _ in range(count)]
        synchronize()
        begin_s = time.perf_counter()
        for batch in batches:
            self.trainer.step(batch)
        synchronize()
        return (time.perf_counter() - begin_s) / count

    def losses(self):
        """Those of all steps since the last call."""
        found = [float(each) for each in self._losses]
        self._losses.clear()
        return found


def in_turns(task, rounds, work):
    """`work(round)` on all ranks of one role after the other: what is timed has the GPU for itself."""
    for number in range(rounds):
        turn = number * len(task.roles) + task.roles.index(task.role)
        for earlier in range(max(0, turn - len(task.roles)), turn):
            for rank in range(task.ranks):
                task.read(f"turn.{earlier}.{rank}", of=f"{task.roles[earlier % len(task.roles)]}.{rank}")
        work(number)
        task.publish(f"turn.{turn}.{task.rank}", True)


def ms(seconds):
    return f"{seconds * 1e3:.3g} ms"


def g1(task):
    """Processes train the same GPT, one by each mode, and take turns to be timed; "ours" compares."""
    steps, rounds, each = (5, 2, 3) if task.rehearse else (20, 5, 10)
    # A rank alone has the gradients of plain compile; several have their average.
    exact = "compute" if task.ranks == 1 else "ddp_compiled"
    claims = {exact: f"losses of {steps} steps in bfloat16: ours equal to the bit to {exact}"}
    near = {role: f"losses of {steps} steps in bfloat16: ours within 1 % of {role}" for role in ("ddp", "ddp_compiled")}
    timed = {role: f"step time: ours over {role}" for role in task.roles[1:]}
    compares = task.role == "ours" and task.rank == 0
    if compares:
        task.planned(*claims.values(), *near.values(), *timed.values())
    open_group(task)
    training = Training(task, task.role)
    first_s, seconds = training.steps(1), list[float]()
    training.steps(steps - 1)
    own = training.losses()
    task.publish(f"losses.{task.role}.{task.rank}", own)
    in_turns(task, rounds, lambda _: seconds.append(training.steps(each)))
    own_s = statistics.median(seconds)
    task.publish(f"times.{task.role}.{task.rank}", [first_s, own_s])
    if not compares:
        return
    for role, claim in (*claims.items(), *near.items()):
        if (other := task.read(f"losses.{role}.0", of=f"{role}.0")) is None:
            continue  # it has died, and the runner says so
        furthest = max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))
        same = sum(a == b for a, b in zip(own, other, strict=True))
        passed = same == steps if claim == claims.get(role) else furthest <= 0.01
        task.record(claim, passed, f"{same} of {steps} equal; largest difference {furthest:.1e} of the loss")
    for role, claim in timed.items():
        if (times := task.read(f"times.{role}.0", of=f"{role}.0")) is not None:
            first = f"first step {first_s:.1f} s, {times[0]:.1f} s"
            task.record(claim, MEASURED, f"{own_s / times[1]:.3f} ({ms(own_s)}, {ms(times[1])}); {first}")


def g2(task):
    """Each feature with two ranks; a role is a backend and a way. A feature that raises ends the process."""
    from features import CAPTURED, FEATURES, run_feature

    backend, way = task.role.split()
    wanted = {name: each for name, each in FEATURES.items() if task.ranks in each.ranks}
    wanted = {name: each for name, each in wanted.items() if re.search(task.features, name)}
    if backend == "gloo":
        wanted = {name: each for name, each in wanted.items() if name in MAIN_FEATURES}
    cases = [(name, "aot_eager") for name, each in wanted.items() if way in each.ways]
    if not task.rehearse and way == CAPTURED:  # generated code last: it takes most of the time
        cases += [(name, "inductor") for name in wanted if name in MAIN_FEATURES]
    claims = {f"{name}: {way}, {compiler}, {backend}": (name, compiler) for name, compiler in cases}
    if task.again:
        claims = {claim: case for claim, case in claims.items() if claim in task.waiting()}
    else:
        task.planned(*claims)
    device = open_group(task, backend)
    for claim, (name, compiler) in claims.items():
        if wanted[name].needs not in ("", device.type):
            task.record(claim, NEEDS_A_GPU)
            continue
        task.publish(f"now.{task.role}.{task.rank}", claim)
        faulthandler.dump_traceback_later(FEATURE_S * task.patience, exit=True)
        begin_s = time.monotonic()
        try:
            difference = run_feature(wanted[name], device, way, compiler)
        except Exception as error:
            task.record(claim, False, detail=f"rank {task.rank}: {type(error).__name__}: {error}")
            raise
        faulthandler.cancel_dump_traceback_later()
        figure = f"largest difference {difference.largest:.1e}; {time.monotonic() - begin_s:.1f} s"
        task.record(claim, not difference.name, figure, f"rank {task.rank}: {difference}")


FAULT_STEP = 4


def g3(task):
    """One case, on two ranks: rank 1 is killed in a backward, or skips a step. `judge_g3` reads what rank 0 printed."""
    timeout_s = 10.0 if task.rehearse else 20.0
    task.publish(f"ready.{task.role}.{task.rank}", True)  # else a slow import of the other rank counts
    task.read(f"ready.{task.role}.{1 - task.rank}", of=f"{task.role}.{1 - task.rank}")
    device = open_group(task, task.role.split()[-1] if task.rehearse else "", timeout_s=timeout_s)
    logging.basicConfig(level=logging.WARNING)
    os.environ[MONITOR_VARIABLE] = str(timeout_s / 3)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.01))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 12):
        is_fault = step == FAULT_STEP and task.rank == 1
        if is_fault and "skip" in task.role:
            continue
        loss = compiled(torch.randn(8, 64, device=device)).square().mean()
        if is_fault and "kill" in task.role:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "reading" in task.role:  # as loops do that log each step: the host waits outside of the backward
            loss.item()
    synchronize()
    task.read("never", of=f"{task.role}.0")  # this rank has no more steps, and is there until rank 0 has given up


def g4(task):
    """One step of a three-layer model: "plain" fills the cache, then once for each tool; `judge_g4` reads logs."""
    if task.role == "plain":
        eager = "the step that is checked has eager gradients"
        tools = [f"{tool} finds nothing in one step" for tool in ("memcheck", "racecheck")]
        task.planned(eager, *tools)
        for claim in tools if task.rehearse or not shutil.which("compute-sanitizer") else ():
            task.record(claim, *([NEEDS_A_GPU] if task.rehearse else [NOT_RUN, "no compute-sanitizer here"]))
    device = open_simulated_group(task, 8)
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()))
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(64, 256, device=device)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    backend = "aot_eager" if task.rehearse else "inductor"
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend=backend, bucket_cap_mb=0.3))
    torch.compile(model, backend=backend)(x).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    synchronize()
    furthest = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
    if task.role == "plain":
        task.record(eager, furthest < 1e-3, f"largest difference {furthest:.1e}")
    print(dp_compile.report(model))


def g5(task):
    """A role is `MODE@RANKS`: a mode on a simulated network of so many ranks. `ours@nccl`: on the real one."""
    mode, _, ranks = task.role.partition("@")
    if ranks == "nccl":
        return _g5_on_the_real_network(task)
    ratios = (0.5, 2.0) if task.rehearse else (0.5, 1.0, 2.0)
    what = {ratio: f"{ranks} ranks, comm/compute {ratio:g}" for ratio in ratios}
    predicted = {ratio: f"{text}: exposed time as predicted, within 5 % of the step" for ratio, text in what.items()}
    steps = {ratio: f"{text}: step time without and with the network" for ratio, text in what.items()}
    if mode == "ours":
        task.planned(*predicted.values(), *steps.values())
    open_simulated_group(task, int(ranks))
    training = Training(task, mode)
    training.steps(5)
    costs, times = _timed_on_networks(task, training, ratios)
    task.publish(f"times.{task.role}", [[ratio, min(found)] for ratio, found in times.items() if found])
    if mode != "ours":
        return
    for ratio, cost in costs.items():
        set_cost(cost)
        is_kept = ranks == "8" and ratio == ratios[-2]
        _predicted_and_measured(task, training, cost, predicted[ratio], is_kept=is_kept)
    peers = [each for each in task.roles if each.endswith(f"@{ranks}")]
    found = {each: dict(task.read(f"times.{each}", of=f"{each}.0") or ()) for each in peers}
    for ratio, claim in steps.items() if all(found.values()) else ():
        texts = [f"{each.partition('@')[0]} {ms(seen[0.0])}, {ms(seen[ratio])}" for each, seen in found.items()]
        task.record(claim, MEASURED, "; ".join(texts))


def _timed_on_networks(task, training, ratios):
    """By ratio of communication to compute, of our measured backward: the cost of a collective, and seconds a step.

    0 is a network for free, on which the first turns are.
    """
    each, rounds = (3, 2) if task.rehearse else (5, 3)
    times = {0.0: []} | {ratio: [] for ratio in ratios}
    costs = {}
    mode, _, ranks = task.role.partition("@")

    def work(number):
        set_cost(FREE)
        times[0.0].append(training.steps(each))
        if number == 0 and mode == "ours":
            with dp_compile.measure(training.model):
                training.steps(each)
            task.publish(f"step.{ranks}", dp_compile.step_of(training.model).to_json())
        if number > 0 and not costs:
            text = task.read(f"step.{ranks}", of=f"ours@{ranks}.0")
            assert text is not None, "our own mode ended without a measured backward"
            step = Step.from_json(text)
            seconds, latency_s = step.measured.compute_s, 10e-6 + (int(ranks) - 1) * 1e-6
            costs.update({ratio: AllReduceCost(latency_s, ratio * seconds / step.plan.nbytes) for ratio in ratios})
        for ratio, cost in costs.items():
            set_cost(cost)
            training.steps(1)
            times[ratio].append(training.steps(each))

    in_turns(task, rounds, work)
    return costs, times


def _predicted_and_measured(task, training, cost, claim, *, is_kept):
    """Predicted from the step on a free network, measured from a trace of `torch.profiler` on this one."""
    step = replace(dp_compile.step_of(training.model), cost=cost)
    activities = [ProfilerActivity.CPU] if task.rehearse else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    training.steps(1)
    with profile(activities=activities) as recorded:
        step_s = training.steps(5)
    path = f"{task.out}/trace.json.gz" if is_kept else f"{task.scratch}/trace.{os.getpid()}.json.gz"
    recorded.export_chrome_trace(path)
    if is_kept:
        Path(task.out, "timeline.svg").write_text(timeline_picture(replace(step, measured=measured_step(path, step))))
    error, figure = _compared(step.exposed_s, measured_step(path, step).exposed_s, step_s)
    # A CPU that other jobs share proves nothing of times.
    task.record(claim, MEASURED if task.rehearse else error <= 0.05, figure)


def _compared(predicted_s, measured_s, step_s):
    error = abs(predicted_s - measured_s) / step_s
    return error, f"predicted {ms(predicted_s)}, measured {ms(measured_s)} of a step of {ms(step_s)}: {error:.1%}"


def _g5_on_the_real_network(task):
    """Predicted with what `calibrate()` measured, and measured, with one rank for each GPU."""
    claim = f"{task.ranks} GPUs: exposed time as predicted from calibrate(), within 5 % of the step"
    if task.rank == 0:
        task.planned(claim)
    open_group(task)
    cost, training = dp_compile.calibrate().cost, Training(task, "ours")
    training.steps(5)
    with dp_compile.measure(training.model):
        training.steps(5)
    step = dp_compile.step_of(training.model)
    step_s = training.steps(10)
    if task.rank == 0:
        error, figure = _compared(replace(step, cost=cost).exposed_s, step.measured.exposed_s, step_s)
        task.record(claim, error <= 0.05, f"{figure}; an all-reduce takes {cost}")


def _seconds_of(work):
    """On the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def g7(task):
    """Two processes: ours, and compiled DDP whose gradients are views of its buckets. "ours" compares."""
    steps, is_ours = 5 if task.rehearse else 50, task.role == "ours"
    growth = f"{task.role}: no growth of allocated memory over {steps} steps"
    peak = "peak of allocated memory: at most 1.02 of compiled DDP's with gradient_as_bucket_view"
    reserved = "peak of reserved memory over that of compiled DDP"
    claims = (peak, reserved, growth) if is_ours else (growth,)
    task.planned(*claims)
    open_group(task)

    def ddp(workload):
        backend = "aot_eager" if task.rehearse else "inductor"
        wrapped = lambda model: wrap(model, None, gradient_as_bucket_view=True)  # noqa: E731
        return Loop(workload, lambda model: torch.compile(wrapped(model), backend=backend))

    training = Training(task, task.role, None if is_ours else ddp)
    training.steps(5)
    if task.rehearse:
        training.steps(steps)
        for claim in claims:
            task.record(claim, NEEDS_A_GPU)
        return
    torch.cuda.reset_peak_memory_stats()
    training.losses()
    before = torch.cuda.memory_allocated()
    training.steps(steps)
    training.losses()
    grown = torch.cuda.memory_allocated() - before
    task.record(growth, grown <= 0, f"{grown:+,} bytes of {before:,}")
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    task.publish(f"peaks.{task.role}", peaks)
    if is_ours and (other := task.read("peaks.ddp_compiled", of="ddp_compiled.0")) is not None:
        figures = [f"{own / theirs:.3f} ({own:,} bytes)" for own, theirs in zip(peaks, other, strict=True)]
        task.record(peak, peaks[0] <= 1.02 * other[0], figures[0])
        task.record(reserved, MEASURED, figures[1])


def g8(task):
    """A small model, one rank. "graph": its whole step in one CUDA graph; "reduce-overhead": Inductor's own graphs."""
    replays, is_graph = 100, task.role == "graph"
    claim = 'mode="reduce-overhead", accumulation: parameters equal to the bit after 10 steps'
    if is_graph:
        claim = f"a step in one CUDA graph, replayed {replays} times: parameters equal to the bit"
    task.planned(claim)
    if task.rehearse:
        return task.record(claim, NEEDS_A_GPU)
    device = open_group(task)
    x = torch.randn(64, 256, device=device)

    def made(**options):
        torch.manual_seed(0)
        model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(256, 256), nn.GELU()))).to(device)
        # What waits for the host cannot be recorded.
        dp_compile.replicate(model, config=dp_compile.ReplicateConfig(check_reductions=False))
        compiled = torch.compile(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with dp_compile.no_sync(model):
                for _ in range(0 if is_graph else 2):
                    compiled(x).square().mean().backward()
            compiled(x).square().mean().backward()
            optimizer.step()

        return model, step

    plain, step = made()
    recorded, fast = made(**({} if is_graph else {"mode": "reduce-overhead"}))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if is_graph else nullcontext():
        for _ in range(3 if is_graph else 10):
            fast()
    torch.cuda.current_stream().wait_stream(stream)
    if is_graph:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # what is recorded does not run
            fast()
        fast = graph.replay
    for _ in range(3 if is_graph else 10):
        step()
    count = replays if is_graph else 1
    fast_s = _seconds_of(lambda: [fast() for _ in range(count)]) / count
    plain_s = _seconds_of(lambda: [step() for _ in range(count)]) / count
    both = zip(recorded.parameters(), plain.parameters(), strict=True)
    furthest = max(float((a - b).abs().max()) for a, b in both)
    task.record(claim, furthest == 0, f"largest difference {furthest:.1e}; {ms(fast_s)} a step, {ms(plain_s)} without")


def g9(task):
    """A role is `MODE cold` or `MODE warm`: a process that takes three steps, in a cache that is empty or full."""
    mode, when = task.role.split()
    claim = f"{when} start, {mode}: seconds until three steps are done"
    task.planned(claim)
    open_group(task)
    ends_s = [time.time() - task.begun_s]
    training = Training(task, mode)
    for _ in range(3):
        training.steps(1)
        ends_s.append(time.time() - task.begun_s)
    steps = ", ".join(f"{end - begin:.1f}" for begin, end in pairwise(ends_s))
    task.record(claim, MEASURED, f"{ends_s[-1]:.1f} s (imports and group {ends_s[0]:.1f}, steps {steps})")


def main(text):
    task = Task(**json.loads(text))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a runner that was killed cannot end its processes
    torch.set_num_threads(1 if task.rehearse else 4)
    # Flash attention's backward has its own order of sums unless this raises; some features have no such algorithm.
    torch.use_deterministic_algorithms(True, warn_only=task.experiment == "G2")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is a kernel for each allocation
    if planted := os.environ.get(PLANT):
        module, _, function = planted.partition(":")
        getattr(importlib.import_module(module), function)()
    status = 0
    try:
        {"G1": g1, "G2": g2, "G3": g3, "G4": g4, "G5": g5, "G7": g7, "G8": g8, "G9": g9}[task.experiment](task)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a communicator that another rank has left may wait for ever


if __name__ == "__main__":
    main(sys.argv[1])
