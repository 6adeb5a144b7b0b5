"""Conversion of fla's RWKV-7."""

from __future__ import annotations

from collections.abc import Iterator

from halflife.models.config import ModelConfig
from halflife.models.convert.rules import Rule, copy
from halflife.models.convert.source import SOURCES, Config, Converted, Tensors, Translation, divide, on_meta, settings

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "num_heads": None, "head_dim": 64,
    "decay_low_rank_dim": 64, "a_low_rank_dim": 64, "v_low_rank_dim": 16, "gate_low_rank_dim": 128,
    "hidden_ratio": 4.0, "intermediate_size": None, "norm_first": True, "norm_eps": 1e-5, "tie_word_embeddings": False,
    "initializer_range": 0.02,
}  # fmt: skip
NULLABLE = ("head_dim", "decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "hidden_ratio")
FIXED = {"attn": (None,), "hidden_act": ("sqrelu",), "norm_bias": (True,)}

# (fla's name, halflife's name). A pair is used if the halflife model has such a parameter. The first layer, for
# example, has no v_lora.
MODEL = (
    ("model.embeddings.weight", "embedding.weight"),
    ("model.layers.0.pre_norm.weight", "embedding_norm.weight"),
    ("model.layers.0.pre_norm.bias", "embedding_norm.bias"),
    ("model.norm.weight", "norm.weight"),
    ("model.norm.bias", "norm.bias"),
)
BLOCK = (
    ("attn_norm.weight", "mixer_norm.weight"),
    ("attn_norm.bias", "mixer_norm.bias"),
    ("attn.k_k", "mixer.k_k"),
    ("attn.k_a", "mixer.k_a"),
    ("attn.r_proj.weight", "mixer.r_proj.weight"),
    ("attn.k_proj.weight", "mixer.k_proj.weight"),
    ("attn.v_proj.weight", "mixer.v_proj.weight"),
    ("attn.o_proj.weight", "mixer.out_proj.weight"),
    ("attn.w_lora.lora.0.weight", "mixer.decay_lora.down"),
    ("attn.w_lora.lora.2.weight", "mixer.decay_lora.up"),
    ("attn.a_lora.lora.0.weight", "mixer.iclr_lora.down"),
    ("attn.a_lora.lora.2.weight", "mixer.iclr_lora.up"),
    ("attn.a_lora.lora.2.bias", "mixer.a0"),
    ("attn.v_lora.lora.0.weight", "mixer.value_lora.down"),
    ("attn.v_lora.lora.2.weight", "mixer.value_lora.up"),
    ("attn.v_lora.lora.2.bias", "mixer.v0"),
    ("attn.g_lora.lora.0.weight", "mixer.gate_lora.down"),
    ("attn.g_lora.lora.2.weight", "mixer.gate_lora.up"),
    ("attn.g_norm.weight", "mixer.norm.weight"),
    ("attn.g_norm.bias", "mixer.norm.bias"),
    ("ffn_norm.weight", "mlp_norm.weight"),
    ("ffn_norm.bias", "mlp_norm.bias"),
    ("ffn.x_k", "mlp.mu"),
    ("ffn.key.weight", "mlp.k_proj.weight"),
    ("ffn.value.weight", "mlp.v_proj.weight"),
)


@SOURCES.add("rwkv7")
def from_fla_rwkv7(config: Config, tensors: Tensors) -> Converted:
    """Convert fla's `RWKV7ForCausalLM` to a halflife configuration and state dict.

    Keys are normalised as in RWKV-LM and in fla with `fuse_norm: false`. fla's fused norm also adds 1e-6 under the
    root, which halflife does not.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    model = model_config(config)
    hidden, heads = model.hidden_size, model.mixer_options["num_heads"]
    moved = Translation(on_meta(model), tensors)
    for i in range(model.num_layers):
        theirs, mixer = f"model.layers.{i}.attn", f"blocks.{i}.mixer"
        _shifts(moved, theirs, mixer, hidden)
        moved.rename(f"{theirs}.r_k", f"{mixer}.r_k", heads, hidden // heads)
        moved.rename(f"{theirs}.w_lora.lora.2.bias", f"{mixer}.decay.logit", hidden)
        for theirs, ours in BLOCK:
            if f"blocks.{i}.{ours}" in moved.shapes:
                moved.rename(f"model.layers.{i}.{theirs}", f"blocks.{i}.{ours}")
    for theirs, ours in MODEL:
        if ours in moved.shapes:
            moved.rename(theirs, ours)
    moved.head("lm_head.weight", "model.embeddings.weight")
    return model, moved.finish()


def model_config(config: Config) -> ModelConfig:
    """Return our configuration of a model with fla's configuration."""
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
    return ModelConfig(
        name="rwkv7", vocab_size=s.vocab_size, hidden_size=s.hidden_size, num_layers=s.num_hidden_layers,
        mixer="rwkv7", mixer_options=options, mlp="rwkv7", intermediate_size=width,
        tie_embeddings=s.tie_word_embeddings, norm="layer", norm_eps=s.norm_eps, embedding_norm=s.norm_first,
        initializer_range=s.initializer_range,
    )  # fmt: skip


def rules(model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of all tensors but the head's, with the names of fla's present version."""
    shapes = {name: tuple(x.shape) for name, x in on_meta(model).state_dict().items()}
    hidden, heads = model.hidden_size, model.mixer_options["num_heads"]
    pairs = list(MODEL)
    for i in range(model.num_layers):
        theirs, mixer = f"model.layers.{i}.attn", f"blocks.{i}.mixer"
        pairs += [(f"model.layers.{i}.{name}", f"blocks.{i}.{ours}") for name, ours in BLOCK]
        yield from (copy(f"{mixer}.mu.{name}", f"{theirs}.x_{name}", 1, 1, hidden) for name in "rwkvag")
        yield copy(f"{mixer}.r_k", f"{theirs}.r_k", heads, hidden // heads)
        yield copy(f"{mixer}.decay.logit", f"{theirs}.w_lora.lora.2.bias", hidden)
    yield from (copy(ours, theirs, *shapes[ours]) for theirs, ours in pairs if ours in shapes)


def _shifts(moved: Translation, theirs: str, ours: str, hidden: int) -> None:
    """Convert the six weights of the token shift, `x_r …`, which fla's first version stores together as `x_x`."""
    if f"{theirs}.x_x" in moved:
        for name, x in zip("rwkvag", moved.take(f"{theirs}.x_x", 6, hidden), strict=True):
            moved.put(f"{ours}.mu.{name}", x.clone())
        return
    for name in "rwkvag":
        moved.rename(f"{theirs}.x_{name}", f"{ours}.mu.{name}", 1, 1, hidden)
