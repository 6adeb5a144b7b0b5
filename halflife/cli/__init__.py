"""The command line: every command parses, calls the library, and prints."""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro

from halflife.cli.about import Build, Info, List
from halflife.cli.compare import Compare
from halflife.cli.convert import Convert
from halflife.cli.evaluate import Eval
from halflife.cli.figures import Figures
from halflife.cli.forecast import Forecast
from halflife.cli.generate import Generate
from halflife.cli.mask import Mask
from halflife.cli.memory import Memory
from halflife.cli.options import one_line_errors, read_options
from halflife.cli.spectrum import Spectrum
from halflife.cli.theory import Theory
from halflife.cli.train import Train

DESCRIPTION = """How linear recurrent sequence models remember and forget.

examples:
  halflife list
  halflife info
  halflife build
  halflife compare mamba2 mamba2+post gated_deltanet --task mqar --scale smoke
  halflife compare --experiment echo-mqar --scale small --seeds 3
  halflife compare --resume runs/20260101-120000-mqar-smoke
  halflife train mamba2+post --data "docs/**/*.md" --tokens 20M --context 1024
  halflife train mamba2+post --data notes.txt --set post.reference_length=512 training.weight_decay=0.05
  halflife generate my-checkpoint "Once upon a time" --temperature 0.8
  halflife eval my-checkpoint --tasks wikitext,lambada_openai,hellaswag --limit 200
  halflife spectrum runs/20260101-120000-mqar-smoke --text tinyshakespeare.txt
  halflife memory mamba2 mamba2+ska llama --lengths 1024 4096 16384 65536
  halflife mask runs/20260101-120000-gate-rank-s5-smoke

`halflife COMMAND --help` shows the options and examples of a command.
"""

COMMANDS = {
    "list": List, "info": Info, "build": Build, "compare": Compare, "train": Train, "generate": Generate, "eval": Eval,
    "spectrum": Spectrum, "memory": Memory, "mask": Mask, "forecast": Forecast, "theory": Theory, "figures": Figures,
    "convert": Convert,
}  # fmt: skip
BROKEN_PIPE = 128 + 13  # the exit code of a shell for a process that SIGPIPE ended


def _commands(brief: bool) -> Any:
    """The type that tyro parses. `brief` leaves the first line of each command's help, for the list of commands."""

    def description(command: type) -> str | None:
        return (command.__doc__ or "").splitlines()[0] if brief else None

    return reduce(
        or_,
        (
            Annotated[command, tyro.conf.subcommand(name, description=description(command))]
            for name, command in COMMANDS.items()
        ),
    )


Command = _commands(brief=False)


@one_line_errors()
def main(arguments: list[str] | None = None) -> None:
    """Run the command. Wrong input ends with one line on stderr and exit code 2, not with a traceback.

    If the reader of its output ends early, as `head` does, the command ends with exit code 141 and no message.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            read_command(arguments).run()
        finally:
            sys.stdout.flush()  # here, because Python reports an error at its exit
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        raise SystemExit(BROKEN_PIPE) from None
    except (ValueError, FileNotFoundError, FileExistsError, ConnectionError, ImportError) as error:
        print(f"halflife: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_command(arguments: list[str]) -> Any:
    """Return the command of a command line, with the options of its --config file.

    Raises:
        FileNotFoundError, ValueError: the file is missing or wrong, or the command has another name now.
        SystemExit: tyro refuses the command line.
    """
    if arguments[:1] == ["reproduce"]:
        raise ValueError("`halflife reproduce` is now `halflife compare --experiment decay-design`")
    command = parse(arguments)
    if getattr(command, "config", None) is None or command.resume is not None:
        return command
    # The options of the file are the defaults of a second reading, so that the command line wins.
    default = read_options(command)
    overrides = (*default.set, *command.set)
    return dataclasses.replace(parse(arguments, default=default), set=overrides)


def parse(arguments: list[str], **options: Any) -> Any:
    """Return the command of a command line, or end with tyro's message."""
    commands = Command if arguments and arguments[0] in COMMANDS else _commands(brief=True)
    return tyro.cli(
        commands, args=arguments, prog="halflife", config=(tyro.conf.OmitArgPrefixes,), description=DESCRIPTION,
        **options,
    )  # fmt: skip
