"""The command line: parse, call, print; one file a group of commands."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from halflife.cli.about import Info, List
from halflife.cli.compare import Compare
from halflife.cli.convert import Convert
from halflife.cli.evaluate import Eval
from halflife.cli.figures import Figures
from halflife.cli.forecast import Forecast
from halflife.cli.generate import Generate
from halflife.cli.mask import Mask
from halflife.cli.memory import Memory
from halflife.cli.spectrum import Spectrum
from halflife.cli.theory import Theory
from halflife.cli.train import Train

EPILOG = """examples:
  halflife train mamba2+post --data "docs/**/*.md" --tokens 20M --context 1024
  halflife compare mamba2 mamba2+post gated_deltanet --task mqar --scale smoke
  halflife compare mamba2 simple+vector --scale small --seeds 3 --lr 1e-3 3e-3 1e-2
  halflife compare --resume runs/20260101-120000-mqar-smoke
  halflife spectrum runs/20260101-120000-mqar-smoke --text tinyshakespeare.txt
  halflife mask runs/20260101-120000-gate-rank-s5-smoke
  halflife memory mamba2 mamba2+ska llama --lengths 1024 4096 16384 65536
  halflife eval my-checkpoint --tasks wikitext,lambada_openai,hellaswag --limit 200
  halflife generate my-checkpoint "Once upon a time" --temperature 0.8
  halflife list
  halflife info
"""

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Figures, tyro.conf.subcommand("figures")]
    | Annotated[Spectrum, tyro.conf.subcommand("spectrum")]
    | Annotated[Theory, tyro.conf.subcommand("theory")]
    | Annotated[Forecast, tyro.conf.subcommand("forecast")]
    | Annotated[Mask, tyro.conf.subcommand("mask")]
    | Annotated[Memory, tyro.conf.subcommand("memory")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Info, tyro.conf.subcommand("info")]
)


def main(arguments: list[str] | None = None) -> None:
    """The entry point: wrong input ends with one line on stderr and exit code 2, not with a traceback."""
    command = tyro.cli(
        Command, args=arguments, prog="halflife", config=(tyro.conf.OmitArgPrefixes,),
        description="How linear recurrent sequence models remember and forget.\n\n" + EPILOG,
    )  # fmt: skip
    try:
        command.run()
    except (ValueError, FileNotFoundError, FileExistsError, ConnectionError, ImportError) as error:
        print(f"halflife: {error}", file=sys.stderr)
        raise SystemExit(2) from None
