"""Tiny models of transformers, one for each class of mixer whose decay is read, with the law of its decay by hand."""

import json
import math

import torch
from transformers import CONFIG_MAPPING

from halflife import layers
from halflife.models.convert import take_mixer
from halflife.models.tensor_file import Checkpoint

VOCAB = 256
LINEAR_THEN_FULL = ["linear_attention"] * 3 + ["full_attention"]
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GATED_DELTANET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
KDA = {
    "num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "layer_types": LINEAR_THEN_FULL, **EXPERTS,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16, "mamba_d_conv": 4,
}  # fmt: skip

# `model_type` → the options of its configuration.
OPTIONS = {
    "qwen3_next": SMALL | GATED_DELTANET | EXPERTS,
    "qwen3_5_text": SMALL | GATED_DELTANET,
    "qwen3_5_moe_text": SMALL | GATED_DELTANET | EXPERTS,
    "qwen4_exp_text": SMALL | GATED_DELTANET | EXPERTS | {
        "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 32, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 64,
    },
    "olmo_hybrid": SMALL | GATED_DELTANET | {"layer_types": LINEAR_THEN_FULL},
    "kimi_linear": SMALL | KDA,
    "bailing_hybrid": SMALL | KDA,
    "glm5_next_text": SMALL | KDA | {
        "qk_rope_head_dim": 0, "head_dim": 0, "n_routed_experts": 4, "index_topk": 32, "index_head_dim": 8,
        "index_n_heads": 2, "hc_mult": 2, "index_kpool": 4, "mlp_layer_types": ["dense"] * 4,
    },
    "mamba2": {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8,
        "n_groups": 2, "chunk_size": 16, "expand": 2, "time_step_limit": (0.01, 0.05),
    },
    "bamba": SMALL | MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": SMALL | MAMBA2 | {
        "mamba_d_ssm": 64, "ssm_in_multiplier": 0.8, "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 2.0],
    },
    "granitemoehybrid": SMALL | MAMBA2 | EXPERTS | {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "shared_intermediate_size": 16,
    },
    "nemotron_h": SMALL | {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
        "hybrid_override_pattern": "M-M*", "time_step_min": 0.05,
    },
    "zamba2": SMALL | {
        "mamba_d_state": 8, "mamba_expand": 2, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1,
        "chunk_size": 16, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1,
        "adapter_rank": 4, "attention_hidden_size": 64, "attention_head_dim": 16, "time_step_min": 0.05,
    },
    "minimax": SMALL | EXPERTS | {"block_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    "recurrent_gemma": SMALL | {"lru_width": 32, "attention_window_size": 16, "conv1d_width": 4},
    "rwkv": {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
        "intermediate_size": 64, "context_length": 64,
    },
}  # fmt: skip


def build(model_type, seed=0, **options):
    """Return the tiny model, with weights large enough that decays differ between tokens."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **OPTIONS[model_type] | options)
    with_head = type(config) in AutoModelForCausalLM._model_mapping
    model = (AutoModelForCausalLM if with_head else AutoModel).from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not any(part in name for part in ("conv", "embed", "A_log")):
                weight.mul_(3)
            elif name.endswith(("_bias", "bias", "A_log", "recurrent_param", "time_decay")):
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def softplus(x):
    return torch.log1p(torch.exp(x))


def gated_deltanet(mixer, x):
    a = mixer.get_submodule("a_proj" if hasattr(mixer, "a_proj") else "in_proj_a").weight
    return -torch.exp(mixer.A_log) * softplus(x @ a.T + mixer.dt_bias)


def qwen3_next(mixer, x):
    """The rows of the projection are β and a of the value heads, for one key head after the other."""
    heads, keys = mixer.num_v_heads, mixer.num_k_heads
    each = heads // keys
    rows = [2 * each * key + each + i for key in range(keys) for i in range(each)]
    return -torch.exp(mixer.A_log) * softplus(x @ mixer.in_proj_ba.weight[rows].T + mixer.dt_bias)


def kimi(mixer, x):
    gate = mixer.forget_gate
    f = (x @ gate.f_a_proj.weight.T @ gate.f_b_proj.weight.T + gate.dt_bias).unflatten(-1, (4, 8))
    return -torch.exp(gate.A_log.view(4, 1)) * softplus(f)


def bailing(mixer, x):
    gate = mixer.forget_gate
    f = (x @ gate.f_proj.weight.T + gate.dt_bias).unflatten(-1, (4, 8))
    rate = torch.exp(gate.A_log.view(4, 1))
    return gate.lower_bound * torch.sigmoid(rate * f) if gate.safe_gate else -rate * softplus(f)


def glm(mixer, x):
    gate = mixer.forget_gate
    f = (x @ gate.f_a_proj.weight.T @ gate.f_b_proj.weight.T + gate.dt_bias).unflatten(-1, (4, 8))
    return -5.0 * torch.sigmoid(torch.exp(gate.A_log.view(4, 1)) * f)


def mamba2(mixer, x, limits=(0.0, math.inf), before=1.0, after=1.0):
    """The last 8 rows of the projection are Δ."""
    step = before * x @ mixer.in_proj.weight[-8:].T * after
    if mixer.in_proj.bias is not None:
        step = step + mixer.in_proj.bias[-8:]
    return -torch.exp(mixer.A_log) * softplus(step + mixer.dt_bias).clip(*limits)


def falcon_h1(mixer, x):
    return mamba2(mixer, x, before=0.8, after=2.0)  # `ssm_in_multiplier`, and the last of `ssm_multipliers`


def minimax(mixer, x):
    """Head h (from 1) of 4 has 2^(−8 h / 4), times a factor that falls from 1 to nearly 0 over the layers."""
    factor = 1 - mixer.layer_idx / (4 - 1 + 1e-5) + 1e-5
    return torch.tensor([-(2.0 ** (-2 * h)) * factor for h in (1, 2, 3, 4)]).expand(*x.shape[:2], 4)


def recurrent_gemma(unit, x):
    """`x` is what the unit reads, after the convolution."""
    blocks = [x[..., 8 * h : 8 * h + 8] @ unit.recurrent_gate_weight[h] + unit.recurrent_gate_bias[h] for h in range(4)]
    rate = softplus(unit.recurrent_param).view(4, 8)
    return -8 * torch.sigmoid(torch.stack(blocks, -2)) * rate


def rwkv(mixer, x):
    return -torch.exp(mixer.time_decay).expand(*x.shape[:2], 1, 32)


# `model_type` → (name of the module of a layer whose input is recorded, g from this module and its input).
LAWS = {
    "qwen3_next": ("linear_attn", qwen3_next), "qwen3_5_text": ("linear_attn", gated_deltanet),
    "qwen3_5_moe_text": ("linear_attn", gated_deltanet), "qwen4_exp_text": ("linear_attn", gated_deltanet),
    "olmo_hybrid": ("linear_attn", gated_deltanet), "kimi_linear": ("self_attn", kimi),
    "bailing_hybrid": ("self_attn", bailing), "glm5_next_text": ("self_attn", glm),
    "mamba2": ("mixer", lambda mixer, x: mamba2(mixer, x, (0.01, 0.05))), "bamba": ("mamba", mamba2),
    "falcon_h1": ("mamba", falcon_h1), "granitemoehybrid": ("mamba", mamba2),
    "nemotron_h": ("mixer", lambda mixer, x: mamba2(mixer, x, (0.05, math.inf))),
    "zamba2": ("mamba", lambda mixer, x: mamba2(mixer, x, (0.05, math.inf))),
    "minimax": ("self_attn", minimax), "recurrent_gemma": ("temporal_block.rg_lru", recurrent_gemma),
    "rwkv": ("attention", rwkv),
}  # fmt: skip
if "lara_mini" in CONFIG_MAPPING:  # since transformers 5.24
    OPTIONS["lara_mini"] = OPTIONS["qwen3_5_moe_text"] | {
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        "sliding_window": 16,
    }
    LAWS["lara_mini"] = ("linear_attn", gated_deltanet)
MISSING = set() if "lara_mini" in OPTIONS else {"LaraMiniGatedDeltaNet"}  # from the installed transformers
assert LAWS.keys() == OPTIONS.keys()


def mixer_of(folder, layer):
    """The mixer of one layer, as a layer of ours."""
    config = json.loads((folder / "config.json").read_text())
    name, options, tensors = take_mixer(config["model_type"], config, Checkpoint(folder), layer)
    mixer = layers.build(name, **options)
    mixer.load_state_dict(tensors, assign=True)
    return mixer
