"""What the commands share that start long jobs and go on with them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def only(command: Any, *allowed: str) -> None:
    """An error if options beside the allowed ones are given: a resumed job has its own."""
    changed = [
        f.name for f in dataclasses.fields(command)
        if f.name not in allowed and getattr(command, f.name) != f.default
    ]  # fmt: skip
    if changed:
        raise ValueError(f"--resume takes all settings from the folder; leave out {', '.join(changed)}")


@contextmanager
def resumable(command: str) -> Iterator[None]:
    """Ctrl-C, or SIGTERM of a job that saves on it, ends the job with the command that goes on with it."""
    from halflife.training.fit import StoppedBySignal

    try:
        yield
    except StoppedBySignal as stopped:
        print(f"\n{stopped}; go on with: {command}", file=sys.stderr)
        raise SystemExit(143) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with: {command}", file=sys.stderr)
        raise SystemExit(130) from None
