"""A network that is played: this process is one of n ranks, and a collective takes as long as a formula says.

    values     as if all n ranks held the same: a sum is n times the tensor, an average is the tensor
    time       alpha + beta * bytes, one collective after the other, in the order in which they were issued
    CPU        a thread sleeps until each deadline, so waiting costs next to nothing
    GPU        a kernel spins on a stream of its own; who waits makes only the current stream wait

Importing this module registers the backend `fabric` with torch. What it costs stands in the environment (`VARIABLE`).
Nothing goes through the store, since nobody else would answer there.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from dp_compile.errors import ConfigError
from dp_compile.plan.backends import FABRIC
from dp_compile.plan.cost import AllReduceCost

VARIABLE: Final = "DP_COMPILE_FABRIC"
_CALIBRATION_CYCLES: Final = 50_000_000  # some 25 ms, so that starting and ending do not count
_CALIBRATIONS: Final = 5

Tensors = Sequence[torch.Tensor]
_T = TypeVar("_T")


def environment(cost: AllReduceCost) -> dict[str, str]:
    """What a process needs in its environment for groups of that cost."""
    return {VARIABLE: json.dumps(asdict(cost))}


class Network(Protocol):
    """What carries collectives, one after the other."""

    def send(self, seconds: float, tensors: Tensors, compute: Callable[[], None]) -> dist.Work:
        """Be busy for so long, and in that time `compute` the values. The work's future holds `tensors`."""


def _unseen_by_dynamo(kind: type[_T]) -> type[_T]:
    """Inside what is compiled, Dynamo would trace methods that C++ calls, and ends with an error in a group's."""
    for name, method in list(vars(kind).items()):
        if callable(method) and not name.startswith("_"):
            setattr(kind, name, torch.compiler.disable(method))
    return kind


@_unseen_by_dynamo
class Fabric(dist.ProcessGroup):
    """The process group. All ranks have what this one has.

    Args:
        rank: of this process.
        ranks: of the group, nearly all of which do not exist.
        cost: of an all-reduce. Broadcast and all-gather are one of its two phases and take half of that.
    """

    dp_compile_backend = FABRIC

    def __init__(self, rank: int, ranks: int, cost: AllReduceCost) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # annotated is only the one with a store
        self.cost = cost
        self._name = ""
        self._timer = TimerNetwork()
        self._streams: dict[torch.device, StreamNetwork] = {}
        weakref.finalize(self, self._timer.close)

    # torch's C++ asks for these by their names; without backends in it, a group does not keep them itself.

    def getBackendName(self) -> str:
        return FABRIC.name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        factor = _factor(dist.ReduceOp.SUM if opts is None else opts.reduceOp, self.size())
        given = _listed(tensors)

        def compute() -> None:
            for tensor in given if factor != 1 else ():
                tensor.mul_(factor)

        return self._send(self.cost.seconds(_nbytes(given)), given, compute)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        given = _listed(tensors)
        return self._send(self.cost.seconds(_nbytes(given)) / 2, given, _nothing)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copied at once: only what happens before training gathers."""
        with torch.no_grad():
            for each, own in zip(outputs, inputs, strict=True):
                for tensor in each:
                    tensor.copy_(own)
        gathered = [tensor for each in outputs for tensor in each]
        return self._send(self.cost.seconds(_nbytes(gathered)) / 2, gathered, _nothing)

    def barrier(self, opts: Any = None) -> dist.Work:
        """As NCCL's, an all-reduce that the process waits for."""
        for network in self._streams.values():
            network.drain()
        return self._timer.send(self.cost.seconds(0), [], _nothing)

    def _send(self, seconds: float, tensors: Tensors, compute: Callable[[], None]) -> dist.Work:
        device = tensors[0].device
        if device.type == "cpu":
            return self._timer.send(seconds, tensors, compute)
        if device not in self._streams:
            self._streams[device] = StreamNetwork(device)
        return self._streams[device].send(seconds, tensors, compute)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _nothing() -> None: ...


def _factor(op: Any, ranks: int) -> int:
    """By what a reduction over equal tensors multiplies them.

    Raises:
        ConfigError: an op for which that is no number.
    """
    kinds = dist.ReduceOp
    if op == kinds.SUM:
        return ranks
    if any(op == each for each in (kinds.AVG, kinds.MIN, kinds.MAX, kinds.BAND, kinds.BOR)):
        return 1
    raise ConfigError(f"the fabric reduces by SUM, AVG, MIN, MAX, BAND and BOR, got {getattr(op, 'op', op)}.")


# --- CPU --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sent:
    until_s: float
    tensors: Tensors
    compute: Callable[[], None]
    future: Future[list[torch.Tensor]]


class TimerNetwork:
    """Deadlines are absolute: a thread that wakes late is late once and does not delay what follows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._queue: SimpleQueue[_Sent | None] = SimpleQueue()
        threading.Thread(target=_deliver, args=(self._queue,), name="dp_compile fabric", daemon=True).start()

    def send(self, seconds: float, tensors: Tensors, compute: Callable[[], None]) -> dist.Work:
        future: Future[list[torch.Tensor]] = Future()
        with self._lock:
            self._free_s = max(time.monotonic(), self._free_s) + seconds
            self._queue.put(_Sent(self._free_s, tensors, compute, future))
        return _Timed(future)

    def close(self) -> None:
        self._queue.put(None)


def _deliver(queue: SimpleQueue[_Sent | None]) -> None:
    """Arithmetic is done here, beside the caller, as gloo does it."""
    with torch.no_grad():
        while (sent := queue.get()) is not None:
            try:
                sent.compute()
            except Exception as error:  # told to whoever waits
                sent.future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
                continue
            time.sleep(max(0.0, sent.until_s - time.monotonic()))
            sent.future.set_result(list(sent.tensors))
            del sent  # this thread may wait for long, and would hold the tensors


@_unseen_by_dynamo
class _Timed(dist.Work):
    def __init__(self, future: Future[list[torch.Tensor]]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Any:
        return self._future


# --- GPU --------------------------------------------------------------------------------------------------------


class StreamNetwork:
    """A stream is the wire: it waits for what the current stream holds now, and spins. Arithmetic runs beside it.

    The wire has priority, as a spinning kernel needs room for one thread and must not wait for a large one to end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wire = torch.cuda.Stream(device, priority=-1)
        self._arithmetic = torch.cuda.Stream(device)
        self._cycles_per_s = _cycles_per_s(self._wire)

    def send(self, seconds: float, tensors: Tensors, compute: Callable[[], None]) -> dist.Work:
        ready = torch.cuda.current_stream(self._device).record_event()
        self._wire.wait_event(ready)
        with torch.cuda.stream(self._wire):
            torch.cuda._sleep(round(seconds * self._cycles_per_s))
        self._arithmetic.wait_event(ready)
        with torch.cuda.stream(self._arithmetic), torch.no_grad():
            compute()
        for tensor in tensors:  # else its memory may be given away before the arithmetic ran
            tensor.record_stream(self._arithmetic)
        self._wire.wait_stream(self._arithmetic)
        return _Enqueued(self._wire, list(tensors))

    def drain(self) -> None:
        """Let the process wait until nothing is on the wire."""
        self._wire.synchronize()


@_unseen_by_dynamo
class _Enqueued(dist.Work):
    """Done when the wire is, as far as the stream is concerned that waits for it. The process goes on."""

    def __init__(self, wire: torch.cuda.Stream, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._wire, self._tensors = wire, tensors
        self._end = wire.record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._wire.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return bool(self._end.query())

    def get_future(self) -> Any:
        """For torch's reducer. Its `wait` lets the current stream wait for what is on the wire when it is made."""
        future: Future[list[torch.Tensor]] = Future(devices=[self._wire.device])
        with torch.cuda.stream(self._wire):
            future.set_result(self._tensors)
        return future


def _cycles_per_s(stream: torch.cuda.Stream) -> float:
    """How fast the clock runs that `torch.cuda._sleep` counts. The first turns only wake the GPU up."""
    found: list[float] = []
    for _ in range(2 * _CALIBRATIONS):
        with torch.cuda.stream(stream):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)
            end.record()
        end.synchronize()
        found.append(_CALIBRATION_CYCLES / (begin.elapsed_time(end) * 1e-3))
    return statistics.median(found[_CALIBRATIONS:])


# --- torch's door -----------------------------------------------------------------------------------------------


def _create(store: Any, rank: int, ranks: int, timeout: timedelta) -> Fabric:
    text = os.environ.get(VARIABLE)
    if text is None:
        raise ConfigError(
            f"backend 'fabric' needs the environment variable {VARIABLE}: what `fabric.environment(cost)` returns."
        )
    values: Mapping[str, Any] = json.loads(text)
    return Fabric(rank, ranks, AllReduceCost.from_dict(values))


dist.Backend.register_backend(FABRIC.name, _create, devices=["cpu", "cuda"])
