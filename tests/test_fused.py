"""The passes of a layer over memory: the native kernels against the same expressions of torch in float64."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, check_custom_ops, generator
from pairwise import slow_beyond
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halflife import LanguageModel, layers, preset
from halflife.hf import HalflifeConfig, HalflifeForCausalLM
from halflife.layers import parts, token_shift
from halflife.layers.parts import rotary
from halflife.models import PRESETS
from halflife.ops import causal_conv1d, fused
from halflife.ops.backends import dispatch
from halflife.ops.backends.dispatch import CannotRun
from halflife.ops.backends.native import build
from halflife.ops.linear_attention import running_decay
from halflife.ops.trapezoid import mimo_output, mimo_products, trapezoid_keys, trapezoid_output
from halflife.packing import Packing
from halflife.position import rope, rotate

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SHAPES = [(2, 70, 3, 16), (1, 1, 1, 1), (2, 0, 2, 8), (1, 5, 2, 7), (1, 130, 2, 80), (3, 3, 1, 256)]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative to the largest entry; measured 5e-7 and 5e-3


@pytest.fixture(autouse=True)
def native_for_few_entries(monkeypatch):
    monkeypatch.setattr(dispatch, "SMALLEST_PASS", 0)


@contextmanager
def in_torch():
    """Let every op of this file run by its expression of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "why_not", lambda: "not in this block")
        yield


def flat(x):
    return x.flatten(-2)


def conv(x, z, weight, bias, state, _, **options):
    return causal_conv1d(flat(x), weight, bias, initial_state=state, output_final_state=True, **options)


def running(x, z, weight, channels, state, numbers, cu_seqlens=None, empty=None):
    """The decay and the key of LightNet, from a state or as at the start of a sequence."""
    packing = Packing.of(cu_seqlens, *x.shape[:2])
    first = None if empty is not None else state.flatten(1)[:, : flat(x).shape[-1]].to(channels.dtype)
    g, last, key = running_decay(flat(x), first, packing, empty=empty is not False, with_key=True)
    return g.clamp(min=-99), last.clamp(min=-99), key  # both are −∞ at first


def turned(x, z, *_):
    angle = torch.arange(5, 5 + x.shape[1]).float().unsqueeze(-1) * torch.rand(x.shape[-1] // 2, generator=generator(0))
    if x.dtype == torch.float64:
        return rotate(x, angle.double().unsqueeze(-2))
    return fused.rotate(x, angle.cos(), angle.sin())


def mimo(x, z, weight, channels, state, numbers):
    """Three values, gates and outputs a head, whose matrices depend on the token, the head and the place."""
    factors = torch.linspace(-1, 2, 9, dtype=channels.dtype).view(3, 3)
    weights = (channels.view(x.shape[2:]) * row.view(3, 1, 1) for row in factors)
    later, now = (numbers[..., None, None] * matrix for matrix in (factors, factors.T.square() - 1))
    return mimo_output(torch.stack([x, z, x * z], 2), later, now, x + z, x, z, *weights)


def products(x, z, weight, channels, state, numbers):
    q, k, before = (torch.stack(rows, 2) for rows in ((x, x / 2, 2 * x), (z, z / 2, 2 * z), (2 * z, z, z / 2)))
    return mimo_products(q, k, before, numbers, numbers.square() - 1, channels[: x.shape[2]])


def keys(x, z, weight, channels, state, numbers, norm=True):
    """Queries of one group and keys of a group a head, with norms; or both of a group a head, without."""
    heads, size = x.shape[2:]
    angle = numbers.unsqueeze(-1) * torch.linspace(0.1, 1, size // 4, dtype=numbers.dtype)
    norms = ((channels[:size], channels.view(heads, size)), (channels[-size:], 1 - channels.view(heads, size)))
    query, key = norms if norm else (None, None)
    c = x[:, :, 0] if norm else flat(x)
    return trapezoid_keys(c, flat(z), x + z, angle, query, key, (None, None), 0.1, True, None)


OPCHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
# Functions of x, z [B, T, H, V], taps [H·V, W], one number per channel, a state, and one number per head and token.
CASES = {
    "rms_norm": lambda x, z, w, c, s, h: fused.rms_norm(flat(x), c, 1e-5),
    "gated": lambda x, z, w, c, s, h: fused.rms_norm_of_gated(flat(x), flat(z), c, x.shape[2], 1e-5),
    "gated with skip": lambda x, z, w, c, s, h: fused.rms_norm_of_gated(
        flat(x), flat(z), c, 1, 1e-5, (c[: x.shape[2]], flat(z * 2 + x))
    ),
    "sigmoid": lambda x, z, w, c, s, h: fused.rms_norm_of_sigmoid_gated(flat(x), flat(z), c, 1e-5),
    "head norm": lambda x, z, w, c, s, h: fused.gated_head_norm(x, flat(z), c[: x.shape[3]], 1e-5),
    "head norm, sigmoid": lambda x, z, w, c, s, h: fused.gated_head_norm(
        x, flat(z), c[: x.shape[3]], 1e-5, gate="sigmoid"
    ),
    "l2": lambda x, z, w, c, s, h: fused.l2_normalize(x),
    "swiglu": lambda x, z, w, c, s, h: fused.swiglu(x, z),
    "scaled heads": lambda x, z, w, c, s, h: fused.scale_heads(x, h),
    "conv": conv,
    "conv without activation": partial(conv, activation=None),
    "conv to unit vectors": lambda x, *a, **o: conv(x, *a, unit=(x.shape[3] * min(2, x.shape[2]), x.shape[3]), **o),
    "rotate": turned,
    "running": lambda x, z, w, c, s, h: running_decay(
        flat(x), s[..., 0], Packing.of(None, *x.shape[:2]), with_key=True
    ),
    "keys": keys,
    "keys without norms": partial(keys, norm=False),
    "output": lambda x, z, w, c, s, h: trapezoid_output(x, z, h, h.square() - 1, c[: x.shape[2]], flat(x - z)),
    "output without gate": lambda x, z, w, c, s, h: trapezoid_output(x, z, h, h.square() - 1, None, None),
    "mimo": mimo,
    "mimo products": products,
}


def arguments(shape, dtype, width=4, sequences=None):
    batch, _, heads, size = shape
    draw = generator(shape, width)
    shapes = [
        shape,
        shape,
        (heads * size, width),
        (heads * size,),
        (sequences or batch, heads * size, width - 1),
        shape[:3],
    ]
    wide = torch.promote_types(dtype, torch.float32)
    return [
        torch.randn(s, generator=draw).bfloat16().to(dtype if i in (0, 1, 4) else wide).requires_grad_()
        for i, s in enumerate(shapes)
    ]


def results(function, leaves):
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    draw = generator("weights")
    total = sum((x * torch.randn(x.shape, generator=draw).bfloat16().to(x.dtype)).sum() for x in outputs)
    used = torch.autograd.grad(total, leaves, allow_unused=True)
    return [x.detach() for x in (*outputs, *used) if x is not None]


def compare(function, leaves, dtype):
    got = results(function, leaves)
    with in_torch():
        expected = results(function, [x.detach().double().requires_grad_() for x in leaves])
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        # The gradient of a norm over one channel is a difference of nearly equal numbers.
        assert not a.numel() or (a - b).abs().max() <= ERROR[dtype] * b.abs().max().clamp(min=0.05)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_torch_in_float64(name, shape, dtype):
    if name == "rotate" and shape[-1] % 2:
        shape = (*shape[:3], shape[3] + 1)
    compare(CASES[name], arguments(shape, dtype), dtype)


def test_mimo_takes_the_products_of_autocast():
    """They are bfloat16, and the native kernel reads float32."""
    draw = generator("mimo")
    y, later, now, *others = (
        torch.randn(s, generator=draw).bfloat16()
        for s in [(2, 9, 3, 2, 8), *[(2, 9, 2, 3, 3)] * 2, *[(2, 9, 2, 8)] * 3, *[(3, 2, 8)] * 3]
    )
    got = mimo_output(y, later, now, *others)
    assert torch.equal(got, mimo_output(y, later.float(), now.float(), *others))
    with in_torch():
        assert not torch.equal(got, mimo_output(y, later, now, *others))  # the kernel did run


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 9, 80])
@pytest.mark.parametrize("lengths", [[70, 0, 1, 2, 131], [3], [0, 0]], ids=str)
def test_packed_convolution(lengths, width, dtype):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    leaves = arguments((1, sum(lengths), 3, 50), dtype, width, len(lengths))
    compare(partial(conv, cu_seqlens=bounds), leaves, dtype)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("empty", [None, True, False], ids=str)
@pytest.mark.parametrize("lengths", [[70, 0, 1, 2, 131], [3], [0, 0]], ids=str)
def test_packed_running_decay(lengths, empty, dtype):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    leaves = arguments((1, sum(lengths), 3, 50), dtype, sequences=len(lengths))
    compare(partial(running, cu_seqlens=bounds, empty=empty), leaves, dtype)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_for_any_threads_and_strides(name):
    """Also where the inputs are parts of one wide tensor, as projections leave them."""
    leaves = arguments((2, 300, 3, 40), torch.float32)
    expected = results(CASES[name], leaves)
    wide = torch.cat([flat(leaves[0]), flat(leaves[1])], -1).detach()
    parts = [part.unflatten(-1, (3, 40)).requires_grad_() for part in wide.split(120, -1)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for a, b in zip(results(CASES[name], [*parts, *leaves[2:]]), expected, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


def test_pieces_of_a_sequence_have_the_bits_of_the_whole():
    x, _, weight, bias, state, _ = (x.detach() for x in arguments((2, 40, 3, 7), torch.float32))
    whole, last = causal_conv1d(flat(x), weight, bias, initial_state=state, output_final_state=True)
    pieces = []
    for tokens in flat(x).split([1, 1, 20, 17, 1], 1):
        y, state = causal_conv1d(tokens, weight, bias, initial_state=state, output_final_state=True)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(state, last)


def test_rotary_is_rope():
    q, k = (torch.randn(2, 9, 3, 16) for _ in range(2))
    for position in (torch.arange(9), torch.arange(18).view(2, 9)):
        for got, x in zip(rotary(q, k, position), (q, k), strict=True):
            torch.testing.assert_close(got, rope(x, position), atol=1e-6, rtol=0)


def test_large_and_not_finite_numbers():
    x = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4, torch.nan, torch.inf]])
    one = torch.ones_like(x)
    torch.testing.assert_close(fused.swiglu(x, one), F.silu(x), atol=1e-30, rtol=1e-6, equal_nan=True)


def test_the_backend_chooses_the_implementation(monkeypatch):
    """With "auto", few entries and mixed dtypes go through torch's expression; by name nothing else takes its place."""
    x = torch.randn(3, 4)
    native = fused.swiglu(x, x, "native")
    assert torch.equal(fused.swiglu(x, x), native)
    with pytest.raises(CannotRun, match="in one of float32, bfloat16 and float16; got bfloat16, float32"):
        fused.swiglu(x, x.bfloat16(), "native")
    with pytest.raises(ValueError, match="unknown backend of swiglu on cpu 'nativ'"):
        fused.swiglu(x, x, "nativ")
    with pytest.raises(CannotRun, match=r"no rules for torch\.func"):
        torch.func.vmap(lambda a: fused.swiglu(a, a, "native"))(x)
    monkeypatch.setattr(torch.ops, "halflife", None)
    for mixed in (x.bfloat16(), x.double()):
        assert torch.equal(fused.swiglu(x, mixed), F.silu(x) * mixed)
    for backend in ("chunked", "reference"):
        assert torch.equal(fused.swiglu(x, x, backend), F.silu(x) * x)
    monkeypatch.setattr(dispatch, "SMALLEST_PASS", 13)
    assert torch.equal(fused.swiglu(x, x), F.silu(x) * x)


def test_tensors_on_two_devices_are_refused():
    x, weight = torch.randn(3, 4), torch.ones(4, device="meta")
    for backend in ("auto", "native", "reference"):
        with pytest.raises(ValueError, match="rms_norm must be on one device; got cpu and meta"):
            fused.rms_norm(x, weight, 1e-5, backend)


def test_second_derivatives_are_refused():
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(fused.swiglu(x, x).sum(), x, create_graph=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("checks", [OPCHECKS[:3], pytest.param(OPCHECKS[3:], marks=pytest.mark.slow)], ids=str)
def test_custom_ops_are_well_formed(name, checks):
    """torch's own checks of schema, fake implementation and autograd registration, on the calls of each case."""
    assert check_custom_ops(lambda: CASES[name](*arguments((1, 5, 2, 8), torch.float32)), checks)


def test_an_unknown_gate_is_refused():
    x = torch.randn(1, 3, 2, 4)
    with pytest.raises(ValueError, match=r"unknown gate 'tanh'.*silu"):
        fused.gated_head_norm(x, x.flatten(2), torch.ones(4), 1e-5, gate="tanh")


def test_no_channels_heads_or_angles():
    """Kernels divide by these numbers, so such calls run in torch."""
    x, none = torch.randn(1, 3, 2, 4), torch.zeros(3, 0)
    assert fused.rms_norm(none, none[0], 1e-5).shape == (3, 0)
    assert fused.scale_heads(x[:, :, :0], torch.zeros(1, 3, 0)).shape == (1, 3, 0, 4)
    assert torch.equal(fused.rotate(x, none, none), x)


def test_forward_derivatives_of_a_layer_are_those_of_torch():
    """Kernels have no forward derivatives, and a custom op without them would return tangents of 0."""
    layer = layers.build("gated_deltanet", hidden_size=64, num_heads=2)
    x, direction = torch.randn(2, 1, 70, 64, generator=generator("tangent"))

    def tangent():
        return torch.func.jvp(lambda x: layer(x)[0], (x,), (direction,))[1]

    with in_torch():
        expected = tangent()
    assert_close({"tangent": tangent()}, {"tangent": expected}, 4e-6)


@pytest.mark.parametrize("dtype", slow_beyond([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", slow_beyond(["mamba2", "mamba3", "gated_deltanet", "rwkv7", "llama", "echo"], PRESETS))
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing(name, dtype):
    """The kind that is not reentrant unpacks each saved tensor once; the other follows positional tensors alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 2, "vocab_size": 9, "num_heads": 2, "train_length": 16}
    model = HalflifeForCausalLM(HalflifeConfig.from_preset(name, **sizes)).to(dtype).train()
    ids = torch.randint(9, (2, 20))
    grads = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert_close(grads[0], grads[1], 0)
    assert_close(grads[0], grads[2], 0)


class Recorder(TorchDispatchMode):
    """Records the names of all operations that run inside it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", slow_beyond(["mamba2", "mamba3", "gated_deltanet", "rwkv7", "echo"], PRESETS))
def test_the_backend_of_a_model_governs_all_of_its_ops(name, monkeypatch):
    """In plain torch it runs no operation of ours; with "auto" it runs some, in training and while decoding."""
    monkeypatch.setattr(dispatch, "SMALLEST_PASS", 0)
    sizes = {"hidden_size": 32, "num_layers": 2, "vocab_size": 9, "num_heads": 2, "train_length": 16}

    def ours(**mixer):
        torch.manual_seed(0)
        model = LanguageModel(preset(name, **sizes, mixer_options=mixer))
        with Recorder() as recorder:
            model(torch.randint(9, (2, 20)))[0].sum().backward()
            with torch.no_grad():
                model(torch.tensor([[1]]), model.eval()(torch.tensor([[1, 2]]))[1])
        return {x for x in recorder.names if x.startswith("halflife")}

    assert ours()
    for backend in ("chunked", "reference"):
        assert ours(backend=backend) == set()


LAYERS = ("gated_deltanet", "deltanet", "kda", "gdn2", "deltaproduct", "mesa", "comba", "mamba2", "mamba2+gate_rank")


@pytest.mark.parametrize("name", LAYERS)
def test_keys_normalised_by_the_convolution_and_skips_added_by_the_op(name, monkeypatch):
    """As layers do on a GPU; Comba has a pass before the norm of the queries."""
    torch.manual_seed(0)
    heads = {"num_key_heads": 1} if name == "gated_deltanet" else {}
    config = preset(name, hidden_size=16, num_layers=1, num_heads=2, vocab_size=8, mixer_options=heads)
    layer, x = LanguageModel(config).blocks[0].mixer.double(), torch.randn(2, 9, 16).double()
    parameters = list(layer.parameters())

    def run():
        y, state = layer(x[:, :4])
        y = torch.cat([y, layer(x[:, 4:], state)[0]], 1)
        return y, *torch.autograd.grad(y.square().sum(), parameters, allow_unused=True, materialize_grads=True)

    want = run()
    monkeypatch.setattr(Tensor, "is_cpu", False)
    calls = []
    monkeypatch.setattr(parts, "causal_conv1d", lambda *a, **o: (calls.append(o["unit"]), causal_conv1d(*a, **o))[1])
    for got, expected in zip(run(), want, strict=True):
        assert_close(got, expected, 1e-12)
    channels = {"gated_deltanet": 16, "deltaproduct": 48}.get(name, 32)
    assert set(calls) == {None if name.startswith(("comba", "mamba2")) else (channels, 8)}


def test_mixtures_of_rwkv7_are_made_with_the_norm_before_them(monkeypatch):
    """As on a GPU, of sequences in two pieces; of packed ones, and if somebody looks at a norm, they are not."""
    torch.manual_seed(0)
    config = preset("rwkv7", hidden_size=16, num_layers=2, num_heads=2, vocab_size=8)
    model, ids = LanguageModel(config).double(), torch.randint(8, (2, 9))
    for parameter in model.parameters():  # some start at zero
        parameter.data += 0.1 * torch.randn_like(parameter)

    def run(**options):
        first, state = model(ids[:, :4])
        y = torch.cat([first, model(ids[:, 4:], state)[0], model(ids.view(1, -1), **options)[0].view(2, 9, -1)], 1)
        return y, *torch.autograd.grad(y.square().sum(), list(model.parameters()), allow_unused=True)

    packed = {"cu_seqlens": torch.tensor([0, 9, 18])}
    want = run(**packed)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    calls, of_norm = [], token_shift.token_mix_of_norm
    monkeypatch.setattr(token_shift, "token_mix_of_norm", lambda *a: (calls.append(1), of_norm(*a))[1])
    for expected in (8, 6):
        for got, wanted in zip(run(**packed), want, strict=True):
            assert_close(got, wanted, 1e-12)
        assert len(calls) == expected
        calls.clear()
        model.blocks[0].mixer_norm.register_forward_hook(lambda *_: None)
