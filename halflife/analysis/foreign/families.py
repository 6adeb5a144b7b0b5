"""The mixers of transformers whose decays can be read: which module shows a decay, and what the decay is there.

A new mixer is one class, a subclass of `MixerDecay` that is registered under the mixer's class names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halflife.registry import Registry

MIXERS: Registry[type[MixerDecay]] = Registry("class of a mixer")
GATE_POWER = 8.0  # c of RG-LRU's paper, a constant in transformers too


class MixerDecay(nn.Module):
    """The log-decays g = log λ ≤ 0 of one mixer of transformers, `[B, T, H]` or `[B, T, H, K]`, in float32.

    A subclass names its `family`, and the `granularity` of its decay. `source_name` is the name of its `source`, and
    `sizes` are the names of the mixer's numbers that `shape` has. `key_axis` is the axis of the keys in the state
    `[B, H, …, …]` that transformers caches, -2 or -1. It is None if the state is no matrix that tokens write to
    linearly, or lies outside the cache. Then there is no forecast.

    The mixer stays as it is. While `observed` is open, a hook on one of its modules, the `source`, calls this module
    with what the source read and returned. `halflife.analysis.capture` takes g from this call, as it takes g from the
    decays of our models. The attributes have the meaning that they have in `halflife.decay.Decay`.
    """

    family: ClassVar[str]
    granularity: ClassVar[str] = "scalar"
    source_name: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]] = ("num_heads",)
    key_axis: ClassVar[int | None] = None

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer: Any = mixer

    @property
    def source(self) -> nn.Module:
        """The module of the mixer whose input or output determines g. The mixer calls it once for each text."""
        return getattr(self.mixer, self.source_name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one token's log-decays: `(H,)` or `(H, K)`."""
        return tuple(getattr(self.mixer, name) for name in self.sizes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return g from the source's input x and output y, `[B, T, …]`."""
        raise NotImplementedError

    @property
    def num_heads(self) -> int:
        """H."""
        return self.shape[0]

    @torch.no_grad()
    def at_rest(self) -> Tensor:
        """Return g where the input of the layer is zero, in `shape`."""
        width = int(getattr(self.source, "in_features", 0)) or int(self.mixer.hidden_size)
        x = next(self.source.parameters()).new_zeros(1, 1, width)
        return self.forward(x, self.source(x)).view(self.shape)

    def timescales(self, position: float = 1) -> Tensor:
        """Return the tokens in which each channel decays by 1/e at zero input, in `shape`. No position changes them."""
        return -1 / self.at_rest()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Call this module with each input and output of the source while the context is open."""

        def after(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Tensor], output: Tensor) -> None:
            self(inputs[0] if inputs else next(iter(options.values())), output)

        with self.source.register_forward_hook(after, with_kwargs=True):
            yield


def softplus_decay(A_log: Tensor, step: Tensor, limits: tuple[float, float] = (0.0, math.inf)) -> Tensor:
    """Return `g = −e^A_log · clamp(softplus(step))`, the law of Mamba-2 and Gated DeltaNet, in float32."""
    return -A_log.float().exp() * nn.functional.softplus(step.float()).clamp(*limits)


# Mamba-2 in Mamba2, Bamba, Falcon-H1, Granite hybrids, Nemotron-H and Zamba2 (https://arxiv.org/abs/2405.21060).
@MIXERS.add("Mamba2Mixer")
@MIXERS.add("BambaMixer")
@MIXERS.add("GraniteMoeHybridMambaLayer")
@MIXERS.add("NemotronHMamba2Mixer")
@MIXERS.add("Zamba2MambaMixer")
class Mamba2Decay(MixerDecay):
    """One decay per head, `g = −e^A_log · clamp(softplus(Δ + dt_bias))`. Δ is the last part of the input projection.

    The limits of the clamp are the mixer's `time_step_limit`.
    """

    family = "Mamba-2"
    source_name = "in_proj"
    key_axis = -1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        step = y[..., -self.mixer.num_heads :].float() + self.mixer.dt_bias.float()
        low, high = self.mixer.time_step_limit or (0.0, math.inf)
        return softplus_decay(self.mixer.A_log, step, (low, high))


@MIXERS.add("FalconH1Mixer")
class FalconH1Decay(Mamba2Decay):
    """The same law after the multipliers of Falcon-H1, which scale the output of the projection."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y * self.mixer.mup_vector)


# Gated DeltaNet in Qwen3-Next, Qwen3.5, Qwen4, Lara Mini and OLMo Hybrid (https://arxiv.org/abs/2412.06464).
@MIXERS.add("Qwen3_5GatedDeltaNet")
@MIXERS.add("Qwen3_5MoeGatedDeltaNet")
@MIXERS.add("Qwen4ExpTextGatedDeltaNet")
@MIXERS.add("LaraMiniGatedDeltaNet")
class GatedDeltaNetDecay(MixerDecay):
    """One decay per head, `g = −e^A_log · softplus(a + dt_bias)`, with a projection of its own for a."""

    family = "Gated DeltaNet"
    source_name = "in_proj_a"
    sizes = ("num_v_heads",)
    key_axis = -2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return softplus_decay(self.mixer.A_log, self.activation(y).float() + self.mixer.dt_bias.float())

    def activation(self, y: Tensor) -> Tensor:
        """Return a, `[B, T, H]`, from the output of the source."""
        return y


@MIXERS.add("OlmoHybridGatedDeltaNet")
class OlmoGatedDeltaNetDecay(GatedDeltaNetDecay):
    """The same law. The projection has another name."""

    source_name = "a_proj"


@MIXERS.add("Qwen3NextGatedDeltaNet")
class Qwen3NextDecay(GatedDeltaNetDecay):
    """The same law. One projection gives β and a of the value heads, key head by key head."""

    source_name = "in_proj_ba"

    def activation(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.mixer.num_k_heads, 2, -1))[..., 1, :].flatten(-2)


# Kimi delta attention in Kimi Linear, GLM and Bailing hybrids (https://arxiv.org/abs/2510.26692).
@MIXERS.add("KimiLinearDeltaAttention")
@MIXERS.add("Glm5NextTextLinearAttention")
@MIXERS.add("BailingHybridDeltaAttention")
class KimiDeltaDecay(MixerDecay):
    """One decay a key channel. The mixer has a module that returns g itself.

    Kimi Linear has `g = −e^A_log · softplus(f(x) + dt_bias)`. The others may have a lower bound b < 0 instead,
    `g = b · sigmoid(e^A_log · (f(x) + dt_bias))`.
    """

    family = "Kimi delta attention"
    granularity = "vector"
    source_name = "forget_gate"
    sizes = ("num_heads", "head_dim")
    key_axis = -2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y.float()


# Lightning attention in MiniMax (https://arxiv.org/abs/2501.08313).
@MIXERS.add("MiniMaxLightningAttention")
class LightningDecay(MixerDecay):
    """One constant decay per head, `g = −slope`. Deep layers have smaller slopes."""

    family = "lightning attention"
    source_name = "qkv_proj"
    sizes = ("num_attention_heads",)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.mixer.slope_rate.float().flatten().expand(*y.shape[:2], -1)


# RWKV-4 (https://arxiv.org/abs/2305.13048).
@MIXERS.add("RwkvSelfAttention")
class Rwkv4Decay(MixerDecay):
    """One constant decay per channel, `g = −e^time_decay`, of numerator and denominator alike. It has no heads."""

    family = "RWKV-4"
    granularity = "vector"
    source_name = "key"

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.mixer.attention_hidden_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.mixer.time_decay.float().exp().expand(*y.shape[:2], 1, -1)


# RG-LRU in RecurrentGemma (https://arxiv.org/abs/2402.19427).
@MIXERS.add("RecurrentGemmaRecurrentBlock")
class RGLRUDecay(MixerDecay):
    """One decay per channel, `g = −8 · σ(W_a x + b_a) · softplus(Λ)`. A head is a block of W_a.

    At position 0 the unit resets its state. The first g of a text is the gate's value nevertheless.
    """

    family = "RG-LRU"
    granularity = "vector"
    source_name = "rg_lru"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.num_attention_heads, self.source.block_width)  # pyright: ignore

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        unit: Any = self.source
        gate = torch.einsum("bthk, hkl -> bthl", x.unflatten(-1, self.shape), unit.recurrent_gate_weight)
        gate = (gate + unit.recurrent_gate_bias).float().sigmoid()
        return -GATE_POWER * gate * nn.functional.softplus(unit.recurrent_param.float()).view(self.shape)

    @torch.no_grad()
    def at_rest(self) -> Tensor:
        """Return g where the unit reads zeros. Calling the unit would change its state."""
        weight: Tensor = self.source.recurrent_gate_weight  # pyright: ignore
        return self.forward(weight.new_zeros(1, 1, weight.shape[0] * weight.shape[1]), None).view(self.shape)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """As in the parent class. Moreover, the convolution goes on from the previous window.

        The block of transformers carries the state of the unit between calls, but the convolution's state only when it
        reads single tokens. Here the last inputs of a window precede the next window.
        """
        conv: nn.Conv1d = self.mixer.conv_1d
        memory = conv.kernel_size[0] - 1
        last: list[Tensor] = []

        def before(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            past = last.pop() if last else inputs[0].new_zeros(*inputs[0].shape[:2], memory)
            joined = torch.cat([past, inputs[0]], -1)
            last.append(joined[..., joined.shape[-1] - memory :])
            return (joined,)

        def after(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return output[..., memory:]

        with super().observed(), conv.register_forward_pre_hook(before), conv.register_forward_hook(after):
            yield
