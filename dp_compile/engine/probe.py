"""Does this torch behave as it has to? Tried out on one tiny backward, before a model is judged by it.

Some of what decides which way a backward goes cannot be imported, only recognised: names of classes and of nodes in
graphs, texts of errors. If torch renamed one, a compiled forward would look as if it were not compiled, and the user's
model would be blamed. So before the first backward in a process that has compiled something, a backward of four numbers
is captured and looked at, in a thread of its own, where no mode of the user's is on. What was found to be right is
remembered on disk, for this torch and this text of the package: later processes look for a file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from dp_compile._torch import autograd, compiler
from dp_compile.engine import window
from dp_compile.errors import UnsupportedTorchError

logger = logging.getLogger("dp_compile.probe")

SUPPORTED: Final = ">=2.11,<2.16"
_PATIENCE_S: Final = 300.0
_ROOMS: Final = ("_torch", "engine", "fx", "passes")
LOWERING_NAMES: Final = (
    "BaseView.unwrap_view",
    "Buffer.get_name",
    "ComputedBuffer.get_mutation_names",
    "ComputedBuffer.get_operation_name",
    "ConcatKernel.can_realize_into_without_copy",
    "ConcatKernel.realize_into",
    "ConcatKernel.unwrap_storage",
    "ConcatKernel.inputs",
    "ExternKernel",
    "ExternKernelAlloc.get_inputs_that_alias_output",
    "ExternKernelAlloc.get_mutation_names",
    "ExternKernelAlloc.op_overload",
    "ExternKernelOut.python_kernel_name",
    "FixedLayout.offset",
    "FlexibleLayout",
    "IndexPutFallback",
    "InputBuffer",
    "IRNode.origins",
    "MultiOutput.get_inputs_that_alias_output",
    "NonOwningLayout",
    "Pointwise.create",
    "ReinterpretView.make_loader",
    "Scatter",
    "StorageBox.realize",
    "TensorBox",
    "GraphLowering.current_node",
    "GraphLowering.mutated_buffers",
    "GraphLowering.never_reuse_buffers",
    "GraphLowering.operations",
    "GraphLowering.register_buffer",
    "GraphLowering.register_operation",
)
"""What `passes/lowering.py` uses of Inductor; a test compares."""

_lock: Final = threading.Lock()
_is_known: bool = False
_MOST_FAILURES: Final = 3
_failures: int = 0
"""How many trials ended with an error that says nothing. Each costs half a second, and one precedes each backward."""


def check() -> None:
    """Called before a backward is looked at; after the first time it costs nothing.

    Does nothing as long as nobody has loaded a compiler: no compiled forward could be overlooked then.

    Raises:
        UnsupportedTorchError: torch has changed something that is relied on; the text names it.
    """
    global _is_known
    if _is_known or "torch._dynamo" not in sys.modules or compiler.forced_eager():
        return
    with _lock:
        if not _is_known and not (file := _memory()).exists():
            findings = _find_out()
            if findings is None:  # Something is in the way: another time.
                _is_known = _failures >= _MOST_FAILURES
                return
            if findings:
                raise UnsupportedTorchError(
                    f"torch {torch.__version__} has changed what dp_compile relies on: {'; '.join(findings)}. "
                    f"Install a torch in the supported range, pip install 'torch{SUPPORTED}', or pass "
                    "ddp_python_hook=False, which leaves the module to torch's DDP."
                )
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
        _is_known = True


def _memory() -> Path:
    from dp_compile._torch import trial

    text = hashlib.sha256(repr((torch.__version__, torch.version.git_version, sys.version_info[:2])).encode())
    for room in _ROOMS:
        for path in sorted(Path(__file__).parents[1].joinpath(room).glob("*.py")):
            text.update(path.read_bytes())
    return Path(trial.cache_directory(), "dp_compile", f"probed-{text.hexdigest()[:32]}")


def _find_out() -> list[str] | None:
    """What is not as it has to be; `None` if that cannot be said now."""
    from dp_compile._torch import trial

    trial.own_device_guard()  # the thread below ends
    attempt = _Trial()
    thread = threading.Thread(target=attempt.run, name="dp_compile probe", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return attempt.findings


class _Trial:
    """A backward of four numbers. `findings`: `None` until it is over."""

    def __init__(self) -> None:
        self.findings: list[str] | None = None
        self._found: list[str] = []

    def run(self) -> None:
        try:
            from dp_compile._torch import dynamo, trial

            with dynamo.compiling(), trial.uncounted():
                ran = self._capture()
        except UnsupportedTorchError as error:
            self.findings = [str(error)]
        except (AttributeError, ImportError, TypeError) as error:
            self.findings = [*self._found, f"{type(error).__name__}: {error}"]
        except Exception as error:
            global _failures
            _failures += 1
            logger.warning("it could not be tried out whether this torch behaves as it has to: %s", error)
        else:
            self.findings = self._found if ran else None

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self._found.append(what)

    def _capture(self) -> bool:
        from dp_compile._torch import dynamo, trial

        if dynamo.stance() != "default":  # it may forbid to compile; another backward will do
            return False
        weight, bias = (torch.ones(2, 2, device="cpu", dtype=torch.float32, requires_grad=True) for _ in range(2))
        heard: list[torch.Tensor] = []
        # A function: Dynamo of torch 2.11 cannot trace `heard.append` itself.
        weight.register_post_accumulate_grad_hook(lambda parameter: heard.append(parameter))
        forward = trial.compiled_ahead_of_time(lambda weight, bias: torch.tanh(weight @ weight + bias).sum())
        output, before = forward(weight, bias), (compiler.captures(), compiler.compiled_graphs())
        kind = type(output.grad_fn).__name__
        self._expect(
            autograd.is_aot_backward(output.grad_fn),
            f"a compiled backward, CompiledFunctionBackward, is a {kind}",
        )
        self._expect(autograd.has_aot_backwards(), "compiled forwards, CompiledFunction, are no subclass of Function")
        with window.Capturing(()) as backward:
            if backward is None:
                return False
            with dynamo.CaptureBackward(self._look_at_capture):
                torch.autograd.backward(output)
        after = compiler.captures(), compiler.compiled_graphs()
        self._expect(
            after == (before[0] + 1, before[1] + 1), "Dynamo's counters captures and unique_graphs stand still"
        )
        self._expect(len(heard) == 1 and weight.grad is not None, "a captured backward leaves out hooks or gradients")
        checkpointed = trial.checkpoint_backward()
        self._expect(
            checkpointed == "CheckpointFunctionBackward",
            f"a reentrant checkpoint, CheckpointFunctionBackward, is a {checkpointed}",
        )
        for name in trial.lowering_lacks(LOWERING_NAMES):
            self._found.append(f"Inductor has no {name}")
        return True

    def _look_at_capture(self, graph_module: fx.GraphModule) -> Any:
        from dp_compile.engine.graph import find_sites

        sites, names = find_sites(graph_module.graph), _names(graph_module.graph)
        self._expect(len(sites.accumulations) == 2, "accumulations of gradients, call_accumulate_grad, are not found")
        self._expect(len(sites.hook_calls) == 1, "calls of hooks, of the type post_acc_grad_hook, are not found")
        self._expect("inputs" in names, "the tensors of a captured graph, inputs, have another name")
        self._expect(
            "call_aot_bwd_prologue" in names, "what starts a compiled backward, call_aot_bwd_prologue, is not found"
        )
        try:
            with torch.enable_grad():
                torch.ones(1, device="cpu", requires_grad=True).sum().backward()
        except NotImplementedError as error:
            self._expect(
                compiler.is_capture_in_the_way(error),
                f"a backward inside a capture is told '{str(error).strip()[:80]}', not that it is 'within another "
                "compiled autograd call'",
            )
        return functools.partial(self._run_capture, graph_module)

    def _run_capture(self, graph_module: fx.GraphModule, *args: Any) -> Any:
        from dp_compile._torch import dynamo, trial

        self._expect(compiler.capture_is_running(), "a running capture, in_compiled_autograd_region, is not told")
        with window.Outside(), dynamo.measuring_no_guards():
            return trial.traced(graph_module.forward, self._look_at_dynamo_graph)(*args)

    def _look_at_dynamo_graph(self, graph_module: fx.GraphModule, _: Sequence[Any]) -> Any:
        names = [getattr(node.target, "__name__", "") for node in graph_module.graph.nodes]
        self._expect(names.count("AccumulateGrad") == 2, "Dynamo's op for accumulations, AccumulateGrad, is not found")
        self._expect("call_aot_bwd_prologue" in names, "Dynamo does not keep call_aot_bwd_prologue")
        return graph_module.forward


def _names(graph: fx.Graph) -> set[str]:
    return {node.name for node in graph.nodes} | {getattr(node.target, "__name__", "") for node in graph.nodes}
