"""Comm hooks with what they are compared with: a hook of torch's, and for eight bits a formula in NumPy."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

import dp_compile


@dataclass(frozen=True)
class Rounded(dp_compile.FunctionalHook):
    """Adds up in bfloat16, and sends later what that lost. Twice, so that there is a second round."""

    share: float = 1.0
    rounds: ClassVar[tuple[str, ...]] = ("all_reduce", "all_reduce")

    def initial_state(self, gradient):
        return {"error": torch.zeros_like(gradient), "seen": gradient.new_zeros(1)}

    def reduce(self, bucket):
        given = list(zip(bucket.gradients, bucket.state, strict=True))
        whole = [gradient + self.share * state["error"] for gradient, state in given]
        sent = torch.cat([each.flatten() for each in whole]).to(torch.bfloat16)
        mean = (yield sent).to(whole[0].dtype) / bucket.ranks
        again = yield mean  # the same on every rank: what comes back is the mean, times the number of ranks
        sizes = [each.numel() for each in whole]
        lost = [torch.cat([each.flatten() for each in whole]) - sent.to(mean.dtype), again / bucket.ranks]
        errors, reduced = (
            [part.view_as(like) for part, like in zip(each.split(sizes), whole, strict=True)] for each in lost
        )
        states = [
            {"error": error, "seen": state["seen"] + 1} for error, state in zip(errors, bucket.state, strict=True)
        ]
        return reduced, states


def as_torch_s(errors, bucket):  # torch refuses annotations that are text
    """The same as a hook of torch's. What it remembers is kept by parameter: torch makes its buckets again."""
    given = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    for parameter, gradient in given:
        gradient += errors.get(id(parameter), torch.zeros_like(gradient))
    sent = bucket.buffer().to(torch.bfloat16)
    offset = 0
    for parameter, gradient in given:
        mine = sent[offset : offset + gradient.numel()].view_as(gradient).float()
        errors[id(parameter)], offset = gradient - mine, offset + gradient.numel()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].float() / dist.get_world_size())


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def values_of(x, hook):
    """What comes back of blocks that were quantised. NumPy has no float8."""
    blocks = x.reshape(-1, hook.block)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scale = np.maximum(np.abs(blocks).max(1, keepdims=True) / np.float32(LARGEST[hook.dtype]), np.float32(2**-126))
        whole = blocks * (np.float32(1) / scale)
        q = np.rint(whole) if hook.dtype == torch.int8 else torch.from_numpy(whole).to(hook.dtype).float().numpy()
        return np.asarray(q * scale, np.float32).reshape(-1)


def in_blocks(tensors, hook):
    """One after the other, each filled up with zeros to whole blocks."""
    return np.concatenate([np.pad(each.flatten(), (0, -each.numel() % hook.block)) for each in tensors])


def reduced_by_formula(gradients, errors, hook):
    """Of gradients and errors of all ranks, `in_blocks`, the reduced gradients, and the errors that remain."""
    ranks, numel = len(gradients), gradients[0].size
    part = hook.block * max(1, math.ceil(numel / (hook.block * ranks)))
    padded = [np.pad(one + error, (0, ranks * part - numel)) for one, error in zip(gradients, errors, strict=True)]
    values = [values_of(each, hook) for each in padded]
    left = [one - value for one, value in zip(padded, values, strict=True)]
    mean = np.sum(values, axis=0, dtype=np.float32) / np.float32(ranks)
    reduced = values_of(mean, hook)
    for rank, each in enumerate(left):
        own = slice(rank * part, (rank + 1) * part)
        each[own] += ranks * (mean - reduced)[own]
    return reduced[:numel], [each[:numel] for each in left]
