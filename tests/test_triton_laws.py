"""The Triton kernels of log-decays and of PoST's spectrum equal the float64 expressions, with all gradients."""

import math
import sys

import pytest
import torch
from helpers import assert_close, generator
from pairwise import crossed

from halflife import decay
from halflife.models import LanguageModel, preset
from halflife.ops.backends.dispatch import run_pass
from halflife.ops.laws import SHAPES, Law, Spectrum, Unevaluated, bounded_decay, log_decay, ordered_spectrum
from halflife.ops.laws import gates as gate_ops
from halflife.ops.laws.gates import SlowInput
from halflife.ops.laws.gates import gates as gates_of
from halflife.ops.linear_attention import longhorn_keys, running_decay
from halflife.packing import Packing

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from test_triton_passes import strided

from halflife.ops.backends import triton
from halflife.ops.backends.triton import laws as kernels
from halflife.ops.backends.triton import post as spectra
from halflife.ops.backends.triton.joint import decays as joint
from halflife.ops.backends.triton.vector import bounded, longhorn, running

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The worst errors measured over this file's cases, relative to the largest entry of a tensor; four times are allowed.
WORST = {torch.float32: 9e-7, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def with_gradients(tensors, dtype, run):
    """The results of `run` on these tensors, and the gradients of a fixed random sum of them, in float64."""
    leaves = {name: x.detach().to(dtype[name]).to(DEVICE) for name, x in tensors.items()}
    leaves = {name: x.requires_grad_(name != "position") for name, x in leaves.items()}
    outputs = [x for x in run(**leaves) if x is not None]
    draw = generator("loss")
    weights = [torch.randn(x.shape, generator=draw).to(DEVICE) for x in outputs]
    sum((x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    found = {str(i): x for i, x in enumerate(outputs)}
    found |= {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}
    return {name: x.detach().double().cpu() for name, x in found.items()}


def check_law(shape, channels, length=40, dtype=torch.float32, *, taper=True, limits=False, with_step=True, scale=3.0):
    draw = generator(shape, channels, length)
    tensors = {"f": scale * torch.randn(2, length, *channels, generator=draw).to(dtype)}
    tensors |= {name: torch.randn(channels, generator=draw) for name in ("bias", "rate")}
    tensors["bias"] = tensors["bias"].to(dtype)
    if taper:
        tensors["taper"] = torch.rand(channels, generator=draw)
        tensors["position"] = torch.randint(1, 100_000, (2, length), generator=draw)
    least, most = (0.2, 1.5) if limits else (0.0, None)

    def run(backend):
        def law(f, bias, rate, taper=None, position=None):
            f = torch.cat([f, f], 1)[:, :length]  # other strides
            law = Law(shape, bias, rate, 0.7, least, most)
            return log_decay(f, law, taper=taper, position=position, with_step=with_step, backend=backend)

        return law

    names = dict.fromkeys(tensors, torch.float32) | {"f": dtype, "bias": dtype, "position": torch.long}
    wide = {name: torch.long if name == "position" else torch.float64 for name in tensors}
    got, want = with_gradients(tensors, names, run("triton")), with_gradients(tensors, wide, run("reference"))
    assert_close(got, want, 4 * WORST[dtype])


@crossed(
    strength=1, shape=SHAPES, channels=[(5,), (4, 20), (100,)], dtype=[torch.float32, torch.bfloat16, torch.float16],
    taper=[True, False], with_step=[True, False],
)  # fmt: skip
def test_laws(shape, channels, dtype, taper, with_step):
    check_law(shape, channels, dtype=dtype, taper=taper, with_step=with_step)


def test_limits_stop_the_gradient():
    check_law("softplus", (4,), limits=True)


@pytest.mark.parametrize("length", [0, 1, pytest.param(700, marks=pytest.mark.slow)])
def test_lengths(length, monkeypatch):
    """The last one has programs of several tiles."""
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    check_law("softplus", (16,), length)


@pytest.mark.parametrize("shape", SHAPES)
def test_small_and_large_activations(shape):
    """Slow decays have an error relative to themselves, and nothing overflows."""
    f = torch.tensor([-120.0, -30, -15, -3, -1e-3, 0, 1e-3, 3, 15, 30, 120], device=DEVICE).expand(1, 3, 11)
    got, step = log_decay(f, Law(shape), with_step=True, backend="triton")
    want, wide = log_decay(f.double(), Law(shape), with_step=True, backend="reference")
    for x, y in ((got, want), (step, wide)):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=1e-37)


@crossed(
    strength=1, bound=[True, False], channels=[(5,), (4, 20), (100,)],
    dtype=[torch.float32, torch.bfloat16, torch.float16], with_key=[True, False], length=[40, 0],
)  # fmt: skip
def test_bounded_decays(bound, channels, dtype, with_key, length, monkeypatch):
    """In programs of several tiles."""
    monkeypatch.setattr(bounded, "PROGRAMS", 3)
    monkeypatch.setattr(kernels, "TILE", 128)
    draw = generator(channels)
    tensors = {"f": 3 * torch.randn(2, length, *channels, generator=draw).to(dtype)}
    if bound:
        tensors["bound"] = torch.rand(channels, generator=draw)

    def run(backend):
        return lambda f, bound=None: bounded_decay(torch.cat([f, f], 1)[:, :length], bound, with_key, backend)

    narrow, wide = {"f": dtype, "bound": torch.float32}, dict.fromkeys(tensors, torch.float64)
    got, want = with_gradients(tensors, narrow, run("triton")), with_gradients(tensors, wide, run("reference"))
    assert_close(got, want, 4 * WORST[dtype])


@pytest.mark.parametrize("bound", [None, 1e-30, 0.3, 0.999999])
def test_small_and_large_activations_above_a_bound(bound):
    """Slow decays have an error relative to themselves, and nothing overflows."""
    f = torch.tensor([-120.0, -30, -15, -3, -1e-3, 0, 1e-3, 3, 15, 30, 60], device=DEVICE).expand(1, 3, 11)
    f, least = f.clone().requires_grad_(), None if bound is None else torch.full((11,), bound, device=DEVICE)
    both = []
    for x, backend in ((f, "triton"), (f.double(), "reference")):
        g, key = bounded_decay(x, None if least is None else least.to(x.dtype), True, backend)
        both.append((g, key, *torch.autograd.grad(g.sum() + key.sum(), x)))
    for x, y, least in zip(*both, (1e-37, 1e-37, 1e-12), strict=True):  # torch's softplus is linear above 20
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=least)


@crossed(
    strength=1, bounds=[None, [0, 1, 1, 3, 12, 21]], state=["zero", None, "given"], with_key=[True, False],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)  # fmt: skip
def test_running_decays(bounds, state, with_key, dtype, monkeypatch):
    """In tiles of 16 tokens, with and without what was before them."""
    monkeypatch.setattr(running, "TILE", 16)
    monkeypatch.setattr(running, "CHANNELS", 2)
    draw, batch = generator(str(bounds)), 2 if bounds is None else 1
    packing = Packing(batch, 21, None if bounds is None else torch.tensor(bounds, device=DEVICE))
    tensors = {"f": 3 * torch.randn(batch, 21, 3, generator=draw).to(dtype)}
    if state == "given":
        tensors["first"] = torch.randn(packing.num_sequences, 3, generator=draw)

    def run(backend):
        def both(f, first=None):
            found = running_decay(strided(f), first, packing, state is None, with_key, backend)
            return [None if x is None else x.clamp(min=-50) for x in found]  # −∞ before a first token

        return both

    narrow, wide = {"f": dtype, "first": torch.float32}, dict.fromkeys(tensors, torch.float64)
    got, want = with_gradients(tensors, narrow, run("triton")), with_gradients(tensors, wide, run("reference"))
    assert_close(got, want, 4 * WORST[dtype])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_running_decays_of_numbers_that_are_none():
    """A NaN stays in the sums, and an infinity has the whole softmax."""
    f = torch.randn(1, 24, 1, generator=generator("nan"))
    f[0, 3], f[0, 19] = torch.inf, torch.nan
    found = [running_decay(f, None, Packing(1, 24), with_key=True, backend=name) for name in ("triton", "reference")]
    torch.testing.assert_close(*found, equal_nan=True)


@crossed(
    strength=1, dtype=[torch.float32, torch.bfloat16, torch.float16], sizes=[(3, 5), (7, 16), (1, 1)], length=[21, 0]
)  # fmt: skip
def test_longhorns_keys(dtype, sizes, length, monkeypatch):
    """In programs of several tiles of tokens and of heads."""
    monkeypatch.setattr(longhorn, "TILE", 64)
    monkeypatch.setattr(longhorn, "ROW", 32)
    draw = generator(sizes)
    shapes = {"logits": (2, length, sizes[0]), "k": (2, length, sizes[1])}
    tensors = {name: 2 * torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}

    def run(backend):
        return lambda logits, k: longhorn_keys(strided(logits), strided(k), k.dtype, backend)

    narrow, wide = (dict.fromkeys(tensors, kind) for kind in (dtype, torch.float64))
    got, want = with_gradients(tensors, narrow, run("triton")), with_gradients(tensors, wide, run("reference"))
    assert_close(got, want, 4 * WORST[dtype])


@crossed(strength=1, count=[2, 3, 17, 64], spread=[0.1, 3.0])
def test_spectrum(count, spread):
    """A wide spread has exponents at both limits, where they have no gradient."""
    draw = generator(count, spread)
    tensors = {"theta": torch.randn(1, generator=draw), "delta": spread * torch.randn(count - 1, generator=draw)}

    def run(backend):
        return lambda theta, delta: ordered_spectrum(theta, delta, math.log(64), backend=backend)

    narrow, wide = (dict.fromkeys(tensors, dtype) for dtype in (torch.float32, torch.float64))
    got, want = with_gradients(tensors, narrow, run("triton")), with_gradients(tensors, wide, run("reference"))
    assert_close(got, want, 4 * WORST[torch.float32])


STRATEGIES = ["mamba2", "gla", "simple", "rwkv7", "mamba2_headwise", "mamba2_no_a"]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("post", [None, {}, pytest.param({"reference_length": 64}, marks=pytest.mark.slow)])
def test_decays_run_by_the_kernels(name, post, monkeypatch):
    """Whole strategies, with PoST and without, give what they give in float64; all that have a law use the kernel."""
    torch.manual_seed(0)
    granularity = "vector" if name in ("rwkv7", "mamba2_headwise", "gla") else "scalar"
    strategy = decay.build(name, num_heads=4, head_dim=6, granularity=granularity)
    if post is not None:
        if name == "gla":
            pytest.skip("GLA's decay has no base rates")
        strategy = decay.PoST(strategy, train_length=64, **post)
    f, position = torch.randn(2, 9, *strategy.shape), torch.randint(1, 64, (2, 9))

    def run():
        strategy.zero_grad()
        inputs = f.to(next(strategy.parameters(), f).dtype, copy=True).requires_grad_()
        g = strategy(inputs, position=position)
        (g * torch.linspace(-1, 1, g.numel()).to(g).view(g.shape)).sum().backward()
        grads = {key: p.grad for key, p in strategy.named_parameters()}
        return {"g": g.detach(), "df": inputs.grad, **grads}

    launched, launch = [], kernels.launch
    for module in (kernels, spectra, joint):
        monkeypatch.setattr(module, "launch", lambda *x: launched.append(x[0]) or launch(*x))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        patch.setattr("halflife.ops.backends.dispatch.SMALLEST_PASS", 0)
        patch.setattr("halflife.ops.backends.dispatch.choose", always_triton)
        got = run()
    laws = [kernel for kernel in launched if kernel not in (spectra.spectrum_kernel, spectra._spectrum_back_kernel)]
    together = post == {} and name == "mamba2"
    assert len(laws) == (0 if name == "mamba2_no_a" else 2)
    assert len(launched) - len(laws) == (0 if post is None else 1 if together else 2)
    strategy.double()
    want = run()
    assert_close(got["g"], want["g"], 1e-6)
    assert_close(got, want, 3.3e-4)  # θ's gradient is a sum that cancels


def always_triton(op, backend, device, call=None):
    """The choice of a CUDA device."""
    from halflife.ops.spec import OPS

    known = OPS[op].backends["triton"]
    return (known if known.why_not(op, device, call) is None else OPS[op].backends["reference"]).function


# -------------------------------------------------------------------------------------------- the gates of a layer


def check_gates(
    kind, channels=(5,), length=40, dtype=torch.float32, *, parts=("logits", "slow"), packed=False, width=4
):
    """A law, a law with a taper, or PoST's spectrum, with other gates, packed or not, with a state."""
    draw = generator(kind, channels, length)
    rows = (1, 2 * length) if packed else (2, length)
    bounds = torch.tensor([0, length // 3, length // 3, 2 * length]) if packed else None
    sequences, gates, size = 3 if packed else 2, 3, math.prod(channels)
    tensors = {"f": 3 * torch.randn(*rows, *channels, generator=draw).to(dtype)}
    tensors["bias"] = torch.randn(channels, generator=draw)
    if kind == "spectrum":
        tensors |= {"theta": torch.randn(1, generator=draw), "delta": torch.randn(size - 1, generator=draw)}
    else:
        tensors["rate"] = torch.randn(channels, generator=draw)
    if kind != "law":
        tensors["position"] = torch.randint(1, 100_000, rows, generator=draw)
    if kind == "taper":
        tensors["taper"] = torch.rand(channels, generator=draw)
    if "logits" in parts:
        tensors["logits"] = torch.randn(*rows, 7, generator=draw).to(dtype)
    if "slow" in parts:
        tensors["slow"] = torch.randn(*rows, gates, generator=draw).to(dtype)
        tensors["taps"] = torch.randn(gates, width, generator=draw)
        tensors |= {name: torch.randn(gates, generator=draw) for name in ("shift", "slow_rate")}
        tensors["first"] = torch.randn(sequences, gates, width - 1, generator=draw)

    def run(backend):
        def all_gates(f, bias, rate=None, position=None, taper=None, theta=None, delta=None, logits=None, **slow):
            f = torch.cat([f, f], -1)[..., : channels[-1]]  # other strides
            law, taper = Law("softplus", bias, rate, 0.7), taper
            if theta is not None:
                taper, law = Spectrum(theta, delta, 4.0), law._replace(rate=theta)
            packing = Packing(*rows, None if bounds is None else bounds.to(DEVICE))
            decay = Unevaluated(f, law, taper, position, channels, 2.0, True)
            return gates_of(decay, logits, SlowInput(*slow.values()) if slow else None, packing, backend)

        return all_gates

    narrow = {name: dtype if name in ("f", "logits", "slow") else x.dtype for name, x in tensors.items()}
    wide = {name: torch.long if name == "position" else torch.float64 for name in tensors}
    got, want = with_gradients(tensors, narrow, run("triton")), with_gradients(tensors, wide, run("reference"))
    assert_close(got, want, 4 * WORST[dtype])


@crossed(
    strength=1, kind=["law", "taper", "spectrum"], channels=[(5,), (4, 20)],
    dtype=[torch.float32, torch.bfloat16, torch.float16], parts=[(), ("logits",), ("slow",), ("logits", "slow")],
    packed=[True, False], width=[1, 4],
)  # fmt: skip
def test_gates(kind, channels, dtype, parts, packed, width):
    channels = channels[:1] if kind == "spectrum" else channels
    check_gates(kind, channels, dtype=dtype, parts=parts, packed=packed, width=width)


@pytest.mark.parametrize("length", [0, 1])
def test_gates_of_short_sequences(length):
    check_gates("spectrum", length=length)


@pytest.mark.parametrize("name", ["mamba2+gate_rank", "mamba2+post+gate_rank", "gated_deltanet+gate_rank"])
def test_a_layer_has_one_pass_of_gates(name, monkeypatch):
    """With the outputs, states and gradients that it has on a CPU, in pieces and packed."""
    torch.manual_seed(0)
    options = {} if name.startswith("mamba2") else {"allow_neg_eigval": True}
    config = preset(name, hidden_size=32, num_heads=2, num_layers=1, vocab_size=8, mixer_options=options)
    layer = LanguageModel(config).blocks[0].mixer.double()
    x = torch.randn(1, 30, 32, dtype=torch.float64)

    def run(bounds=None):
        layer.zero_grad()
        inputs, state, outputs = x.clone().requires_grad_(), None, []
        pieces = inputs.split(30 if bounds is not None else 17, 1)
        for piece in pieces:
            y, state = layer(piece, state, cu_seqlens=bounds)
            outputs.append(y)
        y = torch.cat(outputs, 1)
        (y.sum() + sum(part.sum() for name, part in state.items() if name != "position")).backward()
        found = {key: p.grad for key, p in layer.named_parameters() if p.grad is not None}
        return {"y": y.detach(), "dx": inputs.grad, **state, **found}

    calls = []
    for bounds in (None, torch.tensor([0, 9, 30])):
        want = run(bounds)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cpu", False)
            patch.setattr(gate_ops, "run_pass", lambda *x: calls.append(x[0]) or run_pass(*x))
            got = run(bounds)
        assert_close({key: part.detach() for key, part in got.items()}, {k: x.detach() for k, x in want.items()}, 1e-12)
    assert calls == ["gates"] * 3


def test_as_custom_ops():
    """What torch.compile and autograd rely on: schemas, shapes of fake tensors, and registered gradients."""
    f, vector = torch.randn(2, 3, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = (f, vector, vector, vector, torch.arange(1, 4), "softplus", 1.0, 0.0, None, True)
    torch.library.opcheck(torch.ops.halflife.triton_log_decay, given, test_utils=checks)
    triton.load()
    torch.library.opcheck(torch.ops.halflife.triton_bounded_decay, (f, vector, True), test_utils=checks)
    torch.library.opcheck(torch.ops.halflife.triton_running_decay, (f, f[:, 0], None, False, True), test_utils=checks)
    torch.library.opcheck(torch.ops.halflife.triton_longhorn_keys, (f, f + 1, torch.float32), test_utils=checks)
    given = (torch.zeros(1, requires_grad=True), vector, 4.0)
    torch.library.opcheck(torch.ops.halflife.triton_spectrum, given, test_utils=checks)
    spectrum = torch.zeros(1, requires_grad=True), vector[:3].detach().requires_grad_()
    slow = f, torch.rand(4, 3, requires_grad=True), vector, vector, torch.zeros(2, 4, 2)
    law = "softplus", 1.0, 0.0, None, True, 4.0, 2.0
    given = (f, vector, None, None, torch.arange(1, 4), *spectrum, f, *slow, None, *law)
    torch.library.opcheck(torch.ops.halflife.triton_gates, given, test_utils=checks)
