"""The cache folder, which holds downloads and tokenised corpora."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder(cache: Path | None = None) -> Path:
    """The cache folder: `cache` if given, otherwise `$HALFLIFE_CACHE`, otherwise `~/.cache/halflife`."""
    return (cache or Path(os.environ.get("HALFLIFE_CACHE") or Path.home() / ".cache/halflife")).expanduser()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Allow one process at a time to make `path`. The others wait, and print that they wait."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is making {path}; waiting for it", file=sys.stderr)
        held = lock.acquire()
    with held:
        yield
