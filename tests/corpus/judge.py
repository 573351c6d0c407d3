"""Run a case under a subject on all ranks and say what came: right, refused, wrong, crash, hang."""

import contextlib
import gc
import logging.handlers
import os
import re
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils import _pytree as pytree

from corpus.cases import CASES
from corpus.sides import SUBJECTS, Clock, NotOffered, Wrong, full, seed, side_of
from dp_compile.errors import DPCompileError
from dp_compile.testing.ranks import RankError

RIGHT, REFUSED, WRONG, CRASH, HANG, NOT_OFFERED = "right", "refused", "wrong", "crash", "hang", "not offered"
REFUSED_WITHIN_S = 10.0
"""After that long, an error is no answer: the user has begun to look for the rank that hangs."""
ATOL = 1e-6
TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: of one rank, or of all."""

    kind: str
    text: str = ""
    seconds: float = 0.0
    """From the start of the step to the error; of all ranks: how long the case took."""
    collectives: int = 0
    """How many this rank's group has launched by then."""
    processor_s: float = 0.0
    """Of this rank; of all ranks together."""


def run(ranks, case, subject, within_s=REFUSED_WITHIN_S):
    """Run it on all ranks. Those that something else than right or wrong came of are stopped."""
    start, by_rank = time.monotonic(), list[Outcome]()
    try:
        answers = ranks.outcomes(judge, case.name, subject.name, timeout_s=case.limit_s)
    except RankError as error:
        found = Outcome(HANG, "; ".join(re.findall(r"^rank \d+: .*$", str(error), re.MULTILINE)))
        ranks.stop()
    else:
        by_rank = [value if ok else Outcome(CRASH, value) for ok, value in answers]
        found = merge(case, subject, by_rank, within_s)
        if not _may_go_on(found, subject, by_rank):
            ranks.stop()
    return Outcome(
        found.kind, found.text, time.monotonic() - start, processor_s=sum(each.processor_s for each in by_rank)
    )


def _may_go_on(found, subject, by_rank):
    """Whether the ranks can run another case: in step with each other, and no compiler was left in the middle."""
    clean = (RIGHT, WRONG, NOT_OFFERED, REFUSED) if subject.ours else (RIGHT, WRONG, NOT_OFFERED)
    in_step = len({each.collectives for each in by_rank}) == 1
    return in_step and (found.kind in clean or (found.kind == CRASH and not subject.compiles))


def merge(case, subject, by_rank, within_s=REFUSED_WITHIN_S):
    """What one outcome for each rank adds up to. What the rank with the fault says of itself does not count."""
    seen = {rank: each for rank, each in enumerate(by_rank) if rank not in case.faulty}
    died = [rank for rank, each in seen.items() if each.text == "the process died"]
    if died:
        return Outcome(CRASH, f"the process of rank {died[0]} is aborted")
    for kind in (NOT_OFFERED, HANG, CRASH):
        of_kind = [(rank, each) for rank, each in seen.items() if each.kind == kind]
        if of_kind:
            others = [f"rank {rank}: {each.text}" for rank, each in seen.items() if each.kind in (CRASH, REFUSED)]
            text = of_kind[0][1].text
            return Outcome(kind, f"{text}; {others[0]}" if kind == HANG and others else text)
    refused = [each for each in seen.values() if each.kind == REFUSED]
    if refused and len(refused) < len(seen):
        return Outcome(CRASH, f"not on every rank: {refused[0].text}")
    if refused:
        late = max(each.seconds for each in refused)
        kind = REFUSED if late <= within_s or not subject.ours else HANG
        return Outcome(kind, refused[0].text if kind == REFUSED else f"after {late:.0f} s: {refused[0].text}")
    wrong = [each for each in seen.values() if each.kind == WRONG]
    if not wrong and case.has_to_be_refused:
        return Outcome(WRONG, case.if_not_refused)
    return wrong[0] if wrong else Outcome(RIGHT)


def judge(case_name, subject_name):
    """What this rank sees of a case."""
    start = time.process_time()
    found = _judged(case_name, subject_name)
    collectives = int(dist.group.WORLD._get_sequence_number_for_group())
    return replace(found, collectives=collectives, processor_s=time.process_time() - start)


def _judged(case_name, subject_name):
    case, subject, clock = CASES[case_name], SUBJECTS[subject_name], Clock()
    names = ()
    with _prepared(case, subject) as warned:
        try:
            # The truth: one process, the joint batch, nothing compiled.
            seed(0)
            model = case.build()
            if case.truth_dtype != torch.float32:  # `to` would make what is complex real
                model.to(case.truth_dtype)
            truth = side_of(None, model, Clock(), {}, case.backend, case.truth_dtype)
            expected = case.train(truth)
            names = tuple(name for name, _ in truth.model.named_parameters())
            seed(0)
            clock.start()
            side = side_of(subject, case.build(), clock, dict(case.options), case.backend, torch.float32)
            returned = case.train(side)
            if case.compares and not case.has_to_be_refused:
                compare(side, truth, case)
            _same(returned, expected, case)
        except NotOffered as error:
            return Outcome(NOT_OFFERED, str(error))
        except Wrong as error:
            texts = [each for each in warned() if case.a_warning_counts and any(name in each for name in names)]
            return Outcome(REFUSED, f"a warning: {texts[0]}") if texts else Outcome(WRONG, str(error))
        except Exception as error:
            return _raised(error, case, subject, names, time.monotonic() - clock.began)
        finally:
            side = truth = model = returned = expected = None
    return Outcome(RIGHT)


@contextlib.contextmanager
def _prepared(case, subject):
    """Compilers as new, a short time-out for collectives, no output. Gives what was warned of so far."""
    torch._dynamo.reset()
    logs = logging.handlers.BufferingHandler(10**6)
    logs.setLevel(logging.WARNING)
    for name in ("dp_compile", "torch"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logs], False
    _set_pg_timeout(timedelta(seconds=case.group_timeout_s), dist.group.WORLD)
    optimize_ddp = "python_reducer" if subject.python_reducer else True
    with warnings.catch_warnings(record=True) as kept, torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        warnings.simplefilter("always")
        yield lambda: [*(each.getMessage() for each in logs.buffer), *(str(each.message) for each in kept)]
    gc.collect()


def _raised(error, case, subject, parameters, seconds):
    """A named error, a time-out of the group, or any other error."""
    if os.environ.get("CORPUS_TRACEBACKS"):
        traceback.print_exception(error)
    whole = str(error)
    text = f"{type(error).__name__}: {_first_line(whole)}"
    named = any(re.search(each, whole) for each in case.names) or any(each in whole for each in parameters)
    ours = subject.ours and not case.torch_may_say_so
    if named and (isinstance(error, DPCompileError) if ours else "INTERNAL ASSERT" not in whole):
        return Outcome(REFUSED, text, seconds)
    return Outcome(HANG if TIMED_OUT.search(whole) else CRASH, text, seconds)


def _first_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    line = re.sub(r"/\S*/(third_party|torch|site-packages)/", "", first)
    line = re.sub(r"\[127\.0\.0\.1\]:\d+", "[127.0.0.1]", line)
    return line if len(line) <= 200 else f"{line[:197]}..."


def compare(side, truth, case):
    """Raises `Wrong` with the worst difference. Buffers on the first rank, unless a case is about them: DDP is late."""
    if hasattr(side.wrapped, "reshard"):  # between a forward without backward and the next, parameters are other ones
        side.wrapped.reshard()
    found = []
    theirs = dict(truth.model.named_parameters())
    for name, parameter in side.model.named_parameters():
        other = theirs[name]
        found += _difference(f"{name}.grad", parameter.grad, other.grad, case)
        found += _difference(name, parameter.detach(), other.detach(), case)
    of_buffers = case.buffers_everywhere or dist.get_rank() == 0
    if of_buffers and (side.subject is None or side.subject.broadcasts_buffers):
        others = dict(truth.model.named_buffers())
        for name, buffer in side.model.named_buffers():
            found += _difference(name, buffer, others[name], case)
    if found:
        raise Wrong(max(found)[1] + (f"; {len(found)} tensors differ" if len(found) > 1 else ""))


def _difference(name, ours, theirs, case):
    """Nothing, or how far it is off and the text."""
    where = f"on rank {dist.get_rank()}"
    if theirs is None or ours is None:
        rest = ours if theirs is None else theirs
        if rest is None or not bool(full(rest).any()):
            return []
        return [(float("inf"), f"{name} is {'None' if ours is None else 'not None'} {where}")]
    wide = torch.complex128 if ours.is_complex() else torch.float64
    mine, right = full(ours).to(wide), full(theirs).to(wide)
    scale, off = float(right.abs().max()), float((mine - right).abs().max())
    bound = ATOL + case.rtol * scale if ours.is_complex() or ours.is_floating_point() else 0.0
    return [(off / max(scale, 1e-30), f"{name} is {off:.2g} off, of {scale:.2g}, {where}")] if off > bound else []


def _same(returned, expected, case):
    """What a case returned is what it returned for the truth."""
    if expected is None and returned is None:
        return
    mine, others = pytree.tree_leaves(returned), pytree.tree_leaves(expected)
    if len(mine) != len(others):
        raise Wrong(f"{returned} where {expected} is right")
    for one, other in zip(mine, others, strict=True):
        if isinstance(other, torch.Tensor):
            for _, text in _difference(case.returns, one, other, case):
                raise Wrong(text)
        elif one != other:
            raise Wrong(f"{case.returns}: {returned} where {expected} is right")
