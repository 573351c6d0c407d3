"""Built-in autograd functions as compiled autograd calls them, as attributes of a module: graphs that call these can
be pickled, so AOTAutograd caches their code. torch's own are not attributes of an importable module (2.11 to 2.15).
"""

from __future__ import annotations

from typing import Any

import torch

from dp_compile._torch.missing import named

with named():
    from torch._dynamo.compiled_autograd import Op as Op
    from torch._dynamo.compiled_autograd import ops as _ops


class NamedOp:
    """Calls the built-in autograd function that has this object's name in the installed torch."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(_ops, self.__name__)(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    globals()[name] = op = torch.compiler.allow_in_graph(NamedOp(name))
    return op
