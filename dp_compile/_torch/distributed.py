"""Process groups, stores and torch's DDP. Costs nothing to load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch.dtensors import local_tensor
from dp_compile._torch.missing import loaded, named
from dp_compile.errors import ConfigError
from dp_compile.plan.backends import CLASSES, Backend

with named():
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore

    # Import the defining module: users may rebind the public name `nn.parallel.DistributedDataParallel` to ours.
    from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

    # Newer torch versions deprecate the names on the right, which are the only ones in older versions.
    all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    _c10d: Any = dist.distributed_c10d
    group_name: Callable[[dist.ProcessGroup], str] = _c10d._get_process_group_name
    """Return the name by which functional collectives look up a process group."""
    group_of_name: Callable[[str], dist.ProcessGroup] = _c10d._resolve_process_group
    default_store: Callable[[], Store] = _c10d._get_default_store
    set_parameters_to_ignore: Any = TorchDDP._set_params_and_buffers_to_ignore_for_model
    default_group: Callable[[], dist.ProcessGroup] = _c10d._get_default_group
    _world = _c10d._world
    _abort_process_group, _set_pg_timeout = _c10d._abort_process_group, _c10d._set_pg_timeout
    _broadcast_coalesced: Callable[..., None] = dist._broadcast_coalesced  # type: ignore[attr-defined]

_BROADCAST_BYTES: Final = 250 * 2**20
"""The broadcast bucket size of torch's DDP."""
_BY_SIZE: Final = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_SENT: Final = frozenset(
    {torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64}
)


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> Backend:
    """Return the capabilities of a group's backend for a device type. `None`: the default group.

    A group may have one backend per device type; without one for this type, its first backend counts. The backend's
    class decides, not the group's backend name: torch returns `undefined` after `init_process_group()` without one.
    """
    found: Any = group or default_group()
    types = [each.type for each in found._device_types] if type(found) is dist.ProcessGroup else []
    if types:  # otherwise a Python process group, which is its own backend
        found = found._get_backend(torch.device(device_type if device_type in types else types[0]))
        found = getattr(found, "wrapped_pg", found)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps torch's backends
    stated = getattr(found, "dp_compile_backend", None)
    if isinstance(stated, Backend):
        return stated
    known = (CLASSES[kind.__name__] for kind in type(found).__mro__ if kind.__name__ in CLASSES)
    return next(known, None) or Backend(str(found.name()), device_type)


def working_device(group: dist.ProcessGroup | None) -> str:
    """Return the accelerator's device type if the group has a backend that works on it, "cpu" otherwise."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and backend_of(group, accelerator.type).device == accelerator.type:
        return accelerator.type
    return "cpu"


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of an n-dimensional mesh. Call it on every rank of the root mesh."""
    world = default_group()
    if sorted(mesh.mesh.flatten().tolist()) == sorted(dist.get_process_group_ranks(world)):
        return world
    if mesh.mesh_dim_names is None:
        raise ConfigError("device_mesh needs mesh_dim_names unless it has all ranks of the default group.")
    return mesh._flatten().get_group()


def modules_of_policy(
    policy: Any, module: nn.Module, ignored: set[nn.Module]
) -> Mapping[nn.Module, Mapping[str, Any]] | None:
    """Return the modules that FSDP wraps under a policy, with their options; `None` if `policy` is no policy. Policies
    are objects of `torch.distributed.fsdp.wrap` and functions with a `recurse` argument. Loads FSDP."""
    from torch.distributed.fsdp.wrap import _Policy, _recursive_wrap

    if isinstance(policy, _Policy):
        return policy._run_policy(module, ignored, {})
    chosen: dict[nn.Module, dict[str, Any]] = {}

    def note(wrapped: nn.Module) -> nn.Module:
        chosen[wrapped] = {}
        return wrapped

    if callable(policy):
        _recursive_wrap(module, policy, note, ignored, {each for inner in ignored for each in inner.parameters()})
    return chosen if callable(policy) else None


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a process group exists and was not destroyed."""
    return group in _world.pg_map


def end_other_groups() -> None:
    """Destroy all process groups except the default group."""
    for group in [each for each in _world.pg_map if each is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def end_all_groups() -> None:
    """Destroy all process groups without waiting for in-flight collectives with lost ranks.

    Destroying an NCCL group waits for its collectives, so NCCL groups are aborted; gloo's collectives fail (torch
    2.13). Resets group names: the next default group gets the first one's name, also after a failed initialization.
    """
    if dist.group.WORLD is None:
        _world.group_count = 0
    elif any(backend_of(group, each.type).on_stream for group in _world.pg_map for each in group._device_types):
        _abort_process_group()
    else:
        dist.destroy_process_group()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the time-out in seconds of collectives on `device`: torch's default if the backend has no such option."""
    options = getattr(cast(Any, group)._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout.total_seconds()


def set_timeout(timeout_s: float) -> None:
    """Set the time-out of later collectives of the default process group, in seconds."""
    _set_pg_timeout(timedelta(seconds=timeout_s))


def collectives_launched(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the sequence number of this rank's collectives on `device`. Only differences are meaningful. gloo and
    NCCL count collectives; for a backend that does not, the number is constant."""
    try:
        return int(cast(Any, group)._get_backend(device)._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def is_communication_error(error: BaseException | None) -> bool:
    """Return whether a process group or store raised `error`. gloo raises plain RuntimeErrors that name its source
    file, except the error with which a timed-out operation aborts all others."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("/gloo/", "Application timeout caused pair closure", "Operation timed out!")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def connect_again(store: Store, timeout_s: float) -> Store:
    """Return a new connection to the same store with its own time-out, in seconds."""
    connection = cast(Store, cast(Any, store).clone())
    connection.set_timeout(timedelta(seconds=timeout_s))
    return connection


def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Broadcast tensors from group rank `source` in place, coalesced by dtype. Strides must be equal on all ranks. Of a
    DTensor, only the local shard is broadcast, so all ranks of the group must hold the same shard."""
    if tensors:
        _broadcast_coalesced(group, list(map(_as_sent, tensors)), _BROADCAST_BYTES, source)


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory, each element once, in a dtype that every backend supports. gloo supports
    neither 16-bit integers nor float8 (torch 2.13), and collectives cannot write to an expanded tensor."""
    tensor = local_tensor(tensor).detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    same_size = _BY_SIZE.get(tensor.element_size())
    return tensor if tensor.dtype in _SENT or same_size is None else tensor.view(same_size)


def join_config(joinable: Joinable) -> Any:
    """Return the config of a joinable's latest `Join` context: `enable` and `is_first_joinable`. Only the first
    joinable communicates with ranks that have exhausted their inputs."""
    return joinable._join_config


def parameters_of_active_ddp() -> Sequence[nn.Parameter]:
    """Return the parameters of the torch DDP module whose forward is running, () outside of such a forward."""
    around: Any = TorchDDP._active_ddp_module
    return () if around is None else around._module_parameters


def is_torch_ddp(module: nn.Module) -> bool:
    """Return whether torch's DDP is a real base class of the module, not a virtual one from `register`."""
    return TorchDDP in type(module).__mro__


def composable_apis(module: nn.Module) -> tuple[str, ...]:
    """Return the names of torch's composable APIs (`replicate`, `fully_shard`, ...) applied to this module."""
    registry_of = loaded("torch.distributed._composable.contract", "_get_registry")  # None: no API was applied
    return () if registry_of is None else tuple(registry_of(module) or ())


def is_reduced_by_torch(module: nn.Module) -> bool:
    """Return whether torch's DDP reduces the module's gradients, through its wrapper or composable `replicate`."""
    return is_torch_ddp(module) or "replicate" in composable_apis(module)


def ranks_of_torch_ddp(module: Any) -> int:
    """Return over how many ranks torch's DDP averages. torch's `replicate` creates its DDP in the first forward."""
    if not isinstance(module, TorchDDP):
        from torch.distributed._composable.replicate import replicate

        state = replicate.state(module)
        given, module = state._init_kwargs, getattr(state, "_ddp", None)
    if module is not None:
        return dist.get_world_size(module.process_group)
    mesh = given.get("device_mesh")
    return dist.get_world_size(given.get("process_group")) if mesh is None else int(mesh.size())


def is_hook_of_fully_shard(hook: object) -> bool:
    """Return whether an autograd hook belongs to a module that `fully_shard` manages."""
    kind = loaded("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
    return kind is not None and isinstance(getattr(hook, "__self__", None), kind)


@contextlib.contextmanager
def no_sync_of_torch(module: Any) -> Iterator[None]:
    """Disable gradient reduction of torch's DDP for the module in this block."""
    if isinstance(module, TorchDDP):
        with module.no_sync():
            yield
        return
    from torch.distributed._composable.replicate import replicate

    before = replicate.state(module)._no_sync
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(not before)


def replicate_by_torch(module: nn.Module, **options: Any) -> None:
    """Import torch's composable `replicate`, which uses torch's DDP, and apply it with options that are not None."""
    from torch.distributed._composable.replicate import replicate

    replicate(module, **{name: value for name, value in options.items() if value is not None})
