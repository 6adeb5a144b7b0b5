"""What the faults of `table.py` do to a folder."""

import json
import os
import random
import time
from pathlib import Path

from halflife.files import write_json
from halflife.training.checkpoints import checksums


def each(folder, where):
    """The files that a row names: `a+b/name` stands for a/name and b/name, in the folder of the second's parent."""
    first, plus, rest = where.partition("+")
    if not plus:
        return [folder / where]
    return [folder / first / Path(rest).name, folder / rest]


def flip(path):
    """One bit of the second half, where the content is."""
    data = bytearray(path.read_bytes())
    data[random.Random(path.name).randrange(len(data) // 2, len(data))] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def garbage(path):
    path.write_bytes(b"\xff\x00[" * 100)


def remove(path):
    path.unlink()


def remove_tree(path):
    import shutil

    shutil.rmtree(path)


def file_instead(path):
    remove_tree(path) if path.is_dir() else path.unlink()
    path.write_text("x")


def _times(path, seconds):
    for each in path.rglob("*"):
        os.utime(each, (time.time() + seconds,) * 2)


def future(path):
    _times(path, 1e7)


def past(path):
    _times(path, -1e8)


def extra(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def remarked(path):
    """A half-written file that the checksums cover, as when a dead process wrote it."""
    path.write_bytes(b"half")
    write_json(path.parent / "complete.json", checksums(path.parent))


def half_line(path):
    with path.open("a") as file:
        file.write('{"step": 9, "lo')


def edit(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "learning_rate": 0.5}))
