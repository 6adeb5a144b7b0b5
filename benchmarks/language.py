"""Language models that were trained here, compared with gzip and with a 5-gram that saw the same bytes.

    python benchmarks/language.py runs/text/* --write docs/results/language.md

The runs are folders of `halflife train` with the tokenizer "bytes" on one corpus. The 5-gram (interpolated Kneser-Ney)
is fitted on exactly the bytes in the batches of the run. Neighbouring rows of a document are joined, so that it loses
no context. All are measured on the same validation documents, each from its first byte on. The first byte costs the
model 8 bits.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

import numpy as np
from ngrams import kneser_ney_bits_per_byte  # beside this file

from halflife.data.corpus import Corpus, CorpusConfig
from halflife.files import read_json, write_text
from halflife.lab.experiments.train import load_config
from halflife.models import checkpoint
from halflife.report.figures.language import length, loss
from halflife.report.figures.matplotlib_renderer import draw, save_as
from halflife.runs.folder import read_language
from halflife.runs.language_run import LanguageConfig, MicroBatches, documents, loss_in_rows

EXCERPT = 700  # characters of a sample


def seen(config: LanguageConfig, corpus: Corpus) -> list[bytes]:
    """Return the bytes that training read, each once, as pieces of documents; neighbouring rows are joined."""
    split = corpus.split("train")
    batches = MicroBatches(split, config, 1).slices[0]
    mask = np.zeros(split.tokens + 1, dtype=bool)
    for step in range(config.steps):
        for start in batches.starts(step).tolist():
            mask[start : start + config.context] = True
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    cuts = np.union1d(edges, split.files.offsets)
    pieces = [(a, b) for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True) if mask[a]]
    return [split.files.tokens[a:b].astype(np.uint8).tobytes() for a, b in pieces]


def measure(folder: Path) -> dict[str, Any]:
    """Return the result of a run with `bits`, the bits per byte of the model and of its baselines."""
    config, result = load_config(folder), read_json(folder / "result.json")
    if config.data["tokenizer"] != "bytes":
        raise ValueError(f"{folder} has the tokenizer {config.data['tokenizer']}; the baselines need bytes")
    corpus = Corpus.open(CorpusConfig.from_dict(config.data), show=False)
    split = corpus.split("validation")
    texts = [ids.numpy().astype(np.uint8).tobytes() for ids in documents(split, config.test_tokens)]
    size, found = sum(map(len, texts)), result["documents"]
    train, first = seen(config, corpus), 8 * found["documents"] / size
    followed = found["tokens"] / size
    bits = {
        "rows": loss_in_rows(checkpoint.load(folder).eval(), split, config) / np.log(2) * followed + first,
        "documents": found["nats"] / np.log(2) / size + first,
        "gzip -9, one stream": 8 * len(gzip.compress(b"".join(texts))) / size,
        "gzip -9, each document": 8 * sum(len(gzip.compress(text)) for text in texts) / size,
        "5-gram": kneser_ney_bits_per_byte(train, texts, order=5),
    }
    facts = {"train": corpus.split("train").bytes, "seen": sum(map(len, train)), "validation": size}
    return {**result, "bits": bits, **facts, "config": config}


def seconds(folder: Path) -> float:
    """Return the seconds that the training steps took, from the log."""
    tokens = read_json(folder / "result.json")["tokens"] / read_json(folder / "run.json")["steps"]
    steps, last = 0.0, 0
    metrics = read_language(folder).training.metrics
    for line in (line for line in metrics if "tokens_per_second" in line):
        steps, last = steps + (line["step"] - last) * tokens / line["tokens_per_second"], line["step"]
    return steps


def markdown(folders: list[Path], found: list[dict[str, Any]], figures: str) -> str:
    """Return the page as Markdown."""
    first = found[0]
    config: LanguageConfig = first["config"]
    names = [one["config"].model.name for one in found]
    table = [
        "| | parameters | minutes | tokens/s | MFU | bits/byte | whole documents | gzip −9 | 5-gram |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for folder, name, one in zip(folders, names, found, strict=True):
        rows, documents, whole, each, grams = one["bits"].values()
        table.append(
            f"| {name} | {one['parameters'] / 1e6:.2f} M | {seconds(folder) / 60:.0f} "
            f"| {one['tokens_per_second']:,.0f} | {one['mfu']:.0%} | **{rows:.3f}** | {documents:.3f} "
            f"| {whole:.3f}, {each:.3f} | {grams:.3f} |"
        )
    sizes = " | ".join(f"{row['length']:,}" for row in first["lengths"])
    lengths = [f"| perplexity at length | {sizes} |", "|---" * (len(first["lengths"]) + 1) + "|"]
    for name, one in zip(names, found, strict=True):
        cells = [f"{row['perplexity']:.3f} ({row['last_perplexity']:.3f})" for row in one["lengths"]]
        lengths.append(f"| {name} | {' | '.join(cells)} |")
    size = first["validation"] / first["documents"]["documents"]
    in_rows, carried, zipped, _, grams = zip(*(one["bits"].values() for one in found), strict=True)
    across = ", ".join(f"{bits:.3f} ({name})" for name, bits in zip(names, carried, strict=True))
    commands = [read_json(folder / "versions.json")["command"] for folder in folders]
    return f"""# Language models on documentation

**In rows of {config.context} bytes, as in training, the models need {min(in_rows):.2f} to {max(in_rows):.2f} bits a \
byte; over whole documents, with the state carried, they need {across}, where a 5-gram needs {grams[0]:.2f} and gzip \
{zipped[0]:.2f}. The page is exploratory: each model has one seed and one learning rate, so small differences mean \
nothing, and no verdict on [a claim](../contributing.md#claims) rests on it.**

![Loss by position, perplexity by length]({figures}_length.png)

{chr(10).join(table)}

The models read bytes of this machine's documentation, each {first["seen"] / 1e6:.2f} MB in rows of {config.context} \
bytes, which is less than one epoch.

* Bits per byte are those of the validation documents: in rows as in training (bold), and over whole documents, with \
the state carried from the first byte to the last ({size:,.0f} bytes on average).
* gzip has two numbers: for all documents as one stream, and for each document alone.
* The 5-gram is interpolated Kneser-Ney on exactly the bytes that the model saw.
* The [MFU](../language-models.md) is the rate of operations in training, as a share of that of a large matrix product \
on this machine.

<details markdown="1">
<summary>How it was measured</summary>

The corpus has {first["train"] / 1e6:.1f} MB for training, and {first["validation"] / 1e6:.2f} MB of other documents \
for validation (SHA-256 {config.digest[:16]}…). The first byte of a document is counted as 8 bits. Minutes count the \
training steps without validation ([loss while training]({figures}_loss.png)).

<!-- record -->
```bash
{chr(10).join(commands)}
python benchmarks/language.py {" ".join(map(str, folders))} --write docs/results/language.md
```

</details>

<details markdown="1">
<summary>Perplexity by length</summary>

The perplexity in brackets is that of the last {config.context} bytes. Every length is read from the start of the same \
windows, in which documents follow each other without a boundary.

{chr(10).join(lengths)}

</details>

<details markdown="1">
<summary>A sample</summary>

It follows the start of a validation document, at temperature 0.8. The model's text begins at ⟨…⟩.

{sample(folders[0], names[0])}
</details>
"""


def sample(folder: Path, name: str) -> str:
    text = (folder / "samples.txt").read_text(encoding="utf-8").split("-" * 80 + "\n")[0][:EXCERPT]
    return f"**{name}**\n\n```text\n{text.replace('```', '` ` `')}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, help="the page to write, with its figures beside it")
    options = parser.parse_args()
    found = [measure(folder) for folder in options.runs]
    for one in found:
        print(one["config"].model.name, {name: round(bits, 4) for name, bits in one["bits"].items()})
    if options.write:
        names = [one["config"].model.name for one in found]
        stem = options.write.with_suffix("")
        goals = {"5-gram": found[0]["bits"]["5-gram"], "gzip −9": found[0]["bits"]["gzip -9, one stream"]}
        trainings = {name: read_language(run).training for name, run in zip(names, options.runs, strict=True)}
        save_as(draw(loss(trainings, goals)), Path(f"{stem}_loss.png"))
        save_as(draw(length(dict(zip(names, found, strict=True)))), Path(f"{stem}_length.png"))
        write_text(options.write, markdown(options.runs, found, stem.name))


if __name__ == "__main__":
    main()
