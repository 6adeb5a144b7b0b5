"""Helpers of all converters: `settings` checks a config.json, and `Translation` renames and checks tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel
from halflife.precision import Float32Module
from halflife.registry import Registry

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Converted = tuple[ModelConfig, dict[str, Tensor]]

SOURCES: Registry[Callable[[Config, Tensors], Converted]] = Registry("model_type")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Settings of transformers that change no logits of a text.
GENERIC = {
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
    "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "quantization_config", "num_labels",
    "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions",
    "chunk_size_feed_forward", "is_encoder_decoder", "auto_map",
}  # fmt: skip
SHOWN = 5  # problems of a checkpoint that one message lists


def settings(
    config: Config, defaults: Config, fixed: Mapping[str, tuple[Any, ...]], nullable: tuple[str, ...] = ()
) -> SimpleNamespace:
    """Return the settings that a converter reads from a `config.json`; missing ones get their defaults.

    Args:
        config: the JSON object.
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


def known_keys(config: Config, names: Iterable[str]) -> None:
    """Check that a `config.json` has no other settings than these and those that change no logits.

    Raises:
        ValueError: it has; the message names them.
    """
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


def divide(whole: float, parts: int, name: str) -> int:
    """Return `whole / parts`; raise ValueError, with `name` in the message, if it is no integer."""
    if whole % parts:
        raise ValueError(f"{name} is no whole number: {whole:g} / {parts}")
    return int(whole // parts)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each head `times` times: heads `[H, K, …]` → rows `[H · times · K, …]`."""
    return x.repeat_interleave(times, 0).flatten(0, 1)


class Translation:
    """A state dict of a halflife module that is built from the tensors of another library, checked by name and shape.

    Args:
        module: the halflife module, which gives names, shapes and dtypes. It may be on the meta device.
        tensors: tensors of the other library.
        prefix: prefix of their names.

    Attributes:
        new: the state dict so far. Parameters of a `Float32Module` are float32 or wider; all others have the source's
            dtype.
    """

    def __init__(self, module: nn.Module, tensors: Tensors, prefix: str = "") -> None:
        self.tensors, self.prefix = tensors, prefix
        self.shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
        self.wide = {
            f"{path}.{name}" for path, part in module.named_modules() if isinstance(part, Float32Module)
            for name, _ in part.named_parameters(recurse=False)
        }  # fmt: skip
        self.new: dict[str, Tensor] = {}
        self.taken: set[str] = set()
        self.problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the source's tensor `name`. If it is missing or misfits, return zeros; `finish` will raise."""
        name = self.prefix + name
        self.taken.add(name)
        if name not in self.tensors:
            self.problems.append(f"{name} is missing")
        elif (x := self.tensors[name]).shape != shape:
            self.problems.append(f"{name} is {list(x.shape)} instead of {list(shape)}")
        elif x.dtype not in FLOATS:
            self.problems.append(f"{name} is {x.dtype} instead of a float")
        else:
            return x
        return torch.zeros(()).expand(shape)

    def put(self, ours: str, x: Tensor) -> None:
        """Set the module's parameter `ours` to `x`."""
        wide = torch.promote_types(x.dtype, torch.float32) if ours in self.wide else x.dtype
        self.new[ours] = x.to(wide).reshape(self.shapes[ours])

    def rename(self, theirs: str, ours: str, *shape: int) -> None:
        """Copy the tensor `theirs` to `ours`; give `shape` if the source's shape differs."""
        self.put(ours, self.take(theirs, *(shape or self.shapes[ours])))

    def head(self, theirs: str, embedding: str) -> None:
        """Copy an untied output head. A tied one may be absent, or equal to the embedding; then it is ignored."""
        if "head.weight" in self.shapes:
            return self.rename(theirs, "head.weight")
        if theirs in self and not torch.equal(self.tensors[theirs], self.tensors[embedding]):
            raise ValueError(f"config.json ties the embeddings, but {theirs} and {embedding} differ")
        self.taken.add(theirs)

    def finish(self) -> dict[str, Tensor]:
        """Return the state dict.

        Raises:
            ValueError: tensors are missing, unknown, or of another shape or dtype. The message names them.
        """
        unknown = [f"{name} is unknown" for name in self.tensors if name not in self.taken]
        if problems := self.problems + unknown:
            more = f"; {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError(f"the weights do not fit config.json: {'; '.join(problems[:SHOWN])}{more}")
        assert self.new.keys() == self.shapes.keys(), self.new.keys() ^ self.shapes.keys()
        return self.new


def on_meta(config: ModelConfig) -> LanguageModel:
    """Return the model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return LanguageModel(config)


def assemble(config: ModelConfig, tensors: Tensors) -> LanguageModel:
    """Return the model with these weights and their dtypes."""
    model = on_meta(config)
    model.load_state_dict(tensors, assign=True)
    return model
