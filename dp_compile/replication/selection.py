"""Selection of the parameters and buffers to replicate, by fully qualified name, and checks that they are supported.

As in torch's composable `replicate`, ignored modules and submodules that `fully_shard` manages are excluded, with all
their submodules and tensors, shared ones too. So are parts that were replicated before, as in nested `fully_shard`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import autograd, distributed
from dp_compile._torch.dtensors import is_dtensor
from dp_compile._torch.missing import loaded
from dp_compile._torch.optim import steps_in_backward
from dp_compile.errors import ConfigError, UnsupportedModuleError, require
from dp_compile.replica.module_names import by_qualified_name, class_name, fully_qualified
from dp_compile.replica.precision import Precision
from dp_compile.replica.replica import ModuleRefs, ParameterRef, owners

if TYPE_CHECKING:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # loading it loads all of FSDP

BucketPolicy: TypeAlias = "Callable[..., bool] | Collection[type[nn.Module]] | ModuleWrapPolicy"
"""A set of classes, or a policy of `torch.distributed.fsdp.wrap`: `ModuleWrapPolicy`, or a function with a `recurse`
argument, such as `functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})`."""


class Selection(NamedTuple):
    """The replicated parameters and buffers of a module, by fully qualified name."""

    module: nn.Module
    trainable: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    left_alone: frozenset[nn.Module]
    """Modules that are ignored, replicated by another call or managed by `fully_shard`, each with its submodules."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.trainable | self.frozen

    def refs(self, precision: Precision | None) -> ModuleRefs:
        """Return weak references to what is selected. Which gradients are sparse is found as in torch's DDP."""
        modules, trainable = list(self.module.modules()), list(self.trainable.values())
        embeddings = [each for each in modules if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
        shortened = [each for each in modules if getattr(each, "max_norm", None) is not None]
        names = frozenset(fully_qualified(name) for name, _ in self.module.named_parameters(remove_duplicate=False))

        def indices(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
            chosen = set(map(id, tensors))
            return frozenset(index for index, each in enumerate(trainable) if id(each) in chosen)

        return ModuleRefs(
            root=weakref.ref(self.module),
            all_names=names,
            left_alone=weakref.WeakSet(self.left_alone),
            frozen=tuple(self.frozen.items()),
            buffer_refs=self._places(self.buffers),
            parameter_refs=self._places(self.parameters),
            sparse=indices(each.weight for each in embeddings if each.sparse),
            dtensors=indices(filter(is_dtensor, trainable)),
            renormalised=indices(each for module in shortened for each in module.parameters(recurse=False)),
            is_plain=not any(is_dtensor(each) or each.is_complex() for each in trainable),
            beside_shards=any(map(_is_fully_sharded, self.left_alone)),
            precision=precision,
        )

    def _places(self, tensors: Mapping[str, torch.Tensor]) -> tuple[ParameterRef, ...]:
        """Return all references to each of these tensors: several for a tied one."""
        chosen = set(map(id, tensors.values()))
        return tuple(
            ParameterRef(weakref.ref(owner), attribute, fully_qualified(name))
            for owner, attribute, name, tensor in _placed(self.module)
            if id(tensor) in chosen
        )


def select(module: nn.Module, ignored: frozenset[nn.Module]) -> Selection:
    """Return all tensors of the module that are not excluded, in the order of `named_parameters`."""
    named = by_qualified_name(_tensors(module, ignored))
    parameters = {name: tensor for name, tensor in named.items() if isinstance(tensor, nn.Parameter)}
    return Selection(
        module,
        {name: parameter for name, parameter in parameters.items() if parameter.requires_grad},
        {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad},
        {name: tensor for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)},
        _left_alone(module, ignored),
    )


def is_waiting(module: nn.Module, ignored: frozenset[nn.Module]) -> bool:
    """Return whether a parameter or buffer has no values: it is lazy, or on the meta device."""
    return any(nn.parameter.is_lazy(tensor) or tensor.is_meta for _, tensor in _tensors(module, ignored))


def owning_modules(module: nn.Module, ignored: frozenset[nn.Module]) -> list[nn.Module]:
    """Return those modules in `module`, itself included, that own parameters and are not excluded."""
    walked = module.named_modules(memo={*_left_alone(module, ignored)})  # does not visit these
    return [each for _, each in walked if next(each.parameters(recurse=False), None) is not None]


def _placed(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield (owner, attribute, name with wrappers, tensor) for each reference to a parameter or buffer."""
    for prefix, owner in module.named_modules():
        parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        for attribute, tensor in (*parameters, *owner.named_buffers(recurse=False, remove_duplicate=False)):
            yield owner, attribute, f"{prefix}.{attribute}" if prefix else attribute, tensor


def _tensors(module: nn.Module, ignored: frozenset[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter and buffer that is not excluded, once, with its name including wrappers."""
    seen = {id(tensor) for each in _left_alone(module, ignored) for tensor in (*each.parameters(), *each.buffers())}
    # The module's own list of tensors that torch's DDP excludes, used by torchrec and TRL.
    names = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = (*module.named_parameters(), *module.named_buffers()) if names else ()
    seen |= {id(tensor) for name, tensor in named if name in names or fully_qualified(name) in names}
    for _, _, name, tensor in _placed(module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _left_alone(module: nn.Module, ignored: frozenset[nn.Module]) -> frozenset[nn.Module]:
    return ignored | {submodule for submodule in module.modules() if _is_fully_sharded(submodule)}


def _is_fully_sharded(module: nn.Module) -> bool:
    return "fully_shard" in distributed.composable_apis(module)


# --- checks -----------------------------------------------------------------------------------------------------


def check_ignored(ignored_modules: Iterable[nn.Module] | None) -> frozenset[nn.Module]:
    """Return the ignored modules as a set. Raises ConfigError for anything but an iterable of modules."""
    given = () if ignored_modules is None else ignored_modules
    several = isinstance(given, Iterable) and not isinstance(given, nn.Module)
    ignored: list[Any] = list(given) if several else [given]
    for each in ignored:
        is_module = several and isinstance(each, nn.Module)
        require(is_module, "ignored_modules", "an iterable of modules", type(each), " Pass a list: [module].")
    return frozenset(ignored)


def device_of(given: int | torch.device, option: str = "device_ids or output_device") -> torch.device:
    """Return the device that an argument names, as in torch's DDP: an `int` is a GPU index. May raise ConfigError."""
    is_device = isinstance(given, torch.device) or (type(given) is int and given >= 0)
    require(is_device, option, "the number of a GPU or a torch.device", given)
    if isinstance(given, int):
        return torch.device("cuda", given)
    if given.type == "cuda" and given.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return given


def check_not_managed(module: nn.Module, ignored: frozenset[nn.Module], parts: Collection[nn.Module]) -> None:
    """Raise UnsupportedModuleError if torch's DDP, FSDP or `replicate` manages the module, or a part shares parameters.

    `parts`: submodules replicated before, which must not be tied to others. `fully_shard` may manage submodules only.
    """
    inside = {below for part in parts for below in part.modules()}
    names: dict[torch.Tensor, list[tuple[bool, str]]] = {}
    for owner, _, name, tensor in _placed(module) if parts else ():
        if isinstance(tensor, nn.Parameter):
            names.setdefault(tensor, []).append((owner in inside, fully_qualified(name)))
    tied = [each for each in names.values() if len({is_inside for is_inside, _ in each}) > 1]
    if tied:
        raise UnsupportedModuleError(
            f"{'; '.join(' = '.join(name for _, name in each) for each in tied)}: a tied parameter is used inside and "
            "outside a part that is replicated already, but it is reduced only once. Replicate these modules in one "
            "call."
        )
    fsdp = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, submodule in module.named_modules(memo={*_left_alone(module, ignored)} - {module}):
        apis = distributed.composable_apis(submodule)
        managers = {
            "torch's DistributedDataParallel": distributed.is_torch_ddp(submodule),
            "FullyShardedDataParallel": fsdp is not None and isinstance(submodule, fsdp),
            "fully_shard": "fully_shard" in apis,
            "torch's replicate": "replicate" in apis,
        }
        for manager in (manager for manager, manages in managers.items() if manages):
            place = f"submodule {fully_qualified(name)}" if name else class_name(module)
            raise UnsupportedModuleError(f"{place} is managed by {manager} already. Use one of the two, not both.")


def check(target: Selection, device: torch.device | None, *, copies_buffers: bool, needs_values: bool = True) -> None:
    """Raise for tensors that cannot be replicated; with `needs_values`, also for lazy, meta and fake ones. `device`:
    the `device_id` of the call, which must be the device of all parameters."""
    if not target.trainable:
        raise UnsupportedModuleError(
            f"{class_name(target.module)} has no parameter that requires a gradient (outside ignored_modules, "
            "replicated parts and modules under fully_shard); there is nothing to reduce."
        )
    for name, parameter in target.parameters.items() if device is not None else ():
        if parameter.device != device:
            raise ConfigError(f"{name} is on {parameter.device}, device_id says {device}. Call module.to('{device}').")
    first_name, first = next((name, each.device) for name, each in target.parameters.items())
    for name, tensor in (target.parameters | target.buffers).items():
        is_parameter = isinstance(tensor, nn.Parameter)
        problem = _lacks_values(tensor) if needs_values else ""
        if is_parameter and tensor.device != first:
            problem = problem or f"is on {tensor.device}, {first_name} on {first}. Move the module to one device"
        if name in target.trainable:
            problem = problem or _cannot_be_reduced(tensor, fake_allowed=not needs_values)
        elif is_parameter or copies_buffers:
            problem = problem or _cannot_be_copied(tensor)
        if problem:
            raise UnsupportedModuleError(f"{name} {problem}.")


def _lacks_values(tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "is lazy. Run one forward with an example input before replicate()"
    remedy = "Materialise the module first: module.to_empty(device=...), then initialise it"
    return f"is on the meta device. {remedy}" if tensor.is_meta else ""


def _cannot_be_copied(tensor: torch.Tensor) -> str:
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return ""
    return (
        f"is {tensor.dtype if tensor.is_quantized else tensor.layout}: only plain strided tensors can be copied from "
        "the first rank. Name the module that owns it in ignored_modules; or, if it is a buffer, pass "
        "broadcast_buffers=False, then each rank keeps its own"
    )


def _cannot_be_reduced(parameter: torch.Tensor, *, fake_allowed: bool) -> str:
    plain = type(parameter.data) is torch.Tensor or isinstance(parameter.data, nn.Parameter)
    if autograd.is_fake(parameter):  # a fake parameter is also an nn.Parameter
        plain = fake_allowed
    if not (plain or is_dtensor(parameter)):
        return f"is a {type(parameter.data).__name__}; only plain tensors and DTensors are supported"
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return f"is {parameter.dtype}; gradients of floating and complex dtypes are supported"
    # None: torch accepts gradients of any dtype.
    grad_dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    if grad_dtype != parameter.dtype:
        return (
            f"is {parameter.dtype} and its grad_dtype is {grad_dtype}: gradients are reduced in their parameter's "
            f"dtype. Leave grad_dtype at {parameter.dtype}, or name the module that owns it in ignored_modules"
        )
    if owners.find(parameter) is not None:
        return (
            "is replicated already, by a call on another module. Call replicate() on a part before the module around "
            "it. To replicate it again, call dp_compile.unreplicate() first, on that module or its wrapper"
        )
    if steps_in_backward(parameter):
        return (
            "is updated in the backward by torch's _apply_optimizer_in_backward(), with this rank's own gradient. Call "
            "dp_compile.optim.in_backward(model, optimizer) after replicate()"
        )
    return ""


def check_dtensors(target: Selection, group: dist.ProcessGroup) -> None:
    """Raise for DTensors on a mesh that has several ranks of the group, and for trainable Partial or complex ones.

    Parameters remain DTensors. Each rank reduces its local tensor of a gradient with the ranks that hold the same
    shard: the group of `replicate` must be another dimension of the mesh.
    """
    replicated = set(dist.get_process_group_ranks(group))
    tensors: dict[str, Any] = target.parameters | target.buffers
    for name, tensor in tensors.items():
        if not is_dtensor(tensor):
            continue
        shared = sorted(replicated.intersection(tensor.device_mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise ConfigError(
                f"{name} is a DTensor distributed over ranks {shared}, but the module would be replicated over ranks "
                f"{sorted(replicated)}, which include them. Different shards cannot be averaged. Replicate "
                "over the mesh dimension that tensor parallel does not use: replicate(model, device_mesh=mesh['dp'])."
            )
        if name in target.trainable and any(each.is_partial() for each in tensor.placements):
            raise UnsupportedModuleError(
                f"{name} is a DTensor with a Partial placement: no rank has its value. Call redistribute() on it with "
                "Replicate() or Shard(dim) before it becomes a parameter."
            )
        if name in target.trainable and tensor.is_complex():
            raise UnsupportedModuleError(f"{name} is a complex DTensor; real ones are supported.")


def refuse_dtensors(module: nn.Module, what: str) -> None:
    """Raise ConfigError if the module has DTensor parameters. `what`: the feature that does not support them."""
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter):
            raise ConfigError(
                f"{what} does not support DTensor parameters, and {fully_qualified(name)} is one. Use replicate() and "
                "a plain optimizer for a tensor-parallel module."
            )


# --- bucket policy ----------------------------------------------------------------------------------------------


def units_of(module: nn.Module, policy: BucketPolicy, left_alone: Collection[nn.Module]) -> frozenset[str]:
    """Return the fully qualified names of the modules that a policy selects. torch's policies skip `left_alone`."""
    kinds = tuple(policy) if isinstance(policy, Collection) else ()
    units: Mapping[nn.Module, Mapping[str, Any]] | None
    if kinds and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        units = {each: {} for each in module.modules() if isinstance(each, kinds)}
    else:
        units = distributed.modules_of_policy(policy, module, set(left_alone))
    require(units is not None, "bucket_policy", "a set of module classes or a policy of FSDP", policy)
    assert units is not None
    if any(units.values()):
        raise ConfigError(
            "bucket_policy returned options for a module; only True or False is allowed. To give a module its own "
            "options, call replicate() on it first."
        )
    return frozenset(fully_qualified(name) for name, each in module.named_modules() if each in units)
