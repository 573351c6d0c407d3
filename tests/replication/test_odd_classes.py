"""Modules of unusual classes: the wrapper leaves a class alone; `replicate` swaps it, or names the wrapper."""

from __future__ import annotations

import abc
from typing import Any

import pytest
import torch
from torch import nn

import dp_compile

AOT = dp_compile.ReplicateConfig(backend="aot_eager")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Mixin(abc.ABC):  # noqa: B024
    """In front of `nn.Module`: objects of two such classes have layouts that Python takes for different."""


class MixinFirst(Mixin, Plain):
    pass


class Refusing(type):
    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any) -> Any:
        if "forward" not in body:
            raise TypeError("every class has to define forward")
        return super().__new__(cls, name, bases, body, **kwargs)


class OfRefusing(Plain, metaclass=Refusing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class StoresElsewhere(Plain):
    """Assigns all that it is given, the class too, to another object, and finds it there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("training", "layer") or (name[0] == "_" and name != "__class__"):
            super().__setattr__(name, value)
        else:
            vars(self).setdefault("elsewhere", {})[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class OurNames(Plain):
    """Children and a method with names that methods and wrappers of ours, or of torch's, have."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self._orig_mod, self.no_sync = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def set_requires_gradient_sync(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.set_requires_gradient_sync(self._orig_mod(self.module(self.no_sync(self.layer(x)))))


def graph_module() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


def script_module() -> nn.Module:
    return torch.jit.script(nn.Linear(4, 4))


KINDS: dict[str, Any] = {
    "metaclass": OfRefusing,
    "mixin": MixinFirst,
    "stores": StoresElsewhere,
    "names": OurNames,
    "graph": graph_module,
    "script": script_module,
}


def gradients(module: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    for step in range(2):
        module.zero_grad()
        if step and isinstance(module, torch.fx.GraphModule):
            (relu,) = module.graph.find_nodes(op="call_module", target="1")
            with module.graph.inserting_after(relu):
                relu.replace_all_uses_with(doubled := module.graph.call_function(torch.mul, (relu, 2.0)))
            doubled.args = (relu, 2.0)
            module.recompile()
        model(torch.ones(2, 4) + step).square().mean().backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_every_class_trains(kind: str) -> None:
    """The wrapper takes all, `replicate` swaps the class. The sum of the fake group is this rank's half."""
    for swapped in (False, True) if kind != "metaclass" else (False,):
        torch.manual_seed(1)
        alone = KINDS[kind]()
        torch.manual_seed(1)
        module = KINDS[kind]()
        own = type(module)
        model = (dp_compile.replicate if swapped else dp_compile.DistributedDataParallel)(module, config=AOT)
        assert (type(module) is not own) is swapped
        assert issubclass(type(module), own)
        found = [2 * each for each in gradients(module, model)]
        torch.testing.assert_close(found, gradients(alone, alone))
    if kind == "metaclass":
        module = OfRefusing()
        with pytest.raises(
            dp_compile.UnsupportedModuleError, match=r"Use dp_compile.DistributedDataParallel\(module\)"
        ):
            dp_compile.replicate(module)
        dp_compile.DistributedDataParallel(module)  # nothing of the attempt is left
