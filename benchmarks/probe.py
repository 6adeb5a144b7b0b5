"""Measure the first steps of a run of an experiment, and say how long the whole run would train.

    python benchmarks/probe.py overview small mamba2 gated_deltanet

A line has the tokens a second of one thread, the tokens of a run, and the seconds of its training. Tests are not
counted. With other work on the machine the seconds are too many.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch

from halflife.lab.experiments import EXPERIMENTS
from halflife.runs.one import run_one
from halflife.runs.sweep import Cell
from halflife.training.config import ExecutionConfig

# Settings that make validation and tests short, of those that an experiment has.
SHORT = {
    "save_every": 10**9, "validate_every": 10**9, "test_examples": 1, "validation_examples": 1,
    "validation_tokens": 512, "length_factors": (1,),
}  # fmt: skip


def probe(name: str, scale: str, model: str, steps: int) -> str:
    """Run some steps of a model; `name` and `scale` are those of `halflife compare`."""
    experiment = EXPERIMENTS[name]()
    whole = experiment.settings_at(scale, {})
    changes = {key: value for key, value in SHORT.items() if hasattr(whole, key)} | {"steps": steps}
    if hasattr(whole, "test_tokens"):
        changes["test_tokens"] = 512 if experiment.measure == "loss" else 1024
    if getattr(whole, "lengths", ()):
        changes["lengths"] = (min(whole.lengths),)
    settings = experiment.open_data(experiment.settings_at(scale, changes))
    config = experiment.configure(settings, Cell(model, 1e-3, 0))
    with tempfile.TemporaryDirectory() as folder:
        speed = run_one(config.open(), Path(folder), name=model, execution=ExecutionConfig(show=False))
    full = experiment.configure(whole, Cell(model, 1e-3, 0)).sequences()
    tokens = sum(length * count for length, count in full.items())
    seconds = tokens / speed["tokens_per_second"]
    return f"{name} {scale} {model}: {speed['tokens_per_second']:,.0f} tokens/s, {tokens / 1e6:.2f} M, {seconds:,.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("scale")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for model in arguments.models:
        print(probe(arguments.experiment, arguments.scale, model, arguments.steps), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
