"""Conversion of models back to fla."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from halflife.layers import SwiGLU
from halflife.models.config import ModelConfig
from halflife.models.convert import fla_later, fla_linear, fla_rwkv7
from halflife.models.convert.rules import Rule, convert_back, require_equal, shared_heads
from halflife.models.convert.source import Config
from halflife.models.lm import LanguageModel

Parsed = tuple[SimpleNamespace, ModelConfig]


def to_fla(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `config.json` and tensors of a model of fla that computes what `model` does.

    Raises:
        ValueError: fla has no such model, or the model has options that fla's lacks; the message names them.
    """
    kind, config = model.config.mixer, model.config
    if kind not in KINDS:
        raise ValueError(f"fla has models for mixers {', '.join(KINDS)}; this one has {kind!r}")
    describe, parse, rules = KINDS[kind]
    mlp = getattr(model.blocks[0], "mlp", None)
    wanted = {"mamba3": "none", "rwkv7": "rwkv7"}.get(kind, "swiglu")
    if config.mlp != wanted:
        raise ValueError(f"fla's {kind} has mlp {wanted!r}; this model has {config.mlp!r}")
    theirs = {
        "model_type": kind, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers, "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings, "initializer_range": config.initializer_range,
        **({"intermediate_size": len(mlp.up.weight)} if isinstance(mlp, SwiGLU) else {}), **describe(model),
    }  # fmt: skip
    s, expected = parse(theirs)
    require_equal(model, expected, f"fla's {kind}")
    tensors = _split_convolutions(convert_back(rules(s, expected), model.state_dict()))
    if model.head is not None:
        tensors["lm_head.weight"] = model.head.weight.detach()
    return {**theirs, "dtype": str(model.embedding.weight.dtype).removeprefix("torch.")}, tensors


def _mixers(model: LanguageModel) -> list[Any]:
    return [getattr(block, "mixer", None) for block in model.blocks]


def _shared(model: LanguageModel, parts: slice, more: Callable[[Any], list[Tensor]] = lambda mixer: []) -> int:
    """How many heads share rows of some of q, k and v in all layers."""
    rows = []
    for mixer in _mixers(model):
        for part in (mixer.qkv_proj, *([] if mixer.conv is None else [mixer.conv])):
            rows += part.weight.split(mixer.splits)[parts]
        rows += more(mixer)
    return shared_heads(rows, _mixers(model)[0].num_heads)


def _gla(model: LanguageModel) -> dict[str, Any]:
    one, hidden = _mixers(model)[0], model.config.hidden_size
    options, heads = model.config.mixer_options, one.num_heads
    times = _shared(model, slice(1, 3), lambda mixer: [mixer.decay_proj.up.weight, mixer.decay_proj.up.bias])
    return {
        "num_heads": heads, "num_kv_heads": heads // times, "expand_k": heads * one.head_dim / hidden,
        "expand_v": heads * one.value_dim / hidden, "use_short_conv": one.conv is not None,
        "conv_size": one.conv.size if one.conv else 4, "use_output_gate": hasattr(one.gate, "proj"),
        "feature_map": {"none": None}.get(name := options.get("feature_map", "none"), name),
        "gate_logit_normalizer": int(getattr(one.decay, "tau", 16)), "fuse_norm": True,
        "gate_low_rank_dim": len(one.decay_proj.down.weight), "attn": None, "hidden_act": "swish",
    }  # fmt: skip


def _gated_deltanet(model: LanguageModel) -> dict[str, Any]:
    one = _mixers(model)[0]
    heads, gate = one.num_heads, {} if model.config.mixer == "kda" else {"use_gate": hasattr(one.gate, "proj")}
    return {
        "num_heads": heads // _shared(model, slice(0, 2)), "num_v_heads": heads, "head_dim": one.head_dim,
        "expand_v": one.value_dim / one.head_dim, "use_short_conv": one.conv is not None, **gate,
        "conv_size": one.conv.size if one.conv else 4, "allow_neg_eigval": one.beta_scale == 2, "attn": None,
        "hidden_act": "swish", "fuse_norm": True,
    }  # fmt: skip


def _rwkv7(model: LanguageModel) -> dict[str, Any]:
    one, last, config = _mixers(model)[0], _mixers(model)[-1], model.config
    mlp: Any = model.blocks[0].mlp
    return {
        "head_dim": one.head_dim, "decay_low_rank_dim": len(one.decay_lora.down), "fuse_norm": False,
        "a_low_rank_dim": len(one.iclr_lora.down), "gate_low_rank_dim": len(one.gate_lora.down),
        "v_low_rank_dim": 32 if last.value_lora is None else len(last.value_lora.down), "norm_bias": True,
        "intermediate_size": len(mlp.k_proj.weight), "norm_first": config.embedding_norm, "hidden_act": "sqrelu",
        "value_dim": [config.hidden_size] * config.num_layers, "attn": None,
    }  # fmt: skip


def _mamba3(model: LanguageModel) -> dict[str, Any]:
    one, options = _mixers(model)[0], model.config.mixer_options
    inner, size = one.num_heads * one.head_dim, len(one.key.weight)
    if one.rate_floor is None or inner % model.config.hidden_size:
        raise ValueError(
            "fla's mamba3 has rates that depend on the input (rate_floor) and a whole expand; this model has "
            f"rate_floor {one.rate_floor} and expand {inner / model.config.hidden_size:g}"
        )
    rank = 1 if one.mimo is None else one.mimo.rank
    return {
        "head_dim": one.head_dim, "state_size": size, "expand": inner // model.config.hidden_size,
        "n_groups": one.splits[2] // (rank * size), "rope_fraction": options.get("rope_fraction", 0.5),
        "A_floor": one.rate_floor, "is_outproj_norm": one.norm is not None, "is_mimo": rank > 1,
        **({"mimo_rank": rank} if rank > 1 else {}), "use_bias": False, "hidden_act": "silu",
    }  # fmt: skip


def _split_convolutions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split each convolution into those of q, k and v, as fla stores them."""
    new: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if not name.endswith(".conv1d.weight"):
            new[name] = x
            continue
        at = name.removesuffix("conv1d.weight")
        sizes = [len(tensors[f"{at}{part}_proj.weight"]) for part in "qkv"]
        new |= {f"{at}{part}_conv1d.weight": y.clone() for part, y in zip("qkv", x.split(sizes), strict=True)}
    return new


def _rwkv7_config(config: Config) -> Parsed:
    return SimpleNamespace(), fla_rwkv7.model_config(config)


Entry = tuple[
    Callable[[LanguageModel], dict[str, Any]], Callable[[Config], Parsed],
    Callable[[SimpleNamespace, ModelConfig], Iterable[Rule]],
]  # fmt: skip
KINDS: dict[str, Entry] = {
    "gla": (_gla, fla_linear.gla, fla_linear.gla_rules),
    "gated_deltanet": (_gated_deltanet, fla_linear.gated_deltanet, fla_linear.gated_deltanet_rules),
    "kda": (_gated_deltanet, fla_later.kda, fla_later.kda_rules),
    "rwkv7": (_rwkv7, _rwkv7_config, lambda s, model: fla_rwkv7.rules(model)),
    "mamba3": (_mamba3, fla_later.mamba3, fla_later.mamba3_rules),
}
