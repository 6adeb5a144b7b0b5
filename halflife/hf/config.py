"""A `ModelConfig` inside a configuration of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from halflife.models import ModelConfig, checkpoint, preset

# transformers' name → the field of `ModelConfig`, for the fields that transformers reads.
FIELDS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
    "tie_word_embeddings": "tie_embeddings", "initializer_range": "initializer_range",
}  # fmt: skip

MODEL_FIELDS = frozenset(field.name for field in dataclasses.fields(ModelConfig))

AUTO_FILE = "halflife_model"  # the module beside a saved model with an `auto_map`
# Set as `config.auto_map` before `save_pretrained`, it lets programs open the folder that never import this package.
AUTO_MAP = {
    "AutoConfig": f"{AUTO_FILE}.HalflifeConfig",
    "AutoModel": f"{AUTO_FILE}.HalflifeModel",
    "AutoModelForCausalLM": f"{AUTO_FILE}.HalflifeForCausalLM",
    "AutoModelForSequenceClassification": f"{AUTO_FILE}.HalflifeForSequenceClassification",
    "AutoModelForTokenClassification": f"{AUTO_FILE}.HalflifeForTokenClassification",
}


def _field(name: str) -> property:
    def write(config: HalflifeConfig, value: Any) -> None:
        config.model = ModelConfig.from_dict({**config.model, name: value}).to_dict()

    return property(lambda config: config.model[name], write)


class HalflifeConfig(PreTrainedConfig):
    """A `ModelConfig` for transformers.

        HalflifeConfig.from_preset("mamba2+post", hidden_size=256, num_layers=4, vocab_size=50257)
        HalflifeConfig(my_model_config)

    The attributes `vocab_size`, `hidden_size`, `num_hidden_layers`, `tie_word_embeddings` and `initializer_range` read
    and write the fields of `model`; `num_attention_heads` reads the heads of its first layer.

    Args:
        model: the `ModelConfig` or its dict; the attribute is the dict. None means the preset mamba2, with the fields
            above if they are given.
        use_cache: whether a forward pass returns the state.
        chunked_loss: whether a training step computes the loss without all logits at once. They are then None.
        pad_token_id, bos_token_id, eos_token_id: token ids for `generate`.
        **kwargs: other settings of transformers.

    Raises:
        TypeError: the model is no `ModelConfig` and no dict.
        ValueError: the model has an unknown key, or a keyword contradicts a field of the model.
    """

    model_type = "halflife"
    auto_map: ClassVar[dict[str, str]] = {}  # TRL reads it

    vocab_size = _field("vocab_size")
    hidden_size = _field("hidden_size")
    num_hidden_layers = _field("num_layers")
    tie_word_embeddings = _field("tie_embeddings")
    initializer_range = _field("initializer_range")

    def __init__(
        self,
        model: Any = None,
        *,
        use_cache: bool = True,
        chunked_loss: bool = False,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        heads = kwargs.pop("num_attention_heads", None)  # `to_dict` writes it for other programs
        if mistaken := kwargs.keys() & (MODEL_FIELDS | {"preset"}) - FIELDS.keys():
            raise TypeError(
                f"{', '.join(sorted(mistaken))}: give the fields of a model to HalflifeConfig.from_preset(name, …), or "
                "a ModelConfig"
            )
        if model is None:
            model = preset(
                "mamba2", num_heads=heads, **{FIELDS[name]: kwargs[name] for name in FIELDS if name in kwargs}
            )
        if not isinstance(model, ModelConfig | dict):
            raise TypeError(
                f"model must be a ModelConfig or its dict; got {model!r}. HalflifeConfig.from_preset takes names"
            )
        config = model if isinstance(model, ModelConfig) else ModelConfig.from_dict(model)
        self.model, self.use_cache, self.chunked_loss = config.to_dict(), use_cache, chunked_loss
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        if heads is not None:
            self.num_attention_heads = heads
        for name, field in FIELDS.items():
            if (value := kwargs.pop(name, self.model[field])) != self.model[field]:
                raise ValueError(f"{name} is {value}, but {field} of the model is {self.model[field]}")
        if (version := kwargs.pop("format", checkpoint.FORMAT)) != checkpoint.FORMAT:
            raise ValueError(f"this checkpoint has format {version}; this version reads {checkpoint.FORMAT}")
        super().__init__(**kwargs)

    @property
    def num_attention_heads(self) -> int:
        """Heads of the first layer; 1 where it has none."""
        return self.model_config().mixer_of(0)[1].get("num_heads", 1)

    @num_attention_heads.setter
    def num_attention_heads(self, heads: int) -> None:
        if heads != self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads is {heads}, but the first layer has {self.num_attention_heads}; heads are set in "
                "`model`, or by from_preset(name, num_heads=…)"
            )

    @classmethod
    def from_preset(cls, name: str, **sizes: Any) -> HalflifeConfig:
        """Return the configuration of `halflife.preset(name, **sizes)`."""
        return cls(model=preset(name, **sizes))

    def model_config(self) -> ModelConfig:
        """Return the `ModelConfig`, from which `LanguageModel` is built."""
        return ModelConfig.from_dict(self.model)

    def to_dict(self) -> dict[str, Any]:
        read = {name: self.model[field] for name, field in FIELDS.items()}
        return {**super().to_dict(), **read, "num_attention_heads": self.num_attention_heads}
