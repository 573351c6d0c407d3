"""torchtitan: `parallelize` as the `parallelize_fn` of a model spec, with all other code unchanged.

torchtitan 0.3 cannot keep whole parameters on each rank: its data parallelism is FSDP, possibly with a shard degree
of one. Its trainer calls `parallelize` with a model on the meta device, and initialises the model afterwards. The
trainer divides the loss by the tokens of all ranks, so gradients are summed here, not divided.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dp_compile._torch import compiler
from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError, UnsupportedModuleError, require
from dp_compile.integrations.common import options, refuse_managed, refuse_other_versions
from dp_compile.replica.module_names import class_name
from dp_compile.replication.module import Installed, ReplicatedModule
from dp_compile.replication.replicate import replicate

refuse_other_versions("torchtitan")

from torchtitan.components.quantization.utils import has_quantization  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.common.moe import MoE  # noqa: E402

ModelT = TypeVar("ModelT", bound=nn.Module)

_SPLITS: Final = {  # degrees of torchtitan's `ParallelDims` that must be one here, and their options
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}


def parallelize(
    model: ModelT,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    replicate_config: ReplicateConfig | None = None,
) -> ModelT:
    """Replicate a torchtitan decoder over `dp_replicate`: `dataclasses.replace(spec, parallelize_fn=parallelize)`.

    Activation checkpointing, compilation of each transformer block and mixed precision are as in torchtitan's
    `parallelize_llama`. A model on the meta device is replicated in its first forward, when it has values.

    Args:
        model: the trainer's model, on the meta device or with values. It is modified.
        parallel_dims, training, parallelism, compile_config, ac_config, dump_folder: as torchtitan passes them.
            `inductor` or `aot_eager` for the forward also compiles the backward; otherwise Inductor compiles it.
        replicate_config: options of `dp_compile.replicate`, given by `functools.partial`. The job's dtypes come first.

    Raises:
        ConfigError: the job uses shards, other parallelism, quantization, offloading or CUDA graphs, or an option that
            would have no effect.
        UnsupportedModuleError: the model is no decoder, has experts, or is replicated already.
        DesyncError: ranks have different models or options. On the meta device: in the first forward.
    """
    given = options(replicate_config, compile_config.backend)
    factor, allowed = given.gradient_divide_factor, "left out: torchtitan divides the loss by the tokens of all ranks"
    require(factor in (None, 1.0), "gradient_divide_factor of replicate_config", allowed, factor)
    _refuse_job(parallel_dims, training, parallelism, compile_config)
    _refuse_model(model)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    group = {"device_mesh": parallel_dims.get_mesh("dp_replicate")} if parallel_dims.dp_replicate > 1 else {}
    compute = TORCH_DTYPE_MAP[training.mixed_precision_param]
    policy = MixedPrecisionPolicy(  # as in torchtitan's FSDP; no cast to the dtype of the parameters
        param_dtype=None if compute == TORCH_DTYPE_MAP[training.dtype] else compute,
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    replicate(model, mp_policy=policy, config=dataclasses.replace(given, gradient_divide_factor=1.0), **group)
    # Forwards per step, as torchtitan's trainer computes them.
    micro_steps = training.global_batch_size // (training.local_batch_size * parallel_dims.dp_replicate)
    model.register_forward_pre_hook(_Steps(max(1, int(micro_steps)) if training.global_batch_size >= 0 else 1))
    return model


class _Steps(Installed):
    """Forward pre-hook that lets only the last micro step of a step reduce: if each did, gradients that are reduced
    already would be summed again. Runs after the pre-hook that starts the replication."""

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps, self._done = micro_steps, 0

    @compiler.untraced("dp_compile counts the forwards of a model that torchtitan trains")
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        if self._done == 0 and getattr(module, "_skip_lm_head", False):
            raise ConfigError(  # raised here, because a `parallelize_fn` does not get the loss
                "the job's loss is a ChunkedLossWrapper, which runs a separate backward of lm_head for each chunk; "
                "dp_compile reduces the gradients of one whole backward. Use the wrapped loss: "
                "config.loss = config.loss.loss_fn."
            )
        if self._done % self._micro_steps == 0:
            # On a GPU, torchtitan begins a step without gradients, so this does not wait for the GPU.
            kept = next((each.grad for each in module.parameters() if each.grad is not None), None)
            if kept is not None and bool(kept.any()):
                raise UnsupportedModuleError(
                    f"{class_name(module)} starts a step (forward {self._done + 1}) with reduced gradients of an "
                    f"earlier step. A step has {self._micro_steps} forwards, according to training.global_batch_size "
                    "and training.local_batch_size. Make these match the trainer's accumulation, and zero gradients "
                    "between steps."
                )
        self._done += 1
        if self._micro_steps > 1:
            cast(ReplicatedModule, module).set_requires_gradient_sync(self._done % self._micro_steps == 0)


def _refuse_job(parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any) -> None:
    """Raise if the job sets options for shards, which have no effect on whole parameters, or unsupported options."""
    asked = {_SPLITS[name]: degree for name in _SPLITS if (degree := getattr(parallel_dims, name)) > 1}
    if asked:
        raise ConfigError(
            f"{', '.join(f'parallelism.{name} is {degree}' for name, degree in asked.items())}; dp_compile keeps whole "
            f"parameters on each rank. Use parallelism.data_parallel_replicate_degree={parallel_dims.world_size} and 1 "
            "for the others; or torchtitan's own parallelize_fn."
        )
    wanted: dict[str, tuple[Any, Any]] = {
        "parallelism.fsdp_reshard_after_forward": (parallelism.fsdp_reshard_after_forward, "default"),
        "parallelism.enable_fsdp_symm_mem": (parallelism.enable_fsdp_symm_mem, False),
        "compile.enable_async_tensor_parallel": (compile_config.enable_async_tensor_parallel, False),
        "training.enable_cpu_offload": (training.enable_cpu_offload, False),
    }
    for name, (given, neutral) in wanted.items():
        require(given == neutral, name, f"{neutral!r}: it is for sharded parameters", given)
    backend = parallelism.spmd_backend
    allowed = "'spmd_types' or 'partial_dtensor': parameters are plain tensors here, no DTensors"
    require(backend != "full_dtensor", "parallelism.spmd_backend", allowed, backend)
    # On other devices, torchtitan itself runs without CUDA graphs.
    has_no_graph = training.disable_cuda_graphs or not torch.cuda.is_available()
    allowed = "True: checks after a backward cannot run in a CUDA graph"
    require(has_no_graph, "training.disable_cuda_graphs", allowed, False)


def _refuse_model(model: nn.Module) -> None:
    refuse_managed(model, "torchtitan's parallelize_fn")
    remedy = "Use torchtitan's own parallelize_fn for it."
    if not isinstance(model, Decoder):
        raise UnsupportedModuleError(
            f"{class_name(model)} is none of torchtitan's decoders, and other models have parallelize functions of "
            f"their own. {remedy}"
        )
    if any(isinstance(each, MoE) for each in model.modules()):
        raise UnsupportedModuleError(f"{class_name(model)} has experts, which was not tried with dp_compile. {remedy}")
    if has_quantization(model.config):
        raise ConfigError(
            f"{class_name(model)} has quantized layers (float8, MXFP8 or NVFP4), which were not tried with dp_compile. "
            "Build its spec without their converters, or use torchtitan's own parallelize_fn."
        )
