"""The backward's code for an H100 among eight NCCL-like ranks, generated and read without a GPU: docs/gpu.md."""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate
import pytest
import torch
from generated_code import KERNEL, LAUNCH, WAIT, Span, copies, kernel_arguments, read_code, triton_sources

from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.plan.reduction import Stage, launch_order

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
# Rows in half precision, and with a wire of another dtype what was computed in the parameters': no product rounds.
COPYING = ("embedding-bf16", "wire-bf16")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "bool": 1}


def missing():
    """What this environment lacks, and what to do; nothing if all is there."""
    if torch.version.cuda is not None:
        return "CUDA is played for torch's CPU build only, and this torch was built for CUDA: .ci/gpu tests it itself"
    if shutil.which("g++") is None:
        return "g++ is not installed, which compiles the played CUDA"
    if importlib.util.find_spec("triton") is None and "DP_COMPILE_TRITON" not in os.environ:
        how = "pip install -c constraints.txt -e '.[gpu-code]', or into a folder that DP_COMPILE_TRITON names"
        return f"triton is not installed: {how}, as .ci/setup does"
    return ""


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    """Made by the first who asks, of all of pytest's workers, in a process that sees Triton."""
    if missing():
        pytest.skip(missing())
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    target, part = shared / "generated.json", shared / "generated.part"
    folders = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("DP_COMPILE_TRITON", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "generate.py"), str(part), *generate.CASES]
    with (shared / "generated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            part.rename(target)
    results = json.loads(target.read_text())
    failed = {name: result["failed"] for name, result in results.items() if "failed" in result}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    return results


@pytest.fixture(params=list(generate.CASES))
def result(request, generated):
    """The test is for each case."""
    return generated[request.param] | {"name": request.param}


def launched(code):
    return [call for call in code.calls if call.kind == LAUNCH]


def stages(result, code):
    """The launches, each with its bucket and the number of its stage, in the order in which they have to be."""
    order = launch_order([[Stage(op, op, link=op) for op in bucket["stages"]] for bucket in result["buckets"]])
    for (bucket, stage), launch in zip(order, launched(code), strict=True):
        yield result["buckets"][bucket], stage, launch


def members(result, code):
    """Of each gradient that lies in a bucket's flat memory: its label and where."""
    for bucket, launch in ((bucket, launch) for bucket, stage, launch in stages(result, code) if stage == 0):
        for label, (offset, numel) in bucket["members"].items():
            flat = next(span for span in launch.reads if span.end - span.start >= offset + numel)
            yield label, Span(flat.storage, flat.start + offset, flat.start + offset + numel)


def test_every_gradient_is_written_where_it_is_reduced(result):
    """All of its place in the bucket, before that is launched."""
    for code in map(read_code, result["codes"]):
        for label, member in members(result, code):
            written = 0
            for call in code.calls:
                if call.kind == LAUNCH and any(member.overlaps(span) for span in call.reads):
                    break
                spans = [span for span in call.writes if span.overlaps(member)]
                written += sum(span.numel for span in spans if span.numel <= member.numel)
            assert written >= member.numel, label


def test_no_copy_but_those_that_the_report_names(result):
    named = set(result["copied"]) - {UNUSED_FLAGS}
    for text in result["codes"][:1]:  # a later one may be another graph, and the record is of the last
        code = read_code(text)
        assert set(copies(members(result, code), code)) <= named
    if result["name"] == "padded":  # 65 and 63 are no multiples of 4: a gradient is cut out of a larger product
        assert set(copies(members(result, code), code)) == named == {"0.weight", "2.weight"}
    elif result["name"] not in COPYING:
        assert not named


def test_launches_and_waits_stand_where_the_passes_put_them(result):
    """Launches in the order of the plan, and no result is waited for before everything is launched."""
    assert ["".join(labels(read_code(text))) for text in result["codes"]] == result["graph_orders"]
    for text in result["codes"]:
        code = read_code(text)
        launches, order, last = launched(code), labels(code), []
        for number, (bucket, stage, launch) in enumerate(stages(result, code)):
            assert launch.name.startswith(bucket["stages"][stage])
            assert [span.numel for span in launch.reads] == [bucket["numels"][stage]]
            last += [str(number)] if bucket["stages"][stage + 1 :] == [] else []
        waits = [span for call in code.calls if call.kind == WAIT for span in call.reads]
        assert sorted(waits, key=str) == sorted((span for launch in launches for span in launch.writes), key=str)
        assert "A" not in order[min(map(order.index, last)) :]


def labels(code):
    """Launches `A`, and waits as the number of the launch that they wait for."""
    found = []
    launches = []
    for call in code.calls:
        if call.kind == LAUNCH:
            launches.append(call)
            found.append("A")
        elif call.kind == WAIT:
            found.append(next(str(n) for n in reversed(range(len(launches))) if call.reads[0] in launches[n].writes))
    return found


def test_nobody_touches_what_the_network_has(result):
    for text in [*result["codes"], *result["forwards"]]:
        assert not read_code(text).faults


def test_what_is_aligned_to_16_bytes_starts_there(result):
    """Vector loads and stores rely on it; a gradient may start anywhere in its bucket."""
    checked = 0
    for text in result["codes"]:
        sources, code = triton_sources(text), read_code(text)
        dtypes = dict(re.findall(r"(\w+) = (?:empty_strided_cuda|.*bucket_memory\.default)\(.*torch\.(\w+)[,)]", text))
        for launch in launched(code):  # on two levels, into memory of their own
            dtypes.update((span.storage, dtypes[launch.reads[0].storage]) for span in launch.writes)
        for call in (call for call in code.calls if call.kind == KERNEL):
            source = sources[call.name.removesuffix(".run")]
            aligned = {int(each) for each in re.findall(r"\((\d+),\): \[\['tt\.divisibility', 16\]\]", source)}
            pointers = [name for name in kernel_arguments(source) if "ptr" in name]
            for position, (_, span) in enumerate(zip(pointers, call.reads, strict=True)):
                if span.storage in dtypes and position in aligned:
                    checked += 1
                    assert span.start * ITEMSIZE[dtypes[span.storage]] % 16 == 0, (call, span)
    assert checked
