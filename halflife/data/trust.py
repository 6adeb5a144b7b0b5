"""What a saved run of somebody else may make this machine read.

`run.json` and the `config.json` of a comparison name files, data sets and tokenizers of the Hub, and modules. A resumed
run reads them. The commands therefore sign what they write, with a random key of the user (HMAC-SHA256). A file without
a right signature may name texts in its own folder and below the current folder only, until the user confirms it.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from halflife import extensions
from halflife.data.documents import PYTHON, find, is_name
from halflife.data.tokenizers import OF_BYTES
from halflife.files import finite, read_json_object, sync, write_json

SIGNATURE = "signature"  # a key of the JSON object
VARIABLE = "HALFLIFE_KEY"  # the environment variable with the path of the key
KEY_BYTES = 32  # bytes of the key


def sign(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with a signature; without one if the key cannot be made or read."""
    content = unsigned(saved)
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        return {**content, SIGNATURE: _signature(content)}
    return content


def unsigned(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON file without its signature."""
    return {name: x for name, x in saved.items() if name != SIGNATURE}


def confirm(path: Path) -> None:
    """Sign a file that somebody else wrote, because the user trusts it."""
    if path.is_file():
        saved = unsigned(read_json_object(path))
        write_json(path, {**saved, SIGNATURE: _signature(saved)})


def check_origin(
    saved: Mapping[str, Any],
    path: Path,
    sources: Sequence[str | Path] = (),
    files: Sequence[Sequence[str]] = (),
    tokenizer: str = "bytes",
) -> None:
    """Raise a ValueError unless this user signed a file, or what it names lies in its folder or below the current
    folder.

    `saved` is the content of the file. `sources`, `files` and `tokenizer` are the text that it names, as in
    `CorpusConfig`, with absolute paths.
    """
    with suppress(OSError, RuntimeError):
        if hmac.compare_digest(str(saved.get(SIGNATURE)).encode(), _signature(unsigned(saved)).encode()):
            return
    named = [f"the module {name}" for name in saved.get(extensions.IMPORTS, ()) if name not in extensions.names()]
    local = Path(tokenizer).is_dir() and _near(tokenizer, path.parent)  # otherwise it is one of the Hub, or elsewhere
    if tokenizer not in OF_BYTES and not local:
        named.append(f"the tokenizer {tokenizer}")
    named += [str(place) for place in _foreign(path.parent, sources, files)]
    if named:
        raise ValueError(
            f"{path} was not written with your key, and a resumed run would read {', '.join(named[:3])}"
            f"{f' and {len(named) - 3} more' if len(named) > 3 else ''}. If you want this, give --trust-data"
        )


def _foreign(folder: Path, sources: Sequence[str | Path], files: Sequence[Sequence[str]]) -> Iterator[str | Path]:
    """Yield the places of a text that lie neither in a folder nor below the current one."""
    for i, source in enumerate(sources):
        if is_name(source):
            if source != PYTHON:
                yield source
        elif i < len(files) and files[i]:
            yield from (place for place in files[i] if not _near(place, folder))
        elif not _near(source, folder):
            yield source
        else:
            with suppress(FileNotFoundError):  # the run will name it
                # A link can lead out of the folder.
                yield from (place for place in find([source]) if not _near(place, folder))


def _near(place: str | Path, folder: Path) -> bool:
    """Whether a path lies in a folder, or below the current folder outside of hidden folders."""
    real, here = Path(place).resolve(), Path.cwd().resolve()
    if real.is_relative_to(folder.resolve()):
        return True
    return real.is_relative_to(here) and not any(part.startswith(".") for part in real.relative_to(here).parts)


def _signature(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(finite(dict(content))))  # as it will be read
    return hmac.digest(_key(), json.dumps(plain, sort_keys=True).encode(), "sha256").hex()


def _key() -> bytes:
    """The user's key, which is made when it is first needed. Others cannot read its file."""
    path = Path(os.environ.get(VARIABLE) or Path.home() / ".config/halflife/key").expanduser()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # of mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            sync(Path(temporary))
            with suppress(FileExistsError):  # another process was faster
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    if len(key := path.read_bytes()) != KEY_BYTES:
        raise OSError(f"{path} holds no key of {KEY_BYTES} bytes; remove it")
    return key
