"""What `dp_compile` logs, at which level, and the switch that shows it.

| level   | logger              | what, each once                                                                  |
|---------|---------------------|----------------------------------------------------------------------------------|
| WARNING | `backward`          | the forward is not compiled, torch's reducer reduces; a backward is not captured |
|         | `capture`           | a backward that is not compiled any more, or not at all                          |
|         | `compilation`       | a backward that breaks into several graphs                                       |
|         | `drift`             | parameters are not compared between ranks, for machines differ                   |
|         | `dumps`             | graphs are not dumped any more, and why                                          |
|         | `settling`          | the plan stays although it was to be made anew; the cost of the link stays       |
|         | `replicated_module` | a comm hook reduces                                                              |
|         | `measuring`         | nothing was measured, and why                                                    |
|         | `monitor`           | a backward waits for other ranks; again each time the wait has doubled           |
|         | `probe`             | it could not be tried out whether this torch behaves as it has to                |
|         | `logs`              | the switch has a value that is not allowed                                       |
| INFO    | `replicate`         | the first plan: strategy, buckets, predicted end, ratio to the bound, basis      |
|         | `settling`          | each plan that is made anew, in the same words                                   |
|         | `backward`          | hooks take over from torch's reducer                                             |
|         | `drift`             | after how many backwards parameters are compared                                 |
|         | `measuring`         | what `measure()` saw                                                             |
| DEBUG   | `compilation`       | each graph that is compiled                                                      |

A fallback is said once for each module, not in each step. Without the switch nothing is installed and no level is set:
your own `logging` configuration counts, and without any Python shows warnings on stderr (`logging.lastResort`; a
`NullHandler` would hide them). With it, in the manner of TORCH_LOGS:

    DP_COMPILE_LOGS=info                    all loggers from INFO on, to stderr, with the rank
    DP_COMPILE_LOGS=info,settling=debug     another level for one of them
    DP_COMPILE_LOGS=compilation=debug       only that one; all others as before, WARNING

It is read once, at import. Records then go to that handler and no longer to the root logger's, so that nothing is
shown twice. A value that is not allowed is one warning, not an error: a training job must not die of its log switch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import torch.distributed as dist

from dp_compile.errors import ConfigError

VARIABLE: Final = "DP_COMPILE_LOGS"
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
LOGGERS: Final = (
    "backward",
    "capture",
    "compilation",
    "drift",
    "dumps",
    "logs",
    "measuring",
    "monitor",
    "probe",
    "replicate",
    "replicated_module",
    "settling",
)
"""What logs something, by the name that the switch and Python's `logging` have for it (below `dp_compile.`): a name of
its own, for the module that logs may move to another room. A test compares with the code."""

_PACKAGE: Final = "dp_compile"
_FORMAT: Final = "[rank %(rank)s] %(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger("dp_compile.logs")


def parse_levels(text: str) -> dict[str, int]:
    """Levels by logger, `""` for all: `info,settling=debug` → `{"": 20, "settling": 10}`.

    Raises:
        ConfigError: an unknown level or logger, or one given twice.
    """
    levels: dict[str, int] = {}
    for item in filter(None, (each.strip().lower() for each in text.split(","))):
        name, _, level = item.rpartition("=")
        if level not in LEVELS:
            raise ConfigError(f"{VARIABLE}={text}: unknown level '{level}', allowed are {', '.join(LEVELS)}.")
        if name and name not in LOGGERS:
            raise ConfigError(f"{VARIABLE}={text}: nothing is logged by '{name}', only by {', '.join(LOGGERS)}.")
        if name in levels:
            raise ConfigError(f"{VARIABLE}={text}: two levels for {name or 'all loggers'}, give one.")
        levels[name] = LEVELS[level]
    return levels


def configure(levels: Mapping[str, int]) -> None:
    """Show records of `dp_compile` on stderr from these levels on; other libraries' loggers stay as they are."""
    package = logging.getLogger(_PACKAGE)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_note_rank)
    package.addHandler(handler)
    package.propagate = False
    package.setLevel(levels.get("", logging.WARNING))
    for name in levels.keys() - {""}:
        logging.getLogger(f"{_PACKAGE}.{name}").setLevel(levels[name])


def configure_from_environment() -> None:
    """What `DP_COMPILE_LOGS` asks for; nothing if it is not set."""
    try:
        levels = parse_levels(os.environ.get(VARIABLE, ""))
    except ConfigError as error:
        logger.warning("%s The switch does nothing.", error)
        return
    if levels:
        configure(levels)


class Module(Protocol):
    """What something can be said of once."""

    @property
    def said(self) -> set[str]: ...


def warn_once(logger: logging.Logger, modules: Iterable[Module], message: str, *args: object, key: str = "") -> None:
    """Warn, unless that was said of each of these modules before.

    Args:
        logger: who warns.
        modules: whom it is about.
        message: with places for `args`.
        key: what may not be said twice; `message` as it stands if not given, so that `args` do not count.
    """
    new = [module for module in modules if (key or message) not in module.said]
    for module in new:
        module.said.add(key or message)
    if new:
        logger.warning(message, *args)


def _note_rank(record: logging.LogRecord) -> bool:
    initialized = dist.is_available() and dist.is_initialized()
    record.rank = dist.get_rank() if initialized else os.environ.get("RANK", "-")
    return True
