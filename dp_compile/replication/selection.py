"""Which parameters and buffers of a module are replicated, by fully qualified name, and which are refused.

What torch's composable `replicate` leaves alone is left alone here: ignored modules and submodules that `fully_shard`
manages, each with all below them, and their tensors wherever else they appear. So are parts that were replicated
before, as nested calls of `fully_shard` have it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from dp_compile._torch import autograd, distributed
from dp_compile._torch.dtensors import is_dtensor
from dp_compile._torch.optim import steps_in_backward
from dp_compile.engine.module_names import by_qualified_name, class_name, fully_qualified
from dp_compile.engine.owners import owners
from dp_compile.engine.places import BufferPlace, Outline, ParameterPlace
from dp_compile.errors import ConfigError, ModuleError, require

if TYPE_CHECKING:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # loading it loads all of FSDP

BucketPolicy: TypeAlias = "Callable[..., bool] | Collection[type[nn.Module]] | ModuleWrapPolicy"
"""A set of classes; or one of torch's in `torch.distributed.fsdp.wrap`: `ModuleWrapPolicy`, and functions with a
`recurse` argument, as `functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a module is replicated, by fully qualified name."""

    module: nn.Module
    trainable: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    left_alone: frozenset[nn.Module]
    """What is ignored, replicated by another call or left to `fully_shard`, each with everything below it."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.trainable | self.frozen

    @property
    def sharded(self) -> bool:
        """Whether parts of the module were left to `fully_shard`."""
        return any(_is_fully_sharded(each) for each in self.left_alone)

    def outline(self) -> Outline:
        names = frozenset(fully_qualified(name) for name, _ in self.module.named_parameters(remove_duplicate=False))
        return Outline(weakref.ref(self.module), names, weakref.WeakSet(self.left_alone))

    def buffer_places(self) -> tuple[BufferPlace, ...]:
        chosen = {id(buffer) for buffer in self.buffers.values()}
        return tuple(
            BufferPlace(weakref.ref(owner), name)
            for owner in self.module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if id(buffer) in chosen
        )

    def parameter_places(self) -> tuple[ParameterPlace, ...]:
        """Every place of every parameter: tied ones have several."""
        chosen = {id(parameter) for parameter in self.parameters.values()}
        return tuple(
            ParameterPlace(weakref.ref(owner), attribute, name)
            for owner, attribute, name, parameter in _placed_parameters(self.module)
            if id(parameter) in chosen
        )

    def sparse(self) -> frozenset[int]:
        """The trainable parameters whose gradients are sparse, by index: what torch's DDP looks for, too."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        weights = {id(each.weight) for each in self.module.modules() if isinstance(each, kinds) and each.sparse}
        return frozenset(index for index, each in enumerate(self.trainable.values()) if id(each) in weights)


def select(module: nn.Module, ignored: frozenset[nn.Module]) -> Selection:
    """Everything of the module that is not left alone, in the order of `named_parameters`."""
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
    """Whether the module has parameters or buffers without values: lazy ones, or ones on the meta device."""
    return any(nn.parameter.is_lazy(tensor) or tensor.is_meta for _, tensor in _tensors(module, ignored))


def owning_modules(module: nn.Module, ignored: frozenset[nn.Module]) -> list[nn.Module]:
    """The modules, the outermost one and those below it, that own parameters which are not left alone."""
    walked = _walk(module, _left_alone(module, ignored))
    return [each for _, each in walked if next(each.parameters(recurse=False), None) is not None]


def _placed_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Owner, attribute, fully qualified name and parameter, once for each place that a parameter has."""
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, attribute, fully_qualified(f"{prefix}.{attribute}" if prefix else attribute), parameter


def _tensors(module: nn.Module, ignored: frozenset[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer that is not left alone, once, with its name as the module has it."""
    left_alone = _left_alone(module, ignored)
    seen = {id(tensor) for each in left_alone for tensor in (*each.parameters(), *each.buffers())}
    # What torch's DDP leaves alone because the module names it: torchrec and TRL do.
    names = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = (*module.named_parameters(), *module.named_buffers()) if names else ()
    seen |= {id(tensor) for name, tensor in named if name in names or fully_qualified(name) in names}
    for prefix, submodule in _walk(module, left_alone):
        for name, tensor in (*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{prefix}.{name}" if prefix else name), tensor


def _walk(module: nn.Module, left_alone: frozenset[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules`, but not into what is left alone."""
    seen: set[nn.Module] = set()
    stack = [("", module)]
    while stack:
        name, current = stack.pop()
        if current in left_alone or current in seen:
            continue
        seen.add(current)
        yield name, current
        children = list(current.named_children())
        stack.extend((f"{name}.{child_name}" if name else child_name, child) for child_name, child in children[::-1])


def _left_alone(module: nn.Module, ignored: frozenset[nn.Module]) -> frozenset[nn.Module]:
    return ignored | {submodule for submodule in module.modules() if _is_fully_sharded(submodule)}


def _is_fully_sharded(module: nn.Module) -> bool:
    return "fully_shard" in distributed.composable_apis(module)


# --- what is refused --------------------------------------------------------------------------------------------


def check_ignored(ignored_modules: Iterable[nn.Module] | None) -> frozenset[nn.Module]:
    """The ignored modules as a set; a ConfigError if something else was given."""
    given = () if ignored_modules is None else ignored_modules
    several = isinstance(given, Iterable) and not isinstance(given, nn.Module)
    ignored: list[Any] = list(given) if several else [given]
    for each in ignored:
        if not (several and isinstance(each, nn.Module)):
            raise ConfigError(f"ignored_modules must hold modules, got {type(each).__name__}. Pass a list: [module].")
    return frozenset(ignored)


def device_of(given: int | torch.device, option: str) -> torch.device:
    """A device that was given as torch's DDP takes them: a number means that GPU."""
    if isinstance(given, bool) or not isinstance(given, (int, torch.device)) or (isinstance(given, int) and given < 0):
        raise ConfigError(f"{option} must be the number of a GPU or a torch.device, got {given!r}.")
    if isinstance(given, int):
        return torch.device("cuda", given)
    if given.type == "cuda" and given.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return given


def check_not_managed(module: nn.Module, ignored: frozenset[nn.Module], parts: Collection[nn.Module]) -> None:
    """Refuse a module that torch's DDP, FSDP or `replicate` manages already, or that shares a parameter with its parts.

    `parts`: what was replicated before. Submodules that `fully_shard` manages are left to it, the module itself is not.
    """
    inside = {below for part in parts for below in part.modules()}
    names: dict[nn.Parameter, list[tuple[bool, str]]] = {}
    for owner, _, name, parameter in _placed_parameters(module) if parts else ():
        names.setdefault(parameter, []).append((owner in inside, name))
    tied = [each for each in names.values() if len({is_inside for is_inside, _ in each}) > 1]
    if tied:
        raise ModuleError(
            f"{'; '.join(' = '.join(name for _, name in each) for each in tied)}: a tied parameter lies in a part that "
            "is replicated already, and outside of it, but it is reduced once. Replicate its modules together."
        )
    for name, submodule in _walk(module, _left_alone(module, ignored) - {module}):
        apis = distributed.composable_apis(submodule)
        managers = {
            "torch's DistributedDataParallel": distributed.is_torch_ddp(submodule),
            "FullyShardedDataParallel": distributed.is_fsdp_module(submodule),
            "fully_shard": "fully_shard" in apis,
            "torch's replicate": "replicate" in apis,
        }
        for manager in (manager for manager, manages in managers.items() if manages):
            place = f"submodule {fully_qualified(name)}" if name else class_name(module)
            raise ModuleError(f"{place} is managed by {manager} already. Use one of the two, not both.")


def check_selection(
    target: Selection, device: torch.device | None, *, copies_buffers: bool, needs_values: bool = True
) -> None:
    """Refuse what cannot be replicated, by name.

    Args:
        device: where the user says that the parameters are.
        copies_buffers: the first rank's buffers are copied to the others.
        needs_values: refuse the meta device and fake tensors too.
    """
    if not target.trainable:
        raise ModuleError(
            f"{class_name(target.module)} has no parameter that requires a gradient (outside ignored_modules, "
            "parts that are replicated already and fully_shard); there is nothing to reduce."
        )
    for name, tensor in (target.parameters | target.buffers).items() if needs_values else ():
        if nn.parameter.is_lazy(tensor):
            raise ModuleError(f"{name} is lazy. Run one forward with an example input before replicate().")
        if tensor.is_meta:
            raise ModuleError(
                f"{name} is on the meta device. Materialise the module first: module.to_empty(device=...), then "
                "initialise it."
            )
    _check_devices(target, device)
    for name, parameter in target.trainable.items():
        _check_gradient(name, parameter, fake_allowed=not needs_values)
    for name, tensor in (target.frozen | (target.buffers if copies_buffers else {})).items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ModuleError(
                f"{name} is {tensor.dtype if tensor.is_quantized else tensor.layout}: only plain strided tensors can "
                "be copied from the first rank. Pass broadcast_buffers=False, then each rank keeps its own buffers, "
                "or name the module that owns it in ignored_modules."
            )


def _check_devices(target: Selection, device: torch.device | None) -> None:
    first_name, first = next((name, each.device) for name, each in target.parameters.items())
    for name, parameter in target.parameters.items():
        found = parameter.device
        if device is not None and found != device:
            there = device.type == "cpu" or torch.accelerator.device_count() > (device.index or 0)
            remedy = f"Call module.to('{device}')." if there else "There is no such device here: leave device_id out."
            raise ConfigError(f"{name} is on {found}, device_id says {device}. {remedy}")
        if found != first:
            raise ModuleError(
                f"parameters are on several devices: {first_name} on {first}, {name} on {found}. "
                "Move the module to one device: module.to(device)."
            )


def _check_gradient(name: str, parameter: nn.Parameter, *, fake_allowed: bool) -> None:
    plain = type(parameter.data) is torch.Tensor or isinstance(parameter.data, nn.Parameter)
    if autograd.is_fake(parameter):  # A parameter of a fake mode is one of torch's parameters too.
        plain = fake_allowed
    if not (plain or is_dtensor(parameter)):
        raise ModuleError(
            f"{name} is a {type(parameter.data).__name__}; only plain tensors and DTensors are supported."
        )
    if not (parameter.is_floating_point() or parameter.is_complex()):
        raise ModuleError(f"{name} is {parameter.dtype}; gradients of floating and complex dtypes are supported.")
    # None: torch takes gradients of any dtype as they come.
    grad_dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    if grad_dtype != parameter.dtype:
        raise ModuleError(
            f"{name} is {parameter.dtype} and its grad_dtype is {grad_dtype}: gradients are reduced in their "
            f"parameter's dtype. Leave grad_dtype at {parameter.dtype}, or name the module that owns it in "
            "ignored_modules."
        )
    if owners.find(parameter) is not None:
        raise ModuleError(
            f"parameter {name} is replicated already, by a call on another module. Call replicate() on a part "
            "before the module around it. To replicate it again, call dp_compile.unreplicate() first, on the "
            "module or on its DistributedDataParallel, which some name may still hold."
        )
    if steps_in_backward(parameter):
        raise ModuleError(
            f"torch's _apply_optimizer_in_backward() was called for {name}: its hook would update with this rank's own "
            "gradient. Call dp_compile.optim.in_backward(model, optimizer) after replicate()."
        )


# --- where buckets end ------------------------------------------------------------------------------------------


def units_of(module: nn.Module, policy: BucketPolicy, left_alone: Collection[nn.Module]) -> frozenset[str]:
    """The modules that a policy names, by fully qualified name. torch's policies are not asked about `left_alone`."""
    units: Collection[nn.Module]
    if distributed.is_wrap_policy(policy):
        units = distributed.run_wrap_policy(policy, module, set(left_alone))
        if any(units.values()):
            raise ConfigError(
                "bucket_policy gives options to modules: it can say True or False. Call replicate() first on a module "
                "that has other options."
            )
    elif callable(policy):
        units = distributed.run_auto_wrap_policy(policy, module, set(left_alone))
    else:
        kinds = tuple(policy) if isinstance(policy, Collection) else ()
        is_set = bool(kinds) and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
        require(is_set, "bucket_policy", "a set of module classes or a policy of FSDP", policy)
        units = [each for each in module.modules() if isinstance(each, kinds)]
    return frozenset(fully_qualified(name) for name, each in module.named_modules() if each in units)
