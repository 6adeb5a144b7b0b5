"""The model card of a trained language model: `README.md` in its folder, as the Hugging Face Hub shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halflife.analysis.survey import measure_models
from halflife.data.documents import is_name
from halflife.data.tokenizers import OF_BYTES
from halflife.files import WEIGHTS, finite, write_text
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.figures.spectrum import timescales
from halflife.runs.folder import FIGURES, LanguageRun

CARD = "README.md"
SETTINGS = ("steps", "batch_size", "context", "learning_rate", "schedule", "weight_decay", "warmup", "bf16", "seed")
FIGURE = "timescales"
LOAD = """```python
import halflife.hf  # registers the model with transformers: pip install 'halflife-lm[train]'
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```

`config.json` has no `auto_map`, so transformers downloads and runs no code; `import halflife.hf` is enough."""


def write_card(run: LanguageRun) -> Path | None:
    """Write the card of a finished run, with a figure of its decays; None for a run without a trained model."""
    if not run.result or "diverged" in run.result or not (run.path / WEIGHTS).exists():
        return None
    figure = _draw_decays(run.path)
    write_text(run.path / CARD, "\n".join(_lines(run, figure)) + "\n")
    return run.path / CARD


def _draw_decays(folder: Path) -> str | None:
    """Draw the base time-scales of the model in a folder. Return the figure's path there; None without decays."""
    try:
        spectrum = finite(measure_models((folder,)).to_dict())
    except ValueError:  # the model has neither a decay nor an operator
        return None
    save(timescales(spectrum), folder / FIGURES, FIGURE, ("png",))
    return f"{FIGURES}/{FIGURE}.png"


def _lines(run: LanguageRun, figure: str | None) -> Iterator[str]:
    model, result = run.config["model"], run.result
    yield from _metadata(run)
    yield f"# {model['name']}, {result['parameters']:,} parameters"
    yield ""
    yield f"A causal language model with {model['num_layers']} layers of width {model['hidden_size']}, trained by"
    yield f"[halflife](https://pypi.org/project/halflife-lm/) {run.versions.get('halflife', '')}"
    yield f"on {result['tokens']:,} tokens. Its state of one sequence is {result['state_size']:,} numbers"
    yield "after the first token."
    yield ""
    yield "## Use"
    yield ""
    yield LOAD.format(name=run.path.name)
    yield ""
    tokenizer = run.config["data"]["tokenizer"]
    if tokenizer in OF_BYTES:
        end = ", and 256 ends a document" if "+" in tokenizer else ""
        yield f"Its tokens are the bytes of the text in UTF-8{end}."
    yield "The folder holds the tokenizer, which `AutoTokenizer.from_pretrained` and `pipeline` of transformers load."
    yield f'On a command line: `halflife generate {run.path.name} "Once upon a time"`.'
    yield ""
    yield "## Results"
    yield ""
    yield f"{result['bits_per_byte']:.4f} bits per byte on held-out text, in rows of {run.config['context']:,} tokens."
    yield ""
    yield "| length in tokens | perplexity per token |"
    yield "|---:|---:|"
    yield from (f"| {row['length']:,} | {row['perplexity']:.3f} |" for row in result["lengths"])
    yield ""
    if figure is not None:
        yield f"![The time-scales of the decays, in tokens, by layer]({figure})"
        yield ""
    yield "## Data"
    yield ""
    yield from _data(run.config["data"])
    yield ""
    yield "## Settings"
    yield ""
    yield "| setting | value |"
    yield "|---|---|"
    yield from (f"| {name} | {run.config[name]} |" for name in SETTINGS)
    yield from (f"| model: {name} | {json.dumps(value)} |" for name, value in model.items() if value not in (None, {}))


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
