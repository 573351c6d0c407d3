"""What this process compiled or found, torch's and ours, as one blob that another machine of the same kind can load."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from dp_compile._torch import mega_cache
from dp_compile.engine import artifacts
from dp_compile.engine.artifact_files import write_file

logger = logging.getLogger("dp_compile.kept")


def save_cache_artifacts() -> tuple[bytes, Any] | None:
    """As `torch.compiler.save_cache_artifacts`, with the backwards that are kept (`DP_COMPILE_CACHE`).

    Load it with `load_cache_artifacts` of this package: torch's own refuses a blob with a kind that it does not know.

    Returns:
        The blob, and torch's `CacheInfo` of what is in it; `None` if nothing was compiled.
    """
    found: tuple[bytes, Any] | None = mega_cache.save(_used())
    return found


def load_cache_artifacts(serialized_artifacts: bytes) -> Any:
    """As `torch.compiler.load_cache_artifacts`, for what `save_cache_artifacts` of this package gave, or torch's.

    What does not fit the torch, the machine or the sources of the process that loads it is never served.

    Args:
        serialized_artifacts: the blob.

    Returns:
        torch's `CacheInfo` of what is in it; `None` if it cannot be read.
    """
    return mega_cache.load(serialized_artifacts, _write)


def _used() -> Iterator[tuple[str, bytes]]:
    for name in sorted(artifacts.used):
        with contextlib.suppress(OSError):
            yield name, (artifacts.directory() / name).read_bytes()


def _write(name: str, content: bytes) -> None:
    if re.fullmatch("[0-9a-f]{32}/[0-9a-f]{32}", name) is None:
        logger.warning("a kept backward is not loaded, its name is none of ours: %r", name)
        return
    try:
        write_file(artifacts.directory() / name, content)
    except OSError as error:
        logger.warning("a kept backward is not loaded: %s", error)
