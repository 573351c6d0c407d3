"""Which modules are units of buckets: classes, a function, or a policy by which FSDP wraps modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from dp_compile._torch import distributed
from dp_compile.engine.module_names import fully_qualified
from dp_compile.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # loading it loads all of FSDP

BucketPolicy: TypeAlias = "Callable[..., bool] | Collection[type[nn.Module]] | ModuleWrapPolicy"
"""A set of classes; a function of a module's fully qualified name and the module; or one of torch's in
`torch.distributed.fsdp.wrap`: `ModuleWrapPolicy`, and functions with a `recurse` argument, as
`functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})`."""


def units_of(module: nn.Module, policy: BucketPolicy, left_alone: Collection[nn.Module] = ()) -> frozenset[str]:
    """The modules that a policy names, by fully qualified name.

    Args:
        module: the whole.
        policy: which of its modules are units.
        left_alone: modules that are not replicated. torch's policies are not asked about them.

    Raises:
        ConfigError: the policy is none of the kinds above, or answers something else than `True` or `False`.
    """
    named = [(fully_qualified(name), each) for name, each in module.named_modules()]
    if distributed.is_wrap_policy(policy):
        given = distributed.run_wrap_policy(policy, module, set(left_alone))
        if odd := sorted(name or "the module itself" for name, each in named if given.get(each)):
            raise ConfigError(
                f"bucket_policy gives options to {', '.join(odd)}: it can say True or False. Call replicate() first on "
                "a module that has other options."
            )
        chosen = set(given)
    elif not callable(policy):
        kinds = tuple(policy) if isinstance(policy, Collection) else ()
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
            raise ConfigError(
                f"bucket_policy must be a function, a set of module classes or a policy of FSDP, got {policy!r}."
            )
        chosen = {each for _, each in named if isinstance(each, kinds)}
    elif _is_recursive(policy):
        ignored = {parameter for each in left_alone for parameter in each.parameters()}
        chosen = {unit for unit, _ in _by_recursion(module, policy, left_alone, ignored)}
    else:
        answers = {each: (name, policy(name, each)) for name, each in named}
        for name, answer in answers.values():
            if not isinstance(answer, bool):
                raise ConfigError(f"bucket_policy must return True or False, returned {answer!r} for '{name}'.")
        chosen = {each for each, (_, answer) in answers.items() if answer}
    return frozenset(name for name, each in named if each in chosen)


def _is_recursive(policy: Callable[..., bool]) -> bool:
    try:
        return "recurse" in inspect.signature(policy).parameters
    except (TypeError, ValueError):  # a function written in C
        return False


def _by_recursion(
    current: nn.Module, policy: Callable[..., bool], left_alone: Collection[nn.Module], ignored: set[nn.Parameter]
) -> Iterator[tuple[nn.Module, int]]:
    """The units at and below a module, with the elements of each that no unit below it has.

    Source: `_recursive_wrap` of torch's `fsdp/wrap.py`.
    """
    remainder = numel = sum(parameter.numel() for parameter in current.parameters() if parameter not in ignored)
    if not policy(module=current, recurse=True, nonwrapped_numel=numel):
        return
    for child in current.children():
        for unit, own in _by_recursion(child, policy, left_alone, ignored) if child not in left_alone else ():
            remainder -= own
            yield unit, own
    if policy(module=current, recurse=False, nonwrapped_numel=remainder):
        yield current, remainder
