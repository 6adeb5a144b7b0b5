"""Rules that convert tensors in both directions: a tensor of ours holds rows of tensors of another library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel, on_meta
from halflife.precision import Float32Module

Tensors = Mapping[str, Tensor]
Shape = tuple[int, ...]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHOWN_PROBLEMS = 5  # of a checkpoint, in one message


class Rule(NamedTuple):
    """One tensor of ours from the rows of others, `ours = cat(theirs)[index]`.

    A tensor of any number of axes counts as a matrix, whose rows are the entries of its first axis. Without an index
    one tensor is copied. Without tensors of theirs ours is `value`, or 0. A rule for a tensor that ours lacks is
    skipped.
    """

    ours: str  # the name of our tensor
    # names and shapes of the other tensors; () is the shape of ours. When they are read, axes of length 1 do not count.
    theirs: tuple[tuple[str, Shape], ...]
    # the row of all of theirs that each row of ours is. A row that heads share is repeated.
    index: Tensor | None = None
    flat: bool = False  # whether the index counts single entries in place of rows
    value: Tensor | None = None  # of a tensor that the other library computes

    def under(self, ours: str, theirs: str) -> Rule:
        """Return the rule with prefixes before its names."""
        return self._replace(ours=ours + self.ours, theirs=tuple((theirs + name, shape) for name, shape in self.theirs))


def copy(ours: str, theirs: str, *shape: int) -> Rule:
    """Return the rule of one tensor that has another name, and perhaps another shape."""
    return Rule(ours, ((theirs, shape),))


def heads(first: int, given: int, size: int, times: int = 1) -> Tensor:
    """Return the rows of `given` heads of `size` rows each, from row `first` on, each head repeated `times` times."""
    return torch.arange(given * size).view(given, size).repeat_interleave(times, 0).flatten() + first


def divide(whole: float, parts: int, name: str) -> int:
    """Return `whole / parts`; raise ValueError, with `name` in the message, if it is no integer."""
    if whole % parts:
        raise ValueError(f"{name} is no whole number: {whole:g} / {parts}")
    return int(whole // parts)


def qkv_rules(
    hidden: int, given: Sequence[int], sizes: Sequence[int], taps: int, joined: str = "",
    ours: Sequence[int] | None = None,
) -> Iterator[Rule]:  # fmt: skip
    """Yield the rules of the projection of queries, keys and values, and of the short convolution after it.

    Args:
        hidden, taps: width of the input, and taps of the convolution.
        given, sizes: the heads of queries, keys and values that the other library has, and their sizes.
        joined: the name of their projection; without one, they have `q_proj`, `k_proj` and `v_proj`.
        ours: the heads of each that ours has, which repeat theirs; None means the largest number for each.
    """
    rows = [number * size for number, size in zip(given, sizes, strict=True)]
    index = torch.cat([
        heads(sum(rows[:i]), number, size, divide(own, number, "heads that share a key or a value"))
        for i, (number, size, own) in enumerate(zip(given, sizes, ours or [max(given)] * 3, strict=True))
    ])  # fmt: skip
    separate = tuple((f"{name}_proj.weight", (count, hidden)) for name, count in zip("qkv", rows, strict=True))
    yield Rule("qkv_proj.weight", ((joined, (sum(rows), hidden)),) if joined else separate, index)
    yield Rule("conv.weight", (("conv1d.weight", (sum(rows), 1, taps)),), index)


def convert_from(module: nn.Module, rules: Iterable[Rule], tensors: Tensors, prefix: str = "") -> dict[str, Tensor]:
    """Return the state dict of a module of ours, by rules, from the tensors of another library.

    Parameters of a `Float32Module` become float32 or wider; all others keep the dtype of the source.

    Args:
        module: the module, which gives names, shapes and dtypes. It may be on the meta device.
        rules: the rules of all its tensors. That of an output head comes after that of the embedding.
        tensors: tensors of the other library.
        prefix: prefix of their names.

    Raises:
        ValueError: tensors are missing, unknown, or of another shape or dtype. The message names them.
    """
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    wide = {
        f"{path}.{name}" for path, part in module.named_modules() if isinstance(part, Float32Module)
        for name, _ in part.named_parameters(recurse=False)
    }  # fmt: skip
    new: dict[str, Tensor] = {}
    taken: set[str] = set()
    problems: list[str] = []
    for rule in rules:
        named = [(prefix + name, shape or shapes.get(rule.ours, ())) for name, shape in rule.theirs]
        if rule.ours not in shapes and rule.ours != "head.weight":
            continue
        taken.update(name for name, _ in named)
        if rule.ours not in shapes:  # a tied head may be absent, or equal to the embedding
            embedding, name = new["embedding.weight"], named[0][0]
            if not torch.equal(tensors.get(name, embedding).to(embedding.dtype), embedding):
                problems.append(f"it ties the embeddings, but {name} is not equal to them")
        elif found := [problem for name, shape in named if (problem := _problem(tensors, name, shape))]:
            problems += found
            new[rule.ours] = torch.zeros(shapes[rule.ours])
        else:
            parts = [tensors[name].reshape(shape) for name, shape in named]
            x = _combine(rule, parts) if parts else _constant(rule, shapes, next(iter(new.values())).dtype)
            wider = torch.promote_types(x.dtype, torch.float32) if rule.ours in wide else x.dtype
            new[rule.ours] = x.to(wider).reshape(shapes[rule.ours])
    problems += [f"{name} is unknown" for name in tensors if name not in taken]
    if problems:
        more = f"; {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise ValueError(f"the weights do not fit config.json: {'; '.join(problems[:SHOWN_PROBLEMS])}{more}")
    assert new.keys() == shapes.keys(), new.keys() ^ shapes.keys()
    return new


def _combine(rule: Rule, parts: list[Tensor]) -> Tensor:
    if rule.index is None:
        return parts[0]
    return torch.cat([part.reshape(part.numel() if rule.flat else len(part), -1) for part in parts])[rule.index]


def _constant(rule: Rule, shapes: Mapping[str, Shape], dtype: torch.dtype) -> Tensor:
    """A tensor of ours without tensors of theirs, in the model's dtype, or float32 if that is wider."""
    if rule.value is None:
        return torch.zeros(shapes[rule.ours], dtype=dtype)
    return rule.value.to(torch.promote_types(dtype, torch.float32))


def _problem(tensors: Tensors, name: str, shape: Shape) -> str | None:
    if name not in tensors:
        return f"{name} is missing"
    x = tensors[name]
    if [size for size in x.shape if size != 1] != [size for size in shape if size != 1]:
        return f"{name} is {list(x.shape)} instead of {list(shape)}"
    return None if x.dtype in FLOATS else f"{name} is {x.dtype} instead of a float"


def convert_back(rules: Iterable[Rule], state: Tensors) -> dict[str, Tensor]:
    """Return the other library's tensors from a state dict of ours.

    It is a ValueError, which names the tensor, if rows differ that the other library shares between heads, or a tensor
    has other values than those that the other library computes.
    """
    back: dict[str, Tensor] = {}
    for ours, theirs, index, flat, value in rules:
        if ours not in state:
            continue
        if not theirs:
            fixed = torch.zeros(()) if value is None else value
            if not torch.equal(state[ours].float(), fixed.to(state[ours].device).float().expand_as(state[ours])):
                raise ValueError(f"{ours} has other values than the fixed ones of the other library")
            continue
        shapes = [shape or tuple(state[ours].shape) for _, shape in theirs]
        if index is None:
            back[theirs[0][0]] = state[ours].reshape(shapes[0])
            continue
        rows = state[ours].reshape(len(index), -1)
        sizes = [math.prod(shape) if flat else shape[0] for shape in shapes]
        total = rows.new_empty(sum(sizes), rows.shape[1])
        total[index] = rows
        if not torch.equal(total[index], rows):
            raise ValueError(f"heads share rows of {theirs[0][0]} in transformers, and in {ours} these rows differ")
        for (name, _), shape, part in zip(theirs, shapes, total.split(sizes), strict=True):
            back[name] = part.reshape(shape).clone()
    return back


def join_convolutions(tensors: Tensors) -> dict[str, Tensor]:
    """Join the convolutions of q, k and v, which checkpoints store separately, to `conv1d.weight`.

    transformers splits them into three parts of nearly equal size when it saves, so the sizes do not count.
    """
    joined = dict(tensors)
    for name in tensors:
        at = name.removesuffix("q_conv1d.weight")
        if at != name and all(f"{at}{part}_conv1d.weight" in tensors for part in "kv"):
            joined[f"{at}conv1d.weight"] = torch.cat([joined.pop(f"{at}{part}_conv1d.weight") for part in "qkv"])
    return joined


def split_convolutions(tensors: Tensors) -> dict[str, Tensor]:
    """Split each convolution into those of q, k and v, where these have separate projections."""
    new: dict[str, Tensor] = {}
    for name, x in tensors.items():
        at = name.removesuffix("conv1d.weight")
        if at == name or f"{at}q_proj.weight" not in tensors:
            new[name] = x
            continue
        sizes = [len(tensors[f"{at}{part}_proj.weight"]) for part in "qkv"]
        new |= {f"{at}{part}_conv1d.weight": y.clone() for part, y in zip("qkv", x.split(sizes), strict=True)}
    return new


def shared_heads(mixers: Sequence[Any], parts: slice, more: Sequence[Tensor] = ()) -> int:
    """The number of heads in a row that have equal rows in all layers: the largest divisor of H that fits.

    `parts` says which of queries, keys and values counts, in each mixer's projection and convolution. `more` are
    further matrices whose rows are H heads of equal size.
    """
    rows = [*more]
    for mixer in mixers:
        for part in (mixer.qkv_proj, *([] if mixer.conv is None else [mixer.conv])):
            rows += part.weight.split(mixer.splits)[parts]
    number = mixers[0].num_heads
    for times in range(number, 1, -1):
        if number % times == 0:
            grouped = [x.reshape(number // times, times, -1) for x in rows]
            if all(torch.equal(x, x[:, :1].expand_as(x)) for x in grouped):
                return times
    return 1


# Attributes of modules that change no logits.
FREE = {
    "training", "chunk_size", "backend", "pass_backend", "rate_start", "step_bias", "layer_idx", "num_layers", "depth",
}  # fmt: skip
PLAIN = (bool, int, float, str, tuple, list, type(None))
MODEL_FIELDS = ("mlp", "norm", "position", "embedding_norm")  # fields of `ModelConfig` with plain names for messages


def require_equal(ours: LanguageModel, config: ModelConfig, name: str) -> None:
    """Raise a ValueError unless a model has the modules, settings and sizes of a configuration, there and back again.

    The message has the `name` of the other kind, and the first module and setting that differ.
    """
    for field in MODEL_FIELDS:
        if (here := getattr(ours.config, field)) != (there := getattr(config, field)):
            raise ValueError(f"{name} has {field} {there!r}; this model has {here!r}")
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
    """The settings of a module, those in its groups of options too, and the shapes of its parameters."""
    values = dict(vars(module))
    if dataclasses.is_dataclass(update := values.get("update")):
        values |= vars(update)
    plain = {key: x for key, x in values.items() if isinstance(x, PLAIN) and key[0] != "_" and key not in FREE}
    shapes = {f"shape of {key}": tuple(x.shape) for key, x in (module or nn.Module()).named_parameters(recurse=False)}
    return plain | shapes
