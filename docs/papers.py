"""The settings of the papers' experiments, as the papers print them; `python docs/papers.py` writes the page.

A test compares each value with the scale "paper" of the experiment. What else differs stands in the docstrings of the
experiments, under "Departures".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halflife.files import write_text
from halflife.lab.experiments import EXPERIMENTS
from halflife.report.table import Table

PAGE = Path(__file__).parent / "settings.md"
BEGIN, END = "<!-- python docs/papers.py -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Row:
    """A fact of a paper.

    Attributes:
        setting: a setting of the experiment.
        paper: its value in the paper, None where the paper does not give it.
        source: where the paper or its released code has it, or its words, where they are not the value.
    """

    setting: str
    paper: Any
    source: str = ""

    @property
    def in_paper(self) -> str:
        """What the paper says, in words."""
        said = ("not given",) if self.paper is None else () if self.source else ("the same",)
        return "; ".join([*said, *filter(None, [self.source])])


def _not_given(*settings: str) -> Iterator[Row]:
    return (Row(setting, None) for setting in settings)


FINEWEB_EDU, SAMPLE_10BT = ("hf:HuggingFaceFW/fineweb-edu",), ("hf:HuggingFaceFW/fineweb-edu:sample-10BT",)
ROWS: dict[str, tuple[Row, ...]] = {
    "post-mqar": (
        Row("steps", 8 * 4 * 512, "8 epochs × 4 stages × 512 batches"),
        Row("batch_size", 512, "2^18 tokens"),
        Row("schedule", "linear_by_epoch", "linear, once an epoch"),
        Row("warmup", 0.0, "none"),
        Row("weight_decay", 0.1),
        Row("betas", (0.9, 0.999), "AdamW's default"),
        Row("filler", "zoology", "random tokens"),
        Row("tie_embeddings", True, "released"),
        Row("initializer_range", 0.02, "released"),
        Row("embedding_dropout", 0.1, "released"),
        Row("bf16", True),
        Row("test_examples", 3000),
    ),
    "gate-rank-s5": (
        Row("num_layers", 1, "a single attention layer"),
        Row("train_length", 16),
        Row("validation_length", 64, "Figure 4"),
        Row("steps", 4000),
        Row("batch_size", 128),
        Row("weight_decay", 0.01),
        Row("warmup", 128 / 4000, "128 steps"),
        Row("schedule", "linear", "linear decay to 0"),
        Row("bf16", True),
    ),
    "echo-transfer": (
        Row("hidden_size", 128),
        Row("num_layers", 4),
        Row("num_heads", 4),
        Row("train_length", 64),
        Row("steps", 6000),
        Row("batch_size", 16),
        Row("weight_decay", 0.01, "Table 6"),
        Row("betas", (0.9, 0.95), "Table 6"),
        Row("schedule", "cosine", "Table 6, with warm-up"),
        Row("hop_lengths", (16, 32, 64, 128, 256), "Figure 1"),
    ),
    "echo-mqar": (
        Row("hidden_size", 448),
        Row("num_layers", 16),
        Row("num_heads", 7),
        Row("rank", 56),
        Row("ska_chunk", 64),
        Row("steps", None, "§4.1 has 6,000"),
        Row("batch_size", None, "Table 6 has 16"),
        Row("weight_decay", 0.01, "Table 6"),
        Row("schedule", "cosine", "Table 6"),
        Row("vocab_size", None),
    ),
    "echo-tiers": (
        Row("hidden_size", 96),
        Row("num_layers", 3),
        Row("num_heads", 3),
        Row("amnesia_layers", 4, "with 4 heads"),
        Row("rank", 24),
        Row("chunk_size", 64, "G.2, of the scan"),
        Row("steps", 2500),
        Row("amnesia_steps", 6000),
        Row("batch_size", 16),
        Row("weight_decay", 0.01),
        Row("betas", (0.9, 0.95)),
        Row("schedule", "cosine", "with warm-up"),
        Row("validate_every", 250),
        Row("action_mask", True),
    ),
    "post-lm": (
        Row("text", SAMPLE_10BT, "FineWeb-Edu; released"),
        Row("tokenizer", "meta-llama/Llama-3.1-8B", "Llama-3.1"),
        Row("vocab_size", 128_256),
        Row("size", "post-180m", "Table 5: 24 layers of width 768, tied"),
        Row("train_length", 2048),
        Row("batch_size", 256, "released: 8 × 8 GPUs × 4"),
        Row("steps", 7_629, "4B tokens"),
        Row("learning_rate", 6e-4),
        Row("schedule", "cosine"),
        Row("floor", 1e-5 / 6e-4, "the last rate is 1e-5"),
        Row("warmup", 0.01),
        Row("weight_decay", 0.1),
        Row("betas", (0.9, 0.95)),
        Row("epsilon", 1e-8),
        Row("rwkv7_betas", (0.9, 0.99)),
        Row("rwkv7_epsilon", 1e-18),
        Row("bf16", True),
        *_not_given("mamba2_initialization", "rwkv7_initialization", "delta_initialization"),
    ),
    "decay-lm": (
        Row("text", SAMPLE_10BT, "fineweb-edu-10B"),
        Row("tokenizer", "gpt2", "GPT2-Tokenizer"),
        Row("vocab_size", 50_432, "GPT-2's; padded as released"),
        Row("size", "decay-160m", "Table 5: 12 layers of width 768, 12 heads"),
        Row("train_length", 2048),
        Row("batch_size", 256, "Table 5: 32 on 8 GPUs"),
        Row("steps", 20_000),
        Row("learning_rate", 3e-4),
        Row("betas", (0.9, 0.999)),
        Row("epsilon", None),
        Row("schedule", "wsd", "WSD"),
        *_not_given("decay", "floor", "warmup", "weight_decay", "bf16"),
    ),
    "echo-lm": (
        Row("text", SAMPLE_10BT),
        *_not_given("tokenizer", "vocab_size"),
        Row("size", "echo-180m", "24 layers of width 768, SKA in layers 8 and 16"),
        Row("state_size", None, "64 at 50M"),
        Row("train_length", 2048),
        Row("batch_size", 96),
        Row("steps", 50_000, "10B tokens"),
        Row("learning_rate", 3e-4, "Table 6"),
        Row("betas", (0.9, 0.95), "Table 6"),
        Row("epsilon", None),
        Row("weight_decay", 0.01, "Table 6"),
        Row("schedule", "cosine", "Table 6, with warm-up"),
        *_not_given("floor", "warmup"),
        Row("bf16", True),
    ),
    "gate-rank-lm": (
        Row("text", FINEWEB_EDU),
        *_not_given("tokenizer", "vocab_size"),
        Row("size", "gate-rank-760m", "width 1536, 20 layers (Mamba-2), 18 (Gated DeltaNet)"),
        Row("train_length", 4096),
        Row("batch_size", 120),
        Row("steps", 61_036, "30B tokens"),
        Row("learning_rate", 1.25e-3),
        *_not_given("betas", "epsilon"),
        Row("weight_decay", 0.1),
        Row("schedule", "cosine"),
        Row("floor", None),
        Row("warmup", 0.01),
        Row("bf16", None),
    ),
}


def tables() -> Iterator[str]:
    """Yield a heading and a table for each experiment: each setting, its value here, and what the paper says of it."""
    heading = ["setting", "value", "in the paper"]
    for name, rows in ROWS.items():
        settings = EXPERIMENTS[name].scales["paper"]
        cells = [[f"`{row.setting}`", _write(getattr(settings, row.setting)), row.in_paper] for row in rows]
        yield f"## {name}\n\n{EXPERIMENTS.summary(name)}\n\n{Table(heading, cells, left=heading).markdown()}\n"


def _write(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_write, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def page(text: str) -> str:
    """The page with its generated part made again."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(tables()) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text(encoding="utf-8")))
