"""What commands print before runs begin, and what `--dry-run` prints: settings, and what the runs will need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from halflife.evaluation.memory import format_bytes
from halflife.models import ModelConfig
from halflife.report.table import Table, show, styled
from halflife.runs.one import training_device
from halflife.training.estimate import Estimate
from halflife.training.speed import gemm_rate
from halflife.training.trial import Trial

if TYPE_CHECKING:
    from halflife.training.plan import Needs

HEADINGS = (
    "model", "runs", "parameters", "steps", "tokens", "weights + AdamW", "activations", "FLOPs a run", "at least"
)  # fmt: skip


def print_needs(
    settings: Mapping[str, Mapping[str, Any]], needs: Sequence[tuple[Estimate, int]], bf16: bool, on_text: bool = True
) -> None:
    """Print settings, and a row for each model with what one of its runs needs.

    Settings are title → name → value, and needs are those of one run with the number of runs. With `bf16`, the runs
    compute matrix products in bfloat16. Runs that are not `on_text` have no micro-batches.
    """
    rate = gemm_rate(training_device(), torch.bfloat16 if bf16 else torch.float32, of=max)
    for title, values in settings.items():
        print(f"{title}:")
        for name, value in values.items():
            if value not in ("", {}, []):
                print(f"  {name}: {_text(value)}")
    table: list[Any] = [
        (
            need.model, f"{runs}", f"{need.parameters:,}", f"{need.steps:,}", f"{need.tokens:,}",
            format_bytes(need.state_bytes), format_bytes(need.activation_bytes), f"{need.operations:.3g}",
            format_seconds(need.operations / rate),
        )
        for need, runs in needs
    ]  # fmt: skip
    runs, tokens = sum(runs for _, runs in needs), sum(need.tokens * runs for need, runs in needs)
    total = sum(need.operations * runs for need, runs in needs)
    cells = ("all runs", f"{runs}", "", "", f"{tokens:,}", "", "", f"{total:.3g}", format_seconds(total / rate))
    arithmetic = "bfloat16" if bf16 else "float32"
    rows = ", ".join(f"{count:,}" for count in dict.fromkeys(need.rows for need, _ in needs))
    fewer = " --micro-batch-size holds fewer at once." if on_text else ""
    note = (
        f"at least: the time at {rate:.3g} FLOP/s, which this machine reaches in {arithmetic} matrix products.\n"
        f"activations: what the forward pass of {rows} sequences saves.{fewer}"
    )
    show(Table(HEADINGS, [*table, styled("bold", *cells)], note, "needs"))


def print_plans(needs: Needs, model: str, gpus: int) -> None:
    """Print a row for 1, 2, 4, … to `gpus` GPUs: what each of them needs at least, and the longest row."""
    from halflife.training.plan import H100

    if gpus < 1:
        raise ValueError(f"--gpus must be at least 1; got {gpus}")
    counts = [2**i for i in range(gpus.bit_length()) if 2**i < gpus]
    plans = [needs.plan(count, H100) for count in (*counts, gpus)]
    headings = (
        "GPUs", "a row", "weights + AdamW", "activations", "a layer", "states", "weights sent", "states sent", "a step",
        "the run", "longest row",
    )  # fmt: skip
    rows: list[Any] = [
        (
            f"{plan.gpus:,}", f"{plan.context:,}", format_bytes(plan.weights), format_bytes(plan.activations),
            format_bytes(needs.of_a_layer(needs.length / plan.context)), format_bytes(plan.states),
            format_bytes(plan.sent_weights), format_bytes(plan.sent_states),
            format_seconds(plan.step_seconds), format_seconds(3600 * plan.hours), f"{plan.longest:,}",
        )
        for plan in plans
    ]  # fmt: skip
    note = (
        f"Predicted, not measured, for h100 ({H100.memory / 1e9:.0f} GB): products in bfloat16 at the rate that "
        "one has reached,\na row at a time in each group, and weights, gradients and moments in float32"
        f"{', sharded over the groups' if needs.fsdp else ' on every GPU'}.\n"
        "Memory and bytes sent in a step are those of one GPU. Times are floors, of products and the wire alone. The "
        "longest\nrow is that of all GPUs together."
    )
    title = f"{model} on GPUs: {needs.steps:,} steps of {needs.rows:,} rows of {needs.length:,} tokens"
    show(Table(headings, rows, note, title))


def describe_trial(trial: Trial, here: bool = True) -> str:
    """What runs will take, in one line. The time of runs on other machines, not `here`, is not known."""
    runs = f"{trial.runs} runs" if trial.runs > 1 else "1 run"
    if not here:
        time = "the time is not known, because they run on other machines"
    elif trial.seconds is None:
        time = "the time is not known, because a model is too large to be timed before"
    else:
        time = f"about {format_seconds(trial.seconds)} of training on this machine, one run after the other"
    least = "at least " if trial.seconds is None else ""
    space = f"{least}{format_bytes(trial.memory)} of memory, {format_bytes(trial.disk)} of disk"
    return f"{runs}, {trial.steps:,} steps in all: {time}, {space}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def describe_model(config: ModelConfig) -> str:
    """The sizes of a model and its mixer, in one line."""
    sizes = f"{config.num_layers} layers of width {config.hidden_size:,}, {config.vocab_size:,} tokens"
    parts = [sizes, f"mlp {config.mlp}", f"{config.mixer} {_text(config.mixer_options)}"]
    parts += [f"{kind['mixer']} in layers {_text(kind['layers'])}" for kind in config.hybrids]
    return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Format a duration with one unit: "42 s", "7.5 min", "3.1 h", "12 days"."""
    for unit, size, limit in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if seconds < limit * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 99.5 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:,.0f} days"
