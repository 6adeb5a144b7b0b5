"""What every converter shares: the settings it reads, and tensors on their way from one naming to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
SHOWN = 5  # of the problems of a checkpoint, in one line


def settings(
    config: Config, defaults: Config, fixed: Mapping[str, tuple[Any, ...]], nullable: tuple[str, ...] = ()
) -> SimpleNamespace:
    """What a converter reads of a `config.json`, where that is silent the defaults of its own class.

    Args:
        config: the JSON object.
        defaults: all that is read, booleans and positive numbers, whole ones if the default is; None means that the
            source works the number out for itself.
        fixed: settings with the values that halflife can represent, the default first.
        nullable: those of `defaults` that may be null as well.

    Raises:
        ValueError: a setting of `fixed` with another value, or what is no such number; the message names it.
    """
    for name, choices in {**fixed, "quantization_config": (None,)}.items():
        value = _plain(config.get(name, choices[0]))
        if value not in choices:
            allowed = " or ".join(map(str, choices))
            raise ValueError(f"{name} = {value} in config.json cannot be represented; only {allowed} can")
    read = {name: config.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        may_be_null = default is None or name in nullable
        if not (_fits(read[name], default) or (may_be_null and read[name] is None)):
            raise ValueError(f"{name} = {read[name]!r} in config.json makes no sense")
    return SimpleNamespace(**read)


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else int) and value > 0


def _plain(value: Any) -> Any:
    """Lists as tuples; infinity as transformers writes it, `{"__float__": "Infinity"}`, as a float."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def divide(whole: float, parts: int, name: str) -> int:
    """`whole / parts`; an error, calling it `name`, if that is no integer."""
    if whole % parts:
        raise ValueError(f"{name} is no whole number: {whole:g} / {parts}")
    return int(whole // parts)


def spread(x: Tensor, times: int) -> Tensor:
    """Heads `[H, K, …]` → rows `[H · times · K, …]`: each head so many times in a row."""
    return x.repeat_interleave(times, 0).flatten(0, 1)


class Translation:
    """Tensors of another naming, each taken once by name and shape, on their way into a module of halflife.

    Args:
        module: tells names, shapes and dtypes of halflife; may be on the meta device.
        tensors: those of the source.
        prefix: of their names.

    Attributes:
        new: the state dict so far. Parameters of a `Float32Module` are float32 or wider there, all others in the
            source's dtype.
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
        """The source's tensor `name`, which must have this shape; if not, zeros, and `finish` tells."""
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
        """Gives the module's `ours` its values."""
        wide = torch.promote_types(x.dtype, torch.float32) if ours in self.wide else x.dtype
        self.new[ours] = x.to(wide).reshape(self.shapes[ours])

    def rename(self, theirs: str, ours: str, *shape: int) -> None:
        """One tensor as it is; `shape` where the source's is not ours."""
        self.put(ours, self.take(theirs, *(shape or self.shapes[ours])))

    def head(self, theirs: str, embedding: str) -> None:
        """The output head: a tensor of its own or, tied, none, or a copy of the embedding, which is left out."""
        if "head.weight" in self.shapes:
            return self.rename(theirs, "head.weight")
        if theirs in self and not torch.equal(self.tensors[theirs], self.tensors[embedding]):
            raise ValueError(f"config.json ties the embeddings, but {theirs} and {embedding} differ")
        self.taken.add(theirs)

    def finish(self) -> dict[str, Tensor]:
        """The state dict.

        Raises:
            ValueError: tensors that are missing, of another shape or dtype, or that nobody took; it names them.
        """
        unknown = [f"{name} is unknown" for name in self.tensors if name not in self.taken]
        if problems := self.problems + unknown:
            more = f"; {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError(f"the weights do not fit config.json: {'; '.join(problems[:SHOWN])}{more}")
        assert self.new.keys() == self.shapes.keys(), self.new.keys() ^ self.shapes.keys()
        return self.new


def on_meta(config: ModelConfig) -> LanguageModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return LanguageModel(config)


def assemble(config: ModelConfig, tensors: Tensors) -> LanguageModel:
    """The model with these weights, in their dtypes."""
    model = on_meta(config)
    model.load_state_dict(tensors, assign=True)
    return model
