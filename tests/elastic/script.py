"""A training that is started by `python -m dp_compile.elastic`; one line of JSON for each block on standard output.

Its arguments: the processes that are in the end in the group, which then train some steps; how many; a directory; a
variant; and faults, each `PROCESS@BLOCK:PLACE:WHAT`, with a place of `PLACES`, `regroup` or `join`, which is the next
one from then on, or a number of seconds after the block begins. The batch of a step is a function of the step and the
rank. Rank 0 of each generation saves what it begins with.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dp_compile
from dp_compile import elastic
from dp_compile._torch import compiler
from dp_compile.elastic.training import JOIN_VARIABLE
from dp_compile.optim import in_backward

TIMEOUT_S = 2.0
PAUSE_S = 16.0
"""After it the others have left out a process that was suspended, also where it was the first to come to a meeting: a
collective of 2 s, 5 s for its decision, 3 s for itself in the next meeting."""
VARIANTS = ("", "mixed", "in_backward")
PLACES = ("forward", "backward", "optimizer", "between")


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.layers(x)


class Job:
    """A model with its optimizer, accumulation, unused parameters and buffers."""

    def __init__(self, variant):
        policy, norm = None, nn.BatchNorm1d(16)
        if variant == "mixed":  # of bfloat16 and float32 on a CPU torch has no batch norm
            policy, norm = MixedPrecisionPolicy(torch.bfloat16, torch.float32), nn.LayerNorm(16)
        self.model = dp_compile.replicate(Net(norm), find_unused_parameters=True, mp_policy=policy)
        self.compiled = torch.compile(self.model, backend="aot_eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if variant == "in_backward":
            in_backward(self.model, self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.states = (self.model, self.optimizer, self.scheduler)

    def train(self, steps, rank):
        """The digests after steps in a group that loses no rank."""
        found = []
        for step in steps:
            with dp_compile.no_sync(self.model):
                self.forward(step, rank, 0).backward()
            self.forward(step, rank, 1).backward()
            self.update()
            found.append(self.digest())
        return found

    def forward(self, step, rank, micro):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + micro))
        return self.compiled(x).square().mean()

    def update(self):
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def digest(self):
        tensors = [each.detach().numpy().tobytes() for each in self.model.state_dict().values()]
        return hashlib.sha1(b"".join(tensors)).hexdigest()[:12]

    def save(self, directory, generation, steps):
        torch.save([steps, *(each.state_dict() for each in self.states)], f"{directory}/{generation}.pt")

    def load(self, directory, generation):
        """What a generation began with. Returns after how many steps that was."""
        steps, *states = torch.load(f"{directory}/{generation}.pt")
        for each, state in zip(self.states, states, strict=True):
            each.load_state_dict(state)
        return int(steps)


class Fault:
    """What happens to this process, if something does."""

    def __init__(self, process, faults):
        found = dict(each.split("@") for each in faults).get(process, "-1:-:-")
        at, self.place, self.what = found.split(":")
        self.at, self.block = int(at), -1

    def begin(self, training):
        self.block += 1
        if self.block != self.at:
            return
        if self.place in ("regroup", "join"):
            form = training._form

            def form_struck():
                joins = any(each.startswith("joined") for each in training._registry.members.processes)
                if joins or self.place == "regroup":
                    self.strike()
                form()

            training._form = form_struck
        elif self.place not in PLACES:
            threading.Timer(float(self.place), self.strike).start()

    def reach(self, place):
        if self.block != self.at or place != self.place:
            return
        if place == "backward":  # somewhere in it
            threading.Timer(0.001, self.strike).start()
        else:
            self.strike()

    def strike(self):
        if self.what == "raise":
            raise ValueError("a fault of this rank's own")
        if self.what == "sleep":
            time.sleep(600)  # left out meanwhile, and killed
            return
        if self.what == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            return
        if self.what == "pause" and os.fork() == 0:
            time.sleep(PAUSE_S)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL if self.what == "kill" else signal.SIGSTOP)


def main(last, steps, directory, variant, *faults):
    torch.set_num_threads(1)
    elastic.init_process_group(timeout=timedelta(seconds=60))
    process = os.environ.get(JOIN_VARIABLE) or os.environ["RANK"]
    job, fault = Job(variant), Fault(process, faults)
    training = elastic.Training(*job.states, timeout_s=TIMEOUT_S)
    generation, since = -1, 0
    while True:
        if training.generation != generation and not training.is_joining:
            generation, since = training.generation, training.steps
            if training.rank == 0:
                job.save(directory, generation, since)
        is_last = {*training._registry.members.processes} == {*last.split(",")}
        if is_last and training.steps >= since + steps:
            break
        line = {
            "process": process,
            "from": training.steps,
            "generation": training.generation,
            "ranks": training.world_size,
            "is_joining": training.is_joining,
        }
        fault.begin(training)
        with training.step():
            with dp_compile.no_sync(job.model):
                job.forward(training.steps, training.rank, 0).backward()
            loss = job.forward(training.steps, training.rank, 1)
            fault.reach("forward")
            fault.reach("backward")
            loss.backward()
            fault.reach("optimizer")
            job.update()
        fault.reach("between")
        line |= {
            "to": training.steps,
            "digest": job.digest(),
            "graphs": compiler.compiled_graphs(),
        }
        os.write(1, f"{json.dumps(line)}\n".encode())  # whole, also where others write too
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
