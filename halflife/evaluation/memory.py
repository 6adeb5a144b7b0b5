"""Bytes of a model's state of one sequence at any length, and the length from which a KV cache is larger.

The sizes are measured on the states of a small real model, which reads a few tokens one by one as in decoding. Every
tensor of a state has constant size, grows linearly with the number of tokens, or has one part for each binary digit of
that number (log-linear attention). This is checked, and it gives the size at every length. Counters (integer tensors
such as the position) are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halflife.layers import State
from halflife.layers.memory.log_linear import LogLinear
from halflife.models import PRESETS, LanguageModel, ModelConfig, preset
from halflife.models.lm import on_meta
from halflife.registry import check_choice

PROBES = (1, 2, 4)  # lengths in tokens; two would not show whether a size grows linearly
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHE_DTYPES = {"float32": 4, "bfloat16": 2, "float8": 1}  # bytes of a number; the scales of float8 are not counted
SKA_COMMITTED = ("gram", "transition", "values", "last", "norm")
SKA_PENDING = ("pending_keys", "pending_values", "pending_decays")  # the last with a decay only


@dataclass(frozen=True)
class StateSize:
    """A size of `constant + per_token · T + per_digit · min(digits(T), most_digits)` after T tokens.

    It is in numbers or in bytes, and `digits(T)` is the number of binary digits of T.
    """

    constant: int = 0
    per_token: int = 0
    per_digit: int = 0
    most_digits: int = 0

    def at(self, length: int) -> int:
        """Return the size after `length` tokens."""
        return self.constant + self.per_token * length + self.per_digit * min(length.bit_length(), self.most_digits)

    def __add__(self, other: StateSize) -> StateSize:
        most = {size.most_digits for size in (self, other) if size.per_digit}
        if len(most) > 1:
            raise ValueError(f"states with {' and '.join(map(str, sorted(most)))} levels have no common size")
        return StateSize(
            self.constant + other.constant, self.per_token + other.per_token, self.per_digit + other.per_digit,
            max(most, default=0),
        )  # fmt: skip

    def __mul__(self, times: int) -> StateSize:
        return StateSize(self.constant * times, self.per_token * times, self.per_digit * times, self.most_digits)

    def smaller_from(self, other: StateSize) -> int | None:
        """Return the first length, at least 1, from which this stays smaller than `other`, or None if there is none."""
        last = 1 << max(self.most_digits, other.most_digits, 1) - 1  # from here on both are linear
        gained = other.per_token - self.per_token
        owed = self.at(last) - other.at(last)
        if gained < 0 or (gained == 0 and owed >= 0):
            return None
        if owed >= 0:
            return last + owed // gained + 1
        while last > 1:  # between two powers of 2 both are linear as well
            first = last // 2
            if self.at(last - 1) >= other.at(last - 1):
                return last
            if (owed := self.at(first) - other.at(first)) >= 0:
                return first + owed // gained + 1
            last = first
        return 1


@dataclass(frozen=True)
class StateTensor:
    """The size of one tensor of a layer's state."""

    shape: tuple[int, ...]  # shape after the first token
    numbers: StateSize  # number of its elements
    itemsize: int  # bytes of an element

    @property
    def bytes(self) -> StateSize:
        return self.numbers * self.itemsize


@dataclass(frozen=True)
class LayerState:
    """The size of the state of one kind of layer."""

    mixer: str  # name of the mixer
    # indices, from 0, of the layers of this kind; "embedding" for the Toeplitz layer after the embedding
    layers: tuple[int | str, ...]
    tensors: dict[str, StateTensor]  # the state's tensors by name, without counters

    @property
    def bytes(self) -> StateSize:
        """Bytes of the state of one such layer."""
        return sum((tensor.bytes for tensor in self.tensors.values()), StateSize())


@torch.no_grad()
def layer_states(config: ModelConfig, dtype: str = "bfloat16", cache_dtype: str | None = None) -> list[LayerState]:
    """Measure the state of each kind of layer of a model, for one sequence.

    Args:
        config: configuration of the model. A small model with one layer of each kind is built from it.
        dtype: dtype of the model, "float32" or "bfloat16". Recurrent states are float32 in both.
        cache_dtype: dtype of tensors that grow with the length, "float32", "bfloat16" or "float8"; None means `dtype`.
    """
    _check_dtypes(dtype, cache_dtype)
    small, layers = one_layer_of_each_kind(config)
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers unchanged
        model = LanguageModel(small).to(DTYPES[dtype])
    after: dict[int, tuple[State, ...]] = {}
    state = None
    for length in range(1, max(PROBES) + 1):
        _, state = model.hidden(torch.zeros(1, 1, dtype=torch.long), state)
        after[length] = state
    most = [max((m.num_levels - 1 for m in block.modules() if isinstance(m, LogLinear)), default=0)
            for block in model.blocks] + [0]  # fmt: skip
    names = [small.mixer_of(i)[0] for i in range(small.num_layers)] + [config.position] * (config.position != "none")
    return [
        LayerState(name, where, _state_tensors(name, [after[length][i] for length in PROBES], most[i], cache_dtype))
        for i, (name, where) in enumerate(zip(names, layers, strict=True))
    ]


def one_layer_of_each_kind(config: ModelConfig) -> tuple[ModelConfig, list[tuple[int | str, ...]]]:
    """Return the configuration of a model with one layer of each kind, and the indices of each kind in the full model.

    The vocabulary and the width of the MLP are small, because no state depends on them.
    """
    base = [i for i in range(config.num_layers) if i not in config.other_layers]
    others = [kind for kind in config.hybrids if kind["layers"]]
    where = [base, *(sorted(set(kind["layers"])) for kind in others)]
    kinds: list[tuple[int | str, ...]] = [tuple(layers) for layers in where if layers]
    first = len(kinds) - len(others)  # the place of the first kind that is not the base's
    hybrid, *more = [{**kind, "layers": [first + i]} for i, kind in enumerate(others)] or [{}]
    small = dataclasses.replace(
        config, vocab_size=1, num_layers=len(kinds), hybrid=hybrid, more_hybrids=more, intermediate_size=64
    )
    return small, kinds + [("embedding",)] * (config.position != "none")


def _state_tensors(
    mixer: str, states: Sequence[State], most_digits: int, cache_dtype: str | None
) -> dict[str, StateTensor]:
    """The sizes of a layer's tensors from its states of one sequence after `PROBES` tokens."""
    sizes = {}
    for name in dict.fromkeys(name for state in states for name in state):
        tensors = [state[name] for state in states if name in state]
        if not tensors[0].is_floating_point():
            continue
        counts = [x.numel() for x in tensors]
        per_token = (counts[-1] - counts[0]) // (PROBES[-1] - PROBES[0])
        linear = StateSize(counts[0] - per_token * PROBES[0], per_token)
        by_digits = StateSize(per_digit=counts[0], most_digits=most_digits)
        numbers = next((size for size in (linear, by_digits) if counts == [size.at(n) for n in PROBES]), None)
        if numbers is None:
            raise ValueError(
                f"{name!r} of {mixer} holds {counts} numbers after {list(PROBES)} tokens; this is not linear in the "
                "length, so the size at other lengths is unknown"
            )
        itemsize = CACHE_DTYPES[cache_dtype] if numbers.per_token and cache_dtype else tensors[0].element_size()
        sizes[name] = StateTensor(tuple(tensors[0].shape), numbers, itemsize)
    return sizes


def model_state_size(states: Sequence[LayerState]) -> StateSize:
    """Return the bytes of the state of a whole model."""
    return sum((state.bytes * len(state.layers) for state in states), StateSize())


def kv_cache(hidden_size: int, num_layers: int, cache_dtype: str = "bfloat16") -> StateSize:
    """Return the bytes of the KV cache of a llama without shared key or value heads: 2 · D · layers · T numbers."""
    _check_dtypes("float32", cache_dtype)
    return StateSize(per_token=2 * hidden_size * num_layers * CACHE_DTYPES[cache_dtype])


def _check_dtypes(dtype: str, cache_dtype: str | None) -> None:
    check_choice("dtype", dtype, DTYPES)
    check_choice("cache dtype", cache_dtype or dtype, CACHE_DTYPES)


def ska_state_size(rank: int, width: int, chunk_size: int = 1, decays: int = 0) -> int:
    """Return the numbers in a head's state at any length: 2r² + Pr + r + 1 (Prop. I.14), and the incomplete chunk.

    Its tokens have `decays` log-decays each. The paper leaves out the chunk, although chunk-causal streaming must store
    it. Its 77 KB for the 50M model (§3.5; r 56, P 64, 7 heads, 4 layers, float32) are 1.1 MB by its own formula.
    """
    return 2 * rank**2 + width * rank + rank + 1 + (chunk_size - 1) * (rank + width + decays)


def ska_crossover(rank: int, width: int, chunk_size: int = 1, decays: int = 0) -> float:
    """Return the length beyond which a cache of keys and values, T (r + P) numbers, is larger than `ska_state_size`."""
    return ska_state_size(rank, width, chunk_size, decays) / (rank + width)


def ska_sizes(state: LayerState) -> dict[str, Any]:
    """Compare the state of an SKA layer with a cache of its keys and values, which has `H (r + P)` numbers a token.

    Returns:
        "layers", "heads", "rank", "value_dim"; the numbers in the layer's "committed" and "pending" tensors; and the
        first length at which the state is smaller than the cache: "theory" (Prop. I.14), "measured" (committed numbers
        only) and "with_pending" (all numbers).
    """
    heads, rank = state.tensors["gram"].shape[1:3]
    value_dim = state.tensors["values"].shape[2]
    committed, pending = (
        sum((state.tensors[name].numbers for name in names if name in state.tensors), StateSize())
        for names in (SKA_COMMITTED, SKA_PENDING)
    )
    cache = StateSize(per_token=heads * (rank + value_dim))
    return {
        "layers": list(state.layers), "heads": heads, "rank": rank, "value_dim": value_dim,
        "committed": committed.constant, "pending": pending.constant,
        "theory": math.floor(ska_crossover(rank, value_dim)) + 1, "measured": committed.smaller_from(cache),
        "with_pending": (committed + pending).smaller_from(cache),
    }  # fmt: skip


def measure_memory(
    models: Sequence[str],
    lengths: Sequence[int],
    *,
    hidden_size: int = 256,
    num_layers: int = 4,
    num_heads: int | None = None,
    vocab_size: int = 256,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
) -> dict[str, Any]:
    """Measure the states of models at some lengths, beside the KV cache of a llama of the same sizes.

    Args:
        models: names of presets, `base[+modifier…]`, or folders with trained models.
        lengths: numbers of tokens, in any order.
        hidden_size, num_layers, num_heads, vocab_size: as in `preset`. The vocabulary affects the parameters only.
            Beside trained models, presets and the llama have the sizes of these.
        dtype, cache_dtype: as in `layer_states`.

    Returns:
        The settings; "cache", `{"per_token", "bytes": [one a length]}`; and "models", `[{"model", "parameters",
        "constant", "per_token", "per_digit", "most_digits", "bytes": [one a length], "smaller_from", "layers",
        "ska"}]`. Sizes are in bytes; `StateSize` has their meaning.
        "smaller_from" is the first length at which the state is smaller than the cache, or None.
    """
    from halflife.models.load import configurations

    if not models or len(set(models)) != len(models):
        raise ValueError(f"name at least one model, each once; got {', '.join(models) or 'none'}")
    if not lengths:
        raise ValueError("name at least one length in tokens, such as 1024")
    if (shortest := min(lengths)) < 1:
        raise ValueError(f"a length is a number of tokens, at least 1; got {shortest}")
    if num_heads is not None and num_heads < 1:
        raise ValueError(f"num_heads must be at least 1; got {num_heads}")
    _check_dtypes(dtype, cache_dtype)
    sizes: dict[str, Any] = {"hidden_size": hidden_size, "num_layers": num_layers, "vocab_size": vocab_size}
    folders = [name for name in models if name.partition("+")[0] not in PRESETS and Path(name).is_dir()]
    configs = configurations(folders)
    if configs:
        sizes = {name: getattr(configs[0], name) for name in sizes}
    configs += [preset(name, num_heads=num_heads, **sizes) for name in models if name not in folders]
    lengths = sorted(set(lengths))
    cache = kv_cache(sizes["hidden_size"], sizes["num_layers"], cache_dtype or dtype)
    return {
        **sizes, "num_heads": num_heads, "dtype": dtype, "cache_dtype": cache_dtype or dtype, "lengths": lengths,
        "cache": {"per_token": cache.per_token, "bytes": [cache.at(length) for length in lengths]},
        "models": [_model_row(config, layer_states(config, dtype, cache_dtype), lengths, cache) for config in configs],
    }  # fmt: skip


def _model_row(
    config: ModelConfig, states: Sequence[LayerState], lengths: Sequence[int], cache: StateSize
) -> dict[str, Any]:
    size = model_state_size(states)
    return {
        "model": config.name, "parameters": on_meta(config).num_parameters(), **dataclasses.asdict(size),
        "bytes": [size.at(length) for length in lengths], "smaller_from": size.smaller_from(cache),
        "layers": [
            {
                "mixer": state.mixer, "layers": list(state.layers), **dataclasses.asdict(state.bytes),
                "tensors": {name: dataclasses.asdict(tensor.bytes) for name, tensor in state.tensors.items()},
            }
            for state in states
        ],
        "ska": [ska_sizes(state) for state in states if state.mixer == "ska"],
    }  # fmt: skip


def format_bytes(size: float) -> str:
    """Format bytes with a binary unit and three digits, or two digits below 1: "1.5 MiB", "0.98 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:  # a size that rounds to 1000 gets the next unit
            return f"{size:.{3 if size >= 1 else 2}g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 999.5 else f"{size:,.0f} TiB"
