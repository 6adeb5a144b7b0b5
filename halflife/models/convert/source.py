"""What all kinds of models of other libraries share: `settings` checks a config.json, `Source` converts by rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from halflife.models.config import ModelConfig
from halflife.models.convert.rules import (
    Rule,
    Tensors,
    convert_back,
    convert_from,
    join_convolutions,
    require_equal,
    split_convolutions,
)
from halflife.models.lm import LanguageModel, on_meta
from halflife.registry import Registry

Config = Mapping[str, Any]
Converted = tuple[ModelConfig, dict[str, Tensor]]

# Settings of transformers that change no logits of a text.
GENERIC = {
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "quantization_config", "num_labels",
    "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions",
    "chunk_size_feed_forward", "is_encoder_decoder", "auto_map",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A kind of model of another library. Called with its config.json and tensors, it returns a model of ours."""

    name: str  # the kind, for messages
    library: str  # "transformers" or "fla"
    parse: Callable[[Config], tuple[SimpleNamespace, ModelConfig]]  # config.json → its settings, and our configuration
    # both → the rules of all tensors. That of the head comes after that of the embedding.
    rules: Callable[[SimpleNamespace, ModelConfig], Iterable[Rule]]
    # a model of ours and its mixers → the content of config.json, beside the fields that all kinds have. None: there is
    # no way back.
    describe: Callable[[LanguageModel, list[Any]], dict[str, Any]] | None = None
    read: Callable[[Tensors], Tensors] = join_convolutions  # tensors of a checkpoint → those that the rules name
    # the tensors that the rules name → those of a checkpoint
    write: Callable[[Tensors], dict[str, Tensor]] = split_convolutions
    mixer: str | None = None  # our mixer, if it has another name than the kind

    def __call__(self, config: Config, tensors: Tensors) -> Converted:
        """Return our configuration and state dict; ValueError if a setting or a tensor does not fit."""
        s, model = self.parse(config)
        return model, convert_from(on_meta(model), self.rules(s, model), self.read(tensors))

    def back(self, kind: str, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the config.json and the tensors of a model of the other library that computes what `model` does.

        Raises:
            ValueError: the model has options that the other library lacks; the message names them.
        """
        assert self.describe is not None
        ours, mlp = model.config, getattr(model.blocks[0], "mlp", None)
        widened = next((x for name in ("up", "k_proj") if (x := getattr(mlp, name, None)) is not None), None)
        theirs = {
            "model_type": kind, "vocab_size": ours.vocab_size, "hidden_size": ours.hidden_size,
            "num_hidden_layers": ours.num_layers, "tie_word_embeddings": ours.tie_embeddings,
            "initializer_range": ours.initializer_range,
            **({} if widened is None else {"intermediate_size": len(widened.weight)}),
            **self.describe(model, [getattr(block, "mixer", None) for block in model.blocks]),
        }  # fmt: skip
        s, expected = self.parse(theirs)
        require_equal(model, expected, self.name)
        tensors = self.write(convert_back(self.rules(s, expected), model.state_dict()))
        return {**theirs, "dtype": str(model.embedding.weight.dtype).removeprefix("torch.")}, tensors


SOURCES: Registry[Source] = Registry("model_type")


def settings(
    config: Config, defaults: Config, fixed: Mapping[str, tuple[Any, ...]], nullable: tuple[str, ...] = ()
) -> SimpleNamespace:
    """Return the settings that a converter reads from a `config.json`; missing ones get their defaults.

    Args:
        defaults: the settings that are read and their defaults: booleans and positive numbers, which must be integers
            if the default is one. The default None means that the source library computes the number.
        fixed: settings of which halflife can represent some values only; the first value is the default.
        nullable: names in `defaults` that may also be null.

    Raises:
        ValueError: a setting of `fixed` has another value, or a setting of `defaults` another type or sign. The
            message names the setting.
    """
    for name, choices in {**fixed, "quantization_config": (None,)}.items():
        value = plain(config.get(name, choices[0]))
        if value not in choices:
            allowed = " or ".join(map(str, choices))
            raise ValueError(f"{name} = {value} in config.json cannot be represented; only {allowed} can")
    read = {name: config.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        may_be_null = default is None or name in nullable
        if not (_fits(read[name], default) or (may_be_null and read[name] is None)):
            raise ValueError(f"{name} = {read[name]!r} in config.json makes no sense")
    return SimpleNamespace(**read)


def configured(s: SimpleNamespace, mixer: str, options: dict[str, Any], norm_eps: float, **others: Any) -> ModelConfig:
    """Our configuration of a model by a mixer, with the settings that all kinds of models have, and others."""
    return ModelConfig(
        vocab_size=s.vocab_size, hidden_size=s.hidden_size, num_layers=s.num_hidden_layers, mixer=mixer,
        mixer_options=options, tie_embeddings=s.tie_word_embeddings, norm_eps=norm_eps,
        initializer_range=s.initializer_range, **{"name": mixer, **others},
    )  # fmt: skip


def known_keys(config: Config, names: Iterable[str]) -> None:
    """Raise ValueError if a `config.json` has other settings than these and those that change no logits."""
    if unknown := sorted(set(config) - GENERIC - set(names)):
        raise ValueError(f"config.json has unknown settings, which could change the model: {', '.join(unknown)}")


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else int) and value > 0


def plain(value: Any) -> Any:
    """Turn lists into tuples, and transformers' `{"__float__": "Infinity"}` into a float."""
    if isinstance(value, list):
        return tuple(map(plain, value))
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def assemble(config: ModelConfig, tensors: Tensors) -> LanguageModel:
    """Return the model with these weights and their dtypes."""
    model = on_meta(config)
    model.load_state_dict(tensors, assign=True)
    return model
