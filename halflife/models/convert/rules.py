"""Rules that convert tensors in both directions: a tensor of ours holds rows of tensors of another library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halflife.models.config import ModelConfig
from halflife.models.convert.source import Translation, on_meta
from halflife.models.lm import LanguageModel

Named = tuple[str, tuple[int, ...]]


class Rule(NamedTuple):
    """One tensor of ours from the rows of others, `ours = cat(theirs)[index]`.

    A tensor of any number of axes counts as a matrix, whose rows are the entries of its first axis. Without an index
    one tensor is copied, and the two may differ in their axes of length 1.

    Attributes:
        ours: the name of our tensor.
        theirs: names and shapes of the other tensors.
        index: the row of all of theirs that each row of ours is. A row that heads share is repeated.
    """

    ours: str
    theirs: tuple[Named, ...]
    index: Tensor | None = None

    def under(self, ours: str, theirs: str) -> Rule:
        """Return the rule with prefixes before its names."""
        return Rule(ours + self.ours, tuple((theirs + name, shape) for name, shape in self.theirs), self.index)


def copy(ours: str, theirs: str, *shape: int) -> Rule:
    """Return the rule of one tensor that has another name, and perhaps other axes."""
    return Rule(ours, ((theirs, shape),))


def heads(first: int, given: int, size: int, times: int = 1) -> Tensor:
    """Return the rows of `given` heads of `size` rows each, from row `first` on, each head repeated `times` times."""
    return torch.arange(given * size).view(given, size).repeat_interleave(times, 0).flatten() + first


def convert_from(moved: Translation, rules: Iterable[Rule]) -> None:
    """Set the tensors of ours that the rules give."""
    for ours, theirs, index in rules:
        parts = [moved.take(name, *shape) for name, shape in theirs]
        if index is None:
            moved.put(ours, parts[0])
        else:
            moved.put(ours, torch.cat([part.reshape(len(part), -1) for part in parts])[index])


def convert_back(rules: Iterable[Rule], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the other library's tensors from a state dict of ours.

    Raises:
        ValueError: rows differ that the other library shares between heads. The message names the tensor.
    """
    back: dict[str, Tensor] = {}
    for ours, theirs, index in rules:
        if index is None:
            back[theirs[0][0]] = state[ours].reshape(theirs[0][1])
            continue
        rows = state[ours].reshape(len(index), -1)
        total = rows.new_empty(sum(shape[0] for _, shape in theirs), rows.shape[1])
        total[index] = rows
        if not torch.equal(total[index], rows):
            raise ValueError(f"heads share rows of {theirs[0][0]} in transformers, and in {ours} these rows differ")
        for (name, shape), part in zip(theirs, total.split([shape[0] for _, shape in theirs]), strict=True):
            back[name] = part.reshape(shape).clone()
    return back


def join_convolutions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the convolutions of q, k and v, which checkpoints store separately, to `conv1d.weight`.

    transformers splits them into three parts of nearly equal size when it saves, so the sizes do not count.
    """
    joined = dict(tensors)
    for name in tensors:
        if name.endswith(".q_conv1d.weight"):
            at = name.removesuffix("q_conv1d.weight")
            joined[f"{at}conv1d.weight"] = torch.cat([joined.pop(f"{at}{part}_conv1d.weight") for part in "qkv"])
    return joined


def shared_heads(rows: Sequence[Tensor], num_heads: int) -> int:
    """Return the number of heads in a row that have equal rows in all the matrices: the largest divisor of H that fits.

    Args:
        rows: matrices whose rows are H heads of equal size.
        num_heads: H.
    """
    for times in range(num_heads, 1, -1):
        if num_heads % times == 0:
            grouped = [x.reshape(num_heads // times, times, -1) for x in rows]
            if all(torch.equal(x, x[:, :1].expand_as(x)) for x in grouped):
                return times
    return 1


# Attributes of modules that change no logits.
FREE = {"training", "chunk_size", "backend", "rate_start", "step_bias", "layer_idx", "num_layers", "depth"}
PLAIN = (bool, int, float, str, tuple, list, type(None))


def require_equal(ours: LanguageModel, config: ModelConfig, name: str) -> None:
    """Check that a model has the modules of another configuration, with equal settings and sizes.

    Args:
        ours: the model.
        config: the configuration that the model would have after a conversion there and back.
        name: the kind of the other model, for the message.

    Raises:
        ValueError: it has not; the message names the first module and the setting that differ.
    """
    found, wanted = (dict(model.named_modules()) for model in (ours, on_meta(config)))
    for path in [*wanted, *found]:
        mine, theirs = found.get(path), wanted.get(path)
        if type(mine) is not type(theirs):
            kinds = ("none" if part is None else type(part).__name__ for part in (theirs, mine))
            raise ValueError("{0} has {2} as {1}; this model has {3}".format(name, path, *kinds))
        for key in sorted(_settings(mine).keys() | _settings(theirs).keys()):
            there, here = _settings(theirs).get(key), _settings(mine).get(key)
            if there != here:
                raise ValueError(f"{name} has {key} = {there} in {path or 'the model'}; this model has {here}")


def _settings(module: nn.Module | None) -> dict[str, Any]:
    """The settings of a module and the shapes of its parameters."""
    plain = {key: x for key, x in vars(module).items() if isinstance(x, PLAIN) and key[0] != "_" and key not in FREE}
    shapes = {f"shape of {key}": tuple(x.shape) for key, x in (module or nn.Module()).named_parameters(recurse=False)}
    return plain | shapes
