"""What goes wrong in real processes, and what the ranks that are left say about it.

All is compiled first; then the group's time-out becomes short, and the last rank has the fault in step `FAULT_STEP`.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store as default_store

import dp_compile
from dp_compile._torch import distributed
from dp_compile.config import MONITOR_VARIABLE
from dp_compile.engine import monitor
from dp_compile.engine.monitor import explain
from dp_compile.replica.store_channel import Progress, RankStatus
from dp_compile.testing.ranks import Ranks

STEPS = 6
FAULT_STEP = 3
TIMEOUT_S = 4.0
HANGS_AFTER_S = 60.0


kept = []
"""Models that stay until their process ends: it then depends on nothing else what a rank says last."""


def model_of(group, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    config = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.001, **options)
    dp_compile.replicate(model, process_group=group, config=config)
    assert len(dp_compile.report(model).plan.buckets) == 3
    return model


def train(fault, group, timeout_s=TIMEOUT_S, **options):
    """Train; the last rank runs `fault` in step `FAULT_STEP`. Returns the error as text, with its class."""
    model = model_of(group, **options)
    kept.append(model)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        if number == 2:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_s))
        context = contextlib.nullcontext()
        if number == FAULT_STEP and dist.get_rank() == dist.get_world_size() - 1:
            context = fault(model) or context
        try:
            optimizer.zero_grad()
            with context:
                compiled(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def stall(model):
    """Come when rank 0 has given up."""
    wait_for("gave up")


def pause(model):
    """Come when rank 0 has logged often enough that it waits."""
    wait_for("warned")


def tell(what):
    """Each run of `train` is another topic."""
    default_store().set(f"test_faults/{len(kept)}/{what}", "")


def wait_for(what):
    default_store().wait([f"test_faults/{len(kept)}/{what}"], timedelta(seconds=HANGS_AFTER_S))


def kill(model):
    os.kill(os.getpid(), signal.SIGKILL)


def leave(model):
    sys.exit(0)


@pytest.fixture(scope="module")
def survivors():
    ranks = Ranks(2, "forkserver")
    yield ranks
    ranks.stop()


def in_new_group(fault):
    text = train(fault, dist.new_group(timeout=timedelta(seconds=HANGS_AFTER_S)))
    tell("gave up")
    dist.barrier()
    return text


def test_a_rank_stalls(survivors):
    waiting, late = survivors.run(in_new_group, stall, timeout_s=HANGS_AFTER_S)
    assert waiting.startswith("CommunicationError: rank 0, module of 0.weight: synchronised backward 4, 3 of 3")
    assert "rank 1 has not launched bucket 0 of 3 (2.bias, ...)" in waiting
    assert "outside any backward after 3 synchronised backwards, at test_faults.py:" in waiting
    assert " in wait_for" in waiting
    assert "torch says: " in waiting
    assert "timed out" in waiting.lower() or "timeout" in waiting.lower()
    assert late.startswith("CommunicationError: rank 1, module of 0.weight: synchronised backward 4, ")
    assert "; rank 0 gave up in backward 4: RuntimeError: " in late


def test_only_one_rank_uses_no_sync(survivors):
    """Both raise in the backward in which it matters: the parameters of one have changed by now."""
    synced, local = survivors.run(in_new_group, dp_compile.no_sync, timeout_s=HANGS_AFTER_S)
    assert local.startswith("ReductionError: parameters of the module of 0.weight were changed on this rank after")
    assert synced.startswith("ReductionError: parameters of the module of 0.weight were changed on another rank after")
    assert "is no_sync used on some ranks only?" in synced


@mock.patch.dict(os.environ, {MONITOR_VARIABLE: "1"})
@mock.patch.object(monitor, "_interval_s", mock.Mock(return_value=0.2))  # to ask who is late takes three times as long
def logged_while_waiting():
    """The error as text; seconds and text of each warning until the other rank came."""
    warnings = []

    def heard(record):
        if "synchronised backward 4" in (text := record.getMessage()) and isinstance(record.args, tuple):
            warnings.append((float(str(record.args[0])), text))
        if len(warnings) == 3:
            tell("warned")

    handler = logging.Handler()
    handler.emit = heard
    logger = logging.getLogger("dp_compile.monitor")
    logger.addHandler(handler)
    text = train(pause, dist.new_group(timeout=timedelta(seconds=HANGS_AFTER_S)), HANGS_AFTER_S)
    dist.barrier()
    logger.removeHandler(handler)
    return text, warnings


def test_the_monitor_names_who_is_waited_for(survivors):
    """After the time that the variable says, and each time that the wait has doubled."""
    (waiting, warnings), (late, nothing) = survivors.run(logged_while_waiting, timeout_s=HANGS_AFTER_S)
    assert waiting == late == "no error"
    assert len(warnings) >= 3
    assert all(waited_s >= 2**number for number, (waited_s, _) in enumerate(warnings))
    text = warnings[0][1]
    assert "s in a backward. rank 0, module of 0.weight: synchronised backward 4, 3 of 3 collectives" in text
    assert "rank 1 has not launched bucket 0 of 3 (2.bias, ...)" in text
    assert " in wait_for" in text
    assert not nothing


def over_tcp(port, fault):
    """As after `torchrun`'s rendezvous: a store over TCP, which rank 0 serves."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=HANGS_AFTER_S))
    group = dist.group.WORLD
    if rank == 0:
        default_store().set("pid of rank 0", str(os.getpid()))
    return train(fault, group)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def survive(world_size, fault, method="forkserver"):
    ranks = Ranks(world_size, method)
    try:
        return ranks.outcomes(over_tcp, free_port(), fault, timeout_s=HANGS_AFTER_S)
    finally:
        ranks.stop()


def test_a_rank_is_killed():
    *others, killed = survive(3, kill)
    assert killed == (False, "the process died")
    for rank, (ok, text) in enumerate(others):
        assert ok
        assert text.startswith(f"CommunicationError: rank {rank}, module of 0.weight: synchronised backward 4")
        assert "; rank 2 is not responding (killed, suspended, cut off, or blocked in native code)" in text
        assert text.index("rank 2") < text.index(f"rank {1 - rank}")  # the cause first


def test_a_rank_ends_its_program():
    (ok, text), _ = survive(2, leave, "spawn")  # a copy of a process ends without `atexit`
    assert ok
    assert "CommunicationError: rank 0" in text
    assert "; rank 1 exited after 3 synchronised backwards" in text


ENDS_WHILE_THE_STORE_IS_SLOW = """
import time
from unittest import mock
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from dp_compile.engine import monitor

def write_slowly(*_):
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        slow.set("status", "of this rank")

slow = dist.TCPStore("localhost", 0, is_master=True)
monitor.distributed.connect_again, monitor.write_status = lambda *_: slow, write_slowly
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
replica = mock.MagicMock()  # the monitor holds it weakly
monitor.MONITOR.watch(replica)
assert monitor.MONITOR._thread is not None
"""


def test_the_program_ends_while_the_store_is_slow():
    """The monitor's thread is in native code then. Python aborts a process if such a thread returns after finalization:
    a training that succeeded had exit code -6, and torchrun ended the other ranks."""
    program = [sys.executable, "-c", ENDS_WHILE_THE_STORE_IS_SLOW]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=HANGS_AFTER_S)
    assert ended.returncode == 0, ended.stderr


def kill_first(model):
    """The last rank kills rank 0, which serves the store."""
    os.kill(int(default_store().get("pid of rank 0")), signal.SIGKILL)


def test_the_rank_that_serves_the_store_is_killed():
    killed, (ok, text) = survive(2, kill_first)
    assert killed == (False, "the process died")
    assert ok
    assert text.startswith("CommunicationError: rank 1, module of 0.weight: synchronised backward 4")
    assert "the late rank is unknown: the key-value store does not answer (rank 0 or the launcher" in text


@pytest.mark.parametrize("check", [True, False])
def test_stepping_on_gradients_that_were_not_reduced(fake_group, check):
    model = model_of(None, check_reductions=check)
    compiled, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1)
    with dp_compile.no_sync(model):
        compiled(torch.randn(8, 16)).square().mean().backward()
    compiled(torch.randn(8, 16)).square().mean().backward()  # the end of an accumulation: nothing was changed between
    optimizer.step()
    with dp_compile.no_sync(model):
        compiled(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    with pytest.raises(dp_compile.ReductionError, match="no_sync") if check else contextlib.nullcontext():
        compiled(torch.randn(8, 16)).square().mean().backward()


OWN = Progress(done=7, launched=3)
SAME = RankStatus(5, {"t": OWN})
SLOW = "each of ranks 1, 2 waits in the same place; no rank is late: the connection between ranks is cut or slow"


def status(*progress, **rest):
    return RankStatus(5, {"t": Progress(*progress)}, **rest)


@pytest.mark.parametrize(
    ("other", "starts", "holds"),
    [
        (status(7, 1), "rank 1 has not launched bucket 1 of 3 (b, ...)", "in backward 8 with 1 collective launched"),
        (status(6, 3), "rank 1 has not launched bucket 0 of 3 (c, ...)", "in backward 7 with 3 collectives"),
        (status(7, -1, "E: x", left=True), "rank 1 left backward 8 with an error: E: x", "rank 2 waits"),
        (RankStatus(5, {}), "rank 1 does not have this module any more", "rank 2 waits in the same place"),
        (SAME, SLOW, SLOW),
        (status(9), "rank 1 is ahead, outside any backward after 9 sync", "rank 2 waits"),
    ],
)
def test_the_rank_that_is_late_comes_first(other, starts, holds):
    text = explain("t", OWN, ("c", "b", "a"), {1: other, 2: SAME})
    assert text.startswith(starts)
    assert holds in text


def test_many_ranks_are_late():
    many = explain("t", OWN, ("c", "b", "a"), dict.fromkeys(range(1, 2000)))
    assert many.startswith("each of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1991 more is not responding")


def test_errors_of_communication():
    for error in (RuntimeError("[/a/gloo/transport/tcp/pair.cc:553] x"), dist.DistBackendError("NCCL was aborted")):
        assert distributed.is_communication_error(error)
    for other in (RuntimeError("boom in the user's own backward"), ValueError("/gloo/")):
        assert not distributed.is_communication_error(other)
