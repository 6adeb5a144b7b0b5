"""The processes of a Ray cluster that belongs to one driver: they are marked, watched, and ended with the driver.

`python cluster.py MARK` waits for the end of its standard input, which the driver holds open, and then kills what is
left of the cluster. So nothing is left after a driver that was killed. This file imports the standard library alone.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "HALFLIFE_CLUSTER"  # a variable in the environment of the cluster's processes
SERVERS = ("gcs_server", "raylet")  # programs without which a cluster does no work
KILL_WITHIN = 20.0  # seconds


@contextmanager
def marked() -> Iterator[str]:
    """Mark the processes that start inside, and kill those that are left at the end, or when this process ends.

    Where the system has no `/proc`, nothing is seen, and nothing is killed.
    """
    mark = secrets.token_hex(16)
    warden = subprocess.Popen([sys.executable, "-I", __file__, mark], stdin=subprocess.PIPE, start_new_session=True)
    assert warden.stdin is not None
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        os.environ.pop(MARK, None)
        warden.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            warden.wait(KILL_WITHIN + 5)


def members(mark: str) -> dict[int, str]:
    """The processes with this mark: number → command line."""
    found = {}
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to somebody else
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")
    return found


def servers(mark: str) -> set[str]:
    """The names of the servers of a cluster that run now."""
    programs = {Path(command.partition(" ")[0]).name for command in members(mark).values()}
    return programs & set(SERVERS)


def kill(mark: str) -> None:
    """Kill all processes with this mark, and those that they start meanwhile."""
    deadline = time.monotonic() + KILL_WITHIN
    while (found := members(mark)) and time.monotonic() < deadline:
        for number in found:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill(sys.argv[1])
