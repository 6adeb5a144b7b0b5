"""The topics of `halflife theory`: PoST's claims about decay spectra and computed values, as one dict of plain data.

A topic is a function of the settings. The report has a figure of the same name for each topic, which it draws from
`theory.json` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halflife.data.tokenizers import BYTES, check_ids, read_ids
from halflife.files import RESULT_JSON, THEORY_JSON, read_json, write_json
from halflife.models.load import checkpoints, load_any
from halflife.registry import unknown
from halflife.theory.approximation import (
    adapted_rates,
    best_endpoints,
    best_step,
    geometric_rates,
    linear_rates,
    random_rates,
    taper,
)
from halflife.theory.approximation_survey import error_by_channels, error_by_ends, error_by_position
from halflife.theory.correlations import bits, octave_information, power_law
from halflife.theory.settings import TheorySettings
from halflife.theory.spectra import (
    best_taper,
    coherences,
    effective_channels,
    energies,
    minimum_gap,
    responses,
    spread,
    taper_bound,
)

FAR_ENDS = (0.01, 6.0)  # in units of (1/T, 1); with these ends "as run" is as good as the paper's "adapted"
SLACKS = (0.1, 0.3, 0.5)


# ----------------------------------------------------------------------------------------- approximation


def _errors(s: TheorySettings, cache: Path | None) -> dict[str, Any]:
    return error_by_channels(s.all_counts, s.lengths, s.beta, seed=s.seed, cache=cache)


def _ends(s: TheorySettings, cache: Path | None) -> dict[str, Any]:
    return error_by_ends(s.channels, s.length, s.beta, seed=s.seed, cache=cache)


def _positions(s: TheorySettings, cache: Path | None) -> list[dict[str, Any]]:
    """Errors at positions for three pairs of ends: the paper's, the best, and ends further out."""
    low, high = FAR_ENDS
    ends = (1 / s.length, 1.0), best_endpoints(s.channels, s.length, s.beta, cache=cache), (low / s.length, high)
    first = max(4, min(2 * s.channels, s.length // 2))  # N weights fit as many positions
    positions = spread(first, s.length, 16).int().tolist()
    return [error_by_position(s.channels, s.length, positions, s.beta, ends=pair) for pair in ends]


# ---------------------------------------------------------------------------------------------- spectra


def _gaps(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Gaps of log-rates that are drawn uniformly on [−log T, 0]."""
    return minimum_gap([n for n in s.all_counts if n > 1], 1 / math.log(s.length), seed=s.seed)


def _coherence(s: TheorySettings, cache: Path | None) -> dict[str, Any]:
    n, t, middle = s.channels, s.length, round(math.sqrt(s.length))
    geometric = geometric_rates(n, t)
    spectra = {
        "random, log-uniform": random_rates(n, t, torch.Generator().manual_seed(s.seed), "log-uniform"),
        "linear, best step": linear_rates(n, best_step(n, t, s.beta, cache=cache)),
        "geometric on [1/T, 1]": geometric,
        f"adapted to t = {middle:,}": adapted_rates(geometric, middle, t),
    }
    return {name: coherences(rates) for name, rates in spectra.items()}


def _channels(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    return effective_channels(geometric_rates(s.channels, s.length), spread(1, s.length, 120).int().tolist(), s.length)


def _responses(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    positions = sorted({max(4, s.length // part) for part in (100, 10, 1)})
    return responses(geometric_rates(s.channels, s.length), positions, s.length, points=40)


def _energy(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Energies with τ_k(t) = t^{α_k} (Theorem 4.11), for a slowest, a middle and a fastest channel, up to t = 1,000."""
    steps, trials = min(s.length, 1000), 4000
    return energies(torch.ones(3, dtype=torch.float64), taper(3), steps, trials, s.seed, points=60)


def _taper(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Bounds, and the best taper if the first octaves carry J₀(1 + ε) of information and the others J₀(1 − ε).

    The first octaves are (1 − ε)/2 of all and carry half of the information, so that α = 1/2 reaches the sharp bound.
    """
    by_slack = {}
    for slack in SLACKS:
        bound, octave = taper_bound(slack, s.channels), torch.arange(20)
        best = best_taper(torch.where(octave < round(10 * (1 - slack)), 1 + slack, 1 - slack), s.channels)
        by_slack[f"{slack:g}"] = {"paper": bound.paper.tolist(), "sharp": bound.sharp.tolist(), "best": best.tolist()}
    return by_slack


# --------------------------------------------------------------------------------------------- the data


def _autocovariance(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Exponent β of the text in bits, and in the embeddings of each run.

    Returns:
        "tokens"; "sequences", name → the result of `power_law`; "without", name → why a sequence has no power law.
    """
    if not s.text:
        raise ValueError("autocovariance needs a text: --text FILE")
    ids = read_ids(s.text, s.tokenizer)[: s.tokens]
    vectors = {"bits": bits(BYTES if s.tokenizer is None else int(ids.max()) + 1)}
    for label, folder in (checkpoints(s.runs) if s.runs else {}).items():
        model = load_any(folder)
        check_ids(model.config, ids, s.tokenizer)
        vectors[f"embeddings of {label}"] = model.embedding.weight.detach()
    result: dict[str, Any] = {"tokens": len(ids), "sequences": {}, "without": {}}
    for name, table in vectors.items():
        try:
            result["sequences"][name] = power_law(ids, table, seed=s.seed)
        except ValueError as error:
            result["without"][name] = str(error)
    if not result["sequences"]:
        raise ValueError(f"the text shows no power law: {next(iter(result['without'].values()))}")
    return result


def _information(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """J(σ) of each run, up to its training length. Beyond it, the loss shows how the model extrapolates.

    Returns:
        The run's name → the result of `octave_information`, "trained" (the training length) and "rows" (of the loss).
    """
    if not s.runs:
        raise ValueError("information needs runs of `halflife train`: --runs DIR")
    by_run = {}
    for label, folder in checkpoints(s.runs).items():
        result = read_json(folder / RESULT_JSON) if (folder / RESULT_JSON).is_file() else {}
        if "positions" not in result:
            raise ValueError(f"{folder} has no losses by position: it is no finished run of `halflife train`")
        trained = result["lengths"][0]["length"]
        buckets = [(b["first"], b["last"], b["loss"]) for b in result["positions"] if b["last"] <= trained]
        by_run[label] = {**octave_information(buckets), "trained": trained, "rows": result["rows"]}
    return by_run


# ------------------------------------------------------------------------------------------ all of them

TOPICS: dict[str, Callable[[TheorySettings, Path | None], Any]] = {
    "errors": _errors, "ends": _ends, "positions": _positions, "gaps": _gaps, "coherence": _coherence,
    "channels": _channels, "responses": _responses, "energy": _energy, "taper": _taper,
    "autocovariance": _autocovariance, "information": _information,
}  # fmt: skip
# Topics that need files → the setting that names the files.
OF_FILES = {"autocovariance": "text", "information": "runs"}


def compute(
    settings: TheorySettings, topics: Sequence[str] = (), *, cache: Path | None = None, show: bool = False
) -> dict[str, Any]:
    """Compute the data of some topics, in the order of `TOPICS`.

    Args:
        settings: numbers and files.
        topics: names in `TOPICS`. Default: all topics for which the settings have files.
        cache: JSON file that stores the best ends and steps.
        show: whether to draw a progress bar.

    Returns:
        topic → plain data, in which all numbers are finite.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a number is out of range, a topic is unknown or lacks its files, or a file cannot be read.
    """
    from rich.console import Console
    from rich.progress import track

    settings.validate()
    for name in topics:
        if name not in TOPICS:
            raise unknown("topic", name, list(TOPICS))
    names = topics or [name for name in TOPICS if name not in OF_FILES or getattr(settings, OF_FILES[name])]
    # Topics with files come first, so that a wrong file is an error before anything takes long.
    names = sorted(set(names), key=lambda name: (name not in OF_FILES, list(TOPICS).index(name)))
    data_of: dict[str, Any] = {}

    def add(name: str) -> None:
        data_of[name] = TOPICS[name](settings, cache)

    steps: list[Callable[[], Any]] = [partial(add, name) for name in names]
    if "errors" in names:  # its searches take long, so each is a step of the progress bar; their results are cached
        at = names.index("errors")
        steps[at:at] = [
            partial(search, count, length, settings.beta, cache=cache)
            for length in settings.lengths for count in settings.all_counts for search in (best_endpoints, best_step)
        ]  # fmt: skip
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    for step in track(steps, "computing", console=console, transient=True, disable=hidden):
        step()
    return {name: data_of[name] for name in TOPICS if name in data_of}


def write(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write `theory.json` and return its content. Topics that the file already has and `data` lacks are kept."""
    file = folder / THEORY_JSON
    data = {**(read_json(file) if file.exists() else {}), **data}
    data = {name: data[name] for name in TOPICS if name in data}
    write_json(file, data)
    return data
