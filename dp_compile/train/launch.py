"""Start one process per rank, or take the place that torchrun gives; end all of them when one fails."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from dp_compile.errors import ConfigError, DPCompileError
from dp_compile.train.data import load_corpus
from dp_compile.train.loop import Place, train
from dp_compile.train.options import TrainOptions

CHECK_FAILED: Final = 4
"""Exit status of a rank that finished, with parameters too far from torch's."""

_GRACE_S: Final = 5.0
_TORCHRUN_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def default_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """torchrun's number of ranks; without it one per GPU where there are two or more, else two."""
    if under_torchrun(environ):
        return int(environ["WORLD_SIZE"])
    return max(2, torch.cuda.device_count())


def under_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody else started this process as one rank of several."""
    return all(name in environ for name in _TORCHRUN_VARIABLES)


def launch(options: TrainOptions) -> int:
    """Run a training. Returns the exit status: 0, or 1 if a rank failed or the check did not pass.

    Raises:
        ConfigError: the options do not fit the data, torchrun's ranks or the environment.
        DPCompileError: under torchrun, what went wrong on this rank.
    """
    # Everything that can be wrong with the options, before there are processes that would all say so.
    options.replicate_config().uses_python_hook()
    load_corpus(options.context)
    return _join_torchrun(options) if under_torchrun() else _spawn(options)


def _join_torchrun(options: TrainOptions) -> int:
    rank, world_size, local_rank = (int(os.environ[name]) for name in _TORCHRUN_VARIABLES)
    if options.ranks != world_size:
        raise ConfigError(f"--ranks is {options.ranks}, but torchrun started {world_size}. Leave --ranks out.")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    try:
        return 0 if _run_rank(options, rank, local_rank, local_world_size, meet_at="env://") else 1
    except DPCompileError as error:
        raise type(error)(f"rank {rank}: {error}") from None


def _spawn(options: TrainOptions) -> int:
    with tempfile.TemporaryDirectory(prefix="dp_compile_") as directory:
        # A started process inherits an ignored Ctrl-C, so it dies by our hand, not by a traceback amid its imports.
        with _ignoring_interrupts():
            context = spawn(_rank_main, (options, directory), nprocs=options.ranks, join=False)
        try:
            failed = _first_failure(context.processes)
        finally:
            _stop(context.processes)
        if failed is not None:
            print(f"dp-compile: error: {_describe(failed, context.processes[failed], directory)}", file=sys.stderr)
            return 1
        return 1 if any(process.exitcode == CHECK_FAILED for process in context.processes) else 0


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _first_failure(processes: Sequence[Any]) -> int | None:
    """Wait until all have finished or one has failed; its rank."""
    running = set(range(len(processes)))
    while running:
        wait([processes[rank].sentinel for rank in running])
        ended = {rank for rank in running if processes[rank].exitcode is not None}
        failed = [rank for rank in ended if processes[rank].exitcode not in (0, CHECK_FAILED)]
        if any(processes[rank].exitcode == -signal.SIGINT for rank in failed):
            raise KeyboardInterrupt  # Ctrl-C goes to all; this process may have seen a rank's end before its own signal
        if failed:
            # Of several, the one that was killed by a signal is the cause; the others lost their connection.
            return min(failed, key=lambda rank: processes[rank].exitcode)
        running -= ended
    return None


def _stop(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _describe(rank: int, process: Any, directory: str) -> str:
    note = Path(directory, f"rank{rank}.error")
    if note.exists():
        return f"rank {rank} failed: {note.read_text().rstrip()}"
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return f"rank {rank} {how}; the other ranks were stopped."


def _rank_main(rank: int, options: TrainOptions, directory: str) -> None:
    # At once and without a traceback, also when torch sends it because the parent is gone.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit(1)
    try:
        passed = _run_rank(options, rank, rank, options.ranks, meet_at=f"file://{directory}/store")
    except Exception as error:
        text = str(error) if isinstance(error, DPCompileError) else traceback.format_exc()
        Path(directory, f"rank{rank}.error").write_text(text)
        sys.exit(1)
    sys.exit(0 if passed else CHECK_FAILED)


def _run_rank(options: TrainOptions, rank: int, local_rank: int, local_world_size: int, *, meet_at: str) -> bool:
    """Join the group at the URL `meet_at`, train, leave it. Returns whether the check passed."""

    uses_gpu = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if uses_gpu else torch.device("cpu")
    if uses_gpu:
        torch.cuda.set_device(device)
    # Ranks share the machine: more threads would only fight over its cores.
    torch.set_num_threads(1)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=meet_at,
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=options.timeout_s),
        device_id=device if uses_gpu else None,
    )
    passed = train(options, Place(rank=rank, world_size=options.ranks, device=device, tp=options.tp))
    dist.destroy_process_group()
    return passed
