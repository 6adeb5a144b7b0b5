"""The laws of log-decays: from activations, with PoST's taper on them, and PoST's ordered spectrum.

    step = φ(f + bias),  within limits        g = −c e^{rate} t^{−α} step

φ is softplus (Mamba-2), −logsigmoid (GLA, Simple Decay), sigmoid (RWKV-7) or relu (GateRank's slow state). PoST's
exponent α slows a channel down with its position t. In a sigmoid, which bounds the rates, it moves the logit instead:
`sigmoid(f + bias − α log t)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.arguments import dense, not_plain
from halflife.ops.backends import triton
from halflife.ops.backends.dispatch import be_kind, implements_pass, run_gpu_pass, run_pass
from halflife.ops.spec import define
from halflife.precision import compute_dtype

MOST = 16384  # channels of a spectrum, all in one program of the kernel
SHAPES = ("softplus", "logsigmoid", "sigmoid", "relu")


class Law(NamedTuple):
    """A law of log-decays, `g = −factor · e^{rate} · φ(f + bias)`.

    Attributes:
        shape: φ, one of `SHAPES`.
        bias, rate: tensors that broadcast over the channels of f, `[H]` or `[H, K]`, or None for 0.
        factor: c.
        least, most: limits of φ; None is no upper limit.
    """

    shape: str
    bias: Tensor | None = None
    rate: Tensor | None = None
    factor: float = 1.0
    least: float = 0.0
    most: float | None = None

    def moved(self, offset: Tensor) -> Law:
        """The law with e^offset times the rates; in a sigmoid, with the offset in the logits."""
        if self.shape == "sigmoid":
            return self._replace(bias=offset if self.bias is None else self.bias + offset)
        return self._replace(rate=offset if self.rate is None else self.rate + offset)

    def step(self, f: Tensor) -> Tensor:
        """φ(f + bias) within its limits, in float32 or float64."""
        f = f.to(compute_dtype(f))
        f = f if self.bias is None else f + self.bias
        if self.shape == "logsigmoid":
            return -F.logsigmoid(f)
        step = {"softplus": F.softplus, "sigmoid": torch.sigmoid, "relu": F.relu}[self.shape](f)
        return step.clamp(self.least, self.most) if self.least or self.most is not None else step

    def log_decay(self, step: Tensor) -> Tensor:
        """g of the step sizes φ."""
        g = -step if self.rate is None else -self.rate.exp() * step
        return g if self.factor == 1 else self.factor * g


class Product(NamedTuple):
    """Activations `x Wᵀ + bias`, of which another kernel may compute all, for one token, or the sum.

    Attributes:
        x: `[B, T, R]`, with few channels R.
        weight, bias: W `[H · K, R]`, and `[H · K]` or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None


class Spectrum(NamedTuple):
    """PoST's spectrum of a scalar decay, in the place of the taper, which that kernel computes (`ordered_spectrum`).

    θ is also the rate of the law, in the place of p.
    """

    theta: Tensor
    delta: Tensor
    log_length: float


class Unevaluated(NamedTuple):
    """Log-decays that another kernel computes: that which takes one token of each sequence, or `gates.gates`.

    Attributes:
        f: activations `[B, T, H]` or `[B, T, H, K]`.
        law: its law, with tensors in float32 that broadcast to `[H]` or `[H, K]`.
        taper: α of the positions in such a shape, a spectrum, or None.
        position: `[T]` or `[B, T]`, if there is a taper.
        shape: `(H,)` or `(H, K)`.
        most, gains: of `gates`: writing strengths are most · σ(logits), and whether φ is asked for.
    """

    f: Tensor | Product
    law: Law
    taper: Tensor | Spectrum | None
    position: Tensor | None
    shape: tuple[int, ...]
    most: float = 1.0
    gains: bool = False

    def given(self) -> tuple[Tensor, list[Tensor], list[Any]]:
        """The activations, or what a map makes them of; the weights of the map; and the law, as the kernel takes it."""
        rate, taper, of_spectrum = self.law.rate, self.taper, ([], 1.0)
        if isinstance(taper, Spectrum):
            rate, taper, of_spectrum = None, None, ([taper.theta, taper.delta], taper.log_length)
        vectors = [None if x is None else x.expand(self.shape) for x in (self.law.bias, rate, taper)]
        f, *up = self.f if isinstance(self.f, Product) else (self.f,)
        law = self.law.shape, self.law.factor, self.law.least, self.law.most
        return f, [x.contiguous() for x in up if x is not None], [*of_spectrum, *vectors, self.position, *law]


def log_decay(
    f: Tensor, law: Law, *, taper: Tensor | Spectrum | None = None, offset: Tensor | None = None,
    position: Tensor | None = None, with_step: bool = False, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `g = −c e^{rate + offset} t^{−α} φ(f + bias)` in float32 (float64 for float64 activations).

    Args:
        f: activations `[B, T, H]` or `[B, T, H, K]`.
        law: φ, bias, rate and factor.
        taper: α of each channel, in a shape as those of `law`, or None for no dependence on the position. A `Spectrum`
            has the rates of a scalar decay too.
        offset: a part of the logarithm that does not depend on the position, as the taper.
        position: t of each token, from 1, `[T]` or `[B, T]`, if there is a taper.
        with_step: whether to return φ too.
        backend: "auto", or one of `available_backends("log_decay")`.

    Returns:
        g, and φ or None, each in the shape of f.
    """
    law, channels = law if offset is None else law.moved(offset), f.shape[2:]
    if isinstance(taper, Spectrum):
        settings = law.shape, law.factor, law.least, law.most, with_step, taper.log_length, 1.0, None
        tensors = f, law.bias, None, None, position, taper.theta, taper.delta, *[None] * 6
        return run_pass("gates", backend, tensors, *settings)[:2]  # the op of `gates.py`
    vectors = (law.bias, law.rate, taper)
    if f.ndim == 4:
        vectors = [None if x is None else x.expand(channels).flatten() for x in vectors]
    tensors = (f.flatten(2), *vectors, None if taper is None else position)
    settings = (law.shape, law.factor, law.least, law.most, with_step)
    g, step = run_pass("log_decay", backend, tensors, *settings)
    return g.view(f.shape), step if step is None else step.view(f.shape)


def expression(
    f: Tensor, bias: Tensor | None, rate: Tensor | None, taper: Tensor | None, position: Tensor | None, shape: str,
    factor: float, least: float, most: float | None, with_step: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    law = Law(shape, bias, rate, factor, least, most)
    stretch = None if taper is None or position is None else log_stretch(position, taper)
    if stretch is not None and shape == "sigmoid":
        law, stretch = law.moved(stretch), None
    step = law.step(f)
    g = law.log_decay(step)
    return g if stretch is None else g * stretch.exp().to(g.dtype), step if with_step else None


def log_stretch(position: Tensor, taper: Tensor, offset: Tensor | None = None) -> Tensor:
    """PoST's `offset − α log t` at positions `[T]` or `[B, T]`, with the axes of α behind those."""
    stretch = -position.to(taper.dtype).log().view(*position.shape, *[1] * taper.ndim) * taper
    return stretch if offset is None else stretch + offset


define(
    "log_decay", f="B T D", bias="D | None", rate="D | None", taper="D | None", position="int B T | T | None",
    constants=["position"],
    settings={"shape": "softplus", "factor": 0.5, "least": 0.0, "most": None, "with_step": True},
)  # fmt: skip


def _kernel(f: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    vectors = [None if x is None else x.contiguous() for x in rest[:3]]
    g, step = triton.custom_op("log_decay")(dense(f), *vectors, *rest[3:])
    return g, step if rest[-1] else None


def why_not(op: str, device: torch.device, tensors: Any = None) -> str | None:
    """The reason why the kernels cannot read activations and float32 parameters, or None."""
    if tensors is not None:
        f, *vectors = tensors
        if f.dtype not in triton.DTYPES:
            return f"the Triton kernels take activations of 16 or 32 bits; got {f.dtype}"
        if op in ("log_decay", "gates") and vectors[0] is not None and vectors[0].dtype in triton.DTYPES:
            vectors = vectors[1:]  # the bias may be that of a linear map
        if any(x is not None and x.is_floating_point() and x.dtype != torch.float32 for x in vectors):
            return "the Triton kernels take parameters in float32"
        if (odd := not_plain(*tensors)) is not None:
            return odd
    return triton.why_not(op, device)


implements_pass("log_decay", expression, triton=(_kernel, why_not))


def bounded_decay(
    f: Tensor, bound: Tensor | None, with_key: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Compute `g = log(γ + (1 − γ) σ(f))` in float32 (float64 for float64 activations), and the key `1 − e^g`.

    Source: Qin et al. 2024, "HGRN2"; Decay, Table 1.

    Args:
        f: activations `[B, T, H]` or `[B, T, H, K]`.
        bound: γ in (0, 1), `[H]` or `[H, K]`, or None for 0.
        with_key: whether to return the key too.
        backend: "auto", or one of `available_backends("bounded_decay")`.

    Returns:
        g, and the key in the dtype of f or None, each in the shape of f.
    """
    tensors = f.flatten(2), None if bound is None else bound.flatten()
    g, key = run_gpu_pass("bounded_decay", _bounded, backend, tensors, with_key)
    return g.view(f.shape), None if key is None else key.view(f.shape)


def _bounded(f: Tensor, bound: Tensor | None, with_key: bool) -> tuple[Tensor, Tensor | None]:
    x = f.to(compute_dtype(f))
    g = F.logsigmoid(x)
    if bound is not None:  # (1 + γ e^{−f}) / (1 + e^{−f}), of which slow decays keep their digits
        g = F.softplus(bound.log() - x) + g
    return g, -torch.expm1(g).to(f.dtype) if with_key else None


def _bounded_kernel(f: Tensor, bound: Tensor | None, with_key: bool) -> tuple[Tensor, Tensor | None]:
    g, key = triton.custom_op("bounded_decay")(dense(f), None if bound is None else bound.contiguous(), with_key)
    return g, key if with_key else None


define("bounded_decay", f="B T D", bound="D | None", settings={"with_key": True})
implements_pass("bounded_decay", _bounded, triton=(_bounded_kernel, why_not))


def ordered_spectrum(theta: Tensor, delta: Tensor, log_length: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """PoST's spectrum: base parameters sorted by construction, and their exponents of the position, `[N]` each.

        p_1 = θ,   p_k = p_{k−1} + softplus(δ_{k−1}),    α_k = clamp(ᾱ_k + ((p_k − p_1) − (k − 1) Ḡ) / log T, 0, 1)

    with ᾱ_k = (N − k) / (N − 1) and Ḡ = (p_N − p_1) / (N − 1).

    Args:
        theta: θ `[1]`.
        delta: δ `[N − 1]`, with N ≥ 2.
        log_length: log T.
        backend: "auto", or one of `available_backends("ordered_spectrum")`.
    """
    return run_pass("ordered_spectrum", backend, (theta, delta), log_length)


def spectrum(theta: Tensor, delta: Tensor, log_length: float) -> tuple[Tensor, Tensor]:
    theta, delta = theta.to(compute_dtype(theta)), delta.to(compute_dtype(delta))
    p = theta + torch.cat([theta.new_zeros(1), F.softplus(delta).cumsum(0)])
    return p, tapers(p, log_length)


def tapers(p: Tensor, log_length: float) -> Tensor:
    """α of sorted log-rates p, `[N]`."""
    ideal = torch.linspace(1, 0, len(p), dtype=p.dtype, device=p.device)
    k = torch.arange(len(p), device=p.device, dtype=p.dtype)
    gap = (p[-1] - p[0]) / (len(p) - 1)
    return (ideal + (p - p[0] - k * gap) / log_length).clamp(0, 1)


def _spectrum_kernel(theta: Tensor, delta: Tensor, log_length: float) -> tuple[Tensor, Tensor]:
    return triton.custom_op("spectrum")(theta.contiguous(), delta.contiguous(), log_length)


def _why_not_spectrum(op: str, device: torch.device, tensors: Any = None) -> str | None:
    if tensors is not None and len(tensors[1]) >= MOST:
        return f"the Triton kernel takes fewer than {MOST} channels"
    return why_not(op, device, tensors)


define("ordered_spectrum", theta="1", delta="D", settings={"log_length": 6.0})
be_kind("norms", "spectrum")
implements_pass("ordered_spectrum", spectrum, triton=(_spectrum_kernel, _why_not_spectrum))
