"""Which modules are units of buckets: this package's policies, and torch's, which FSDP wraps by."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch import nn

from dp_compile._torch import distributed
from dp_compile.engine.module_names import class_name, fully_qualified
from dp_compile.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy  # loading it loads all of FSDP

BucketPolicy: TypeAlias = "Callable[..., bool] | Collection[type[nn.Module]] | CustomPolicy | ModuleWrapPolicy"
"""A set of classes; a function of a module's fully qualified name and the module; or one of torch's in
`torch.distributed.fsdp.wrap`: `ModuleWrapPolicy`, `CustomPolicy`, and functions with a `recurse` argument, as
`functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})` or `size_based_auto_wrap_policy`."""


CAP: Final = "bucket_cap_mb"
"""What a `CustomPolicy` may say of a module, beside that it is a unit."""


def units_of(
    module: nn.Module,
    policy: BucketPolicy,
    left_alone: Collection[nn.Module] = (),
    *,
    option: str = "bucket_policy",
) -> frozenset[str]:
    """The modules that a policy names, by fully qualified name; see `caps_of`."""
    return frozenset(caps_of(module, policy, left_alone, option=option))


def caps_of(
    module: nn.Module,
    policy: BucketPolicy,
    left_alone: Collection[nn.Module] = (),
    *,
    option: str = "bucket_policy",
) -> dict[str, float]:
    """The modules that a policy names, by fully qualified name, with the MiB at which their buckets are closed.

    Infinity but where a `CustomPolicy` answers `{"bucket_cap_mb": MiB}`.

    Args:
        module: the whole.
        policy: which of its modules are units.
        left_alone: modules that are not replicated. torch's policies are not asked about them.
        option: what the policy was given as. Of buckets only it may say more than which modules are units.

    Raises:
        ConfigError: the policy is none of the kinds above, or answers something that it may not.
    """
    caps: dict[nn.Module, float] = {}
    if distributed.is_wrap_policy(policy):
        caps = dict(_by_wrap_policy(module, policy, left_alone, option))
        chosen = set(caps)
    elif not callable(policy):
        kinds = tuple(policy) if isinstance(policy, Collection) else ()
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
            raise ConfigError(
                f"{option} must be a function, a set of module classes or a policy of FSDP, got {policy!r}."
            )
        chosen = {each for each in module.modules() if isinstance(each, kinds)}
    elif _is_recursive(policy):
        chosen = set(_by_recursion(module, policy, left_alone))
    else:
        answers = [(each, policy(fully_qualified(name), each), name) for name, each in module.named_modules()]
        odd = [(name, answer) for _, answer, name in answers if not isinstance(answer, bool)]
        if odd:
            name, answer = odd[0]
            raise ConfigError(f"{option} must return True or False, returned {answer!r} for '{name}'.")
        chosen = {each for each, answer, _ in answers if answer}
    named = {fully_qualified(name): each for name, each in module.named_modules() if each in chosen}
    return {name: caps.get(each, math.inf) for name, each in named.items()}


def modules_named(module: nn.Module, given: Iterable[type[nn.Module] | str], option: str) -> dict[str, nn.Module]:
    """The submodules of these classes or names, by fully qualified name.

    Raises:
        ConfigError: a name is not one of the module's; the text has all such names.
    """
    given = tuple(given)
    kinds = tuple(each for each in given if not isinstance(each, str))
    names = {each for each in given if isinstance(each, str)}
    named = {name: each for name, each in module.named_modules() if name}
    if missing := names - {*named, *map(fully_qualified, named)}:
        raise ConfigError(
            f"{option} names {', '.join(repr(each) for each in sorted(missing))}, which {class_name(module)} does not "
            "have. Give classes, or names as in named_modules()."
        )
    return {
        fully_qualified(name): each
        for name, each in named.items()
        if isinstance(each, kinds) or {name, fully_qualified(name)} & names
    }


def _by_wrap_policy(
    module: nn.Module, policy: object, left_alone: Collection[nn.Module], option: str
) -> Iterator[tuple[nn.Module, float]]:
    names = {each: name for name, each in module.named_modules()}
    allowed = {CAP} if option == "bucket_policy" else set()
    for each, given in distributed.run_wrap_policy(policy, module, set(left_alone)).items():
        name = names[each] or "the module itself"
        if odd := sorted(given.keys() - allowed):
            can = f"Buckets have {CAP} only" if allowed else "It can say True or False"
            raise ConfigError(
                f"{option} gives arguments of its own to {name}: {', '.join(odd)}. {can}; pass other options to "
                "replicate(), dtypes as mp_policy."
            )
        cap_mb = given.get(CAP, math.inf)
        if isinstance(cap_mb, bool) or not isinstance(cap_mb, (int, float)) or not cap_mb > 0:
            raise ConfigError(f"bucket_policy gives {name} {CAP}={cap_mb!r}: it must be a number of MiB > 0.")
        yield each, float(cap_mb)


def _is_recursive(policy: Callable[..., Any]) -> bool:
    try:
        return "recurse" in inspect.signature(policy).parameters
    except (TypeError, ValueError):  # a function written in C
        return False


def _by_recursion(
    module: nn.Module, policy: Callable[..., bool], left_alone: Collection[nn.Module]
) -> Iterator[nn.Module]:
    """From the leaves up: a module is asked how it stands to the elements that no unit below it has.

    Source: `_recursive_wrap` of torch's `fsdp/wrap.py`.
    """
    ignored = {parameter for each in left_alone for parameter in each.parameters()}

    def walk(current: nn.Module) -> Iterator[tuple[nn.Module, int]]:
        """The units at and below a module, with the elements of each that no unit below it has."""
        numel = sum(parameter.numel() for parameter in current.parameters() if parameter not in ignored)
        if not policy(module=current, recurse=True, nonwrapped_numel=numel):
            return
        remainder = numel
        for child in current.children():
            for unit, own in walk(child) if child not in left_alone else ():
                remainder -= own
                yield unit, own
        if policy(module=current, recurse=False, nonwrapped_numel=remainder):
            yield current, remainder

    for unit, _ in walk(module):
        yield unit
