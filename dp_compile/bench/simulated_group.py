"""A simulated process group: this process is one of n ranks, and a formula gives the duration of collectives.

    values     as if all n ranks held equal tensors: a sum is n times the tensor, an average is the tensor
    time       alpha + beta * bytes, one collective at a time, in launch order
    CPU        a thread sleeps until the end of a collective, so waiting costs almost no CPU time
    GPU        a kernel spins on a separate stream; `wait` blocks only the current stream

Importing this module registers the backend `fabric` with torch. The environment variable named by `VARIABLE` sets
alpha and beta. The store of the process group is not used, because no other rank would answer there.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from dp_compile.errors import require
from dp_compile.plan.backends import FABRIC
from dp_compile.plan.cost import AllReduceCost

VARIABLE: Final = "DP_COMPILE_FABRIC"
_CALIBRATION_CYCLES: Final = 50_000_000  # about 25 ms: start and end of the kernel are negligible

Tensors = Sequence[torch.Tensor]
_T = TypeVar("_T")


def environment(cost: AllReduceCost) -> dict[str, str]:
    """Return environment variables that give the simulated groups of a process this cost."""
    return {VARIABLE: json.dumps(asdict(cost))}


def hidden_from_dynamo(kind: type[_T]) -> type[_T]:
    """Disable Dynamo in all methods of a class: it would trace methods that C++ calls from compiled code, and fail."""
    for name, method in list(vars(kind).items()):
        if callable(method) and not name.startswith("__"):
            setattr(kind, name, torch.compiler.disable(method))
    return kind


@hidden_from_dynamo
class SimulatedGroup(dist.ProcessGroup):
    """A group with one real rank. `cost`: of an all-reduce; broadcast and all-gather take half its time."""

    dp_compile_backend = FABRIC

    def __init__(self, rank: int, ranks: int, cost: AllReduceCost) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # torch annotates only the overload with a store
        self.cost = cost
        self._name = ""
        self._timer = TimerNetwork()
        self._streams: dict[torch.device, StreamNetwork] = {}

    # torch's C++ calls these by name. A group without C++ backends must implement them.

    def getBackendName(self) -> str:
        return FABRIC.name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        op, kinds = dist.ReduceOp.SUM if opts is None else opts.reduceOp, dist.ReduceOp
        known = any(op == each for each in (kinds.SUM, kinds.AVG, kinds.MIN, kinds.MAX, kinds.BAND, kinds.BOR))
        require(known, "a reduction of the simulated group", "SUM, AVG, MIN, MAX, BAND or BOR", getattr(op, "op", op))
        return self._send(1.0, tensors, self.size() if op == kinds.SUM else 1)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._send(0.5, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy at launch, not when the simulated time is over: all-gathers run only before the training."""
        with torch.no_grad():
            for each, own in zip(outputs, inputs, strict=True):
                for tensor in each:
                    tensor.copy_(own)
        return self._send(0.5, [tensor for each in outputs for tensor in each])

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        """Called by torch 2.15 to gather objects; earlier versions of torch call `allgather`."""
        return self.allgather([list(output.view(self.size(), *given.shape))], [given])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for the network's streams and launch an all-reduce of zero bytes. Blocks the host, as in NCCL."""
        for network in self._streams.values():
            network.wire.synchronize()
        return self._timer.send(self.cost.seconds(0), [], 1)

    def _send(self, share: float, tensors: torch.Tensor | Tensors, factor: int = 1) -> dist.Work:
        """Launch a collective that takes `share` of an all-reduce's time and multiplies `tensors` by `factor`."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        device, seconds = tensors[0].device, share * self.cost.seconds(sum(tensor.nbytes for tensor in tensors))
        if device.type == "cpu":
            return self._timer.send(seconds, tensors, factor)
        if device not in self._streams:
            self._streams[device] = StreamNetwork(device)
        return self._streams[device].send(seconds, tensors, factor)


class TimerNetwork:
    """Simulates the network on a CPU. The end of a collective is fixed at launch, even if a thread wakes late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0

    def send(self, seconds: float, tensors: Tensors, factor: int) -> dist.Work:
        future: Future[list[torch.Tensor]] = Future()
        with self._lock:
            self._free_s = until_s = max(time.monotonic(), self._free_s) + seconds

        def deliver() -> None:
            """Multiply tensors in this thread, concurrently with the caller, as gloo does; sleep until the end."""
            try:
                _multiply(tensors, factor)
            except Exception as error:  # `wait` raises it
                future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
                return
            time.sleep(max(0.0, until_s - time.monotonic()))
            future.set_result(list(tensors))

        threading.Thread(target=deliver, daemon=True).start()
        return _Timed(future)


@torch.no_grad()
def _multiply(tensors: Tensors, factor: int) -> None:
    for tensor in tensors if factor != 1 else ():
        tensor.mul_(factor)


@hidden_from_dynamo
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


class StreamNetwork:
    """Simulates the network on a GPU: one stream waits for the current stream, then spins; another does arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self._device = device  # the network's stream has high priority, so large kernels do not delay its kernel
        self.wire, self._arithmetic = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        rates: list[float] = []  # cycles per second of the clock of `torch.cuda._sleep`
        for _ in range(10):
            with torch.cuda.stream(self.wire):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                torch.cuda._sleep(_CALIBRATION_CYCLES)
                end.record()
            end.synchronize()
            rates.append(_CALIBRATION_CYCLES / (begin.elapsed_time(end) * 1e-3))
        self._cycles_per_s = statistics.median(rates[5:])  # the GPU's clock rises during the first half

    def send(self, seconds: float, tensors: Tensors, factor: int) -> dist.Work:
        ready = torch.cuda.current_stream(self._device).record_event()
        self.wire.wait_event(ready)
        with torch.cuda.stream(self.wire):
            torch.cuda._sleep(round(seconds * self._cycles_per_s))
        self._arithmetic.wait_event(ready)
        with torch.cuda.stream(self._arithmetic):
            _multiply(tensors, factor)
        for tensor in tensors:  # otherwise the allocator may reuse their memory before the arithmetic has run
            tensor.record_stream(self._arithmetic)
        self.wire.wait_stream(self._arithmetic)
        return _Enqueued(self.wire, list(tensors))


@hidden_from_dynamo
class _Enqueued(dist.Work):
    """A simulated collective on a GPU. `wait` blocks the current stream, not the host, until the collective ends."""

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
        """Return a future for torch's reducer, to make a stream wait for all of the network's work so far."""
        future: Future[list[torch.Tensor]] = Future(devices=[self._wire.device])
        with torch.cuda.stream(self._wire):
            future.set_result(self._tensors)
        return future


def _create(store: Any, rank: int, ranks: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(rank, ranks, AllReduceCost.from_dict(json.loads(os.environ[VARIABLE])))


dist.Backend.register_backend(FABRIC.name, _create, devices=["cpu", "cuda"])
