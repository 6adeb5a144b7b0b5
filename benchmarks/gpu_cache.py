"""Our Triton kernels compiled before a GPU is at hand, in a folder that travels: `python benchmarks/gpu_cache.py`.

Triton finds a compiled kernel by a hash of its own files, the kernel's code and line, the arguments' types, values and
alignments, the options, the version of ptxas, the architecture, and some environment variables. None of them depends on
the machine, so the same wheel of Triton finds it there. Only the lists of files hold absolute paths; `relocate` mends
them. Inside `watching`, kernels of ours that are compiled after all are noted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
CACHE = FOLDER.parent / ".triton-gpu"
STAMP = "stamp.json"


def stamp() -> dict[str, Any]:
    """What the compiled kernels depend on: the release of Triton and the sources of our kernels."""
    import triton
    from offline_sources import sources

    return {"triton": triton.__version__, "sources": sources()}


def use(folder: Path) -> str | None:
    """Let Triton read its kernels from `folder`; return the reason if they are not those of today, or None.

    This must run before a process launches a kernel. Other processes have it from the environment.
    """
    try:
        found = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except OSError:
        return f"there is no {folder.name}/{STAMP}; python benchmarks/gpu_cache.py makes it"
    if found != (now := stamp()):
        return f"{folder.name} is of Triton {found['triton']} and other kernels; Triton {now['triton']} is installed"
    relocate(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return None


def relocate(folder: Path) -> None:
    """Let the lists of files in a cache of Triton point to files beside them."""
    for file in folder.glob("*/__grp__*.json"):
        paths = json.loads(file.read_text(encoding="utf-8"))["child_paths"]
        paths = {name: str(file.parent / Path(path).name) for name, path in paths.items()}
        file.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")


@contextlib.contextmanager
def watching() -> Iterator[dict[str, list[str]]]:
    """Note the kernels of ours that are taken from a cache ("hits"), and those that are compiled ("compiled")."""
    seen: dict[str, list[str]] = {"hits": [], "compiled": []}
    try:
        from triton import knobs
    except ImportError:
        yield seen
        return

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if src.fn.fn.__module__.startswith("halflife."):
            seen["hits" if cache_hit else "compiled"].append(src.name)

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield seen
    finally:
        knobs.compilation.listener = before


def fill(folder: Path, runs: list[Callable[[], object]], target: str = "sm_90") -> int:
    """Compile every kernel of ours that the functions launch, in all configurations, and return their number.

    The functions run on tensors of the meta device.
    """
    import offline_kernels
    from triton.runtime import autotuner

    os.environ["TRITON_CACHE_DIR"] = str(folder)

    def each(tuner: Any, *args: Any, **options: Any) -> None:
        for config in tuner.configs:
            tuner.fn.run(*args, **options, **config.all_kwargs())

    launches: list[offline_kernels.Launch] = []
    with offline_kernels.captured(launches, target):
        autotuner.Autotuner.run = each  # `captured` restores it
        for run in runs:
            run()
    from triton import knobs

    knobs.compilation.store_binary_only = True  # a tenth of the bytes
    with watching() as seen:
        for launch in launches:
            offline_kernels.compiled(launch, target)
    (folder / STAMP).write_text(json.dumps(stamp()), encoding="utf-8")
    return len(seen["compiled"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=CACHE)
    parser.add_argument("--target", default="sm_90", choices=("sm_90", "sm_80"))
    arguments = parser.parse_args()
    import gpu_jobs

    count = fill(arguments.folder, gpu_jobs.launching(torch.device("meta")), arguments.target)
    size = sum(file.stat().st_size for file in arguments.folder.rglob("*") if file.is_file()) / 1e6
    print(f"{count} kernels compiled; {arguments.folder} has {size:.0f} MB")


if __name__ == "__main__":
    main()
