"""Channel mixers: SwiGLU, and Echo's Koopman MLP, one step of a linear system with eigenvalues in the unit disc."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.initial import draws
from halflife.ops.fused import swiglu, swiglu_linear
from halflife.ops.linear import weight_of
from halflife.ops.recurrent import maps_of_norm, takes_map
from halflife.precision import Float32Module


class Eigenvalues(Float32Module):
    """The eigenvalues `γ + iω = σ(·) e^{iθ}`, one per pair of channels.

    Their modulus starts at 0.95, and their angles are spread evenly over [0, π].
    """

    MODULUS = 0.95

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.modulus_logit, self.angle = nn.Parameter(torch.empty(pairs)), nn.Parameter(torch.empty(pairs))
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        self.modulus_logit.fill_(math.log(self.MODULUS / (1 - self.MODULUS)))
        self.angle.copy_(torch.linspace(0, math.pi, len(self.angle)))

    def forward(self) -> tuple[Tensor, Tensor]:
        """γ and ω, `[pairs]`."""
        modulus = self.modulus_logit.sigmoid()
        return modulus * self.angle.cos(), modulus * self.angle.sin()


class ClampedEigenvalues(Float32Module):
    """The eigenvalues `λ = γ + iω`, one per pair of channels, divided by max(|λ|, 1), as Echo prints it.

    γ and ω are the parameters. They start on the unit circle, where R is orthogonal, with angles spread evenly over [0,
    π]; the paper gives no start.
    """

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.empty(pairs)), nn.Parameter(torch.empty(pairs))
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        angle = torch.linspace(0, math.pi, len(self.real))
        self.real.copy_(angle.cos())
        self.imaginary.copy_(angle.sin())

    def forward(self) -> tuple[Tensor, Tensor]:
        """γ and ω, `[pairs]`."""
        modulus = torch.hypot(self.real, self.imaginary).clamp(min=1)
        return self.real / modulus, self.imaginary / modulus


class KoopmanMLP(nn.Module):
    """`W_read R SiLU(W_lift x)`, where R is block-diagonal with blocks `[[γ, ω], [−ω, γ]]` and `|γ + iω| ≤ 1`.

    R rotates and contracts each pair of channels. It is orthogonal only in the limit of modulus 1 (Echo, Appendix J;
    its §3.3 claims more). Source: Echo, §3.3; docs/equations.md, section 6.

    Args:
        hidden_size: D.
        intermediate_size: inner width, which must be even. None means 8/3 D, rounded up to a multiple of 64.
        gated: whether to multiply by `σ(W_gate x)` before the read-out. It then has as many parameters as SwiGLU.
        clamped: whether `|γ + iω|` is clamped at 1, as the paper prints it. Otherwise it is a sigmoid, and below 1.

    Raises:
        ValueError: the width is odd.
    """

    maps_of_input = ("lift", "gate")  # see `Mixer`

    def __init__(
        self, hidden_size: int, intermediate_size: int | None = None, *, gated: bool = False, clamped: bool = False
    ) -> None:
        super().__init__()
        width = intermediate_size or -(-8 * hidden_size // 3 // 64) * 64
        if width % 2:
            raise ValueError(
                f"the Koopman MLP rotates pairs of channels, so intermediate_size must be even; got {width}"
            )
        self.lift = nn.Linear(hidden_size, width, bias=False)
        self.gate = nn.Linear(hidden_size, width, bias=False) if gated else None
        self.read = nn.Linear(width, hidden_size, bias=False)
        self.eigenvalues = ClampedEigenvalues(width // 2) if clamped else Eigenvalues(width // 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.silu(self.lift(x)).unflatten(-1, (-1, 2)).unbind(-1)
        real, imaginary = (part.to(x.dtype) for part in self.eigenvalues())
        turned = torch.stack([real * first + imaginary * second, real * second - imaginary * first], -1).flatten(-2)
        return self.read(turned if self.gate is None else turned * self.gate(x).sigmoid())


class SwiGLU(nn.Module):
    """`(silu(x W_gate) ⊙ x W_up) W_down` (Shazeer 2020).

    Args:
        hidden_size: D.
        intermediate_size: inner width; None means 8/3 D, rounded up to a multiple of 64.
    """

    pass_backend = "auto"  # see `parts.set_backend`
    maps_of_input = ("gate", "up")  # see `Mixer`

    def __init__(self, hidden_size: int, intermediate_size: int | None = None) -> None:
        super().__init__()
        width = intermediate_size or -(-8 * hidden_size // 3 // 64) * 64
        self.gate = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gate(x), self.up(x)
        weight = None if x.is_cpu else weight_of(self.down)
        if weight is not None and self.pass_backend == "auto" and takes_map(a, b, weight):
            return maps_of_norm(b, None, 0.0, [weight], gate=a, kind="silu_before")[0]
        if weight is None:
            return self.down(swiglu(a, b, self.pass_backend))
        return swiglu_linear(a, b, weight, self.pass_backend)
