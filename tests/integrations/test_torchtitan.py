"""`parallelize` in torchtitan's own trainer, on two ranks: every step beside its own FSDP, on its debug model."""

import dataclasses
import re
from importlib.util import find_spec
from unittest import mock

import pytest
import titan_jobs
import torch
import torch.distributed as dist
from docs_scripts import python_of
from launched import as_launched, assert_same_steps
from on_ranks import on_ranks
from torch import nn

import dp_compile
from dp_compile.testing.ranks import Ranks

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_spec("torchtitan") is None, reason="torchtitan is not installed: pip install -e '.[test-torchtitan]'"
    ),
]


@pytest.fixture(scope="module")
def titan_ranks():
    """Two that nobody else uses: torchtitan patches torch's fake mode, and switches a cache of Dynamo off."""
    ranks = Ranks(2, "forkserver")
    yield ranks
    ranks.stop()


def with_ours(config):
    exec(python_of("integrations.md", "torchtitan"), names := {})
    parallelize = names["debugmodel"]().model_spec.parallelize_fn
    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)
    return config


def changes_of(case):
    titan_jobs.load()
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    given = {
        "accumulated": {"training__global_batch_size": 12},
        "bfloat16": {"training__mixed_precision_param": "bfloat16", "activation_checkpoint": SelectiveAC.Config()},
    }
    return {"compile__enable": True, **given[case]}


@pytest.mark.parametrize("case", ["accumulated", "bfloat16"])
@on_ranks("titan_ranks")
def test_every_step_as_torchtitans(case, tmp_path):
    folder = str(tmp_path)
    with as_launched():
        changes = changes_of(case)
        *ours, trainer = titan_jobs.run(with_ours(titan_jobs.job(**changes)), folder)
        (model,) = trainer.model_parts
        expected = {"captured", "without sync"} if case == "accumulated" else {"captured"}
        assert set(dp_compile.report(model).backwards) == expected
        assert len(ours[0]) == titan_jobs.STEPS
        # With torchtitan's other kinds of SPMD its FSDP wants a later torch than 2.13.
        *theirs, _ = titan_jobs.run(titan_jobs.job(parallelism__spmd_backend="partial_dtensor", **changes), folder)
        assert_same_steps(ours, theirs)


def call(config, model=None, **options):
    """What torchtitan's trainer does with the function, without the trainer."""
    from torchtitan.distributed import ParallelDims

    from dp_compile.integrations.torchtitan import parallelize

    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        built = config.model_spec.model.build() if model is None else model
    return parallelize(
        built,
        parallel_dims=ParallelDims.from_config(config.parallelism, dist.get_world_size()),
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
        **options,
    )


def with_gradients():
    """A loop of one's own that never sets gradients to zero."""
    model = call(titan_jobs.job()).to_empty(device="cpu")
    model.init_weights()
    for _ in range(2):
        model(torch.ones(1, 32, dtype=torch.long)).sum().backward()


def refusals(folder):
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    job, replicas = titan_jobs.job, "parallelism__data_parallel_replicate_degree"
    gpu = mock.patch("torch.cuda.is_available", return_value=True)
    divided = dp_compile.ReplicateConfig(gradient_divide_factor=2.0)
    return {
        "data_parallel_shard_degree is 2": lambda: call(
            job(**{replicas: 1, "parallelism__data_parallel_shard_degree": -1})
        ),
        "parallelism.fsdp_reshard_after_forward must be 'default'": lambda: call(
            job(parallelism__fsdp_reshard_after_forward="never")
        ),
        "parallelism.spmd_backend must be": lambda: call(job(parallelism__spmd_backend="full_dtensor")),
        "training.enable_cpu_offload must be False": lambda: call(job(training__enable_cpu_offload=True)),
        "training.disable_cuda_graphs must be True": gpu(lambda _: call(job())),
        "Linear is none of torchtitan's decoders": lambda: call(job(), nn.Linear(2, 2)),
        "is replicated already": lambda: call(job(), dp_compile.replicate(call(job()))),
        "gradient_divide_factor of replicate_config must be left out": lambda: call(job(), replicate_config=divided),
        "loss is a ChunkedLossWrapper": lambda: titan_jobs.run(with_ours(job(loss=llama3_debugmodel().loss)), folder),
        "at the start of a step (forward 2)": with_gradients,
    }


@on_ranks("titan_ranks")
def test_what_is_refused(tmp_path):
    with as_launched():
        titan_jobs.load()
        for expected, wrong in refusals(str(tmp_path)).items():
            with pytest.raises(dp_compile.DPCompileError, match=re.escape(expected)):
                wrong()
