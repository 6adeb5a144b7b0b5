"""The model card of a trained language model: `README.md` in its folder, as the Hugging Face Hub shows it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halflife.analysis.survey import NothingToShow, measure_models
from halflife.data.documents import is_name
from halflife.data.tokenizers import OF_BYTES
from halflife.extras import install_anywhere
from halflife.files import WEIGHTS, finite, write_text
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.figures.spectrum import timescales
from halflife.report.table import Table
from halflife.runs.folder import FIGURES
from halflife.runs.records import LanguageRun

CARD = "README.md"
SETTINGS = ("steps", "batch_size", "context", "learning_rate", "schedule", "weight_decay", "warmup", "bf16", "seed")
FIGURE = "timescales"
CARD_TEXT = """# {name}, {parameters:,} parameters

A causal language model with {layers} layers of width {width}, trained by
halflife {version} on {tokens:,} tokens. Its state of one sequence is {state:,} numbers
after the first token.

## Use

```python
import halflife.hf  # registers the model with transformers: {install}
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
```

`config.json` has no `auto_map`, so transformers downloads and runs no code; `import halflife.hf` is enough.

{bytes}The folder holds the tokenizer, which `AutoTokenizer.from_pretrained` and `pipeline` of transformers load.
On a command line: `halflife generate {typed} "Once upon a time"`.

## Results

{bits:.4f} bits per byte on held-out text, in rows of {context:,} tokens.

{lengths}

{figure}## Data

{data}

## Settings

{settings}
"""


def write_card(run: LanguageRun) -> Path | None:
    """Write the card of a finished run, with a figure of its decays; None for a run without a trained model."""
    if not run.result or "diverged" in run.result or not (run.path / WEIGHTS).exists():
        return None
    figure = _draw_decays(run.path)
    return write_text(run.path / CARD, "\n".join([*_metadata(run), _text(run, figure)]))


def _draw_decays(folder: Path) -> str | None:
    """Draw the base time-scales of the model in a folder. Return the figure's path there; None without decays."""
    try:
        spectrum = finite(measure_models((folder,)).to_dict())
    except NothingToShow:
        return None
    save(timescales(spectrum), folder / FIGURES, FIGURE, ("png",))
    return f"{FIGURES}/{FIGURE}.png"


def _text(run: LanguageRun, figure: str | None) -> str:
    model, result, tokenizer = run.config["model"], run.result, run.config["data"]["tokenizer"]
    lengths = [(f"{row['length']:,}", f"{row['perplexity']:.3f}") for row in result["lengths"]]
    settings = [(name, run.config[name]) for name in SETTINGS]
    settings += [(f"model: {name}", json.dumps(value)) for name, value in model.items() if value not in (None, {})]
    names, folder = ("setting", "value"), run.path.resolve().name
    end = ", and 256 ends a document" if "+" in tokenizer else ""
    return CARD_TEXT.format(
        name=model["name"], parameters=result["parameters"], layers=model["num_layers"], width=model["hidden_size"],
        version=run.versions.get("halflife", ""), tokens=result["tokens"], state=result["state_size"],
        folder=folder, typed=shlex.quote(folder), bits=result["bits_per_byte"], context=run.config["context"],
        bytes=f"Its tokens are the bytes of the text in UTF-8{end}.\n" if tokenizer in OF_BYTES else "",
        lengths=Table(("length in tokens", "perplexity per token"), lengths, left=("",)).markdown(),
        install=install_anywhere("train"),
        figure=f"![The time-scales of the decays, in tokens, by layer]({figure})\n\n" if figure else "",
        data="\n".join(_data(run.config["data"])), settings=Table(names, settings, left=names).markdown(),
    )  # fmt: skip


def _metadata(run: LanguageRun) -> Iterator[str]:
    """The YAML block that the hub reads. JSON strings are YAML strings."""
    yield "---"
    yield "library_name: halflife"
    yield "pipeline_tag: text-generation"
    yield f"tags: {json.dumps(['linear-attention', run.config['model']['name']])}"
    if names := [s[3:].partition("@")[0].partition(":")[0] for s in run.config["data"]["sources"] if s[:3] == "hf:"]:
        yield f"datasets: {json.dumps(names)}"
    yield "---"
    yield ""


def _data(data: dict[str, Any]) -> Iterator[str]:
    """The sources, without the folders of this machine, and their weights."""
    names = [source if is_name(source) else Path(source).name for source in data["sources"]]
    tokenizer = data["tokenizer"]
    if tokenizer.startswith(".") or Path(tokenizer).is_absolute():
        tokenizer = Path(tokenizer).name  # a folder
    weights = data.get("weights") or [None] * len(names)
    for name, weight in zip(names, weights, strict=True):
        yield f"- `{name}`" + ("" if weight is None else f", weight {weight:g}")
    yield ""
    yield f"Tokenizer `{tokenizer}`. {data['fractions'][0]:.2%} of the documents were held out."
