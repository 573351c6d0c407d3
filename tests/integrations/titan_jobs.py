"""Jobs of torchtitan's debug model on CPUs: what stands in for a device, triton, tokenizer and text.
For ranks of their own: torchtitan changes settings of torch's compiler."""

import dataclasses
import functools
import gc
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._triton import has_triton_package

STEPS, VOCABULARY = 20, 2048


class _CPU:
    """`torch.cpu`, with what torchtitan asks of a device beyond it."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def get_device_name(_):
        return "CPU"

    @staticmethod
    def get_device_properties(_):
        return SimpleNamespace(total_memory=2**30)

    @staticmethod
    def memory_stats(_):
        return {}

    @staticmethod
    def nothing():
        pass

    reset_peak_memory_stats = empty_cache = nothing


@dataclasses.dataclass
class Tokens:
    """Other ones on each rank, and other numbers of them that count."""

    rank: int = 0
    shape: tuple[int, int] = (0, 0)

    def build(self, *, dp_rank, seq_len, local_batch_size, **_):
        return Tokens(dp_rank, (local_batch_size, seq_len + 1))

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(VOCABULARY, self.shape, generator=generator)
            labels = tokens[:, 1:].clone()
            labels[:, : 3 * self.rank] = -100
            yield {"input": tokens[:, :-1]}, labels


@dataclasses.dataclass
class NoTokenizer:
    def build(self, **_):
        return None


def load():
    """Import torchtitan in this process."""
    if "torchtitan.trainer" in sys.modules:
        return
    has_triton_package()  # remembered, before there seems to be one
    missing = [name for name in ("triton", "triton.language") if find_spec("triton") is None]
    sys.modules.update((name, mock.MagicMock()) for name in missing)
    with (
        mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"),
        mock.patch.object(torch._utils, "_get_device_module", return_value=_CPU()),
    ):
        import torchtitan.models.llama3.config_registry
        import torchtitan.trainer  # noqa: F401
    for name in missing:
        del sys.modules[name]


def small(config):
    """torchtitan's debug job with two layers, little data, and what runs on a CPU. It is changed and returned."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, STEPS
    config.compile.backend = "aot_eager"
    config.debug.seed = 0
    config.dataloader, config.tokenizer = Tokens(), NoTokenizer()
    return config


def job(**changes):
    """The same in float32, on all ranks of the group. `changes`: fields, with `__` for dots."""
    load()
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = small(llama3_debugmodel())
    config.loss = config.loss.loss_fn
    config.parallelism.data_parallel_replicate_degree = dist.get_world_size()
    config.parallelism.data_parallel_shard_degree = 1
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    for path, value in changes.items():
        *owners, name = path.split("__")
        setattr(functools.reduce(getattr, owners, config), name, value)
    return config


def run(config, folder):
    """What torchtitan's own trainer does with a job: loss and norm of each step, the parameters, the trainer."""
    from torchtitan.components.metrics import MetricsProcessor

    torch._dynamo.reset()
    steps = []

    def log(self, step, loss, max_loss, norm, **_):
        steps.append((loss, norm))

    config.dump_folder = folder
    no_timeout = mock.patch("torch.distributed.set_timeout", create=True)  # torch 2.13 has no such function
    with mock.patch.object(MetricsProcessor, "log", log), mock.patch("time.sleep"), no_timeout:
        trainer = config.build()
        try:
            trainer.train()
        finally:
            trainer.close()
            gc.enable()  # torchtitan collects garbage by itself
    values = [getattr(each, "full_tensor", lambda each=each: each)() for each in trainer.model_parts[0].parameters()]
    return steps, torch.cat([each.detach().flatten() for each in values]).numpy(), trainer
