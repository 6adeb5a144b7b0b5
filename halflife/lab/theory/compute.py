"""The topics of `halflife theory`: claims of the papers, and computed values, as one dict of plain data.

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

from halflife.analysis.readable import on_terminal
from halflife.data.tokenizers import BYTE_VOCABULARY, check_ids, read_ids
from halflife.decay.minimax import best_endpoints, geometric_rates, taper
from halflife.files import RESULT_JSON, THEORY_JSON, read_json, write_json
from halflife.lab.theory import spectra
from halflife.lab.theory.approximation import best_step
from halflife.lab.theory.approximation_survey import error_by_channels, error_by_ends, error_by_position
from halflife.lab.theory.correlations import bits, octave_information, power_law
from halflife.lab.theory.costs import cost_table
from halflife.lab.theory.covariances import gram_bounds, phase_attenuation
from halflife.lab.theory.gradients import gradient_flow
from halflife.lab.theory.normalization import relative_energies
from halflife.lab.theory.settings import TheorySettings
from halflife.lab.theory.statements import statements
from halflife.lab.theory.stationarity import block_exponents, spectral_density
from halflife.models.load import checkpoints, load_any
from halflife.registry import check_choice

FAR_ENDS = (0.01, 6.0)  # in units of (1/T, 1); with these ends "as run" is as good as the paper's "adapted"
SLACKS = (0.1, 0.3, 0.5)


def _positions(s: TheorySettings, cache: Path | None) -> list[dict[str, Any]]:
    """Errors at positions for three pairs of ends: the paper's, the best, and ends further out."""
    low, high = FAR_ENDS
    ends = (1 / s.length, 1.0), best_endpoints(s.channels, s.length, s.beta, cache=cache), (low / s.length, high)
    first = max(4, min(2 * s.channels, s.length // 2))  # N weights fit as many positions
    positions = spectra.spread(first, s.length, 16).int().tolist()
    return [error_by_position(s.channels, s.length, positions, s.beta, ends=pair) for pair in ends]


def _channels(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Channels in use of static rates; "theorem" and "default" have the stretching with t_ref = T and t_ref = 1."""
    rates, positions = geometric_rates(s.channels, s.length), spectra.spread(1, s.length, 120).int().tolist()
    found = (spectra.effective_channels(rates, positions, s.length, reference) for reference in (None, s.length, 1))
    static, theorem, default = found
    return {**static, "theorem": theorem, "default": default}


def _responses(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Responses with the stretching of Theorem 4.11, t_ref = T, and as "default" with the algorithm's t_ref = 1."""
    positions = sorted({max(4, s.length // part) for part in (100, 10, 1)})
    rates = geometric_rates(s.channels, s.length)
    theorem, default = (spectra.responses(rates, positions, reference, points=40) for reference in (s.length, 1))
    return {**theorem, "default": default}


def _energy(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Energies with τ_k(t) = t^{α_k} (Theorem 4.11), for a slowest, a middle and a fastest channel, up to t = 1,000.

    "default" has the τ_k(t) = (T t)^{α_k} of the algorithm, t_ref = 1.
    """
    steps, trials = min(s.length, 1000), 4000
    both = torch.ones(3, dtype=torch.float64), geometric_rates(3, s.length)
    theorem, default = (spectra.energies(rates, taper(3), steps, trials, s.seed, points=60) for rates in both)
    return {**theorem, "default": default}


def _taper(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Bounds, and the best taper if the first octaves carry J₀(1 + ε) of information and the others J₀(1 − ε).

    The first octaves are (1 − ε)/2 of all and carry half of the information, so that α = 1/2 reaches the sharp bound.
    """
    by_slack = {}
    for slack in SLACKS:
        bound, octave = spectra.taper_bound(slack, s.channels), torch.arange(20)
        best = spectra.best_taper(torch.where(octave < round(10 * (1 - slack)), 1 + slack, 1 - slack), s.channels)
        by_slack[f"{slack:g}"] = {"paper": bound.paper.tolist(), "sharp": bound.sharp.tolist(), "best": best.tolist()}
    return by_slack


# --------------------------------------------------------------------------------------------- the data


def _autocovariance(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Exponent β of the text in bits, and in the embeddings of each run; "without" says why a sequence has none."""
    ids, table = _bits(s, "autocovariance")
    vectors = {"bits": table}
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


def _blocks(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """Exponents of block averages of the text in bits."""
    ids, table = _bits(s, "blocks")
    return {"tokens": len(ids), **block_exponents(ids, table, seed=s.seed)}


def _density(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """The slope of the spectrum of the text in bits, and β of its autocovariance."""
    ids, table = _bits(s, "density")
    law = power_law(ids, table, seed=s.seed)
    claimed = {"claimed slope": law["exponent"] - 1, "claimed low": law["low"] - 1, "claimed high": law["high"] - 1}
    return {"tokens": len(ids), **claimed, **spectral_density(ids, table, seed=s.seed)}


def _bits(s: TheorySettings, topic: str) -> tuple[torch.Tensor, torch.Tensor]:
    if not s.text:
        raise ValueError(f"{topic} needs a text: --text FILE")
    ids = read_ids(s.text, s.tokenizer)[: s.tokens]
    return ids, bits(BYTE_VOCABULARY if s.tokenizer is None else int(ids.max()) + 1)


def _information(s: TheorySettings, _: Path | None) -> dict[str, Any]:
    """J(σ) of each run, up to its training length. Beyond it, the loss shows how the model extrapolates."""
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


TOPICS: dict[str, Callable[[TheorySettings, Path | None], Any]] = {
    "errors": lambda s, cache: error_by_channels(s.all_counts, s.lengths, s.beta, seed=s.seed, cache=cache),
    "ends": lambda s, cache: error_by_ends(s.channels, s.length, s.beta, seed=s.seed, cache=cache),
    "positions": _positions,
    # Gaps of log-rates that are drawn uniformly on [−log T, 0].
    "gaps": lambda s, _: spectra.minimum_gap([n for n in s.all_counts if n > 1], 1 / math.log(s.length), seed=s.seed),
    "channels": _channels, "responses": _responses, "energy": _energy,
    "normalization": lambda s, _: relative_energies(s.channels, s.length),
    "taper": _taper, "autocovariance": _autocovariance, "blocks": _blocks, "density": _density,
    "information": _information, "gradients": lambda s, _: gradient_flow(seed=s.seed),
    "phases": lambda s, _: phase_attenuation(seed=s.seed), "gram": lambda s, _: gram_bounds(seed=s.seed),
    "costs": lambda s, _: cost_table(), "statements": lambda s, _: statements(s.seed),
}  # fmt: skip
# Topics that need files → the setting that names the files.
OF_FILES = {"autocovariance": "text", "blocks": "text", "density": "text", "information": "runs"}


def compute(
    settings: TheorySettings, topics: Sequence[str] = (), *, cache: Path | None = None, show: bool = False
) -> dict[str, Any]:
    """Compute the plain data of some topics, in the order of `TOPICS`; by default of all that have their files.

    `cache` is a JSON file that stores the best ends and steps.
    """
    from rich.progress import track

    settings.validate()
    for name in topics:
        check_choice("topic", name, TOPICS)
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
    for step in track(steps, "computing", **on_terminal(show)):
        step()
    return {name: data_of[name] for name in TOPICS if name in data_of}


def write(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write `theory.json` and return its content. Topics that the file already has and `data` lacks are kept."""
    file = folder / THEORY_JSON
    data = {**(read_json(file) if file.exists() else {}), **data}
    data = {name: data[name] for name in TOPICS if name in data}
    write_json(file, data)
    return data
