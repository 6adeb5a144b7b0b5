"""Training one language model on the user's text: the configuration, the run, and its report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_type_hints

from halflife import extensions
from halflife.data.corpus import Corpus, CorpusConfig
from halflife.data.paths import absolute_paths
from halflife.data.trust import SIGNATURE, check_origin
from halflife.files import RUN_JSON, VERSIONS_JSON, folder_lock, read_json_object, write_json
from halflife.lab.experiments.decay_rows import row_or_preset
from halflife.lab.experiments.values import convert
from halflife.models import ModelConfig
from halflife.models.presets.sizes import SIZES
from halflife.registry import check_choice, check_least
from halflife.runs.folder import FolderKind, folder_kind
from halflife.runs.language_run import LanguageConfig
from halflife.runs.one import run_one
from halflife.runs.versions import versions
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
    model: ModelConfig | None = None,
    **settings: Any,
) -> LanguageConfig:
    """The configuration of a run that trains the preset `name` on `tokens` tokens of `corpus`, in whole batches.

    Args:
        name: the name of the preset, or of a row of the Decay paper's grid (`vector/gla`, `tpe/tnl-l:released`).
        size: a name of `SIZES`, which sets the arguments of `preset`. The vocabulary is that of the size or of the
            tokenizer, whichever is larger.
        sizes: arguments of `preset` that replace those of `size`.
        schedule_name, floor, decay: see `training.schedules.schedule`.
        model: the model in the place of a preset. Then the name and sizes do not count.
        **settings: other fields of `LanguageConfig`.
    """
    if size is not None:
        check_choice("size", size, SIZES)
    check_least(tokens=tokens)
    context, vocabulary = corpus.config.context, corpus.tokenizer.vocab_size
    known = {**SIZES.get(size or "", {}), **(sizes or {})}
    known["vocab_size"] = max(vocabulary, known.get("vocab_size", vocabulary))
    model = model or row_or_preset(name, train_length=context, **known)
    steps = math.ceil(tokens / (batch_size * context))
    kind, options = schedule(schedule_name, steps, learning_rate, floor=floor, decay=decay)
    return LanguageConfig(
        model=model, steps=steps, batch_size=batch_size, learning_rate=learning_rate, schedule=kind,
        schedule_options=options, digest=corpus.digest, data=corpus.config.to_dict(), context=context,
        mode=corpus.config.mode, **settings,
    )  # fmt: skip


def load_config(folder: Path) -> LanguageConfig:
    """The configuration of the run in a folder.

    A ValueError says that the folder holds a run of another kind, that `run.json` is damaged or of a newer version, or
    that somebody else wrote it and it names what lies elsewhere.
    """
    path = folder / RUN_JSON
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no run (it has no {RUN_JSON})")
    saved = read_json_object(path)
    check_origin(saved, path)
    extensions.recall(saved, folder)
    data = {name: x for name, x in saved.items() if name not in (extensions.IMPORTS, SIGNATURE)}
    if folder_kind(folder) is not FolderKind.LANGUAGE_RUN:
        raise ValueError(f"{folder} holds no run of `halflife train`")
    fields = {f.name: f for f in dataclasses.fields(LanguageConfig)}
    if unknown_names := [name for name in data if name not in fields]:
        raise ValueError(
            f"{path} has settings that this version does not know: {', '.join(unknown_names)}. Use the version of "
            "halflife that wrote it (versions.json names it)"
        )
    required = [name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in data]:
        raise ValueError(f"{path} is damaged: it has no {', '.join(missing)}")
    hints = get_type_hints(LanguageConfig)
    values = {name: convert(f"{name} in {path}", x, hints[name]) for name, x in data.items() if name != "model"}
    try:
        values["data"] = absolute_paths(values["data"], folder)
        values["data"].update(dict.fromkeys({"cache_dir"} & values["data"].keys()))  # that of this user is taken
        config = LanguageConfig(**values, model=ModelConfig.from_dict(data["model"]))
        corpus = CorpusConfig.from_dict(config.data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: a setting has a value that cannot be ({error!r})") from error
    sources, files = list(corpus.sources), list(corpus.files or [()] * len(corpus.sources))
    if config.start is not None:  # the folder of weights counts as a source whose files are known
        sources, files = [*sources, config.start], [*files, (config.start,)]
    check_origin(saved, path, sources, files, corpus.tokenizer)
    return config


def run_language(
    config: LanguageConfig, folder: Path, *, execution: ExecutionConfig, samples: Sequence[str] = (), command: str = ""
) -> dict[str, Any]:
    """Run, or continue, `config` in a folder; write figures, samples and the report. Returns the result.

    The trained model continues the prompts `samples`, in `samples.txt`. `versions.json` has the `command` line.
    """
    from halflife.report.redraw import write_report
    from halflife.runs.samples import write_samples

    if execution.context_parallel > 1 and config.mode == "continued":
        raise ValueError("--carry-state continues whole rows, and --context-parallel cuts rows into pieces")
    first = rank() == 0
    with folder_lock(folder) if first else nullcontext():
        run = config.open(execution.show and first)
        if any(len(run.corpus.tokenizer.encode(prompt)) == 0 for prompt in samples):
            raise ValueError("a prompt has at least one token; got an empty one")

        def claimed() -> None:
            if first and not (folder / VERSIONS_JSON).exists():
                write_json(folder / VERSIONS_JSON, {**versions(), "command": command})

        result = run_one(run, folder, name=config.model.name, execution=execution, claimed=claimed)
        if first:
            if "diverged" not in result:
                write_samples(folder, run.corpus, samples)
            write_report(folder)
    return result
