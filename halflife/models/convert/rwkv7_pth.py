"""Conversion of RWKV-7 as its author publishes it, in one file `.pth` without a configuration."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from halflife.models.config import ModelConfig
from halflife.models.convert.source import Converted, Tensors, Translation, on_meta

SUFFIX = ".pth"
NORM_EPS = 1e-5
HEAD_NORM_EPS = 64e-5  # of the norm of each head, whatever its size

# (published name, our name) of matrices that both store as [outputs, inputs], and of vectors.
ATTENTION = (
    *((f"x_{name}", f"mu.{name}") for name in "rwkvag"),
    ("w0", "decay.logit"), ("a0", "a0"), ("v0", "v0"), ("k_k", "k_k"), ("k_a", "k_a"), ("r_k", "r_k"),
    ("receptance.weight", "r_proj.weight"), ("key.weight", "k_proj.weight"), ("value.weight", "v_proj.weight"),
    ("output.weight", "out_proj.weight"), ("ln_x.weight", "norm.weight"), ("ln_x.bias", "norm.bias"),
)  # fmt: skip
# (published name, our name) of low-rank maps, which are stored as [inputs, rank] and [rank, outputs].
LORAS = (("w", "decay_lora"), ("a", "iclr_lora"), ("v", "value_lora"), ("g", "gate_lora"))
RANKS = (("decay_rank", "w1"), ("iclr_rank", "a1"), ("gate_rank", "g1"))
LORA_NAMES = tuple(f"{name}{i}" for name, _ in LORAS for i in (1, 2))
BLOCK = (
    ("ln1", "mixer_norm"), ("ln2", "mlp_norm"), ("ffn.key", "mlp.k_proj"), ("ffn.value", "mlp.v_proj"),
)  # fmt: skip


def read_pth(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file of `torch.save`, without running code that it may hold.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something other than named tensors, or is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is damaged, or holds more than tensors, which is not read: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise ValueError(f"{path} holds no named tensors")
    return tensors


def from_rwkv7_pth(tensors: Tensors) -> Converted:
    """Convert RWKV-7 with the names of its author's code, "x070", to a halflife configuration and state dict.

    The shapes give the configuration. The interpolation of values is unused in the first layer and left out.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape, as in other versions of RWKV.
    """
    model = _config(tensors)
    unused = {f"blocks.0.att.{name}" for name in ("v0", "v1", "v2")}
    moved = Translation(on_meta(model), {name: x for name, x in tensors.items() if name not in unused})
    for theirs, ours in _names(model.num_layers):
        if ours not in moved.shapes:
            continue
        if theirs[-2:] in LORA_NAMES:
            moved.put(ours, moved.take(theirs, *reversed(moved.shapes[ours])).T.contiguous())
            continue
        shape = tuple(moved.tensors[theirs].shape) if theirs in moved else ()
        vector = not theirs.endswith(".weight") and math.prod(shape) == math.prod(moved.shapes[ours])
        moved.rename(theirs, ours, *(shape if vector else ()))  # vectors have axes of length 1, or those of the heads
    return model, moved.finish()


def _config(tensors: Tensors) -> ModelConfig:
    first = [f"blocks.0.att.{name}" for name in ("r_k", *(part for _, part in RANKS))]
    needed = ("emb.weight", *first, "blocks.0.ffn.key.weight")
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(f"this is no RWKV-7 of version x070: {missing[0]} is missing")
    layers = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    vocabulary, hidden = tensors["emb.weight"].shape
    heads, size = tensors["blocks.0.att.r_k"].shape

    value = tensors.get("blocks.1.att.v1")
    options = {
        "num_heads": heads, "head_dim": size, "norm_eps": HEAD_NORM_EPS / size,
        "value_rank": None if value is None else value.shape[-1],
        **{name: tensors[f"blocks.0.att.{part}"].shape[-1] for name, part in RANKS},
    }  # fmt: skip
    return ModelConfig(
        name="rwkv7", vocab_size=vocabulary, hidden_size=hidden, num_layers=layers, mixer="rwkv7",
        mixer_options=options, mlp="rwkv7", intermediate_size=len(tensors["blocks.0.ffn.key.weight"]),
        tie_embeddings=False, norm="layer", norm_eps=NORM_EPS, embedding_norm=True,
    )  # fmt: skip


def _names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield (published name, our name) of every tensor; some of ours do not exist in the first layer."""
    yield from (("emb.weight", "embedding.weight"), ("head.weight", "head.weight"))
    for part in ("weight", "bias"):
        yield from ((f"blocks.0.ln0.{part}", f"embedding_norm.{part}"), (f"ln_out.{part}", f"norm.{part}"))
    for i in range(num_layers):
        at, ours = f"blocks.{i}.", f"blocks.{i}.mixer."
        yield from ((f"{at}att.{theirs}", f"{ours}{name}") for theirs, name in ATTENTION)
        for theirs, name in LORAS:
            yield from ((f"{at}att.{theirs}1", f"{ours}{name}.down"), (f"{at}att.{theirs}2", f"{ours}{name}.up"))
        yield (f"{at}ffn.x_k", f"blocks.{i}.mlp.mu")
        for theirs, name in BLOCK:
            yield from ((f"{at}{theirs}.{part}", f"{at}{name}.{part}") for part in ("weight", "bias"))
