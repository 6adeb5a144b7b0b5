"""Parts that commands share: options from a file, jobs that resume, and the default device."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

from halflife import extensions
from halflife.cli.groups import option_types, options_of, replace_options
from halflife.registry import construct, unknown

Command = TypeVar("Command")
NOT_IN_FILES = ("config", "resume", "trust_data")
EXIT_PARTLY_FAILED = 3  # the exit code of a command that has ended its work, of which a part failed or diverged


def read_options(command: Command) -> Command:
    """Return the command with the options of its file `command.job.config`, and defaults for all others.

    The file is YAML or JSON. Keys are the options' names, with "-" or "_"; `set` is a list of `group.option=value` or a
    mapping. An unknown key, or a value of the wrong type, is a ValueError.
    """
    from halflife.lab.experiments.values import convert, load_yaml

    file: Path = command.job.config  # pyright: ignore[reportAttributeAccessIssue] (commands with a file have it)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}, which --config names")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from None
    written = load_yaml(text, str(file)) or {}
    if not isinstance(written, Mapping):
        raise ValueError(f"{file} must hold a mapping from options to values")
    hints = {name: hint for name, hint in option_types(type(command)).items() if name not in NOT_IN_FILES}
    options = {}
    for key, value in written.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise unknown(f"option in {file}:", str(key), [*hints])
        value = _entries(value) if name == "set" else value
        options[name] = convert(f"{key} in {file}", value, hints[name])
    return construct(type(command), options)


def _entries(overrides: Any) -> Any:
    """A mapping of overrides as the list that `--set` takes: `{"mixer": {"power": 2}}` → `["mixer.power=2"]`."""
    if not isinstance(overrides, Mapping):
        return overrides
    entries = {}
    for name, value in overrides.items():
        is_group = isinstance(value, Mapping) and "." not in name
        entries |= {f"{name}.{option}": own for option, own in value.items()} if is_group else {name: value}
    return [f"{name}={json.dumps(value)}" for name, value in entries.items()]


def take_overrides(command: Command, options: Mapping[str, str]) -> tuple[Command, dict[str, Any]]:
    """Return the command after its `--set` entries that are options of the command, and the other entries by name.

    `options` maps such entries to names of options.
    """
    from halflife.lab.experiments.overrides import parse_overrides
    from halflife.lab.experiments.values import convert

    overrides = parse_overrides(command.job.set)  # pyright: ignore[reportAttributeAccessIssue]
    hints = option_types(type(command))
    own = {options[n]: convert(n, value, hints[options[n]]) for n, value in overrides.items() if n in options}
    return replace_options(command, own), {name: value for name, value in overrides.items() if name not in options}


def check_job(command: Any, name: str, *allowed: str) -> None:
    """Check the job of a command, and sign the file `name` of the folder where --trust-data asks for it.

    The options `allowed` may be given with --resume, beside those that confirm the origin or print less. Others are a
    ValueError, because a resumed job has its settings.
    """
    from halflife.data.trust import confirm

    job, options = command.job, options_of(command)
    if options["gpus"] is not None and not job.dry_run:
        raise ValueError("--gpus belongs to --dry-run, which says what each of them would need")
    if job.resume is None:
        if job.trust_data:
            raise ValueError("--trust-data belongs to --resume, whose folder somebody else may have written")
        return
    allowed, defaults = ("resume", "trust_data", "quiet", *allowed), options_of(type(command)())
    if given := [k for k, value in options.items() if k not in allowed and value != defaults[k]]:
        raise ValueError(f"--resume takes all settings from the folder; leave out {', '.join(given)}")
    if job.trust_data:
        confirm(job.resume / name)


def to_type(*words: str) -> str:
    """The words after `halflife` as a line to type, with the extensions and the launcher of this command."""
    processes = os.environ.get("LOCAL_WORLD_SIZE")  # which torchrun sets
    start = ["halflife"] if processes is None else ["torchrun", "--nproc-per-node", processes, "-m", "halflife.cli"]
    return shlex.join([*start, *(word for name in extensions.names() for word in ("--import", name)), *words])


def command_line() -> str:
    """This command as it was typed."""
    return shlex.join(["halflife", *sys.argv[1:]])


@contextmanager
def resumable(command: str, begun: Path) -> Iterator[None]:
    """End an interrupted job (Ctrl-C, or a signal on which it saves) with a message that shows `command`, to resume it.

    Without the file `begun` there is nothing to resume. Of the processes of torchrun the first one says it.
    """
    from halflife.training.fit import StoppedBySignal

    try:
        yield
    except StoppedBySignal as stopped:
        _say_once(f"\n{stopped}; resume with: {command}")
        raise SystemExit(128 + stopped.number) from None
    except KeyboardInterrupt:
        hint = f"resume with: {command}" if begun.exists() else "nothing was written yet, so give the command again"
        _say_once(f"\ninterrupted; {hint}")
        raise SystemExit(130) from None


def _say_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def silence_stdout() -> None:
    """Send what is printed from now on nowhere, after the reader of a pipe has gone away."""
    with suppress(OSError, ValueError):  # a stream without a descriptor, or a closed one
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def say(text: str) -> None:
    """Print a line of a long job, which goes on if the reader of a pipe has gone away."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence_stdout()


ADVICE = {
    errno.ENOSPC: "make room on the disk; a run then continues with --resume",
    errno.EDQUOT: "make room in your quota; a run then continues with --resume",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f); a run then continues with --resume",
    errno.EROFS: "choose a folder on a disk that can be written",
    errno.EACCES: "change its permissions, or choose another folder",
    errno.EPERM: "change its permissions, or choose another folder",
    errno.ENOTDIR: "a file stands where a folder is needed; move it, or choose another folder",
    errno.EISDIR: "a folder stands where a file is needed; move it, or name a file",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings without the place in the code that raised them."""
    kept = warnings.formatwarning
    warnings.formatwarning = lambda message, *place, **line: f"halflife: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = kept


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End a command with one line on stderr, and an exit code of docs/commands.md, where the machine stops it.

    The system refuses a file, memory is short, a key interrupts the command, or the reader of its output goes away. Any
    other exception passes.
    """
    with suppress(ImportError):  # `main` says what to install
        from rich.console import Console

        Console.on_broken_pipe = _fall_silent
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that know ASCII alone
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except OSError as error:
        _end(os_error(error), 2)
    except (MemoryError, RuntimeError) as error:
        if (message := memory_error(error)) is None:
            raise
        _end(message, 2)


def _fall_silent(self: Any) -> None:
    """Print nothing more after the reader of a pipe has gone away. By default rich then ends the process."""
    self.quiet = True
    silence_stdout()


def _end(message: str, code: int) -> None:
    print(f"halflife: {message}", file=sys.stderr)
    raise SystemExit(code) from None


def os_error(error: OSError) -> str:
    """The file that the system refused, its reason, and what to do."""
    if error.strerror is None:
        return " ".join(str(error).split())
    advice = ADVICE.get(error.errno or 0)
    return f"{error.filename or 'a file'}: {error.strerror}{f'; {advice}' if advice else ''}"


def memory_error(error: Exception) -> str | None:
    """The message of an error that too little memory raised; None for other errors."""
    text = " ".join(str(error).split())
    if not isinstance(error, MemoryError) and "out of memory" not in text and "can't allocate memory" not in text:
        return None
    asked = re.search(r"tried to allocate ([\d.]+ ?\w+)", text)
    return (
        f"there is not enough memory{f' for {asked[1]} more' if asked else ''}; choose a smaller model, batch or "
        "context, or for training --micro-batch-size and --recompute"
    )


@contextmanager
def progress_bar(what: str, *, show: bool) -> Iterator[Callable[[int], object]]:
    """Give a function that counts on a progress bar on stderr, if that is a terminal and `show` is true."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from halflife.analysis.readable import on_terminal

    columns = (BarColumn(), TextColumn(f"{{task.completed:,.0f}} {what}"), TimeElapsedColumn())
    with Progress(*columns, **on_terminal(show)) as bars:
        yield partial(bars.advance, bars.add_task("", total=None))


def check_device(name: str | None) -> None:
    """Raise a ValueError if no tensors can be made on a device; None is a device that exists."""
    if name is None:
        return
    import torch

    try:
        torch.empty(1, device=name)
        works = torch.device(name).type != "meta"
    except (RuntimeError, AssertionError, ImportError, NotImplementedError):  # what torch raises depends on the device
        works = False
    if not works:
        raise ValueError(f"there is no device {name!r} here; name cpu, or an accelerator as in cuda or cuda:1")


def new_folder(name: str) -> Path:
    """The folder of a new job: runs/<time>-<name>."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name.replace('/', '-')}"


def open_page(page: Path) -> None:
    """Open a page in the browser of a desktop, for someone at a terminal who did not set HALFLIFE_OPEN=0.

    Nothing is opened over ssh or in CI, and it is no error if there is no browser.
    """
    environment = os.environ
    screen = sys.platform in ("darwin", "win32") or any(environment.get(x) for x in ("DISPLAY", "WAYLAND_DISPLAY"))
    elsewhere = any(environment.get(x) for x in ("CI", "SSH_CONNECTION")) or environment.get("HALFLIFE_OPEN") == "0"
    if not screen or elsewhere or not sys.stdout.isatty():
        return
    import webbrowser

    with suppress(webbrowser.Error, OSError):
        if webbrowser.open(page.resolve().as_uri()):
            print("opened in a browser, which HALFLIFE_OPEN=0 prevents")


def default_device(device: str | None) -> str:
    """Return `device`, or if it is None the GPU where there is one, else the CPU."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")
