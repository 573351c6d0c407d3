"""The launcher and its processes, as copies of one that has compiled the model alone: a tenth of the time."""

import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from unittest import mock

import script
import torch.distributed as dist

from dp_compile.config import MONITOR_VARIABLE
from dp_compile.elastic import __main__ as launcher

HANGS_AFTER_S = int(os.environ.get("DP_COMPILE_ELASTIC_HANGS_AFTER_S", "150"))
"""Then a process says where it is."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class Forked:
    """What the launcher uses of `subprocess.Popen`."""

    def __init__(self, function):
        self._code = None
        self._pid = os.fork()
        if self._pid == 0:
            _exit_with(function)

    @staticmethod
    def of_command(command, env):
        return Forked(partial(_run, command, env))

    def poll(self):
        return self.wait(os.WNOHANG)

    def wait(self, options=0):
        if self._code is None:
            pid, status = os.waitpid(self._pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self):
        os.kill(self._pid, signal.SIGKILL)


class Launcher:
    """Launches the script again and again, with one variant of its model."""

    def __init__(self, variant):
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("forkserver").Process(target=_serve, args=(variant, theirs))
        self._process.start()

    def launch(self, arguments, output, timeout_s):
        """The exit code of the launcher, 124 if it has not ended in time."""
        self._connection.send((_launch, (arguments, str(output), timeout_s), 1))
        (code,) = self._connection.recv()
        return code

    def replay(self, ranks, directory, generation, steps):
        """The digests of steps of so many ranks that lose none, from what a generation began with."""
        with tempfile.TemporaryDirectory() as scratch:
            self._connection.send((_replay, (ranks, str(directory), generation, steps, scratch), ranks))
            assert self._connection.recv() == [0] * ranks
            return json.loads(Path(scratch, "digests").read_text())

    def stop(self):
        self._process.kill()
        self._process.join()


def _serve(variant, connection):
    os.environ[MONITOR_VARIABLE] = "off"  # it is a thread, which a copy would lack
    script.prepare(variant)
    while True:
        function, arguments, copies = connection.recv()
        started = [Forked(partial(function, variant, number, *arguments)) for number in range(copies)]
        connection.send([each.wait() for each in started])


def _replay(variant, rank, ranks, directory, generation, steps, scratch):
    store = dist.FileStore(f"{scratch}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    job = script.job_of(variant)
    begin = job.load(directory, generation)
    digests = job.train(range(begin, begin + steps), rank)
    if rank == 0:
        Path(scratch, "digests").write_text(json.dumps(digests))
    return 0


def _launch(variant, number, arguments, output, timeout_s):
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(124))
    signal.alarm(timeout_s)
    with mock.patch.multiple(launcher, subprocess=mock.Mock(Popen=Forked.of_command), TCPStore=_served_elsewhere):
        return launcher.main(arguments)


def _served_elsewhere(address, _, *, timeout, **options):
    """A store served by a process that ends with this one: copies of a thread that holds a lock would wait for good."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        store = dist.TCPStore(address, 0, timeout=timeout, **options)
        os.write(writing, str(store.port).encode())
        while True:
            signal.pause()
    return dist.TCPStore(address, int(os.read(reading, 16)), is_master=False, timeout=timeout)


def _run(command, env):
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.dump_traceback_later(HANGS_AFTER_S, file=sys.__stderr__)
    os.environ.clear()
    os.environ.update(env)
    _, _, last, steps, *others = command
    script.main(last, int(steps), *others)
    return 0


def _exit_with(function):
    """Ends a copy without what would be ended of the first process."""
    code = 1
    try:
        code = function()
    except SystemExit as exits:
        code = int(str(exits.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
