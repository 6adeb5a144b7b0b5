"""Runs in processes of their own, which a fault can kill or limit."""

import os
import resource
import signal
import sys
from pathlib import Path

WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def single(folder):
    """A run on a task, from its start or from where it is."""
    from tiny_runs import run, tiny

    run(tiny(), folder)


def trial(folder, kill_at=None, counted=None, job=single):
    """A run that kills itself at an event that changes the file system below its folder.

    Args:
        folder: of the run.
        kill_at: the number of the event, from 0; None for never.
        counted: a file for the number of all events.
        job: what runs in the folder.
    """
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
    job(folder)
    if counted is not None:
        Path(counted).write_text(str(count))


COMPARED = {
    "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 128, "train_length": 8, "pairs": (2,), "steps": 4,
    "batch_size": 4, "test_examples": 8, "validation_examples": 8, "save_every": 2, "validate_every": 2,
}  # fmt: skip


def compare(folder, models=("mamba2", "llama")):
    """A comparison of models, from its start or from where it is."""
    from halflife.lab.experiments.compare import create_comparison, run_comparison

    if not (folder / "config.json").exists():
        create_comparison(models, settings=COMPARED, output=folder)
    run_comparison(folder, show=False)


def trial_of_comparison(folder, kill_at=None, counted=None):
    """`trial` for a comparison."""
    trial(folder, kill_at, counted, job=compare)


def limited(folder, size):
    """A run whose files may have `size` bytes; exit code 5 after an OSError, which names the folder."""
    from tiny_runs import run, tiny

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the system then refuses the write instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        run(tiny(), folder)
    except OSError as error:
        sys.exit(5 if str(folder) in str(error) else 6)
