"""`halflife train`."""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from halflife.cli.resume import only, resumable


@dataclass(frozen=True)
class Train:
    """Train a language model on your text: any preset, from scratch, to a folder that transformers can load.

    Writes into --output: config.json and model.safetensors (also for `AutoModelForCausalLM.from_pretrained`), the
    tokenizer, run.json (all settings), metrics.jsonl, result.json, figures/, report.html and samples.txt. Interrupted
    (Ctrl-C, SIGTERM, a crash, kill -9), it goes on with --resume DIR from its last checkpoint, to the same numbers.

    examples:
      halflife train mamba2+post --data "docs/**/*.md" notes.txt --tokens 20M --context 1024
      halflife train gated_deltanet --data corpus.jsonl.gz --tokenizer gpt2 --hidden-size 512 --num-layers 12 --bf16
      halflife train mamba2 --size decay-160m --data hf:HuggingFaceFW/fineweb-edu --tokenizer gpt2 --tokens 10B
      halflife train --resume runs/20260101-120000-mamba2
      torchrun --nproc-per-node 8 -m halflife.cli train mamba2 --data … --output out --fsdp
    """

    model: Positional[str | None] = None
    """A preset, base[+modifier…]; `halflife list` shows them."""
    data: tuple[str, ...] = ()
    """Files (.txt .md .jsonl .parquet, also .gz), folders, globs in quotes, or hf:owner/name from the Hub."""
    output: Path | None = None
    """The folder to write. Default: runs/<time>-<model>."""
    resume: Path | None = None
    """Go on with the run in this folder. How it is carried out (micro batches, processes, …) may be given anew."""
    tokens: str = "20M"
    """Tokens to train on: 500K, 20M, 1B."""
    context: int = 1024
    """Tokens of a row."""
    batch_size: int = 8
    """Rows of a step, of all processes together."""
    tokenizer: str = "bytes"
    """bytes, bytes+eos (a token ends each document), or one of Hugging Face: a name or a folder."""
    documents: str = "packed"
    """packed (state, convolution and position start anew with each document), or concatenated."""
    field: str = "text"
    """Field of .jsonl and .parquet records that holds the text."""
    held_out: float = 0.01
    """Share of the documents that is kept for validation."""
    size: str | None = None
    """A size of the papers: decay-160m, echo-180m, …; `halflife list` shows them."""
    hidden_size: int | None = None
    """Width. Default: 256, or the size's."""
    num_layers: int | None = None
    """Layers. Default: 6, or the size's."""
    num_heads: int | None = None
    """Heads. Default: the architecture's own, or the size's."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    schedule: str = "cosine"
    """cosine (to the floor), wsd (stays, then falls in a line to the floor), linear, constant."""
    floor: float = 0.1
    """The last learning rate, as a share of --lr."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises."""
    decay: float = 0.2
    """Share of the steps in which wsd falls."""
    weight_decay: float = 0.1
    """Of matrices; decays, norms, biases and embeddings' companions have none."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    bf16: bool = False
    """Products in bfloat16; decays, states and weights stay float32."""
    seed: int = 0
    """Of weights and of the order of the data."""
    validate_every: int = 200
    """Steps between validations."""
    save_every: int = 200
    """Steps between checkpoints."""
    micro_batch_size: int | None = None
    """Rows that a process holds at once; gradients of several micro-batches are added. Default: all of its rows."""
    gradient_checkpointing: bool = False
    """Keep no activations inside blocks: less memory, a third more work."""
    fsdp: bool = False
    """With torchrun: shard parameters and optimiser over the processes (FSDP2); without it each has all (DDP)."""
    tensorboard: bool = False
    """Also write <output>/tensorboard (needs halflife[tensorboard])."""
    prompts: tuple[str, ...] = ()
    """Continued into samples.txt at the end. Default: the starts of three validation documents."""
    quiet: bool = False
    """No progress bars."""

    HOW = ("resume", "micro_batch_size", "gradient_checkpointing", "fsdp", "tensorboard", "prompts", "quiet")

    def run(self) -> None:
        from halflife.experiments import train as language
        from halflife.training.config import ExecutionConfig, rank

        execution = ExecutionConfig(
            micro_batch_size=self.micro_batch_size, gradient_checkpointing=self.gradient_checkpointing, fsdp=self.fsdp,
            tensorboard=self.tensorboard, show=not self.quiet,
        )  # fmt: skip
        if self.resume is not None:
            only(self, *self.HOW)
            folder, config = self.resume, language.load_config(self.resume)
        else:
            folder = self._folder()
            config = self._config(not self.quiet and rank() == 0)
        if rank() == 0:
            print(f"writing to {folder}")
        with resumable(f"halflife train --resume {shlex.quote(str(folder))}"):
            result = language.run_language(
                config, folder, execution=execution, samples=self.prompts,
                command=shlex.join(["halflife", *sys.argv[1:]]),
            )  # fmt: skip
        if rank() == 0:
            report(result, folder)

    def _folder(self) -> Path:
        from halflife.training.config import world_size

        if self.model is None or not self.data:
            raise ValueError("give a model and --data, or --resume and the folder of a run")
        if self.output is None and world_size() > 1:
            raise ValueError("with torchrun, give --output: all processes must write to one folder")
        folder = self.output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{self.model}"
        if (folder / "run.json").exists() and world_size() == 1:
            raise FileExistsError(f"{folder} holds a run already; continue it with --resume {folder}")
        return folder

    def _config(self, show: bool):
        from halflife.data.corpus import Corpus, CorpusConfig
        from halflife.experiments import train as language

        corpus = Corpus.open(
            CorpusConfig(
                sources=self.data, tokenizer=self.tokenizer, context=self.context, mode=self.documents,
                field=self.field, fractions=(self.held_out, 0.0), seed=self.seed,
            ),
            show,
        )  # fmt: skip
        sizes = {"hidden_size": self.hidden_size, "num_layers": self.num_layers, "num_heads": self.num_heads}
        default = {} if self.size else {"num_layers": 6}
        return language.configure(
            self.model or "", corpus, tokens=number(self.tokens), batch_size=self.batch_size, learning_rate=self.lr,
            size=self.size, sizes={**default, **{k: v for k, v in sizes.items() if v is not None}},
            schedule_name=self.schedule, floor=self.floor, decay=self.decay, warmup=self.warmup,
            weight_decay=self.weight_decay, clip=self.clip, bf16=self.bf16, seed=self.seed,
            validate_every=self.validate_every, save_every=self.save_every,
        )  # fmt: skip


def number(text: str) -> int:
    """A number of tokens: 500K, 20M, 1.5B, 1000000.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace("_", ""))
    if not found:
        raise ValueError(f"{text!r} is no number of tokens; write 500K, 20M, 1.5B or 1000000")
    return round(float(found[1]) * 1000 ** " KMBT".index(found[2] or " "))


def report(result: dict, folder: Path) -> None:
    """Prints what a run gave."""
    from rich import print as show
    from rich.table import Table

    if "diverged" in result:
        show(f"[bold]diverged[/bold]: {result['diverged']}; try a lower --lr")
        return
    table = Table(title=f"{result['parameters']:,} parameters, {result['tokens']:,} tokens")
    for column in ("length", "perplexity", "of its last context"):
        table.add_column(column, justify="right")
    for row in result["lengths"]:
        table.add_row(f"{row['length']:,}", f"{row['perplexity']:.3f}", f"{row['last_perplexity']:.3f}")
    show(table)
    speed = f"{result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.1%}"
    rows, whole = result["bits_per_byte"], result["bits_per_byte_of_documents"]
    show(f"validation: {rows:.4f} bits per byte in rows as in training, {whole:.4f} of whole documents")
    show(f"training: {speed}")
    show(f"report: {folder / 'report.html'}")
    show(f'continue a text with: halflife generate {folder} "…"')
