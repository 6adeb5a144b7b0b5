"""The configurations that runs save, as options of the commands that made them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from halflife.lab.experiments.base import EXPERIMENTS, RECIPE
from halflife.lab.experiments.overrides import model_overrides
from halflife.models import ModelConfig
from halflife.tasks import TASKS

Options = dict[str, Any]

# Options of `halflife train` that a run saves under the same name.
SAME_NAME = ("context", "batch_size", "warmup", "weight_decay", "clip", "bf16", "seed", "validate_every", "save_every")
# Fields of a run on text that `--set training.…` alone sets.
SET_ONLY = ("betas", "epsilon", "validation_tokens", "test_tokens")
VOCABULARY_SIZES = {"bytes": 256, "bytes+eos": 257}  # of tokenizers of ours


def train_options(run: Mapping[str, Any]) -> Options:
    """Return the options of `halflife train` that give the run whose `run.json` holds `run`.

    "set" has what the preset and the options do not give.
    """
    data, carried = run["data"], run["mode"] == "continued"
    mode = {"documents": "concatenated", "carry_state": True} if carried else {"documents": run["mode"]}
    overrides = {f"training.{name}": run[name] for name in SET_ONLY if name in run}
    if (schedule := _schedule(run)) is None:
        overrides |= {"training.schedule": run["schedule"], "training.schedule_options": run["schedule_options"]}
    fitted = {"post_fit": True} if run.get("post_fit") else {}
    model: Options = {"from_weights": run["start"], **fitted} if run.get("start") else {}
    if fitted or not model:  # otherwise the weights give the model
        chosen, changed = _model_options(run)
        model, overrides = {**chosen, **model}, overrides | changed
    return {
        **model, "data": _sources(data), "tokenizer": data["tokenizer"], "field": data["field"],
        "held_out": data["fractions"][0], **mode, "lr": run["learning_rate"],
        "tokens": str(run["steps"] * run["batch_size"] * run["context"]),
        **{name: run[name] for name in SAME_NAME}, **({"freeze": list(run["freeze"])} if run.get("freeze") else {}),
        **(schedule or {}), "set": overrides,
    }  # fmt: skip


def _model_options(run: Mapping[str, Any]) -> tuple[Options, Options]:
    """The options that give the model, and overrides for what they do not give."""
    from halflife.lab.experiments.decay_design import row_or_preset

    model = ModelConfig.from_dict(run["model"])
    sizes: Options = {"hidden_size": model.hidden_size, "num_layers": model.num_layers}
    base = row_or_preset(model.name, vocab_size=model.vocab_size, train_length=run["context"], **sizes)
    known = model.vocab_size == VOCABULARY_SIZES.get(run["data"]["tokenizer"])
    vocabulary = {} if known else {"model.vocab_size": model.vocab_size}
    return {"model": model.name, **sizes}, model_overrides(model, base) | vocabulary


def _sources(data: Mapping[str, Any]) -> list[str]:
    """The values of --data that give the sources and weights of a `CorpusConfig`."""
    if not (weights := data.get("weights")):
        return data["sources"]
    return [f"{source}={weight:g}" for source, weight in zip(data["sources"], weights, strict=True)]


def _schedule(run: Mapping[str, Any]) -> Options | None:
    """The inverse of `training.schedules.schedule`; None for a schedule that it does not give."""
    settings = run["schedule_options"]
    names = run["schedule"], *sorted(settings)
    if names == ("cosine_with_min_lr", "min_lr_rate"):
        return {"schedule": "cosine", "floor": settings["min_lr_rate"]}
    if names == ("warmup_stable_decay", "decay_type", "min_lr_ratio", "num_decay_steps"):
        share = settings["num_decay_steps"] / run["steps"]
        return {"schedule": "wsd", "floor": settings["min_lr_ratio"], "decay": share}
    if names == ("polynomial", "lr_end", "power"):
        return {"schedule": "linear", "floor": settings["lr_end"] / run["learning_rate"]}
    return {"schedule": "constant"} if names == ("constant_with_warmup",) else None


def compare_options(comparison: Mapping[str, Any], options: Collection[str]) -> Options:
    """Return the options of `halflife compare` that give the comparison whose `config.json` holds `comparison`.

    `options` are those with the name of a setting.
    """
    settings, tried = comparison["settings"], comparison["learning_rates"]
    rates = list(tried.values())
    experiment = comparison["experiment"]
    chosen: Options = {"experiment": experiment}
    if experiment in TASKS:
        chosen = {"task": [experiment]}
    elif "tasks" in settings and comparison["task"] != experiment:
        chosen = {"task": settings["tasks"]}
    recipe = {f"training.{name}": settings[name] for name in RECIPE}
    given = {
        "models": comparison["models"], **chosen, "scale": comparison["scale"], "seeds": len(comparison["seeds"]),
        "tune_seeds": comparison.get("tune_seeds"),
        **{name: settings[name] for name in options if name in settings},
        "set": recipe | settings.get("overrides", {}),
    }  # fmt: skip
    if all(rate == rates[0] for rate in rates):
        return {**given, "lr": rates[0]}
    kind = EXPERIMENTS[experiment]()
    if all([*kind.default_rates(model, comparison["scale"])] == own for model, own in tried.items()):
        return given
    # The grid of some models was extended. One option holds the rates of all models, so each tries them all.
    return {**given, "lr": sorted({rate for own in rates for rate in own})}
