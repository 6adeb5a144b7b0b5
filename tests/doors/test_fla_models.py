"""fla's own model classes compute what our converted models do. fla-core has no models; flash-linear-attention has."""

import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from test_convert_fla_rows import FLAS, LENGTH, LOOPS, SINGLE, VARIANTS, VOCABULARY, published, unit

from halflife.models.convert import SOURCES, assemble

models = pytest.importorskip("fla.models", reason="pip install --no-deps flash-linear-attention==0.6.0")

NAMES = {
    "delta_net": "DeltaNet", "gated_deltaproduct": "GatedDeltaProduct", "comba": "Comba", "retnet": "RetNet"
}  # fmt: skip


def norm(self, x, residual=None, prenorm=False, **options):
    """The functions of fla's modules, whose kernels need a GPU."""
    x = x if residual is None else x + residual
    y = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
    return (y, x) if prenorm else y


def gated_norm(self, x, gate, **options):
    return norm(self, x) * (gate.sigmoid() if self.activation == "sigmoid" else F.silu(gate))


def convolve(self, x, cache=None, output_final_state=False, cu_seqlens=None):
    y = F.conv1d(F.pad(x.mT, (self.kernel_size[0] - 1, 0)), self.weight, groups=len(self.weight)).mT
    return F.silu(y) if self.activation else y, None


def turn_both(self, q, k, **options):
    angle = torch.arange(q.shape[1])[:, None] * 10_000.0 ** -(torch.arange(self.dim // 2) / (self.dim // 2))
    turn = sys.modules["fla.modules.rotary.ops"].rotary_embedding_ref
    return tuple(turn(x, angle.cos(), angle.sin()) for x in (q, k))


def rule(kind):
    """A function with the arguments of fla's kernel, by its naive one."""

    def kernel(q, k, v, beta=None, g=None, p=None, use_qk_l2norm_in_kernel=False, **options):
        if use_qk_l2norm_in_kernel:
            q, k, p = (x if x is None else unit(x) for x in (q, k, p))
        q, k, p = (x if x is None else x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k, p))
        if kind == "retnet":
            return FLAS[kind](q, k, v), None
        g = torch.zeros_like(beta) if g is None else g
        return LOOPS[kind](q, k, v, *([] if p is None else [p]), beta, g), None

    return kernel


KERNELS = {
    "delta_net": ("delta_net", "fused_recurrent_delta_rule"),
    "gated_deltaproduct": ("gated_deltaproduct", "fused_recurrent_gated_delta_rule"),
    "comba": ("comba", "fused_recurrent_comba"),
    "retnet": ("multiscale_retention", "fused_recurrent_retention"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_logits_equal_those_of_flas_classes(model_type, changes, monkeypatch):
    from fla.modules import FusedRMSNormGated, GatedMLP, RMSNorm, RotaryEmbedding, ShortConvolution

    for cls, function in ((RMSNorm, norm), (FusedRMSNormGated, gated_norm), (ShortConvolution, convolve),
                          (RotaryEmbedding, turn_both)):  # fmt: skip
        monkeypatch.setattr(cls, "forward", function)
    mlp = lambda self, x, **_: self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # noqa: E731
    monkeypatch.setattr(GatedMLP, "forward", mlp)
    module, kernel = KERNELS[model_type]
    monkeypatch.setattr(f"fla.layers.{module}.{kernel}", rule(model_type))

    config, weights = published(model_type, torch.float32, **changes)
    settings = getattr(models, f"{NAMES[model_type]}Config")(
        **{k: v for k, v in config.items() if k != "model_type"}, fuse_cross_entropy=False
    )
    theirs = getattr(models, f"{NAMES[model_type]}ForCausalLM")(settings).eval()
    found = theirs.load_state_dict(weights, strict=False)
    assert found.unexpected_keys == []
    assert set(found.missing_keys) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    theirs.tie_weights()
    ids = torch.randint(VOCABULARY, (2, LENGTH))
    ours = assemble(*SOURCES[model_type](settings.to_dict(), theirs.state_dict()))
    with torch.no_grad():
        assert_close(ours(ids)[0], theirs(ids, use_cache=False).logits, SINGLE)
