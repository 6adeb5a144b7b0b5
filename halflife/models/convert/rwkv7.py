"""Conversion of RWKV-7: fla's, in both directions, and its author's, one file `.pth` without a configuration."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halflife.models.config import ModelConfig
from halflife.models.convert.rules import Rule, Tensors, convert_from, copy, divide
from halflife.models.convert.source import SOURCES, Config, Converted, Source, configured, settings
from halflife.models.lm import LanguageModel, on_meta

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "num_heads": None, "head_dim": 64,
    "decay_low_rank_dim": 64, "a_low_rank_dim": 64, "v_low_rank_dim": 16, "gate_low_rank_dim": 128,
    "hidden_ratio": 4.0, "intermediate_size": None, "norm_first": True, "norm_eps": 1e-5, "tie_word_embeddings": False,
    "initializer_range": 0.02,
}  # fmt: skip
NULLABLE = ("head_dim", "decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "hidden_ratio")
FIXED = {"attn": (None,), "hidden_act": ("sqrelu",), "norm_bias": (True,)}

SUFFIX = ".pth"
PTH_NORM_EPS = 1e-5
PTH_HEAD_NORM_EPS = 64e-5  # of the norm of each head, whatever its size

# (our name, fla's, the author's) of modules with a weight and perhaps a bias. The first layer has no value_lora.
MODEL = (
    ("embedding", "model.embeddings", "emb"), ("norm", "model.norm", "ln_out"), ("head", "lm_head", "head"),
    ("embedding_norm", "model.layers.0.pre_norm", "blocks.0.ln0"),
)  # fmt: skip
BLOCK = (
    ("mixer_norm", "attn_norm", "ln1"), ("mlp_norm", "ffn_norm", "ln2"),
    ("mlp.k_proj", "ffn.key", "ffn.key"), ("mlp.v_proj", "ffn.value", "ffn.value"),
    ("mixer.r_proj", "attn.r_proj", "att.receptance"), ("mixer.k_proj", "attn.k_proj", "att.key"),
    ("mixer.v_proj", "attn.v_proj", "att.value"), ("mixer.out_proj", "attn.o_proj", "att.output"),
    ("mixer.norm", "attn.g_norm", "att.ln_x"),
)  # fmt: skip
VECTORS = (
    *((f"mixer.mu.{name}", f"attn.x_{name}", f"att.x_{name}") for name in "rwkvag"),
    ("mlp.mu", "ffn.x_k", "ffn.x_k"), ("mixer.k_k", "attn.k_k", "att.k_k"), ("mixer.k_a", "attn.k_a", "att.k_a"),
    ("mixer.r_k", "attn.r_k", "att.r_k"), ("mixer.decay.logit", "attn.w_lora.lora.2.bias", "att.w0"),
    ("mixer.a0", "attn.a_lora.lora.2.bias", "att.a0"), ("mixer.v0", "attn.v_lora.lora.2.bias", "att.v0"),
)  # fmt: skip
LORAS = (("decay_lora", "w"), ("iclr_lora", "a"), ("value_lora", "v"), ("gate_lora", "g"))


def _rules(s: SimpleNamespace, model: ModelConfig, author: bool = False) -> Iterator[Rule]:
    hidden, number = model.hidden_size, model.mixer_options["num_heads"]
    shapes = {f"mixer.mu.{name}": (1, 1, hidden) for name in "rwkvag"}
    shapes |= {"mixer.r_k": (number, hidden // number), "mixer.decay.logit": (hidden,)}
    sizes = {name: tuple(x.shape) for name, x in on_meta(model).state_dict().items()}
    for ours, *names in MODEL:
        yield from (copy(f"{ours}.{part}", f"{names[author]}.{part}") for part in ("weight", "bias"))
    for i in range(model.num_layers):
        at, theirs = f"blocks.{i}.", f"blocks.{i}." if author else f"model.layers.{i}."
        for ours, *names in BLOCK:
            yield from (copy(f"{at}{ours}.{part}", f"{theirs}{names[author]}.{part}") for part in ("weight", "bias"))
        for ours, *names in VECTORS:
            yield copy(f"{at}{ours}", f"{theirs}{names[author]}", *shapes.get(ours, ()))
        for name, letter in LORAS:
            for j, part in enumerate(("down", "up")):
                ours = f"{at}mixer.{name}.{part}"
                if not author:
                    yield copy(ours, f"{theirs}attn.{letter}_lora.lora.{2 * j}.weight")
                elif ours in sizes:  # the author's maps are [inputs, outputs]
                    shape = sizes[ours][::-1]
                    index = torch.arange(shape[0] * shape[1]).view(shape).T.flatten()
                    yield Rule(ours, ((f"{theirs}att.{letter}{j + 1}", shape),), index, flat=True)


def _parse(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    s = settings(config, DEFAULTS, FIXED, NULLABLE)
    widths = config.get("value_dim") or s.hidden_size
    if any(width != s.hidden_size for width in (widths if isinstance(widths, list) else [widths])):
        raise ValueError(f"value_dim = {widths} in config.json cannot be represented; only {s.hidden_size} can")
    if not (s.head_dim or s.num_heads):
        raise ValueError("config.json must give head_dim or num_heads")
    heads = divide(s.hidden_size, s.head_dim, "hidden_size / head_dim") if s.head_dim else s.num_heads
    options = {
        "num_heads": heads, "decay_rank": s.decay_low_rank_dim, "iclr_rank": s.a_low_rank_dim,
        "value_rank": s.v_low_rank_dim, "gate_rank": s.gate_low_rank_dim, "norm_eps": s.norm_eps,
    }  # fmt: skip
    width = s.intermediate_size or -(-int(s.hidden_size * (s.hidden_ratio or 4)) // 32) * 32
    others = {"norm": "layer", "embedding_norm": s.norm_first, "intermediate_size": width}
    return s, configured(s, "rwkv7", options, s.norm_eps, mlp="rwkv7", **others)


def _describe(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    one, last, config = mixers[0], mixers[-1], model.config
    return {
        "head_dim": one.head_dim, "decay_low_rank_dim": len(one.decay_lora.down), "fuse_norm": False,
        "a_low_rank_dim": len(one.iclr_lora.down), "gate_low_rank_dim": len(one.gate_lora.down),
        "v_low_rank_dim": 32 if last.value_lora is None else len(last.value_lora.down), "norm_bias": True,
        "norm_first": config.embedding_norm, "hidden_act": "sqrelu",
        "value_dim": [config.hidden_size] * config.num_layers, "attn": None, "norm_eps": config.norm_eps,
    }  # fmt: skip


def _split_shifts(tensors: Tensors) -> dict[str, Tensor]:
    """Split the six weights of the token shift, which fla's first version stores together as `x_x`."""
    split: dict[str, Tensor] = {}
    for name, x in tensors.items():
        parts = zip("rwkvag", x, strict=False) if name.endswith(".x_x") else ()
        split |= {name[:-1] + letter: part.clone() for letter, part in parts} if parts else {name: x}
    return split


# Keys are normalised as in RWKV-LM and in fla with `fuse_norm: false`. fla's fused norm also adds 1e-6 under the root,
# which halflife does not.
SOURCES.add("rwkv7")(Source("fla's rwkv7", "fla", _parse, _rules, _describe, read=_split_shifts))


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
    model = _pth_config(tensors)
    unused = {f"blocks.0.att.{name}" for name in ("v0", "v1", "v2")}
    used = {name: x for name, x in tensors.items() if name not in unused}
    return model, convert_from(on_meta(model), _rules(SimpleNamespace(), model, author=True), used)


def _pth_config(tensors: Tensors) -> ModelConfig:
    ranks = (("decay_rank", "w1"), ("iclr_rank", "a1"), ("gate_rank", "g1"))
    first = [f"blocks.0.att.{name}" for name in ("r_k", *(part for _, part in ranks))]
    needed = ("emb.weight", *first, "blocks.0.ffn.key.weight")
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(f"this is no RWKV-7 of version x070: {missing[0]} is missing")
    layers = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    vocabulary, hidden = tensors["emb.weight"].shape
    heads, size = tensors["blocks.0.att.r_k"].shape

    value = tensors.get("blocks.1.att.v1")
    options = {
        "num_heads": heads, "head_dim": size, "norm_eps": PTH_HEAD_NORM_EPS / size,
        "value_rank": None if value is None else value.shape[-1],
        **{name: tensors[f"blocks.0.att.{part}"].shape[-1] for name, part in ranks},
    }  # fmt: skip
    return ModelConfig(
        name="rwkv7", vocab_size=vocabulary, hidden_size=hidden, num_layers=layers, mixer="rwkv7",
        mixer_options=options, mlp="rwkv7", intermediate_size=len(tensors["blocks.0.ffn.key.weight"]),
        tie_embeddings=False, norm="layer", norm_eps=PTH_NORM_EPS, embedding_norm=True,
    )  # fmt: skip
