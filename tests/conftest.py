"""Process groups for the tests: a fake one in this process, and pools of real ranks."""

import gc
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from meshes import keep_groups
from on_ranks import Pool, forget_replicas
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_compile._torch import dynamo

# No deadlines and no "too slow": the machines that run the tests are shared.
settings.register_profile(
    "dp_compile", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dp_compile")
# More threads than cores wait for each other by spinning: two workers at the same time took 25 times the CPU time.
torch.set_num_threads(1)
# As in the ranks too: compiling makes many objects of which few are garbage.
gc.set_threshold(20_000, 20, 100)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for what tests start
os.environ.setdefault("DP_COMPILE_LINK", "nominal")  # plans are those of nominal links, on every machine
# As in the ranks: compiling a small model takes a seventh less.
dynamo.measure_no_guards()
# A rank that is a copy of a process with all of this loaded starts at once; loading it takes a core five seconds. But
# copies order their sets of texts alike, so the two ranks of most tests are none, and they end without `atexit`.
multiprocessing.set_forkserver_preload(["dp_compile.bench.modes", "torch._dynamo", "torch._inductor.compile_fx"])


def pytest_sessionstart(session):
    """torch's structured traces would fill the report of each failed test with thousands of lines without text."""
    capture = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (capture.caplog_handler, capture.report_handler) if capture is not None else ():
        handler.addFilter(lambda record: record.name != "torch.__trace")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Dynamo counts recompilations by code object, and many models share `nn.Sequential`'s. No replica is left."""
    torch._dynamo.reset()
    yield
    forget_replicas()


@pytest.fixture(scope="module")
def fake_group():
    """A default process group of two ranks, this one the first, in which every collective returns its input."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.group.WORLD
    yield group
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks():
    """As many real processes in one gloo group as `DP_COMPILE_TEST_RANKS` says, two by default."""
    yield from _pool(int(os.environ.get("DP_COMPILE_TEST_RANKS", "2")))


@pytest.fixture(scope="session")
def ranks2(ranks):
    """Two of them, for tests in which each rank has its own part."""
    if ranks.world_size == 2:
        yield ranks
    else:
        yield from _pool(2)


def pool_of(world_size):
    """A fixture: so many real processes in one gloo group."""

    @pytest.fixture(scope="session")
    def pool():
        yield from _pool(world_size, "forkserver")

    return pool


ranks3, ranks4 = pool_of(3), pool_of(4)
mesh_ranks = pool_of(4)
"""They keep the groups of their meshes; of `meshed`."""


@pytest.fixture
def meshed(mesh_ranks):
    """They may be new ones: those in which a test failed are gone."""
    mesh_ranks.run(keep_groups)
    return mesh_ranks


@pytest.fixture
def own_ranks(ranks):
    """As many as `ranks`, for one test, which may leave them out of step."""
    yield from _pool(ranks.world_size, "forkserver")


def _pool(world_size, method="spawn"):
    ranks = Pool(world_size, method)
    yield ranks
    ranks.stop()
