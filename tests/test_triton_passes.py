"""The Triton kernels of passes over memory equal the float64 definitions, with all gradients."""

import sys

import pytest
import torch
from helpers import assert_close, generator
from pairwise import crossed

from halflife.models import loss
from halflife.ops import causal_conv1d, fused, rwkv7
from halflife.ops.backends import dispatch
from halflife.ops.cross_entropy import cross_entropy, losses_and_errors
from halflife.ops.dplr import erase_write, feedback_keys

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from halflife.ops.backends import triton
from halflife.ops.backends.triton.passes import convolution, keys, mixing, norms, rows
from halflife.ops.backends.triton.passes import cross_entropy as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The worst errors measured over this file's cases, relative to the largest entry of a tensor; four times are allowed.
WORST = {torch.float32: 1e-6, torch.bfloat16: 7.3e-3, torch.float16: 5.2e-4}


def check(run, tensors, dtype, wide=()):
    """Compare `run(backend, **tensors)` with the definition in float64: outputs, and gradients of a random sum.

    The tensors named in `wide` are float32, all others have the dtype. A shape stands for random numbers.
    """
    draw = generator(*tensors)
    tensors = {name: x if torch.is_tensor(x) else torch.randn(x, generator=draw) for name, x in tensors.items()}
    tensors = {name: x.bfloat16() for name, x in tensors.items()}  # numbers that every dtype has
    narrow = {name: x.to(torch.float32 if name in wide else dtype) for name, x in tensors.items()}
    got, want = _all(run, "triton", narrow), _all(run, "reference", {name: x.double() for name, x in tensors.items()})
    assert_close(got, want, 4 * WORST[dtype])


def _all(run, backend, tensors):
    leaves = {name: x.detach().to(DEVICE).requires_grad_() for name, x in tensors.items()}
    outputs = [x for x in run(backend, **leaves) if x is not None]
    draw = generator("loss")
    weights = [torch.randn(x.shape, generator=draw).bfloat16().to(DEVICE) for x in outputs]
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = {str(i): x for i, x in enumerate(outputs)} | dict(zip([f"d{name}" for name in leaves], grads, strict=True))
    return {name: x.detach().double().cpu() for name, x in found.items()}


def strided(x):
    """The same entries with other strides, as parts of a projection have them."""
    return torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]]


# ------------------------------------------------------------------------------------------------- convolution


def check_conv(
    shape, width, dtype, *, activation="silu", bias=True, state=True, final=True, bounds=None, wide=False, unit=None,
    splits=None,
):  # fmt: skip
    draw = generator(shape, width)
    sequences = shape[0] if bounds is None else len(bounds) - 1
    tensors = {"x": shape, "weight": (shape[2], width), "bias": shape[2:], "state": (sequences, shape[2], width - 1)}
    kept = {"x", "weight"} | ({"bias"} if bias else set()) | ({"state"} if state else set())
    tensors = {name: torch.randn(size, generator=draw) for name, size in tensors.items() if name in kept}

    def run(backend, x, weight, bias=None, state=None):
        y, last = causal_conv1d(
            strided(x), weight, bias, activation=activation, initial_state=state, output_final_state=final,
            cu_seqlens=None if bounds is None else torch.tensor(bounds, device=DEVICE), backend=backend,
            dtype=weight.dtype if wide else None, unit=unit, splits=splits,
        )  # fmt: skip
        return (y, last) if splits is None else (*y, last)

    # Results in float32 have its errors, and the gradient of x is rounded to x's dtype.
    check(run, tensors, dtype, wide=("weight", "bias", "state") if wide else ("weight", "bias"))


@crossed(
    strength=1, width=[4, 1, 2, 3], dtype=DTYPES, activation=["silu", None], bias=[True, False], state=[True, False],
    final=[True, False], bounds=[None, [0, 1, 1, 3, 12, 21]], wide=[True, False],
)  # fmt: skip
def test_convolution(width, dtype, activation, bias, state, final, bounds, wide):
    """Sequences shorter than a window, an empty one, and tiles that are not full."""
    shape = (2 if bounds is None else 1, 21, 5)
    options = {"activation": activation, "bias": bias, "state": state, "final": final}
    check_conv(shape, width, dtype, **options, bounds=bounds, wide=wide)


@crossed(
    strength=1, unit=[(32, 16), (64, 32), (128, 128), (12, 6)], dtype=DTYPES,
    activation=["silu", None], bounds=[None, [0, 1, 1, 3, 12, 21]], state=[True, False],
)  # fmt: skip
def test_convolution_to_unit_vectors(unit, dtype, activation, bounds, state):
    """Sizes that a program holds, with channels behind them, and one that it does not."""
    shape = (2 if bounds is None else 1, 21, unit[0] + 5)
    check_conv(shape, 3, dtype, activation=activation, bounds=bounds, state=state, unit=unit)


@crossed(
    strength=1, splits=[(64, 128), (128, 64, 64), (32, 32, 5), (64, 64, 64, 64)], unit=[None, (64, 32)],
    bounds=[None, [0, 1, 1, 3, 12, 21]], dtype=DTYPES,
)  # fmt: skip
def test_parts_of_a_convolution(splits, unit, bounds, dtype):
    """Parts of whole tiles, which have memory of their own, and others."""
    shape = (2 if bounds is None else 1, 21, sum(splits))
    check_conv(shape, 4, dtype, bounds=bounds, unit=unit, splits=splits)


@pytest.mark.parametrize("bounds", [None, [0, 0]])
@pytest.mark.parametrize("length", [0, 1, pytest.param(130, marks=pytest.mark.slow)])
def test_lengths_of_a_convolution(length, bounds, monkeypatch):
    """The last one has programs of several tiles, and several blocks of channels."""
    monkeypatch.setattr(convolution, "PROGRAMS", 3)
    channels = 70 if length > 1 else 3
    check_conv((1, length, channels), 4, torch.float32, bounds=bounds and [0, length // 3, length])


def test_many_taps_run_in_torch():
    x, weight = torch.randn(1, 3, 2), torch.randn(2, 9)
    with pytest.raises(dispatch.CannotRun, match="at most 8 taps; got 9"):
        causal_conv1d(x, weight, backend="triton")


# ------------------------------------------------------------------------------------- norms, gates and rotations

NORMS = {
    "plain": lambda x, z, w, s, **o: fused.rms_norm(x, w, 1e-5, **o),
    "plain of heads": lambda x, z, w, s, **o: fused.rms_norm(x.unflatten(-1, (3, -1)), w[: w.numel() // 3], 1e-5, **o),
    "gated": lambda x, z, w, s, **o: fused.rms_norm_of_gated(x, z, w, 1, 1e-5, **o),
    "gated groups with skip": lambda x, z, w, s, **o: fused.rms_norm_of_gated(x, z, w, 3, 1e-5, (w[:3], z), **o),
    "gated with skip": lambda x, z, w, s, **o: fused.rms_norm_of_gated(x, x, w, 1, 1e-5, (w[:3], z), **o),
    "sigmoid": lambda x, z, w, s, **o: fused.rms_norm_of_sigmoid_gated(x, z, w, 1e-5, **o),
    "heads": lambda x, z, w, s, **o: fused.gated_head_norm(
        x.unflatten(-1, (3, -1)), z, w[: w.numel() // 3], 1e-5, **o
    ),
    "heads, sigmoid": lambda x, z, w, s, **o: fused.gated_head_norm(
        x.unflatten(-1, (3, -1)), z, w[: w.numel() // 3], 1e-5, gate="sigmoid", **o
    ),
    "l2": lambda x, z, w, s, **o: fused.l2_normalize(x.unflatten(-1, (3, -1)), **o),
    "swiglu": lambda x, z, w, s, **o: fused.swiglu(x, z, **o),
    "swiglu with skip": lambda x, z, w, s, **o: fused.swiglu(x, z, skip=(w[:3], x), **o),
    "scaled heads": lambda x, z, w, s, **o: fused.scale_heads(x.unflatten(-1, (3, -1)), s, **o),
}  # fmt: skip


def check_pass(name, shape, dtype):
    """x, z `[B, T, 3 V]`, weights of all channels, and a number for each of 3 heads."""
    draw = generator(shape)
    sizes = {"x": shape, "z": shape, "w": shape[2:], "s": (*shape[:2], 3)}
    tensors = {key: torch.randn(size, generator=draw) for key, size in sizes.items()}
    tensors["w"] += 1

    def run(backend, x, z, w, s):
        return [NORMS[name](strided(x), strided(z), w, s, backend=backend)]

    check(run, tensors, dtype, wide=("w", "s"))


@crossed(strength=1, name=NORMS, dtype=DTYPES, shape=[(2, 3, 24), (1, 5, 99)])
def test_passes(name, dtype, shape, monkeypatch):
    """Norms of more than 16 channels with a skip read their inputs twice."""
    monkeypatch.setattr(norms, "WIDE", 16)
    check_pass(name, shape, dtype)


@pytest.mark.parametrize("name", ["plain", "gated", "gated with skip", "heads"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_parameters_of_16_bits(name, dtype):
    """Their gradients are summed in float32."""
    draw = generator(name)
    tensors = {key: torch.randn(2, 3, 24, generator=draw) for key in "xz"} | {"w": 1 + torch.rand(24, generator=draw)}
    check(lambda backend, x, z, w: [NORMS[name](x, z, w, None, backend=backend)], tensors, dtype)


@pytest.mark.parametrize("shape", [(1, 3), (130, 2, 40), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_programs(shape, dtype):
    sums, narrow = torch.randn(shape, generator=generator(shape)).to(DEVICE), torch.zeros(1, dtype=dtype)
    found = rows.gradient_of(sums, narrow, None)
    assert found.dtype == dtype
    assert_close(found.double(), sums.double().sum(0), 4 * WORST[dtype])
    assert rows.gradient_of(sums, narrow, narrow.float()).dtype == torch.float32


@crossed(strength=1, dtype=DTYPES, wide=[True, False], shape=[(2, 3, 24), (1, 5, 99), (1, 0, 24)], used=["both", 0, 1])
def test_sum_with_its_norm(dtype, wide, shape, used):
    """Of a residual stream in float32 or in the dtype of the branch, both results used, or one of them."""

    def run(backend, x, y, w):
        both = fused.add_rms_norm(strided(x), strided(y), w, 1e-5, backend)
        return both if used == "both" else [both[used]]

    check(run, {"x": shape, "y": shape, "w": shape[2:]}, dtype, wide=("w", "x") if wide else ("w",))


@pytest.mark.parametrize("name", ["gated groups with skip", "heads", "swiglu", "scaled heads"])
@pytest.mark.parametrize("shape", [(1, 0, 24), pytest.param((1, 40, 1536), marks=pytest.mark.slow)], ids=str)
def test_sizes_of_passes(name, shape, monkeypatch):
    """The last one has programs of several tiles, and several blocks of channels."""
    monkeypatch.setattr(norms, "TILE", 1024)
    monkeypatch.setattr(norms, "PROGRAMS", 1)
    check_pass(name, shape, torch.float32)


@crossed(
    strength=1, dtype=DTYPES, pairs=[4, 3, 17], rest=[0, 5], batch=[2, 1], rows=[False, True], length=[5, 0],
)  # fmt: skip
def test_rotations(dtype, pairs, rest, batch, rows, length):
    """Angles of a batch or of each row, and channels beyond the pairs."""
    draw = generator(pairs, rest)
    x = torch.randn(batch, length, 3, 2 * pairs + rest, generator=draw)
    angle = torch.randn(*([batch] if rows else []), length, pairs, generator=draw).bfloat16().double()

    def run(backend, x):
        wide = angle.to(DEVICE, torch.promote_types(x.dtype, torch.float32))
        return [fused.rotate(strided(x), wide.cos(), wide.sin(), backend)]

    check(run, {"x": x}, dtype)


@crossed(
    strength=1, count=[3, 1, 6], dtype=DTYPES, shape=[(2, 5, 7), (3, 1, 2), (1, 0, 3)],
    kind=["given", "first", "none", "norm", "sum", "wide sum"],
)  # fmt: skip
def test_mixtures_of_tokens(count, dtype, shape, kind, monkeypatch):
    """Of tokens with those before them, which are given with other strides, or are in x but for the first ones.

    Or of norms of tokens, or of sums of two.
    """
    monkeypatch.setattr(mixing, "ROWS", 4)
    monkeypatch.setattr(mixing, "PROGRAMS", 4)
    normed = kind not in ("given", "first", "none")
    shape = (1, 3, 3) if normed and not shape[1] else shape
    given = {"given": shape, "first": (shape[0], shape[2]), "sum": (shape[0], shape[2])}
    sizes = {"x": shape, "mu": (count, shape[2])} | ({"before": given[kind]} if kind in given else {})
    sizes |= {"weight": shape[2:], "bias": shape[2:]} if normed else {}
    sizes |= {"branch": shape} if "sum" in kind else {}

    def run(backend, x, mu, before=None, weight=None, bias=None, branch=None):
        if normed:
            branch = None if branch is None else strided(branch)
            return rwkv7.token_mix_of_norm(strided(x), branch, weight, bias, before, mu.unbind(), 0.1, backend)
        if kind == "given":
            before = torch.cat([before, before[:, :1]], 1)[:, : shape[1]]
        return rwkv7.token_mix(strided(x), before, mu.unbind(), kind != "given" and shape[1] > 0, backend)

    check(run, sizes, dtype, wide=("mu", "weight", "bias", *(["x"] if kind == "wide sum" else [])))


def test_more_mixtures_run_in_torch():
    x = torch.randn(1, 1, 2)
    with pytest.raises(dispatch.CannotRun, match="at most 6 mixtures; got 7"):
        rwkv7.token_mix(x, x, [*torch.randn(7, 2)], backend="triton")


@pytest.fixture
def few_tiles(monkeypatch):
    """Programs of RWKV-7's passes then have several tiles."""
    monkeypatch.setattr(keys, "TILE", 64)
    monkeypatch.setattr(keys, "PROGRAMS", 4)


HEADS = [(2, 13, 3, 5), (1, 5, 2, 16), (1, 0, 1, 3)]


@crossed(strength=1, dtype=DTYPES, shape=HEADS, read=[True, False])
def test_keys_of_rwkv7(dtype, shape, read, few_tiles):
    """Keys and what the correction reads and writes, with the weight of a token's own value and without."""
    sizes = {"key": shape, "rate": shape, "bias": shape[2:], "unit": shape[2:], "change": shape[2:]}
    sizes |= {"r": shape, "bonus": shape[2:]} if read else {}

    def run(backend, key, rate, bias, unit, change, r=None, bonus=None):
        return rwkv7.rwkv7_keys(strided(key), strided(rate), r, bias, unit, change, bonus, None, backend)

    check(run, sizes, dtype, wide=("bias", "unit", "change", "bonus"))


@crossed(strength=1, dtype=DTYPES, shape=HEADS, value=[5, 20, 1], most=[1.0, 2.0])
def test_erase_and_write_gates(dtype, shape, value, most, few_tiles):
    """Of Gated DeltaNet-2, with values of other sizes than keys."""
    *rows, heads, size = shape
    sizes = {"erase": (*rows, heads * size), "write": (*rows, heads * value), "k": shape, "v": (*rows, heads, value)}

    def run(backend, erase, write, k, v, g):
        return erase_write(strided(erase), strided(write), strided(k), strided(v), -g.abs(), most, backend)

    check(run, sizes | {"g": shape}, dtype, wide=("g",))


@crossed(strength=1, dtype=DTYPES, shape=HEADS, apart=[True, False], most=[1.0, 2.0])
def test_keys_with_feedback(dtype, shape, apart, most, few_tiles):
    """Of Comba."""
    sizes = {"q": shape, "k": shape, "logits": shape[:3], "share": shape[2:3], "output": shape[2:3]}

    def run(backend, q, k, logits, share, output):
        return feedback_keys(strided(q), strided(k), logits, share, output, most, apart, backend=backend)

    check(run, sizes, dtype, wide=("share", "output"))


@crossed(strength=1, dtype=DTYPES, shape=HEADS)
def test_outputs_of_rwkv7(dtype, shape, few_tiles):
    channels = (shape[2] * shape[3],)
    sizes = {"o": shape, "s": shape[:3], "v": shape, "gate": (*shape[:2], *channels), "weight": channels}

    def run(backend, o, s, v, gate, weight, bias):
        return [rwkv7.rwkv7_output(strided(o), s, strided(v), strided(gate), weight, bias, 1e-3, None, backend)]

    check(run, sizes | {"bias": channels}, dtype, wide=("weight", "bias", "s"))


@crossed(strength=1, dtype=DTYPES, shape=HEADS)
def test_values_and_channel_mix_of_rwkv7(dtype, shape, few_tiles):
    def run(backend, v, first, rate, bias):
        mixed = rwkv7.rwkv7_values(strided(v), strided(first), strided(rate), bias, backend)
        return [mixed, rwkv7.relu_square(strided(rate), backend)]

    check(run, {"v": shape, "first": shape, "rate": shape, "bias": shape[2:]}, dtype, wide=("bias",))


def test_norms_round_to_the_dtype_of_autocast():
    """So that no product casts their output again; the gradients are those of the rounded output."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    exact = fused.rms_norm(x, w, 1e-5, "triton")
    with torch.autocast("cpu", torch.bfloat16):
        y = fused.rms_norm(x, w, 1e-5, "triton")
    assert y.dtype == torch.bfloat16
    assert_close(y.double(), exact.double(), 4 * WORST[torch.bfloat16])
    weights = torch.randn(3, 8).bfloat16()
    got, want = (torch.autograd.grad((z * weights).sum(), (x, w)) for z in (y, exact))
    assert_close(dict(enumerate(got)), dict(enumerate(want)), 4 * WORST[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 20), (1, 0, 8)], ids=str)
def test_swiglu_keeps_no_product(dtype, shape):
    """The gradient of the map after it is that of the definition, and neither gradient keeps what the map reads."""
    draw = generator(shape)
    a, b, weight = (torch.randn(size, generator=draw) for size in (shape, shape, (6, shape[-1])))

    def run(backend, a, b, weight):
        return [fused.swiglu_linear(strided(a), strided(b), weight, backend)]

    check(run, {"a": a, "b": b, "weight": weight}, dtype)
    leaves, kept = [x.to(dtype).requires_grad_() for x in (a, b, weight)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = fused.swiglu_linear(*leaves, "triton")
    assert {x.data_ptr() for x in kept} <= {x.data_ptr() for x in leaves}
    leaves[2].requires_grad_(False)
    gradients = torch.autograd.grad(out.sum(), leaves[:2])
    alone = torch.autograd.grad(fused.swiglu_linear(*leaves, "triton").sum(), leaves[:2])
    torch.testing.assert_close(alone, gradients, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "groups", "skips"), [((2, 3, 24), 3, True), ((1, 5, 99), 1, False), ((1, 0, 6), 1, True)]
)
def test_gated_norms_keep_no_output(dtype, shape, groups, skips, monkeypatch):
    """The gradients with that of the map after it, whose input the kernel of the gradients makes to the bit."""
    monkeypatch.setattr(norms, "WIDE", 16)
    draw = generator(shape)
    sizes = {"y": shape, "z": shape, "w": shape[2:], "x": shape, "D": (3,), "map": (6, shape[-1])}
    tensors = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}

    def run(backend, y, z, w, x, D, map):
        skip = (D, strided(x)) if skips else None
        return [fused.rms_norm_of_gated_linear(strided(y), strided(z), w, groups, 1e-5, skip, map, backend)]

    check(run, tensors, dtype, wide=("w", "D"))
    leaves, kept = [x.to(dtype).requires_grad_() for x in tensors.values()], []
    y, z, w, x, D, map = leaves
    given = y, z, w, groups, 1e-5, (D, x) if skips else None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = fused.rms_norm_of_gated_linear(*given, map, "triton")
    assert {x.data_ptr() for x in kept if x is not None} <= {x.data_ptr() for x in leaves}
    if y.numel():
        one = torch.zeros_like(out)
        one[0, 0, 0] = 1
        read = torch.autograd.grad(out, map, one)[0][0]
        torch.testing.assert_close(read, fused.rms_norm_of_gated(*given, "triton")[0, 0], rtol=0, atol=0)


def test_wide_norms_run_in_torch():
    x = torch.randn(1, 1, 8193)
    with pytest.raises(dispatch.CannotRun, match="at most 8192 channels; got 8193"):
        fused.l2_normalize(x, backend="triton")


# ------------------------------------------------------------------------------------------------- the loss


@pytest.fixture
def few_logits(monkeypatch):
    """Programs of the loss then have several blocks of logits."""
    monkeypatch.setattr(kernels, "BLOCK", 16)


@crossed(strength=1, dtype=DTYPES, shape=[(7, 40), (3, 1), (0, 5)], size=[1, 100])
def test_cross_entropy(dtype, shape, size, few_logits):
    """Of rows with strides and labels that are ignored; the gradients in the place of logits are the same ones."""
    logits = size * torch.randn(shape, generator=generator(shape))
    labels = torch.arange(3, 3 + shape[0]) % shape[1]
    labels[1::3] = -100

    def run(backend, logits):
        return [cross_entropy(strided(logits), labels.to(DEVICE), backend=backend)]

    check(run, {"logits": logits}, dtype)
    wide, given = logits.bfloat16().double(), logits.bfloat16().to(DEVICE, dtype)
    factor = torch.tensor(1.5)
    expected = dict(zip("ab", losses_and_errors(wide, labels, factor, backend="reference"), strict=True))
    losses, errors = losses_and_errors(given, labels.to(DEVICE), factor.to(DEVICE), backend="triton")
    assert errors is given
    assert_close({"a": losses.double().cpu(), "b": errors.double().cpu()}, expected, 4 * WORST[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_in_chunks(dtype, few_logits, monkeypatch):
    """Several chunks of tokens, of which one has fewer, with labels that count for nothing."""
    monkeypatch.setattr(loss, "IN_PLACE", 3 * 40 * dtype.itemsize)
    draw, labels = generator("loss"), torch.arange(8) * 5
    labels[1::3] = -100
    tensors = {"hidden": torch.randn(8, 6, generator=draw), "weight": torch.randn(40, 6, generator=draw)}

    def run(backend, hidden, weight):
        return [loss.ChunkedLoss.apply(hidden, weight, labels.to(DEVICE), backend)]

    check(run, tensors, dtype)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_logits_that_are_not_finite(few_logits):
    """As torch has it; and a label outside of the vocabulary gives no number that looks like a loss."""
    logits, labels = torch.zeros(8, 40), torch.tensor([0, 1, 2, 3, 4, 5, 40, -1])
    logits[0, 1:], logits[1, 1:3], logits[2, 0], logits[3, 30] = 4 * [-torch.inf]
    logits[4, 30], logits[5, 30], logits[3, :16] = torch.inf, torch.nan, -torch.inf
    found = cross_entropy(logits, labels, backend="triton")
    torch.testing.assert_close(found[:6], cross_entropy(logits[:6], labels[:6]), equal_nan=True)
    assert found[6:].isnan().all()


# ------------------------------------------------------------------------------------------------- custom ops

X, WEIGHT = torch.randn(2, 3, 4), torch.randn(4, 3)
X4 = torch.randn(2, 3, 2, 5)
GIVEN = {
    "conv": (X, WEIGHT, WEIGHT[:, 0].contiguous(), torch.randn(2, 4, 2), None, True, torch.float64, 0, 0, [4]),
    "cross_entropy": (X, torch.tensor([[0, 1, 2], [3, -100, 1]]), -100),
    "cross_entropy_errors": (X, torch.zeros(2, 3, dtype=torch.long), X[..., 0], X[..., 1], X[0, 0, 0], -100),
    "norm": (X, X + 1, WEIGHT[:, 0].contiguous(), X, torch.randn(2), "silu_before", 2, True, 1e-5),
    "norm_again": (X, X + 1, X - 1, WEIGHT[:, 0].contiguous(), X, torch.randn(2), 2, 1e-5),
    "add_norm": (X, X.bfloat16(), WEIGHT[:, 0].contiguous(), 1e-5, None),
    "swiglu": (X, X + 1),
    "swiglu_again": (X, X + 1, X - 1),
    "scale_heads": (X, torch.randn(2, 3, 2)),
    "rwkv7_keys": (X4, X4 + 1, X4 - 1, X4[0, 0], X4[0, 1], X4[0, 2], X4[1, 0], torch.float32),
    "rwkv7_output": (X4, X4[..., 0], X4 + 1, X4.flatten(2), *X4[0, :2].flatten(1), 1e-3, torch.bfloat16),
    "rwkv7_values": (X4, X4 + 1, X4 - 1, X4[0, 0]),
    "erase_write": (X4.flatten(2), X4.flatten(2) + 1, X4, X4 - 1, -X4.exp(), 1.0),
    "feedback_keys": (X4, X4 + 1, X4[..., 0], X4[0, 0, :, 0], X4[0, 0, :, 1], 2.0, False, torch.float32),
    "relu_square": (X,),
    "token_mix of one tensor": (X, X[:, 0], torch.randn(1, 4), X + 2, X[1, 0], X[0, 0], 1e-5, torch.float32, True),
    "token_mix": (X, X + 1, torch.randn(3, 4), None, None, None, 0.0, torch.float32, False),
    "rotate": (torch.randn(2, 3, 2, 4), *(f(torch.randn(1, 3, 2)) for f in (torch.cos, torch.sin)), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_as_custom_ops(name):
    """What torch.compile and autograd rely on: schemas, shapes of fake tensors, and registered gradients."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    learned = name != "cross_entropy_errors"  # which is called inside a backward pass
    given = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in GIVEN[name]]
    given = [
        x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() and learned else x for x in given
    ]
    torch.library.opcheck(triton.custom_op(name.split()[0]).packet, given, test_utils=checks)


def test_second_derivatives_are_refused():
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    y, _ = causal_conv1d(x, weight, backend="triton")
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
