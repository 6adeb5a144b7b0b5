"""Runs in processes of their own, which a fault can kill or limit."""

import os
import resource
import signal
import sys
from pathlib import Path

WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def trial(folder, kill_at=None, counted=None):
    """A run that kills itself at an event that changes the file system below its folder.

    Args:
        folder: of the run.
        kill_at: the number of the event, from 0; None for never.
        counted: a file for the number of all events.
    """
    from tiny_runs import run, tiny

    count = 0

    def hook(event, arguments):
        nonlocal count
        writes = event in WRITES or (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        )
        if writes and str(arguments[0]).startswith(str(folder)):
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)
    run(tiny(), folder)
    if counted is not None:
        Path(counted).write_text(str(count))


def limited(folder, size):
    """A run whose files may have `size` bytes; exit code 5 after an OSError, which names the folder."""
    from tiny_runs import run, tiny

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the system then refuses the write instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        run(tiny(), folder)
    except OSError as error:
        sys.exit(5 if str(folder) in str(error) else 6)
