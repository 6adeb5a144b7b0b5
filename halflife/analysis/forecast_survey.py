"""Many trained models: how far each was forecast to remember, and how far it does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from halflife import tasks
from halflife.analysis.forecast import check, crossing, forecast, measure
from halflife.analysis.tables import finite
from halflife.files import read_json, write_json, write_text
from halflife.models.load import checkpoints, load_any

KINDS = ("mqar", "niah")
LAGS = ("half_lag", "forecast_half_lag", "fade_lag", "fill_lag", "energy_lag")


def survey(
    folders: Sequence[Path],
    *,
    longest: int = 128,
    window: int = 1,
    examples: int = 32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> dict[str, Any]:
    """Forecasts and measures the recall of every model below the folders that was validated on MQAR or NIAH.

    Args:
        folders: runs of `halflife compare`, or what holds them.
        longest: lags are measured up to this many times the training length.
        window: training lengths that are read for the forecast, which begins there.
        examples, seed: of the sequences read.
        device: where the models run.
        show: whether to draw a progress bar.

    Returns:
        "examples", "seed", "window"; "models", one dict a model and task: "model", "seed", "checkpoint", "task",
        "train_length", "num_pairs"; "lags", "measured" (accuracies) and "half_lag"; from the window on,
        "forecast_lags", "forecast" (accuracies) and "forecast_half_lag", "fade_lag", "fill_lag", "energy" (a pair's
        over the noise) and "energy_lag"; "heads"; and "refused": what cannot be forecast, and why.

    Raises:
        FileNotFoundError, ValueError: no checkpoint, a damaged one, or none of a run on MQAR or NIAH.
    """
    from rich.console import Console
    from rich.progress import track

    found = checkpoints(folders)
    models, refused = [], {}
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    for label, folder in track(found.items(), "forecasting", console=console, transient=True, disable=hidden):
        run = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
        specs = _specs(run)
        if not specs:
            refused[label] = f"no run on {' or '.join(KINDS)} (run.json)"
            continue
        try:
            model = load_any(folder, device).eval()
            check(model)
        except ValueError as error:
            refused[label] = str(error)
            continue
        for spec in specs:
            whose = {"model": model.config.name, "seed": run.get("seed"), "checkpoint": str(folder)}
            models.append({**whose, **_one(model, spec, longest, window, examples, seed)})
    if not models:
        raise ValueError("nothing to forecast: " + "; ".join(f"{label}: {why}" for label, why in refused.items()))
    return {"examples": examples, "seed": seed, "window": window, "models": models, "refused": refused}


def _specs(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tasks that a run was validated on, those of `KINDS`, each once, with the most pairs."""
    specs = [spec for spec in run.get("validation", []) if isinstance(spec, dict) and spec.get("name") in KINDS]
    return [max((s for s in specs if s["name"] == name), key=lambda s: s["num_pairs"])
            for name in dict.fromkeys(spec["name"] for spec in specs)]  # fmt: skip


def _one(model: Any, spec: Mapping[str, Any], longest: int, window: int, examples: int, seed: int) -> dict[str, Any]:
    task: Any = tasks.build(**spec)
    read = window * task.length
    lags = lags_to(longest * task.length)
    measured = measure(model, task, lags, examples=examples, seed=seed)
    beyond = [lag for lag in lags if lag >= read]
    found = forecast(model, task, beyond, window=read, examples=examples, seed=seed)
    return {
        "task": spec["name"], "train_length": task.length, "num_pairs": task.num_pairs, "lags": lags,
        "measured": measured, "half_lag": crossing(lags, measured, 0.5), "forecast_lags": beyond,
        "forecast": found["accuracy"],
        "forecast_half_lag": found["half_lag"], "fade_lag": found["fade_lag"], "fill_lag": found["fill_lag"],
        "energy_lag": found["energy_lag"], "energy": found["energy"],
        "heads": found["heads"],
    }  # fmt: skip


def lags_to(longest: int) -> list[int]:
    """0, and two lags an octave from 4 on."""
    steps = range(2 * int(math.log2(longest / 4)) + 1) if longest >= 4 else range(0)
    return [0, *dict.fromkeys(round(4 * 2 ** (i / 2)) for i in steps)]


def octaves(row: Mapping[str, Any], key: str) -> float | None:
    """log2 of a forecast over the measured half-lag; None where there is nothing to compare.

    That is: a model that never recalled half, or one that neither was seen nor forecast to fall below. If one of the
    two lies beyond the longest lag, that one counts for it: the error is at least this.
    """
    if row["measured"][0] < 0.5:
        return None
    last = float(row["lags"][-1])
    measured, found = (min(value, last) for value in (row["half_lag"], row[key]))
    if math.isinf(row["half_lag"]) and math.isinf(row[key]):
        return None
    return math.log2(max(found, 1) / max(measured, 1))


def errors(models: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of both forecasts: "models" compared, median and largest size of the error in octaves, and the median error."""
    table = {}
    for name, key in (("aged state", "forecast_half_lag"), ("energy", "energy_lag")):
        found = [error for row in models if (error := octaves(row, key)) is not None]
        if found:
            sizes = [abs(error) for error in found]
            table[name] = {"models": len(found), "median": median(sizes), "largest": max(sizes), "bias": median(found)}
    return table


def markdown(result: Mapping[str, Any]) -> str:
    """A table of what `survey` gives, a row a model, and the errors under it."""
    heading = "model | seed | task | T | pairs | recall at 0, T | half-lag | aged state | octaves "
    heading += "| fades | fills | energy | octaves"
    lines = [f"| {heading} |", "|---|---|---|" + "---:|" * 10]
    for row in result["models"]:
        near = min(range(len(row["lags"])), key=lambda i: abs(row["lags"][i] - row["train_length"]))
        recalled = ", ".join(f"{100 * row['measured'][i]:.0f}" for i in (0, near))
        cells = [row["model"], str(row["seed"]), row["task"], f"{row['train_length']:,}", str(row["num_pairs"]),
                 f"{recalled} %", _lag(row, "half_lag")]  # fmt: skip
        for keys in (("forecast_half_lag",), ("fade_lag", "fill_lag", "energy_lag")):
            error = octaves(row, keys[-1])
            cells += [*(_lag(row, key) for key in keys), "–" if error is None else f"{error:+.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    for name, found in errors(result["models"]).items():
        lines.append(
            f"\n{name}: {found['models']} models, error {found['median']:.2f} octaves in the median, at most "
            f"{found['largest']:.2f} (median with its sign {found['bias']:+.2f})."
        )
    return "\n".join(lines) + "\n"


def _lag(row: Mapping[str, Any], key: str) -> str:
    return f"> {row['lags'][-1]:,}" if math.isinf(row[key]) else f"{row[key]:,.0f}"


def saved(path: Path) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or another.
    """
    result = read_json(path)
    if not isinstance(result, dict) or not isinstance(result.get("models"), list):
        raise ValueError(f"{path} is no forecast of `halflife forecast`")
    for row in result["models"]:
        for key in LAGS:
            row[key] = math.inf if row[key] is None else row[key]
    return result


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """`forecast.json` (null: not within the lags) and `forecast.md`."""
    files = [folder / "forecast.json", folder / "forecast.md"]
    write_json(files[0], finite(result))
    write_text(files[1], markdown(result))
    return files
