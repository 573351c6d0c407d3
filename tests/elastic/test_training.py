"""Trainings that lose ranks and gain others, in processes; and ranks that meet in a store, as threads.

How could it be wrong without a word? By an average over ranks that are gone, by ranks whose parameters, buffers or
optimizers differ, by a step that some ranks have done and others have not. So each generation is compared with a
training of as many ranks that starts from what it began with, and loses none.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from docs_scripts import python_of
from script import PLACES, VARIANTS, Job
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import dp_compile
from dp_compile import elastic
from dp_compile._torch.distributed import TCPStore
from dp_compile.elastic import training as of_elastic
from dp_compile.elastic.membership import LeftOutError, Members, Registry, TooFewRanksError
from dp_compile.elastic.training import regroup
from dp_compile.errors import CommunicationError, ConfigError
from dp_compile.optim import in_backward
from dp_compile.replication.module import replica_of
from dp_compile.testing.ranks import Ranks

SCRIPT = str(Path(__file__).with_name("script.py"))
FAULTS = [f"{place}:{what}" for place in PLACES for what in ("kill", "stop", "pause")]
FAULTS += [f"{place}:{what}" for place in PLACES if place != "backward" for what in ("raise", "sleep")]
"""In a backward a thread strikes: it can raise nothing in another one."""


class Pools(dict):
    def __missing__(self, number):
        self[number] = Ranks(number, "forkserver")
        return self[number]


@pytest.fixture(scope="module")
def pools():
    """By the number of ranks, made when they are needed."""
    found = Pools()
    yield found
    for each in found.values():
        each.stop()


def launch(directory, *faults, ranks=3, restarts=0, last, variant=""):
    """The exit code of the launcher, and all that was printed."""
    kill_after_s = "30" if any(each.endswith("pause") for each in faults) else "3"
    options = ["--ranks", str(ranks), "--restarts", str(restarts), "--kill-after", kill_after_s]
    command = [sys.executable, "-m", "dp_compile.elastic", *options]
    with (directory / "output").open("w") as output:
        given = {"stdout": output, "stderr": subprocess.STDOUT, "timeout": 480, "check": False}
        code = subprocess.run([*command, SCRIPT, last, "3", str(directory), variant, *faults], **given).returncode
    return code, (directory / "output").read_text()


def replay(variant, directory, generation, steps):
    """By a training that begins with as many ranks, and has been in no other group."""
    torch._dynamo.reset()
    job, group = Job(variant), dist.group.WORLD
    if group.size() == 3:  # a constant third may be folded into a kernel, and rounded there
        regroup(replica_of(job.model), group, -1)
    begin = job.load(directory, generation)
    return job.train(range(begin, begin + steps), dist.get_rank())


def train(pools, directory, *faults, losses, variant="", **options):
    """What each process has noted at the end of each block, in that order.

    Each step is that of as many ranks that lose none. A loss costs one step, and compiles nothing.
    """
    code, output = launch(directory, *faults, variant=variant, **options)
    assert code == 0, f"{code}: {output}"
    blocks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    digests = dict[int, str]()
    for generation in sorted({each["generation"] for each in blocks if not each["is_joining"]}):
        mine = [each for each in blocks if each["generation"] == generation and not each["is_joining"]]
        begin, end = min(each["from"] for each in mine), max(each["to"] for each in mine)
        assert len({each["ranks"] for each in mine}) == 1
        if end > begin:
            (found, *_) = pools[mine[0]["ranks"]].run(replay, variant, str(directory), generation, end - begin)
            digests |= dict(zip(range(begin + 1, end + 1), found, strict=True))
        for each in mine:
            assert each["to"] - each["from"] in (0, 1)
            assert each["to"] == 0 or each["digest"] == digests[each["to"]], each
    for each in blocks:
        assert not each["is_joining"] or each["digest"] == digests[each["to"]], each
    lost = Counter(each["process"] for each in blocks if each["to"] == each["from"])
    assert max(lost.values(), default=0) <= losses, lost
    for process in {each["process"] for each in blocks}:
        graphs = [each["graphs"] for each in blocks if each["process"] == process and not each["is_joining"]]
        assert len(set(graphs[4:])) <= 1, f"process {process} compiles for another number of ranks: {graphs}"
    return blocks


def test_a_rank_is_killed_and_another_joins(tmp_path, pools):
    blocks = train(pools, tmp_path, "1@5:backward:kill", restarts=1, last="0,2,joined 1", losses=1)
    assert [each["ranks"] for each in blocks if each["process"] == "0"][-3:] == [3, 3, 3]
    assert {each["process"] for each in blocks[-3:]} == {"0", "2", "joined 1"}


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_before_the_block_is_not_lost(goes_on):
    """A vote that cannot be launched: the block runs, and then its step is lost, or the error is raised."""
    early, step = CommunicationError("a rank is gone"), elastic.Training.step
    training = mock.Mock(_begin=mock.Mock(side_effect=early), _lose=mock.Mock(return_value=goes_on))
    with nullcontext() if goes_on else pytest.raises(CommunicationError, match="a rank is gone"), step(training):
        pass
    training._lose.assert_called_once_with(early)
    training._lose.return_value = goes_on
    with nullcontext() if goes_on else pytest.raises(CommunicationError, match="a rank is gone"), step(training):
        raise ValueError("the default process group has not been initialized")
    training._lose.return_value = False
    with pytest.raises(KeyboardInterrupt), step(training):
        raise KeyboardInterrupt
    training._end.assert_not_called()


def refused(model, monkeypatch):
    registry = Registry(dist.HashStore(), "0", Members.initial(2))
    monkeypatch.setattr(of_elastic, "_registry", registry)
    with pytest.raises(ConfigError) as found:
        elastic.Training(model)
    return str(found.value)


def test_what_cannot_lose_a_rank(fake_group, monkeypatch):
    for option in ("shard", "overlap_forward"):
        model = dp_compile.replicate(nn.Linear(2, 2))
        in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1), **{option: True})
        assert "weight is sharded, or defers updates to the next forward" in refused(model, monkeypatch)
    model = dp_compile.replicate(nn.Linear(2, 2))
    model.register_comm_hook(powerSGD_hook.PowerSGDState(fake_group), powerSGD_hook.powerSGD_hook)
    assert "may have a state or a process group" in refused(model, monkeypatch)
    assert "no parameter of the model is replicated" in refused(nn.Linear(2, 2), monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1])
def test_the_page(tmp_path, number):
    script, text = tmp_path / "script.py", python_of("algorithms.md", "Elastic training")
    if number:  # what comes before it is the same
        begin = text.partition("training = ")[0]
        text = f"{begin}data = torch.randn(500, 4)\n{python_of('algorithms.md', 'Elastic training', number)}"
    script.write_text(text)
    command = [sys.executable, "-m", "dp_compile.elastic", "--ranks", "3", "--restarts", "2", str(script)]
    assert subprocess.run(command, timeout=240, check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_every_place(pools, tmp_path, fault, variant):
    train(pools, tmp_path, f"0@5:{fault}", last="1,2", variant=variant, losses=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("last", "restarts", "faults"),
    [
        ("0,3", 0, ("1@5:backward:kill", "2@5:backward:stop")),
        ("0,3", 0, ("1@5:backward:kill", "2@5:regroup:kill")),
        ("0,3,joined 1", 1, ("1@5:backward:kill", "2@0:join:kill")),
        ("0,3,joined 1", 1, ("1@5:backward:kill", "2@0:join:pause")),
        ("0,2,3,joined 2", 2, ("1@5:backward:kill", "joined 1@0:regroup:kill")),
    ],
)
def test_two_losses(pools, tmp_path, last, restarts, faults):
    """At once, one while the others regroup, and one while a process joins, of a member or of that process."""
    train(pools, tmp_path, *faults, ranks=4, restarts=restarts, last=last, losses=2)


@pytest.mark.nightly
def test_the_launcher_is_killed(tmp_path):
    """And the store with it: each rank raises an error that says so."""
    code, text = launch(tmp_path, "0@5:between:launcher", last="nobody")
    assert code == -signal.SIGKILL
    end_s = time.monotonic() + 10.0
    while text.count("LostStoreError: process ") < 3 and time.monotonic() < end_s:
        text = (tmp_path / "output").read_text()
    assert {each for each in "012" if f"LostStoreError: process {each}: the launcher's" in text} == {*"012"}, text


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(int(os.environ.get("DP_COMPILE_ELASTIC_SEQUENCES", "10"))))
def test_random_sequences(pools, tmp_path, seed):
    """Kills, stops and joins, of processes that have joined too, and at any time."""
    drawn = random.Random(seed)
    ranks, restarts = drawn.choice([2, 3, 4]), drawn.randint(0, 3)
    struck = list(map(str, sorted(drawn.sample(range(ranks), drawn.randint(1, ranks - 1)))))
    names, deaths = [str(rank) for rank in range(ranks)], len(struck)
    for number in range(1, restarts + 1):
        if number <= deaths:
            names.append(f"joined {number}")
            if drawn.random() < 0.3:
                struck.append(names[-1])
                deaths += 1
    faults = []
    for process in struck:
        at_any_time = f"{drawn.uniform(0.0, 2.5):.3f}:{drawn.choice(['kill', 'stop', 'pause'])}"
        # From block 2 on collectives have the short time-out; a process is alone in its group in the first one.
        faults.append(f"{process}@{drawn.randint(2, 9)}:{drawn.choice([*FAULTS, *[at_any_time] * len(FAULTS)])}")
    last, variant = ",".join(each for each in names if each not in struck), drawn.choice(VARIANTS)
    print(f"{ranks} ranks, {restarts} restarts, {variant or 'plain'}, {faults}, in the end {last}")
    options = {"ranks": ranks, "restarts": restarts, "last": last, "variant": variant}
    train(pools, tmp_path, *faults, losses=len(faults), **options)


@pytest.fixture
def store():
    return dist.HashStore()


FIRST = Members(0, ("0", "1", "2"))


def registry_of(store, process):
    Registry(store, process, Members.initial(3))
    registry = Registry(store, process, FIRST)
    registry._ask("compare_set", "members", Members.initial(3).to_json(), FIRST.to_json())
    return registry


def met(store, *processes, min_ranks=1, wait_s=0.0):
    """What these processes of a first generation agree on, all at once."""

    def meet(process):
        registry = registry_of(store, process)
        registry.meet(grace_s=0.5, min_ranks=min_ranks, wait_s=wait_s)
        return registry.members

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(meet, processes))


@pytest.mark.parametrize("is_known", [True, False])
def test_who_is_left_keeps_the_order(store, is_known):
    if is_known:
        registry_of(store, "1").leave()
    assert set(met(store, "2", "0")) == {Members(1, ("0", "2"))}
    assert registry_of(store, "launcher").is_dead("1")


def test_the_first_one_is_suspended_while_it_decides(store):
    """The others meet again without it; what it decides later counts for nothing, and marks no one as left out."""
    zombie, ask = registry_of(store, "0"), Registry._ask
    once = []

    def suspended(registry, operation, *arguments):
        if registry is zombie and operation == "compare_set" and not once:
            once.append(set())
            once[0] |= set(met(store, "1", "2"))
        return ask(registry, operation, *arguments)

    with mock.patch.object(Registry, "_ask", suspended), pytest.raises(LeftOutError):
        zombie.meet(grace_s=0.0, min_ranks=1, wait_s=0.0)
    assert once == [{Members(1, ("1", "2"))}]
    assert [zombie.is_dead(each) for each in "012"] == [True, False, False]


def test_the_first_one_dies_while_it_decides(store):
    dead = registry_of(store, "0")
    dead._ask("append", "0/arrivals/1", "0\n")
    dead.leave()
    assert set(met(store, "1", "2")) == {Members(1, ("1", "2"))}


def test_one_that_has_come_dies(store):
    dead = registry_of(store, "1")
    dead._ask("append", "0/arrivals/1", "2\n1\n")
    dead.leave()
    registry_of(store, "2")._decide("0/arrivals/1", 0.2, 1, 0.0)
    assert dead.current().processes == ("2",)


def test_one_comes_too_late(store):
    met(store, "0", "1")
    with pytest.raises(LeftOutError, match=r"process 2 was excluded: it reached the rendezvous more than 0\.5 s"):
        met(store, "2")


def test_too_few_are_left(store):
    with pytest.raises(TooFewRanksError, match="remaining ranks: 1, min_ranks: 2"):
        met(store, "1", min_ranks=2)


def test_processes_that_join_come_last_and_dead_ones_do_not(store):
    alive, dead = (Registry(store, each, Members(0, (each,))) for each in ("new", "old"))
    dead._ask("append", "joins", "old\n")
    dead.leave()
    member = registry_of(store, "0")
    assert member.wants_to_join()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(alive.join)
        registry_of(store, "2").leave()
        expected = Members(1, ("0", "1", "new"), 2)
        assert set(met(store, "1", "0", min_ranks=3, wait_s=5.0)) == {expected}
        joined.result()
    assert alive.members == expected
    assert not alive.wants_to_join()


def test_the_training_has_ended(store):
    registry = Registry(store, "new", Members(0, ("new",)))
    registry_of(store, "launcher").end()
    with pytest.raises(CommunicationError, match="process new cannot join: the training has ended"):
        registry.join()


def test_the_store_is_gone():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    registry = Registry(client, "0", Members.initial(3))
    del server
    with pytest.raises(CommunicationError, match="process 0: the launcher's key-value store does not answer"):
        registry.meet(grace_s=0.5, min_ranks=1, wait_s=0.0)
