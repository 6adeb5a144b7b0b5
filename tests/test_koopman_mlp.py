"""Echo's channel mixer by value: complex numbers, the unit disc, parameters, gradients, models."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_raises
from hypothesis import given, settings
from hypothesis import strategies as st

from halflife import LanguageModel, preset
from halflife.layers import KoopmanMLP, SwiGLU

each_gate = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
SIZE, WIDTH = 6, 8


def mlp(gated):
    """Build a layer in float64, with eigenvalues (float32) anywhere in the unit disc."""
    layer = KoopmanMLP(SIZE, WIDTH, gated=gated).double()
    with torch.no_grad():
        layer.eigenvalues.modulus_logit.normal_()
        layer.eigenvalues.angle.normal_(std=math.pi)
    return layer


def rotation(layer):
    """Build R `[width, width]` entry by entry from Eq. 14 and the eigenvalue parameters."""
    eigenvalues, pairs = layer.eigenvalues, layer.lift.out_features // 2
    matrix = torch.zeros(2 * pairs, 2 * pairs, dtype=torch.float64)
    for i in range(pairs):
        modulus = 1 / (1 + math.exp(-eigenvalues.modulus_logit[i].item()))
        angle = eigenvalues.angle[i].item()
        gamma, omega = modulus * math.cos(angle), modulus * math.sin(angle)
        matrix[2 * i, 2 * i], matrix[2 * i, 2 * i + 1] = gamma, omega
        matrix[2 * i + 1, 2 * i], matrix[2 * i + 1, 2 * i + 1] = -omega, gamma
    return matrix


def by_hand(layer, x, turned):
    """Compute `W_read (turned ⊙ σ(W_gate x))`, or the same without the gate."""
    gate = 1.0 if layer.gate is None else (x @ layer.gate.weight.T).sigmoid()
    return (turned * gate) @ layer.read.weight.T


@each_gate
def test_equals_equation_14(gated):
    """Pairs are neighbours: the rows of a block are `(γ, ω)` and `(−ω, γ)`."""
    layer, x = mlp(gated), torch.randn(2, 3, SIZE, dtype=torch.float64)
    lifted = F.silu(x @ layer.lift.weight.T)
    torch.testing.assert_close(layer(x), by_hand(layer, x, lifted @ rotation(layer).T), rtol=0, atol=1e-14)


@each_gate
def test_is_a_complex_product(gated):
    """The factor is the conjugate of λ: `z₁ + i z₂ = (γ − iω)(g₁ + i g₂)`. A positive angle turns g₁ towards −g₂."""
    layer, x = mlp(gated), torch.randn(5, SIZE, dtype=torch.float64)
    lifted = torch.view_as_complex(F.silu(x @ layer.lift.weight.T).unflatten(-1, (-1, 2)))
    eigenvalues = torch.polar(layer.eigenvalues.modulus_logit.double().sigmoid(), layer.eigenvalues.angle.double())
    turned = torch.view_as_real(lifted * eigenvalues.conj()).flatten(-2)
    torch.testing.assert_close(layer(x), by_hand(layer, x, turned), rtol=0, atol=1e-14)


def test_starts_inside_the_unit_disc_with_angles_over_half_a_turn():
    real, imaginary = KoopmanMLP(SIZE, WIDTH).eigenvalues()
    angles = torch.tensor([0, math.pi / 3, 2 * math.pi / 3, math.pi])
    torch.testing.assert_close(real, 0.95 * angles.cos())
    torch.testing.assert_close(imaginary, 0.95 * angles.sin())


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
EXTREME = st.one_of(FINITE, st.sampled_from([0.0, 17.0, 90.0, -90.0, 1e4, -1e4, 3e38, -3e38]))


@given(logits=st.lists(EXTREME, min_size=4, max_size=4), angles=st.lists(EXTREME, min_size=4, max_size=4))
@settings(max_examples=100, deadline=None)
def test_eigenvalues_stay_in_the_unit_disc(logits, angles):
    """This holds for any parameters, up to the rounding of γ and ω in float32."""
    eigenvalues = KoopmanMLP(SIZE, WIDTH).eigenvalues
    with torch.no_grad():
        eigenvalues.modulus_logit.copy_(torch.tensor(logits))
        eigenvalues.angle.copy_(torch.tensor(angles))
    real, imaginary = (part.double() for part in eigenvalues())
    assert (real.square() + imaginary.square() <= 1 + 2 * torch.finfo(torch.float32).eps).all()


@given(logit=st.floats(-6, 6), angle=st.floats(-10, 10))
@settings(max_examples=50, deadline=None)
def test_contracts_by_the_modulus(logit, angle):
    """Both singular values of a block are |λ| (App. J.7), and norms shrink by it. R is orthogonal at modulus 1 only."""
    layer = KoopmanMLP(2, 2).double()
    with torch.no_grad():
        layer.lift.weight.copy_(torch.eye(2))
        layer.read.weight.copy_(torch.eye(2))
        layer.eigenvalues.modulus_logit.fill_(logit)
        layer.eigenvalues.angle.fill_(angle)
    x = torch.tensor([[1.5, -0.5], [0.3, 2.0]], dtype=torch.float64)
    lifted, modulus = F.silu(x), torch.tensor(logit).double().sigmoid()
    turned = layer(x)
    torch.testing.assert_close(turned.norm(dim=-1), modulus * lifted.norm(dim=-1), rtol=1e-6, atol=0)
    block = torch.linalg.solve(lifted, turned)
    torch.testing.assert_close(block.T @ block, modulus**2 * torch.eye(2, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_is_orthogonal_at_modulus_one_alone():
    """§3.3 calls R orthogonal. Its singular values start at 0.95 and reach 1 for the largest logits only."""
    layer = KoopmanMLP(SIZE, WIDTH)
    assert torch.linalg.svdvals(rotation(layer)).sub(0.95).abs().max() < 1e-6
    with torch.no_grad():
        layer.eigenvalues.modulus_logit.fill_(40.0)
    matrix = rotation(layer)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(WIDTH, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("size", "width"), [(16, 64), (96, 256), (128, 384), (448, 1216), (768, 2048)])
def test_parameters(size, width):
    """2 d d_k and two per pair, d_k = ⌈8d/3⌉ rounded up to 64; with a gate, those of a SwiGLU and two per pair."""
    plain, gated, swiglu = (
        sum(p.numel() for p in layer.parameters())
        for layer in (KoopmanMLP(size), KoopmanMLP(size, gated=True), SwiGLU(size))
    )
    assert KoopmanMLP(size).lift.out_features == width == math.ceil(size * 8 / 3 / 64) * 64
    assert plain == 2 * size * width + width
    assert gated == swiglu + width == 3 * size * width + width


def test_an_odd_width_is_an_error():
    assert_raises(ValueError, "must be even; got 7", KoopmanMLP, SIZE, 7)


@each_gate
def test_gradients(gated):
    layer = mlp(gated)
    # Eigenvalues stay float32 through `.double()`, which is too inexact for differences.
    for parameter in layer.eigenvalues.parameters():
        parameter.data = parameter.data.double()
    x = torch.randn(3, SIZE, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters))


@pytest.mark.parametrize("kind", ["koopman", "koopman_gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_in_a_model(kind, dtype):
    """Every block has the layer, every parameter has a gradient, and eigenvalues stay float32."""
    config = preset("mamba2+koopman_mlp", hidden_size=32, num_layers=2, vocab_size=31, num_heads=4)
    assert config.mlp == "koopman"
    model = LanguageModel(preset("mamba2", hidden_size=32, num_layers=2, vocab_size=31, num_heads=4, mlp=kind)).to(
        dtype
    )
    assert all(isinstance(block.mlp, KoopmanMLP) for block in model.blocks)
    logits, _ = model(torch.randint(31, (2, 9)))
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for block in model.blocks:
        assert (block.mlp.gate is not None) == (kind == "koopman_gated")
        assert all(p.dtype == torch.float32 and p.grad.any() for p in block.mlp.eigenvalues.parameters())
