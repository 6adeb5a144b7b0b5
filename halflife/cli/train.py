"""`halflife train`."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from halflife.cli.groups import Execution, Job, as_typed, options_of
from halflife.cli.options import (
    EXIT_PARTLY_FAILED,
    check_job,
    command_line,
    new_folder,
    resumable,
    say,
    take_overrides,
    to_type,
)
from halflife.files import RESULT_JSON, RUN_JSON, check_new_folder

if TYPE_CHECKING:
    from halflife.runs.language_run import LanguageConfig
    from halflife.training.trial import Trial

# Names for --set that are options of the command.
RECIPE = ("batch_size", "warmup", "weight_decay", "clip", "bf16", "seed", "validate_every", "save_every")
OPTIONS = {
    **{f"model.{name}": name for name in ("hidden_size", "num_layers", "mlp")},
    **{f"training.{name}": name for name in RECIPE}, "training.learning_rate": "lr",
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """The text, and how it is cut into rows."""

    data: tuple[str, ...] = ()
    """Files (.txt .md .jsonl .parquet, also .gz), folders, globs in quotes, or hf:owner/name[:config][@revision] from
    the Hub, of which only as much is downloaded as --tokens and --held-out need. With weights, SOURCE=0.7 for every
    source, the rows of a batch are mixed in these shares."""
    tokens: str = "20M"
    """Tokens to train on: 500K, 20M, 1B."""
    context: int = 1024
    """Tokens of a row."""
    tokenizer: str = "bytes"
    """bytes, bytes+eos (a token ends each document), or a tokenizer of Hugging Face by its name or folder."""
    documents: str = "packed"
    """packed (each document starts with an empty state) or concatenated (the state crosses documents)."""
    carry_state: bool = False
    """With --documents concatenated, row b of a step continues row b of the step before, with its state. The gradient
    stops at the cut (truncated back-propagation through time), and checkpoints hold the states."""
    field: str = "text"
    """The field that holds the text in .jsonl and .parquet records."""
    held_out: float = 0.01
    """Share of the documents for validation."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a new model."""

    size: str | None = None
    """A model size of the papers: decay-160m, echo-180m, …; `halflife list` shows them."""
    hidden_size: int | None = None
    """Model width. Default: 256, or the width of --size."""
    num_layers: int | None = None
    """Layers. Default: 6, or the layers of --size."""
    num_heads: int | None = None
    """Heads. Default: the choice of the architecture, or the heads of --size."""
    mlp: str | None = None
    """The MLP of every block: swiglu, koopman, rwkv7, … or none (Mamba-2 as its paper has it). Default: that of the
    preset or of --size."""


@dataclass(frozen=True)
class Start:
    """Trained weights from which the run starts, and parameters that stay as they are."""

    from_weights: Annotated[str | None, arg(aliases=["--from"])] = None
    """Continue a trained model instead of a new one: a folder, or owner/name[@revision] on the hub, of a model of ours
    or of one that `halflife convert` converts. Give its tokenizer with --tokenizer. Embeddings grow to a larger one."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, as patterns of their names: "embedding*" "blocks.0.*"."""


@dataclass(frozen=True)
class Recipe:
    """Optimiser and schedule."""

    batch_size: int = 8
    """Rows of a step, over all processes."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    schedule: str = "cosine"
    """cosine (falls to the floor), wsd (stays constant, then falls linearly to the floor), linear, or constant."""
    floor: float = 0.1
    """The last learning rate, as a share of --lr."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises."""
    decay: float = 0.2
    """Share of the steps in which wsd falls."""
    weight_decay: float = 0.1
    """Weight decay of matrices, embeddings and the head. Decays, norms and biases have none."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    bf16: bool = False
    """Compute matrix products in bfloat16. Decays, states and weights stay float32."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    validate_every: int = 200
    """Steps between validations."""
    save_every: int = 200
    """Steps between checkpoints."""


@dataclass(frozen=True)
class TrainExecution(Execution):
    """How the run uses memory and processes, and what it reports."""

    compile: bool = False
    """Run each block by torch.compile, which takes minutes once. The lines of metrics.jsonl count its graphs."""
    fsdp: bool = False
    """With torchrun, shard parameters and optimiser over the processes (FSDP2). Default: each process has all (DDP)."""
    context_parallel: int = 1
    """With torchrun, processes that share each row: each has a piece, and states pass from one to the next."""
    profile: bool = False
    """Profile three steps, by pass: profile.csv, and trace.json for chrome://tracing or ui.perfetto.dev."""
    prompts: tuple[str, ...] = ()
    """Texts that the model continues into samples.txt. Default: the starts of three validation documents."""


@dataclass(frozen=True)
class Train:
    """Train a language model on your text from scratch, with any preset, into a folder that transformers can load.

    The folder --output gets config.json and model.safetensors (also for `AutoModelForCausalLM.from_pretrained`), the
    tokenizer, run.json (all settings), metrics.jsonl, result.json, figures/, report.html and samples.txt. A run that is
    interrupted (Ctrl-C, SIGTERM, a crash, kill -9) continues from its last checkpoint with --resume DIR, and reaches
    the same numbers.

    examples:
      halflife train mamba2 --data "docs/**/*.md" notes.txt --tokens 20M --context 1024
      halflife train gated_deltanet --data corpus.jsonl.gz --tokenizer gpt2 --hidden-size 512 --num-layers 12 --bf16
      halflife train mamba2 --size decay-160m --data hf:HuggingFaceFW/fineweb-edu --tokenizer gpt2 --tokens 10B
      halflife train mamba2+post --data notes.txt --set post.reference_length=512 training.betas="[0.9, 0.99]"
      halflife train mamba2 --data notes.txt=0.7 "docs/**/*.md=0.3" --tokens 5M
      halflife train --from my-checkpoint --data notes.txt --tokens 2M --lr 1e-4 --freeze "embedding*"
      halflife train --resume runs/20260101-120000-mamba2
      torchrun --nproc-per-node 8 -m halflife.cli train mamba2 --data … --output out --fsdp --compile
      halflife train mamba2 --size decay-160m --data notes.txt --tokens 10B --bf16 --dry-run --gpus 64
      torchrun --nproc-per-node 8 -m halflife.cli train mamba2 --data … --output out --context-parallel 8
    """

    model: Positional[str | None] = None
    """A preset, base[+modifier…], or a row of the Decay paper's grid (vector/gla). `halflife list` shows presets."""
    text: Text = Text()
    shape: Shape = Shape()
    start: Start = Start()
    recipe: Recipe = Recipe()
    execution: TrainExecution = TrainExecution()
    job: Job = field(default_factory=Job)

    def run(self) -> None:
        from halflife.lab.experiments import train as language
        from halflife.report.tables.estimate import describe_trial
        from halflife.report.tables.language import print_language_run
        from halflife.report.tracking import track_options
        from halflife.training.config import ExecutionConfig, rank

        own, rows, show = self.execution, self.execution.micro_batch_size, not self.job.quiet
        names = ("micro_batch_size", "recompute", "compile", "fsdp", "context_parallel", "profile")
        tracking = track_options(own.track)
        chosen = {} if self.job.dry_run else {name: getattr(own, name) for name in names}  # without torchrun, too
        execution = ExecutionConfig(**chosen, show=show, **tracking)
        check_job(self, RUN_JSON, *options_of(own))
        if self.job.resume is not None:
            folder, config = self.job.resume, language.load_config(self.job.resume)
        else:
            folder = self._folder()
            command, overrides = take_overrides(self, OPTIONS)
            config = command._configure(overrides, show=show and rank() == 0)
            if self.job.dry_run:
                return _print_needs(config, own)
        if rank() == 0:
            say(f"writing to {folder}")
            if show and not (folder / RESULT_JSON).exists() and (trial := _try(config, rows)):
                say(describe_trial(trial))
        with resumable(to_type("train", "--resume", str(folder), *as_typed(own)), folder / RUN_JSON):
            result = language.run_language(
                config, folder, execution=execution, samples=own.prompts, command=command_line()
            )
        if rank() == 0:
            print_language_run(result, folder)
            if "diverged" in result:
                raise SystemExit(EXIT_PARTLY_FAILED)

    def _folder(self) -> Path:
        from halflife.training.config import rank, world_size

        start, output = self.start, self.job.output
        name = self.model or (start.from_weights and Path(start.from_weights).resolve().name)
        if not name or not self.text.data:
            raise ValueError("give a model (or --from) and --data, or --resume and the folder of a run")
        shape = {"model": self.model, **options_of(self.shape)}
        given = [name for name, value in shape.items() if value is not None]
        if start.from_weights and given:
            raise ValueError(f"--from takes the model from its folder; leave out {', '.join(given)}")
        if output is None and world_size() > 1:
            raise ValueError("with torchrun, give --output: all processes must write to one folder")
        folder = output or new_folder(name)
        if (folder / RUN_JSON).exists() and world_size() == 1:
            raise FileExistsError(f"{folder} holds a run already; continue it with --resume {shlex.quote(str(folder))}")
        if rank() == 0 and not (folder / RUN_JSON).exists() and not self.job.dry_run:
            check_new_folder(folder)
        return folder

    def _configure(self, overrides: dict[str, Any], show: bool) -> LanguageConfig:
        from halflife.data.corpus import Corpus, CorpusConfig
        from halflife.data.mixture import read_weights
        from halflife.lab.experiments import train as language
        from halflife.lab.experiments.overrides import apply_overrides
        from halflife.lab.experiments.values import convert, parse_count
        from halflife.registry import check_choice, check_least

        text, recipe, shape = self.text, options_of(self.recipe), options_of(self.shape)
        batch_size, size = self.recipe.batch_size, shape.pop("size")
        if text.carry_state and text.documents != "concatenated":
            raise ValueError("--carry-state needs --documents concatenated: the state crosses documents, too")
        check_choice("mode of --documents", text.documents, ("packed", "concatenated"))
        check_least(batch_size=batch_size, context=text.context)
        tokens, sizes = parse_count(text.tokens), {} if size else {"num_layers": 6}
        if (steps := overrides.pop("training.steps", None)) is not None:
            tokens = convert("training.steps", steps, int) * batch_size * text.context
        if (vocab_size := overrides.pop("model.vocab_size", None)) is not None:
            sizes["vocab_size"] = convert("model.vocab_size", vocab_size, int)
        sizes |= {name: value for name, value in shape.items() if value is not None}
        rows = math.ceil(tokens / (batch_size * text.context)) * batch_size + 1
        sources, weights = read_weights(text.data)
        data = CorpusConfig(
            sources=sources, weights=weights, tokens=rows * text.context, tokenizer=text.tokenizer,
            context=text.context, mode="continued" if text.carry_state else text.documents, field=text.field,
            fractions=(text.held_out, 0.0), seed=self.recipe.seed,
        )  # fmt: skip
        # A size of the papers has a vocabulary, so no tokenizer is needed to know the model.
        known = "vocab_size" in sizes or size is not None
        corpus = Corpus.unread(data, known) if self.job.dry_run else Corpus.open(data, show)
        start = self._start(corpus.tokenizer.vocab_size) if self.start.from_weights else {}
        config = language.configure(
            self.model or "", corpus, tokens=tokens, size=size, sizes=sizes, learning_rate=recipe.pop("lr"),
            schedule_name=recipe.pop("schedule"), freeze=self.start.freeze, **recipe, **start,
        )  # fmt: skip
        return apply_overrides(config, overrides)

    def _start(self, vocab_size: int) -> dict[str, Any]:
        """The fields of a configuration that starts from trained weights."""
        from halflife.training.start import start_of

        model, folder, digest, rows = start_of(self.start.from_weights or "", vocab_size)
        if rows != vocab_size:
            grown = f"the embeddings grow to {vocab_size:,}" if rows < vocab_size else "the last rows stay unused"
            say(f"the model has {rows:,} tokens and the tokenizer {vocab_size:,}; {grown}")
        return {"model": model, "start": folder, "start_digest": digest}


def _try(config: LanguageConfig, rows: int | None) -> Trial | None:
    """What the run will take; None under torchrun, where several processes share its work."""
    from halflife.runs.one import training_device
    from halflife.training.config import world_size
    from halflife.training.trial import try_runs

    return try_runs([(config, config.sequences())], training_device(), rows) if world_size() == 1 else None


def _print_needs(config: LanguageConfig, own: TrainExecution) -> None:
    from halflife.report.tables.estimate import print_needs, print_plans
    from halflife.training.estimate import estimate
    from halflife.training.plan import Needs

    run = config.to_dict()
    model = run.pop("model")
    sequences = config.sequences()
    print_needs({"model": model, "run": run}, [(estimate(config, sequences, own.micro_batch_size), 1)], config.bf16)
    if own.gpus is not None:
        needs = Needs.of(config, max(sequences), "blocks" in own.recompute, own.fsdp)
        print_plans(needs, config.model.name, own.gpus)
