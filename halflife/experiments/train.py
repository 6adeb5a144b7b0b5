"""Training one language model on the user's text: a folder with its configuration, then the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from halflife.data.corpus import Corpus, CorpusConfig
from halflife.files import folder_lock, read_json, write_json
from halflife.models import ModelConfig, preset
from halflife.models.presets.sizes import SIZES
from halflife.registry import unknown
from halflife.runs.language_run import LanguageConfig, run
from halflife.runs.sweep import versions
from halflife.training.config import ExecutionConfig, rank
from halflife.training.schedules import schedule


def configure(
    name: str,
    corpus: Corpus,
    *,
    tokens: int,
    batch_size: int,
    learning_rate: float,
    size: str | None = None,
    sizes: dict[str, Any] | None = None,
    schedule_name: str = "cosine",
    floor: float = 0.1,
    decay: float = 0.2,
    **settings: Any,
) -> LanguageConfig:
    """The run that trains the preset `name` on `tokens` tokens of `corpus`.

    Args:
        name: a preset.
        corpus: opened.
        tokens: to train on, rounded up to whole batches.
        batch_size: rows of a batch, each a context long.
        learning_rate: after the warm-up.
        size: a name of `models.sizes.SIZES`, whose tokens and layers are taken; its vocabulary too, if it is larger
            than the tokenizer's.
        sizes: settings of `preset` that go before those.
        schedule_name, floor, decay: see `training.schedules`.
        **settings: other fields of `LanguageConfig`.

    Raises:
        ValueError: unknown names, or sizes that make no sense.
    """
    if size is not None and size not in SIZES:
        raise unknown("size", size, list(SIZES))
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1; got {tokens}")
    context, vocabulary = corpus.config.context, corpus.tokenizer.vocab_size
    known = {**SIZES.get(size or "", {}), **(sizes or {})}
    known["vocab_size"] = max(vocabulary, known.get("vocab_size", vocabulary))
    model = preset(name, train_length=context, **known)
    steps = math.ceil(tokens / (batch_size * context))
    kind, options = schedule(schedule_name, steps, learning_rate, floor=floor, decay=decay)
    return LanguageConfig(
        model=model, steps=steps, batch_size=batch_size, learning_rate=learning_rate, schedule=kind,
        schedule_options=options, digest=corpus.digest, data=plain(corpus.config), context=context,
        mode=corpus.config.mode, **settings,
    )  # fmt: skip


def plain(config: CorpusConfig) -> dict[str, Any]:
    """A corpus's configuration as JSON holds it; files by their whole path, so that a run goes on from anywhere."""
    sources = [str(s) if str(s).startswith("hf:") else str(Path(s).absolute()) for s in config.sources]
    cache = None if config.cache_dir is None else str(Path(config.cache_dir).absolute())
    return {**dataclasses.asdict(config), "sources": sources, "fractions": list(config.fractions), "cache_dir": cache}


def opened(data: dict[str, Any], show: bool) -> Corpus:
    """The corpus of `plain`."""
    cache = None if data["cache_dir"] is None else Path(data["cache_dir"])
    fields = {**data, "sources": tuple(data["sources"]), "fractions": tuple(data["fractions"]), "cache_dir": cache}
    return Corpus.open(CorpusConfig(**fields), show)


def saved(folder: Path) -> LanguageConfig:
    """The configuration of the run in `folder`.

    Raises:
        FileNotFoundError, ValueError: there is none, or another kind of run.
    """
    if not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run: there is no run.json")
    data = read_json(folder / "run.json")
    fields = {f.name for f in dataclasses.fields(LanguageConfig)}
    if not isinstance(data, dict) or "context" not in data or not set(data) <= fields:
        raise ValueError(f"{folder} holds no run of `halflife train`")
    return LanguageConfig(**{**data, "model": ModelConfig.from_dict(data["model"]), "betas": tuple(data["betas"])})


def execute(
    config: LanguageConfig, folder: Path, *, execution: ExecutionConfig, samples: Sequence[str] = (), command: str = ""
) -> dict[str, Any]:
    """Runs or goes on with `config` in `folder`; writes figures and samples. Returns the result.

    Args:
        samples: prompts that the model continues at the end, into `samples.txt`.
        command: that started it, for `command.txt`.
    """
    with folder_lock(folder) if rank() == 0 else nullcontext():
        return _execute(config, folder, execution, samples, command)


def _execute(
    config: LanguageConfig, folder: Path, execution: ExecutionConfig, samples: Sequence[str], command: str
) -> dict[str, Any]:
    corpus = opened(config.data, execution.show and rank() == 0)
    if rank() == 0 and not (folder / "versions.json").exists():
        write_json(folder / "versions.json", {**versions(), "command": command})
    result = run(config, corpus, folder, name=config.model.name, execution=execution)
    if rank() == 0 and "lengths" in result:
        from halflife.runs.samples import write_samples

        write_samples(folder, corpus, samples)
    if rank() == 0:
        from halflife.report.redraw import write_report

        write_report(folder)
    return result
