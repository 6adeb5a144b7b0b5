"""The command line: every command parses, calls the library, and prints."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from halflife import __version__, extensions
from halflife.cli.groups import replace_options
from halflife.cli.options import check_device, one_line_errors, one_line_warnings, read_options, silence_stdout
from halflife.extras import EXTRAS, install, missing, require
from halflife.files import CONFIG_JSON
from halflife.layers import LAYERS
from halflife.registry import check_choice, constructor_parameters, plain_type

DESCRIPTION = """How linear recurrent sequence models remember and forget.

examples:
  halflife list
  halflife info
  halflife build
  halflife compare mamba2 mamba2+post gated_deltanet --task mqar --scale smoke
  halflife compare --experiment echo-mqar --scale small --seeds 3
  halflife compare --resume runs/20260101-120000-mqar-smoke
  halflife tokenizer "docs/**/*.md" --output my-tokenizer
  halflife train mamba2+post --data "docs/**/*.md" --tokens 20M --context 1024
  halflife train mamba2+post --data notes.txt --set post.reference_length=512 training.weight_decay=0.05
  halflife generate my-checkpoint "Once upon a time" --temperature 0.8
  halflife serve my-checkpoint --port 8000
  halflife export my-checkpoint --onnx my-graphs
  halflife eval my-checkpoint --tasks wikitext,lambada_openai,hellaswag --limit 200
  halflife spectrum my-checkpoint --text book.txt
  halflife memory mamba2 mamba2+ska llama --lengths 1024 4096 16384 65536
  halflife throughput mamba2 mamba2+gate_rank llama --lengths 1024 4096 16384
  halflife look my-checkpoint --text book.txt

`halflife COMMAND --help` shows the options and examples of a command, and `halflife --version` the version.
`halflife --import MODULE COMMAND …` first imports a module of yours that registers decays, layers, presets or tasks.
"""

WELCOME = """halflife shows how linear recurrent sequence models remember and forget.

  halflife compare mamba2 gated_deltanet --task mqar    train models to recall pairs, and compare them: 2 to 4 minutes
  halflife train mamba2 --data notes.txt --tokens 300K  train a language model on your text: a minute
  halflife look FOLDER --text notes.txt                 see what a trained model keeps of a text
  halflife forecast FOLDER                              say after how many tokens it forgets
  halflife memory                                       print how much memory models need, in a second

Begin with the first. `halflife --help` has all commands, `halflife info` says what is fast on this machine."""

# Name of a command → module of `halflife.cli` and class. A command's module is imported when the command is typed.
COMMANDS = {
    "list": "about.List", "info": "about.Info", "build": "about.Build", "compare": "compare.Compare",
    "train": "train.Train", "generate": "generate.Generate", "eval": "evaluate.Eval", "spectrum": "spectrum.Spectrum",
    "memory": "measure.memory.Memory", "forecast": "forecast.Forecast", "theory": "theory.Theory",
    "figures": "figures.Figures", "convert": "convert.Convert", "throughput": "measure.throughput.Throughput",
    "serve": "deploy.serve.Serve", "export": "deploy.export.Export",
    "look": "measure.look.Look", "check": "measure.check.Check", "diagnose": "measure.diagnose.Diagnose",
    "tokenizer": "tokenizer.Tokenizer",
}  # fmt: skip
_TRAINING, _FIGURES = ("transformers", "accelerate", "filelock"), ("matplotlib",)
_PAGE = (*_FIGURES, "jinja2")
# Packages that a command always needs. Without this table it would miss them after minutes of work.
NEEDS = {
    "compare": (*_TRAINING, *_PAGE), "train": (*_TRAINING, *_PAGE), "figures": _PAGE, "eval": _FIGURES,
    "spectrum": _PAGE, "memory": _FIGURES, "forecast": _FIGURES, "theory": _FIGURES,
    "throughput": _FIGURES, "diagnose": _PAGE, "tokenizer": ("transformers",), "serve": ("fastapi", "uvicorn"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}  # fmt: skip
# What commands need that have a choice, so that no option of theirs is required.
CHOICES = {"compare": ["models or --experiment"], "train": ["a model", "--data"]}
BROKEN_PIPE = 128 + 13  # the exit code of a shell for a process that SIGPIPE ended


@one_line_errors()
def main(arguments: list[str] | None = None) -> None:
    """Run the command. Wrong input ends with one line on stderr and exit code 2, not with a traceback.

    If the reader of its output ends early, as `head` does, the command ends with exit code 141 and no message.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in ([], ["--version"]):
        print(WELCOME if not arguments else f"halflife {__version__}")
        return
    try:
        try:
            arguments = _import_extensions(arguments)
            command = read_command(arguments)
            require(f"halflife {arguments[0]}", *NEEDS.get(arguments[0], ()))
            check_device(getattr(command, "device", None))
            with one_line_warnings():
                command.run()
        finally:
            sys.stdout.flush()  # here, because Python reports an error at its exit
    except BrokenPipeError:
        silence_stdout()  # for what Python flushes at its exit
        raise SystemExit(BROKEN_PIPE) from None
    except (ValueError, FileNotFoundError, FileExistsError, ConnectionError, ImportError) as error:
        print(f"halflife: {_say(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _import_extensions(arguments: list[str]) -> list[str]:
    """Import the modules that `--import MODULE` names, before or after the command; return the other arguments.

    Layers that they add are checked.
    """
    others, known = list(arguments), set(LAYERS.names())
    while "--import" in others:
        at = others.index("--import")
        if at + 1 == len(others):
            raise ValueError("--import needs the name of a module")
        extensions.add(others[at + 1])
        del others[at : at + 2]
    if added := [name for name in LAYERS.names() if name not in known]:
        from halflife.evaluation.layer_check import check_imported

        for fault in check_imported(added):
            print(f"halflife: warning: {fault}", file=sys.stderr)
    return others


def _say(error: Exception) -> str:
    """Return the error's message. Python's own message about a missing package is replaced by what to install."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if name in EXTRAS and str(error).startswith("No module named"):
        what = "the command line" if EXTRAS[name] == "cli" else "this command"
        return f"{missing(what, name)}, or {install('all')} for every command"
    if isinstance(error, FileNotFoundError) and error.strerror and error.filename:  # Python's own "[Errno 2] …"
        missed = Path(error.filename)
        if missed.name == CONFIG_JSON and not missed.parent.exists():
            return f"there is no folder {missed.parent}; make one with: halflife train mamba2 --data notes.txt"
        return f"there is no file {missed}"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}"
    if str(error).startswith("there is no folder "):
        return f"{error}; {_folders_here()}"
    return str(error)


def _folders_here() -> str:
    """The newest runs in the current folder, or how to make one."""
    found = sorted(Path("runs").glob("*/config.json"), key=lambda file: -file.stat().st_mtime)
    if not found:
        return "make one with: halflife compare mamba2 gated_deltanet --task mqar"
    return f"the newest here: {', '.join(str(file.parent) for file in found[:3])}"


def read_command(arguments: list[str]) -> Any:
    """Return the command of a command line, with the options of its --config file; raises as `read_options`, or as
    tyro.
    """
    command = parse(arguments)
    job = getattr(command, "job", None)
    if job is None or job.config is None or job.resume is not None:
        return command
    # The options of the file are the defaults of a second reading, so that the command line wins.
    default = read_options(command)
    return replace_options(parse(arguments, default=default), {"set": (*default.job.set, *job.set)})


def parse(arguments: list[str], **options: Any) -> Any:
    """Return the command of a command line, or end with tyro's message."""
    import tyro

    options = {"config": (tyro.conf.OmitArgPrefixes,), **options}
    if arguments and not arguments[0].startswith("-"):
        name, *rest = arguments
        if (known := "--gradient-checkpointing") in rest:  # as the Trainer of transformers calls it
            rest = [*(word for word in rest if word != known), "--recompute", "blocks"]
        check_choice("command", name, COMMANDS)
        if not rest and (lacking := CHOICES.get(name) or _required(command_class(name))):
            raise ValueError(f"{name} needs {' and '.join(lacking)}. {_about(command_class(name))}")
        return tyro.cli(
            command_class(name), args=_joined(rest, command_class(name)), prog=f"halflife {name}", **options
        )
    return tyro.cli(_any_command(), args=arguments, prog="halflife", description=DESCRIPTION, **options)


def _required(command: type) -> list[str]:
    """The options without which a command cannot begin."""
    absent = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [one for one in dataclasses.fields(command) if (one.default, one.default_factory) == absent]
    return [
        f"a {one.name.removesuffix('s')}" if str(one.type).startswith("Positional") else f"--{one.name}"
        for one in needed
    ]


def _about(command: type) -> str:
    text = command.__doc__ or ""
    return f"{text.splitlines()[0]}\n\n{inspect.cleandoc(text[text.index('    examples:') :])}"


def _joined(arguments: list[str], command: type) -> list[str]:
    """Move the values of a repeated option with several values behind its first place: tyro would drop the first ones.

    So `--set a=1 --set b=2` is `--set a=1 b=2`, and so is `--set=a=1 --set=b=2`.
    """
    several = _several(command)
    parts: list[list[str]] = [[]]
    for word in arguments:
        name, equals, value = word.partition("=")
        if option := several.get(name.replace("_", "-")):
            parts.append([option, *([value] if equals else [])])
        elif re.match("--?[a-z]", word):
            parts.append([word])
        else:
            parts[-1].append(word)
    first: dict[str, list[str]] = {}
    for part in parts[1:]:
        if part[0] in several and part[0] in first:
            first[part[0]] += part[1:]
            part.clear()
        else:
            first.setdefault(part[0], part)
    return [word for part in parts for word in part]


def _several(command: type) -> dict[str, str]:
    """The options with several values: each way to write it → its first one."""
    found: dict[str, str] = {}
    for name, one in constructor_parameters(command).items():
        kind, notes = plain_type(one.annotation), getattr(one.annotation, "__metadata__", ())
        if any(get_origin(x) is tuple for x in (kind, *get_args(kind))):
            option = f"--{name.replace('_', '-')}"
            aliases = (alias for note in notes for alias in getattr(note, "aliases", None) or ())
            found |= dict.fromkeys((option, *aliases), option)
    return found


def command_class(name: str) -> type:
    """Import the class of a command."""
    module, _, class_name = COMMANDS[name].rpartition(".")
    return getattr(importlib.import_module(f"halflife.cli.{module}"), class_name)


def _any_command() -> Any:
    """The type that tyro parses into one of the commands. The list of commands shows the first line of their help."""
    from tyro.conf import subcommand

    first_lines = {name: (command_class(name).__doc__ or "").splitlines()[0] for name in COMMANDS}
    types = (Annotated[command_class(name), subcommand(name, description=line)] for name, line in first_lines.items())
    return reduce(or_, types)
