"""A stand-in for NCCL on CPUs: its abilities and its semantics, over gloo.

What it has: AVG, reduce-scatter and all-gather into tensors, all-to-all, broadcast, barrier; one lane, on which
collectives run in the order of their launches; asynchronous work objects. What it refuses, as NCCL does: other devices,
AND, OR and XOR, int16 and complex numbers, memory with gaps. AVG over one rank raises, as NCCL may return anything
(FSDP2 avoids it). It has no point-to-point messages: the package sends none over NCCL.

Two things are stricter than NCCL, so that a fault shows each time and not once in a thousand:
    a result is in the memory once its work was waited for, not earlier; until then that holds NaN
    a wait raises if what the collective read, or its result, was written between launch and wait

Sums are added up in the order of the ranks, in the dtype of the tensor: every rank gets the same bits.
"""

import itertools
import threading
import weakref
from collections import Counter
from concurrent import futures
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dp_compile.bench.simulated_group import hidden_from_dynamo
from dp_compile.plan.backends import NCCL

ADDING = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
PICKING = {dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.PRODUCT: torch.mul}
REFUSED_DTYPES = (torch.int16, torch.complex64, torch.complex128)

launched = Counter()
"""How often each collective was launched in this process, with its op: `reduce_scatter avg`, `all_gather`."""


def _bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _flat(tensor):
    """All elements in the order of the memory, whichever memory format it has."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@hidden_from_dynamo
class Work(dist.Work):
    """A collective on its way. Holds what it reads and writes until it was waited for."""

    def __init__(self, lane, collective, reads, writes, timeout):
        super().__init__()
        self._lock, self._timeout, self._is_delivered = threading.RLock(), timeout, False
        self._future = None
        self._reads, self._writes = [_flat(each) for each in reads], [_flat(each) for each in writes]
        self._tensors = list(writes or reads)
        given = [each.clone() for each in self._reads]
        with torch.no_grad():
            for each in self._writes:
                kind = each.dtype
                each.fill_(torch.nan if kind.is_floating_point else kind == torch.bool or torch.iinfo(kind).max)
            written = {(each.data_ptr(), each.numel()) for each in self._writes}
            for flat, own in zip(self._reads, given, strict=True):
                # But for a part of an all-gather that is in its place already.
                if (flat.data_ptr(), flat.numel()) not in written:
                    flat.copy_(own)
        self._before = [each.clone() for each in (*self._reads, *self._writes)]
        self._ran = lane.submit(torch.no_grad()(collective), given)  # its result is in private memory

    def _deliver(self):
        with self._lock, torch.no_grad():
            results = self._ran.result()
            if self._is_delivered:
                return
            for now, then in zip((*self._reads, *self._writes), self._before, strict=True):
                if not torch.equal(_bytes(now), _bytes(then)):
                    raise RuntimeError("memory of a collective was written between its launch and its wait")
            for memory, result in zip(self._writes, results, strict=bool(self._writes)):
                memory.copy_(result)
            self._is_delivered, self._before, self._reads = True, [], []

    def wait(self, timeout=None):
        limit = (timeout or self._timeout).total_seconds()
        if not futures.wait([self._ran], limit).done:
            raise dist.DistBackendError(f"a collective has not ended within {limit:g} s")
        self._deliver()
        return True

    def is_completed(self):
        return self._ran.done() and self.wait()

    def get_future(self):
        """Its result is in the memory when it is completed: torch's reducer waits for it and never for the work."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                # A separate thread: a callback of the future may launch a collective on this lane and wait for it.
                finish = threading.Thread(target=self._complete, args=(self._future,), daemon=True)
                self._ran.add_done_callback(lambda _: finish.start())
            return self._future

    def _complete(self, future):
        try:
            self._deliver()
        except BaseException as error:  # raised by the future's wait
            future.set_exception(error)  # torch annotates it wrongly
        else:
            future.set_result(self._tensors)


@hidden_from_dynamo
class StandIn(dist.ProcessGroup):
    """The process group, registered as `name`; `timeout`: of each collective."""

    def __init__(self, name, store, rank, ranks, timeout):
        super().__init__(rank, ranks)  # annotated is only the one with a store
        # No stream on a CPU: the host waits, and its clock measures.
        self.dp_compile_backend = replace(NCCL, name=name, device="cpu", on_stream=False)
        self.options = SimpleNamespace(_timeout=timeout)
        self._name = self._description = ""
        self._inner = dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout)
        self._count = 0
        self._lane = futures.ThreadPoolExecutor(1, "stand-in for NCCL")

    # --- what torch asks of a group

    def getBackendName(self):
        return self.dp_compile_backend.name

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = name

    def getGroupDesc(self):
        return self._description

    def setGroupDesc(self, description):
        self._description = description

    def _get_backend(self, device):
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    def _get_sequence_number_for_group(self):
        return self._count

    def shutdown(self):
        self._lane.shutdown(wait=False)

    # --- the lane

    def _launch(self, what, reads, writes, collective):
        for each in (*reads, *writes):
            if each.device.type != "cpu":
                raise ValueError(f"No backend type associated with device type {each.device.type}")
            if each.dtype in REFUSED_DTYPES or each.layout is not torch.strided:
                raise TypeError(f"NCCL reduces and sends no {each.dtype} in {each.layout}")
            if not each.is_contiguous() and not each.is_contiguous(memory_format=torch.channels_last):
                raise ValueError("Tensors must be contiguous")
        launched[what] += 1
        self._count += 1
        return Work(self._lane, collective, reads, writes, self.options._timeout)

    def _gathered(self, own):
        """The same tensor of each rank."""
        sent = _bytes(own)
        parts = [torch.empty_like(sent) for _ in range(self.size())]
        self._inner.allgather([parts], [sent]).wait()
        return [each.view(own.dtype) for each in parts]

    def _op(self, opts):
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        found = next((each for each in (*ADDING, *PICKING) if op == each), None)
        if found is None:
            raise ValueError(f"Cannot use {getattr(op, 'op', op)} with NCCL")
        if found == dist.ReduceOp.AVG and self.size() == 1:
            raise ValueError("AVG over one rank: NCCL may return anything")
        return found

    def _reduced(self, own, op):
        parts = self._gathered(own)
        if op == dist.ReduceOp.AVG and own.is_floating_point():
            parts = [each * (1 / self.size()) for each in parts]  # before the sum, as NCCL
        first, *others = parts
        for each in others:
            if op in ADDING:
                first = first | each if own.dtype == torch.bool else first + each
            else:
                first = PICKING[op](first, each)
        return first // self.size() if op == dist.ReduceOp.AVG and not own.is_floating_point() else first

    # --- collectives

    def allreduce(self, tensors, opts=None):
        given, op = _listed(tensors), self._op(opts)
        return self._launch(f"all_reduce {_name(op)}", given, given, lambda g: [self._reduced(x, op) for x in g])

    def reduce_scatter_single(self, output, given, opts=None):
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        op = self._op(opts)
        for output, given in zip(outputs, inputs, strict=True):
            if output.dtype != given.dtype or output.numel() * self.size() != given.numel():
                raise ValueError("input tensor must be the same type and size of output times world_size")
        reduce = lambda g: [self._reduced(x, op).chunk(self.size())[self.rank()] for x in g]  # noqa: E731
        return self._launch(f"reduce_scatter {_name(op)}", inputs, outputs, reduce)

    def reduce_scatter(self, outputs, inputs, opts=None):
        return self.reduce_scatter_single(outputs[0], torch.cat([each.flatten() for each in inputs[0]]), opts)

    def all_gather_single(self, output, given, opts=None):
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        for output, given in zip(outputs, inputs, strict=True):
            if output.dtype != given.dtype or given.numel() * self.size() != output.numel():
                raise ValueError("output tensor size must be equal to world_size times input tensor size")
        return self._launch("all_gather", inputs, outputs, lambda g: [torch.cat(self._gathered(x)) for x in g])

    def allgather(self, outputs, inputs, opts=None):
        return self._launch("all_gather", inputs, outputs[0], lambda g: self._gathered(g[0]))

    def all_to_all_single(self, output, given, output_sizes, input_sizes, opts=None):
        row = given.numel() // max(1, len(given)) * given.element_size()
        sizes = [[each * row for each in rows] for rows in (output_sizes or [], input_sizes or [])]

        def collective(tensors):
            received = torch.empty_like(_bytes(output))
            self._inner.alltoall_base(received, _bytes(tensors[0]), *sizes).wait()
            return [received.view(output.dtype)]

        return self._launch("all_to_all", [given], [output], collective)

    def broadcast(self, tensors, opts=None):
        given, root = _listed(tensors), 0 if opts is None else opts.rootRank
        writes = given if root != self.rank() else []
        return self._launch("broadcast", given, writes, lambda g: [self._gathered(x)[root] for x in g])

    def barrier(self, opts=None):
        work = self.allreduce([torch.zeros(1)])
        work.wait()  # by the host, as NCCL's
        return work

    # Older names, by which C++ and torch 2.11 and 2.12 call.
    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _listed(tensors):
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _name(op):
    return str(getattr(op, "name", op)).rpartition(".")[2].lower()


_made = weakref.WeakKeyDictionary()
_count = itertools.count()
_stores = []
"""The store of the first default group, which outlives it."""


def use(name="stand-in", default=False):
    """Make this rank's default group again with the stand-in, called `name` (or `cpu:nccl2,cuda:gloo`), by every rank.

    `default`: give no name to `init_process_group`, but make this backend torch's default for the CPU.
    """
    before = dist.group.WORLD
    if _made.get(before) == (name, default):
        return
    if not _stores:
        _stores.append(dist.distributed_c10d._get_default_store())
    given = {"rank": before.rank(), "world_size": before.size(), "timeout": timedelta(seconds=60)}
    given["store"] = dist.PrefixStore(f"stand-in/{next(_count)}", _stores[0])
    dist.destroy_process_group()
    register(*(each.rpartition(":")[2] for each in name.split(",") if "gloo" not in each))
    backends = dist.Backend.default_device_backend_map
    usual, backends["cpu"] = backends["cpu"], name if default else backends["cpu"]
    try:
        dist.init_process_group(None if default else name, **given)
    finally:
        backends["cpu"] = usual
    assert isinstance(dist.group.WORLD, StandIn)
    _made[dist.group.WORLD] = name, default


def register(*names):
    """Let torch know it under these names, for tensors on the CPU."""
    for name in names:
        dist.Backend.register_backend(name, lambda *args, name=name: StandIn(name, *args), devices=["cpu"])
