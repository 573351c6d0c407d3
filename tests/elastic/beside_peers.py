"""Seconds from the death of one of three ranks to the next finished step, here, with torchelastic and with torchft.

    python tests/elastic/beside_peers.py [ours torchelastic torchft]

The same model, optimizer and batches, gloo, time-outs of two seconds. torchelastic restarts all ranks, which load what
rank 0 has saved after each step; torchft (`pip install torchft`) goes on, eagerly. One line for each way: the median of
three runs, and each of them. Here a process joins too: how long after its start, with how much of a processor, and
how long the others' step takes in which it does. `PEERS_RUNS=1`: one run of each.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

RANKS, KILLED, AT, STEPS = 3, 1, 8, 14
TIMEOUT: Final = timedelta(seconds=2)
RUNS: Final = int(os.environ.get("PEERS_RUNS", "3"))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(100 * step + rank))


def note(step: int) -> None:
    os.write(1, f"finished {step} {time.time()}\n".encode())


def age_s() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def die(step: int, name: str, *, again: bool = False) -> None:
    if step >= AT and name == str(KILLED) and not again:
        os.write(1, f"killed {step} {time.time()}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def ours(_: str) -> None:
    import dp_compile
    from dp_compile import elastic

    elastic.init_process_group("gloo")
    model = dp_compile.replicate(net())
    compiled, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())
    training = elastic.Training(model, optimizer, timeout_s=TIMEOUT.total_seconds())
    has_joined, joined_at = training.is_joining, sys.maxsize
    while training.steps < joined_at + STEPS - AT:
        before, ranks, is_joining, start_s = training.steps, training.world_size, training.is_joining, time.time()
        with training.step():
            loss = compiled(batch(before, training.rank)).square().mean()
            die(before, os.environ["RANK"], again=has_joined)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if training.steps > before and not is_joining:
            note(before)
        if training.world_size > ranks:
            joined_at, now_s = training.steps, time.time()
            text = f"joined {age_s()} {time.process_time()}\n" if is_joining else f"waited {now_s - start_s}\n"
            os.write(1, text.encode())


def torchelastic(directory: str) -> None:
    dist.init_process_group("gloo")  # its agent sees the death at once, and ranks start again at different times
    model, rank, file = nn.parallel.DistributedDataParallel(net()), dist.get_rank(), Path(directory, "saved")
    compiled, optimizer, first = torch.compile(model), torch.optim.AdamW(model.parameters()), 0
    if file.exists():
        first, of_model, of_optimizer = torch.load(file)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
    for step in range(first, STEPS):
        loss = compiled(batch(step, rank)).square().mean()
        die(step, str(rank), again=os.environ["TORCHELASTIC_RESTART_COUNT"] != "0")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save([step + 1, model.state_dict(), optimizer.state_dict()], file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
        note(step)


def torchft(_: str) -> None:
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.ddp import PureDistributedDataParallel  # type: ignore[import-not-found]

    # Of this replica alone: its `torchrun` would serve it.
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    name, inner = os.environ["REPLICA_GROUP_ID"], net()
    wrapped = torch.optim.AdamW(inner.parameters())

    def load(state: dict[str, Any]) -> None:
        inner.load_state_dict(state["model"])
        wrapped.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": inner.state_dict(), "optimizer": wrapped.state_dict()},
        replica_id=f"replica_{name}",
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=20),
        init_sync=False,
    )
    # Not its `DistributedDataParallel`, whose hook raises an AssertionError when a rank is lost (0.2.0, torch 2.13).
    model, optimizer = PureDistributedDataParallel(manager, inner), Optimizer(manager, wrapped)
    while manager.current_step() < 300:
        before = manager.current_step()
        optimizer.zero_grad()
        loss = model(batch(before, manager.participating_rank() or 0)).square().mean()
        if manager.num_participants() == RANKS:  # the third replica joins the first two later
            die(before, name)
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            note(before)
    manager.shutdown()
    del store


WAYS: Final = {each.__name__: each for each in (ours, torchelastic, torchft)}


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@contextmanager
def started(way: str, directory: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes whose output counts."""
    worker, environment = [__file__, "--worker", way, directory], {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/cache"
    of_each: list[dict[str, str]] = [{}]
    others = []
    if way == "ours":
        options = ["--ranks", str(RANKS), "--restarts", "1"]
        command = [sys.executable, "-m", "dp_compile.elastic", *options, *worker]
    elif way == "torchelastic":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1"]
        command = [sys.executable, *run, *worker]
        # Ranks that start again find addresses of dead ones in a store that is shared over restarts (torch 2.13).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        address = f"127.0.0.1:{free_port()}"
        found = shutil.which("torchft_lighthouse", path=f"{os.environ.get('PATH')}:{os.environ.get('TORCHFT_BIN', '')}")
        assert found, "torchft_lighthouse is not on the PATH"
        options = ["--min_replicas", "2", "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "1000"]
        others = [subprocess.Popen([found, "--bind", address, *options, "--join_timeout_ms", "2000"])]
        command = [sys.executable, *worker]
        shared = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
        of_each = [shared | {"REPLICA_GROUP_ID": str(rank), "MASTER_PORT": str(free_port())} for rank in range(RANKS)]
    running = [subprocess.Popen(command, env=environment | each, stdout=subprocess.PIPE, text=True) for each in of_each]
    try:
        yield running
    finally:
        for process in (*running, *others):
            process.kill()
            process.wait()


def measure(way: str) -> float:
    """Seconds from the death to the first end of the step of then, or of a later one."""
    with tempfile.TemporaryDirectory() as directory, started(way, directory) as running:
        output = "".join(process.communicate(timeout=300)[0] for process in running)
    ((killed, killed_s),) = re.findall(r"^killed (\d+) (\S+)$", output, re.MULTILINE)
    finished = re.findall(r"^finished (\d+) (\S+)$", output, re.MULTILINE)
    for what, found in (("joined", r"^joined (\S+) (\S+)$"), ("waited", r"^waited (\S+)()$")):
        for each in re.findall(found, output, re.MULTILINE):
            print(f"{way}: {what}", *(f"{float(number):.2f} s" for number in each if number), flush=True)
    return min(float(at) for step, at in finished if int(step) >= int(killed)) - float(killed_s)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        torch.set_num_threads(1)
        WAYS[sys.argv[2]](sys.argv[3])
        return
    for way in sys.argv[1:] or WAYS:
        runs = [measure(way) for _ in range(RUNS)]
        each = ", ".join(f"{run:.2f}" for run in sorted(runs))
        print(f"{way}: {statistics.median(runs):.2f} s ({each})", flush=True)


if __name__ == "__main__":
    main()
