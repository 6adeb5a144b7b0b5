"""Single options of a run, set by name: `mixer.power=2`, `post.reference_length=512`, `training.weight_decay=0.05`.

A name is `group.option`. The options of a group are those of the run's own model, read from the signatures of its
classes, so that an unknown name is answered with the names that exist.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import torch

from halflife import layers
from halflife.decay import DECAYS, PoST
from halflife.decay.base import Decay
from halflife.lab.experiments.values import convert, describe, load_yaml
from halflife.layers import LAYERS
from halflife.layers.memory.choice import KINDS
from halflife.models import LanguageModel, ModelConfig
from halflife.registry import check_choice, constructor_parameters, option_groups, plain_type, unknown
from halflife.training.config import TrainConfig
from halflife.training.schedules import check_schedule

Config = TypeVar("Config", bound=TrainConfig)
Options = dict[str, Any]

# Options that a group of this name would have, and why it refuses them.
MODEL_REFUSED = {
    "name": "it is the name of the preset",
    "mixer": "choose a preset with that mixer instead",
    "mixer_options": "mixer.… sets these options one at a time",
    "hidden_size": "a preset derives its heads from it; use the option --hidden-size",
    "num_layers": "a preset derives the layers of a hybrid from it; use the option --num-layers",
    "vocab_size": "the tokenizer or the task sets it",
}
SET_BY_MODEL: dict[str, str] = dict.fromkeys(
    ("hidden_size", "layer_idx", "num_layers"), "the model sets it for all of its layers"
)
PARTS = ("decay", "post", "gate_rank", "log_linear", "ska")  # groups of parts that a model may lack
# Fields of a run that say what it is trained on.
DATA_FIELDS = ("model", "stages", "validation", "tests", "digest", "data", "context", "mode", "test_split")


@dataclass(frozen=True)
class Group:
    """The options of one group that a run has."""

    owner: str  # what has the options, for messages
    types: Mapping[str, Any]  # option → type
    # takes options and returns the fields of the run's configuration that they change
    write: Callable[[Options], Options]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)  # option → why it cannot be set in this group
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # option → its value in this run
    classes: Sequence[type] = ()  # the classes that have the options


def parse_overrides(written: Sequence[str]) -> Options:
    """The values by name of `["mixer.power=2", …]`. Values are YAML, and the last of equal names wins."""
    parsed: Options = {}
    for entry in written:
        name, equals, value = entry.partition("=")
        if not name.strip() or not equals:
            raise ValueError(f"write an option as group.option=value, for example mixer.power=2; got {entry!r}")
        parsed[name.strip()] = load_yaml(value, f"the value of {name.strip()}")
    return parsed


def apply_overrides(config: Config, overrides: Mapping[str, Any], *, skip_absent_parts: bool = False) -> Config:
    """Return the run `config` with the options of `overrides` replaced.

    Args:
        config: the configuration of a run on tasks or on text.
        overrides: `group.option` → value, with a group of `GROUPS`. Groups are set in that order, so that
            `decay.tau` belongs to the decay that `mixer.decay` names.
        skip_absent_parts: leave out the options of a part (`PARTS`) that the model does not have, as for the baselines
            of a comparison. See `check_parts`.

    Raises:
        ValueError: an unknown name (the message lists the known ones), a value of the wrong type, or an option that
            has no meaning for this model (the message says why).
    """
    chosen: dict[str, Options] = {group: {} for group in GROUPS}
    for name, value in overrides.items():
        group, dot, option = name.partition(".")
        if not dot:
            raise ValueError(f"write {name!r} as group.option; the groups are {', '.join(GROUPS)}")
        check_choice("group of options", group, GROUPS)
        chosen[group][option] = value
    for group, options in chosen.items():
        if options and not (skip_absent_parts and group in PARTS and _missing(config, group)):
            config = _set_group(config, group, options)
    if any(options for group, options in chosen.items() if group != "training"):
        _on_meta(config.model, lambda: LanguageModel(config.model))
    return config


def check_parts(configs: Sequence[TrainConfig], overrides: Mapping[str, Any]) -> None:
    """Raise a ValueError if `overrides` set options of a part that no model of a comparison has."""
    first = {name: value for name, value in overrides.items() if name.startswith(("model.", "mixer."))}
    configs = [apply_overrides(config, first) for config in configs]
    for name in overrides:
        group = name.partition(".")[0]
        reasons = [_missing(config, group) for config in configs] if group in PARTS else []
        if reasons and all(reasons):
            raise ValueError(f"{name} has no meaning here: {reasons[0]}")


def describe_options(config: TrainConfig) -> dict[str, list[tuple[str, str, str, str]]]:
    """Group → its options in a run as `(group.option, type, value, meaning)`; a model lacks some groups."""
    described = {}
    for name in GROUPS:
        if _missing(config, name):
            continue
        group = GROUPS[name](config)
        entries = {key: text for cls in reversed(group.classes) for key, text in _entries(cls).items()}
        described[name] = [
            (f"{name}.{option}", describe(hint), json.dumps(group.values.get(option)), entries.get(option, ""))
            for option, hint in group.types.items() if option not in group.refused
        ]  # fmt: skip
    return described


def _missing(config: TrainConfig, group: str) -> str:
    """Why the model of `config` has no option of a group; "" if it has some."""
    try:
        GROUPS[group](config)
    except ValueError as error:
        return str(error)
    return ""


def _set_group(config: Config, name: str, options: Options) -> Config:
    if reason := _missing(config, name):
        raise ValueError(f"{name}.{next(iter(options))} has no meaning here: {reason}")
    group = GROUPS[name](config)
    for option in options:
        if option in group.refused:
            raise ValueError(f"{name}.{option} cannot be set: {group.refused[option]}")
        if option not in group.types:
            known = [known for known in group.types if known not in group.refused]
            raise unknown(f"{name} option of {group.owner}", option, known)
    typed = {option: convert(f"{name}.{option}", value, group.types[option]) for option, value in options.items()}
    return dataclasses.replace(config, **group.write(typed))


def _model(config: TrainConfig) -> Group:
    def write(options: Options) -> Options:
        return {"model": dataclasses.replace(config.model, **options)}

    return Group("a model", get_type_hints(ModelConfig), write, MODEL_REFUSED, vars(config.model), [ModelConfig])


def _mixer(config: TrainConfig) -> Group:
    """Options of the base's mixer; in a hybrid also those that the other mixer alone has."""
    model = config.model
    classes = [LAYERS[model.mixer]]
    own, other, values = constructor_options(classes[0]), {}, _values(classes[0], model.mixer_options)
    if model.hybrid:
        classes.append(LAYERS[model.hybrid["mixer"]])
        other = {k: v for k, v in constructor_options(classes[1]).items() if k not in own}
        values = _values(classes[1], model.hybrid["options"]) | values

    def write(options: Options) -> Options:
        changed = _with_mixer(model, {name: value for name, value in options.items() if name in own})
        rest = {name: value for name, value in options.items() if name not in own}
        return _with_hybrid(changed["model"], rest) if rest else changed

    nested = {
        name: f"{name.removesuffix('_options')}.… sets these options one at a time"
        for name, hint in own.items() if "Mapping" in str(hint)
    }  # fmt: skip
    return Group(model.name, {**own, **other}, write, SET_BY_MODEL | nested, values, classes)


def _decay(config: TrainConfig) -> Group:
    model = config.model
    mixer = _on_meta(model, lambda: layers.build(model.mixer, hidden_size=model.hidden_size, **model.mixer_options))
    decay = getattr(mixer, "decay", None)
    if not isinstance(decay, Decay):
        raise ValueError(f"{model.name} has no decay")
    strategy = type(decay.decay if isinstance(decay, PoST) else decay)
    own = {n: hint for n, hint in constructor_options(strategy).items() if n not in constructor_options(Decay)}
    if not own or strategy not in [DECAYS[name] for name in DECAYS]:  # of these a layer has a choice
        raise ValueError(f"{strategy.__name__} has no options")

    def write(options: Options) -> Options:
        return _with_mixer(model, {"decay_options": {**given, **options}})

    given = model.mixer_options.get("decay_options") or {}
    return Group(strategy.__name__, own, write, values=_values(strategy, given), classes=[strategy])


def _wrapper(name: str, title: str, cls: type, given: Sequence[str]) -> Callable[[TrainConfig], Group]:
    """The group of a part that is a mapping of options among the mixer's: PoST, or several states."""

    def group(config: TrainConfig) -> Group:
        options = config.model.mixer_options.get(name)
        if not isinstance(options, Mapping):
            raise ValueError(f"{config.model.name} has no {title}; the modifier +{name} adds it")

        def write(changed: Options) -> Options:
            return _with_mixer(config.model, {name: {**options, **changed}})

        types = {option: hint for option, hint in constructor_options(cls).items() if option not in given}
        return Group(title, types, write, values=_values(cls, options), classes=[cls])

    return group


def _ska(config: TrainConfig) -> Group:
    model, cls = config.model, LAYERS["ska"]
    if "ska" not in (model.mixer, model.hybrid.get("mixer")):
        raise ValueError(f"{model.name} has no layer of spectral Koopman attention; the modifier +ska adds some")
    in_hybrid = model.hybrid.get("mixer") == "ska"
    given, place = (model.hybrid["options"], _with_hybrid) if in_hybrid else (model.mixer_options, _with_mixer)
    return Group(
        "SKA", constructor_options(cls), lambda options: place(model, options), SET_BY_MODEL, _values(cls, given), [cls]
    )


def _training(config: TrainConfig) -> Group:
    def write(options: Options) -> Options:
        if "schedule" in options:
            options = {"schedule_options": {}, **options}  # the settings of one schedule are errors for another
        if "schedule_options" in options:
            run = dataclasses.replace(config, **options)
            check_schedule(run.schedule, run.schedule_options, run.steps, run.learning_rate)
        return options

    hints = get_type_hints(type(config))
    types = {field.name: hints[field.name] for field in dataclasses.fields(config) if field.name not in DATA_FIELDS}
    return Group("a run", types, write, values=vars(config), classes=[type(config), TrainConfig])


GROUPS: dict[str, Callable[[TrainConfig], Group]] = {
    "model": _model,
    "mixer": _mixer,
    "decay": _decay,
    "post": _wrapper("post", "PoST", PoST, ("decay",)),
    **{name: _wrapper(name, cls.__name__, cls, ("hidden_size", "num_heads")) for name, cls in KINDS.items()},
    "ska": _ska,
    "training": _training,
}


def constructor_options(cls: type) -> dict[str, Any]:
    """Option → type of what `cls(…)` takes; see `registry.constructor_parameters`."""
    return {name: plain_type(parameter.annotation) for name, parameter in constructor_parameters(cls).items()}


def _values(cls: type, changed: Mapping[str, Any]) -> Options:
    """Option → value: the defaults of `cls(…)`, and `changed`."""
    parameters = constructor_parameters(cls)
    return {n: p.default for n, p in parameters.items() if p.default is not p.empty} | dict(changed)


def _entries(cls: type) -> dict[str, str]:
    """Option → what the docstrings of a class, its groups of options and its parents say about it."""
    found: dict[str, str] = {}
    for parent in (c for part in (cls, *option_groups(cls).values()) for c in part.__mro__):
        text = inspect.cleandoc(parent.__doc__ or "")
        section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        for names, entry in re.findall(
            r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE
        ):
            for name in names.split(", "):
                found.setdefault(name, " ".join(entry.split()))
    return found


def _with_mixer(model: ModelConfig, options: Options) -> Options:
    return {"model": dataclasses.replace(model, mixer_options={**model.mixer_options, **options})}


def _with_hybrid(model: ModelConfig, options: Options) -> Options:
    hybrid = {**model.hybrid, "options": {**model.hybrid["options"], **options}}
    return {"model": dataclasses.replace(model, hybrid=hybrid)}


def _on_meta(model: ModelConfig, build: Callable[[], Any]) -> Any:
    """What `build` makes on the meta device, without memory; errors name the model."""
    try:
        with torch.device("meta"):
            return build()
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"these options have no meaning for {model.name}: {error}") from error
