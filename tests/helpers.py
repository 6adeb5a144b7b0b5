"""Helpers that several test files use."""

import importlib
import inspect
import socket
import sys
import warnings
import zlib
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from halflife import LanguageModel, layers, ops, preset
from halflife.ops.call import Call
from halflife.ops.spec import OPS as SPECS

OPS = {"linear_attention": ops.linear_attention, "delta_rule": ops.delta_rule, "dplr": ops.dplr}
GRANULARITIES = ("none", "scalar", "vector")

each_op = pytest.mark.parametrize("op", OPS)
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
each_backend = pytest.mark.parametrize("backend", ops.available_backends("linear_attention"))


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="fla-core imports triton, which has Linux wheels only")


def fla_module(name):
    """Return a module of fla.ops, imported when a test needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that there is no GPU and no flash-attn
        return importlib.import_module(f"fla.ops.{name}")


def fla(module, name):
    """Return a function of a module of fla.ops."""
    return getattr(fla_module(module), name)


def cases(names, *rows):
    """Parametrise a test by rows of values for the names, as in `"name, message"`."""
    return pytest.mark.parametrize(names, rows)


# Native kernels take float32 and narrower numbers alone.
WIDEST = {"native": torch.float32}


def widest(backend, arguments):
    """float64 arguments in the widest dtype that `backend` takes."""
    return rounded(arguments, WIDEST.get(backend, torch.float64))


def bound(backend, exact):
    """The tolerance of a test that is `exact` in float64: four times the worst measured for a narrower backend."""
    return 4 * 7.0e-7 if backend in WIDEST else exact


# Log-decays from no decay to a full reset, as they occur in models.
LOG_DECAYS = (0.0, -1e-6, -0.05, -5.0, -20.0, -1000.0, -torch.inf)


def call_of(op, tensors, **settings):
    """A call of an op as `dispatch` makes it, from its tensors and `initial_state` by name; absent ones are None."""
    given = {name: tensors.get(name) for name in SPECS[op].tensors}
    return Call.of(op, given, tensors.get("initial_state"), **settings)


def put_backend(monkeypatch, op, backend, function, why_not=None):
    """Put an implementation of an op in the place of another, and return the function of that one."""
    before = SPECS[op].backends[backend]
    monkeypatch.setitem(SPECS[op].backends, backend, replace(before, function=function, why_not=why_not))
    return before.function


def unchecked(function):
    """Return the function without its wrappers. Our functions are wrapped in the shape checks of `conftest.py`."""
    return inspect.unwrap(function)


def tiny(name, **sizes):
    """A model of two layers of width 16 with two heads, trained at 32 tokens."""
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "train_length": 32, **sizes}
    return LanguageModel(preset(name, **sizes))


def ids_of(batch, length):
    """The same bytes in every test, `[batch, length]`."""
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def port():
    """A free port of this machine."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def generator(*key):
    """Return a generator whose numbers depend on `key` alone, not on the tests that ran before."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def op_inputs(op, granularity, length, *, batch=1, heads=2, key=6, value=5, decay=None, sequences=None):
    """Return the arguments of an op in float64; `decay` is one log-decay, "mixed", or None for moderate log-decays."""
    draw = generator(op, granularity, length, key, value, decay)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    shape = (batch, length, heads)
    arguments = {
        "q": randn(*shape, key),
        "k": F.normalize(randn(*shape, key), dim=-1),
        "v": randn(*shape, value),
        "initial_state": randn(sequences or batch, heads, key, value),
    }
    if op == "delta_rule":
        arguments["beta"] = 2 * randn(*shape).sigmoid()  # values above 1 give negative eigenvalues
    if op == "dplr":
        # As in RWKV-7, the removed direction has norm 1 and a rate between 0 and 1, so that the state cannot grow.
        direction = F.normalize(randn(*shape, key), dim=-1)
        arguments |= {"a": -direction, "b": direction * randn(*shape, key).sigmoid()}
    if granularity != "none":
        size = (*shape, key) if granularity == "vector" else shape
        if decay is None:
            g = -randn(*size).exp() / 4
        elif decay == "mixed":
            g = torch.tensor(LOG_DECAYS, dtype=torch.float64)[torch.randint(len(LOG_DECAYS), size, generator=draw)]
        else:
            g = torch.full(size, decay, dtype=torch.float64)
        arguments["g"] = g
    return arguments


def rounded(arguments, dtype):
    """Convert arguments to `dtype`. The state and log-decays stay float32 or wider, as in layers."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: x.to(wide if name in ("g", "initial_state") else dtype) for name, x in arguments.items()}


def with_grads(outputs, arguments):
    """Return `{"o", "state", "d…"}` with the gradients "d…" of a fixed random sum of `(o, state)`."""
    outputs = {name: x for name, x in zip(("o", "state"), outputs, strict=True) if x is not None}
    draw = generator("loss")
    # The weights are drawn in bfloat16, so that every dtype has exactly the same ones.
    loss = sum((x * torch.randn(x.shape, generator=draw).bfloat16().to(x.dtype)).sum() for x in outputs.values())
    # Without tokens, the token loop does not use its inputs.
    grads = torch.autograd.grad(loss, list(arguments.values()), allow_unused=True, materialize_grads=True)
    return {**outputs, **{f"d{name}": grad for name, grad in zip(arguments, grads, strict=True)}}


def leaves(arguments):
    """Return copies of the arguments that require gradients."""
    return {name: x.detach().requires_grad_() for name, x in arguments.items()}


def run_op(op, arguments, **options):
    """Return the outputs and gradients of one call (`with_grads`)."""
    arguments = leaves(arguments)
    return with_grads(OPS[op](**arguments, output_final_state=True, **options), arguments)


def run_on(device, op, arguments, cu_seqlens=None, backend="triton", chunk_size=64):
    """Run `op` on a device and return its outputs and gradients (`with_grads`) on the CPU."""
    arguments = leaves({name: x.to(device) for name, x in arguments.items()})
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    outputs = op(
        **arguments, scale=0.3, output_final_state=True, cu_seqlens=bounds, chunk_size=chunk_size, backend=backend
    )
    return {name: x.cpu() for name, x in with_grads(outputs, arguments).items()}


def slices(cu_seqlens):
    """Return the packed sequences as slices of the token axis."""
    return [slice(a, b) for a, b in pairwise(cu_seqlens)]


def everywhere(value):
    """A change of log-decays: all become `value`."""
    return lambda g: g.fill_(value)


def slow_after_resets(g):
    """After a run of full resets come log-decays of −0.01, which float32 would lose in a sum of −2,000."""
    g[:, :20] = -1000
    g[:, 20:] = -0.01


# A `run` is a layer, a model, an op or a decay as `(x, state, **options) -> (y, state)`. Its `x` is a tensor with
# tokens on axis 1, or a list or dict of such tensors. A state is a tensor, or a tuple or dict of states.


def at(x, tokens):
    """Return a piece of the token axis of every tensor in `x`."""
    if isinstance(x, dict):
        return {name: part[:, tokens] for name, part in x.items()}
    return [part[:, tokens] for part in x] if isinstance(x, (list, tuple)) else x[:, tokens]


def state_parts(state):
    """Return the tensors of a state by their paths."""
    if isinstance(state, torch.Tensor):
        return {"state": state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {f"{name}.{path}": x for name, part in items for path, x in state_parts(part).items()}


def run_pieces(run, x, bounds, state=None):
    """Return outputs and the last state of consecutive pieces of the tokens, each from the state of the one before."""
    outputs = []
    for tokens in slices(bounds):
        y, state = run(at(x, tokens), state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def token_loop(q, v, step):
    """The outputs `[B, T, H, V]` of a recurrence `state [H, K, V] → step(state, row, t)`, read by q without a scale."""
    outputs = torch.empty_like(v)
    for row in range(len(v)):
        state = v.new_zeros(*q.shape[2:], v.shape[-1])
        for t in range(v.shape[1]):
            state = step(state, row, t)
            outputs[row, t] = torch.einsum("hk,hkv->hv", q[row, t], state)
    return outputs


def unit(x):
    """x over its norm, as fla and the published models divide."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def outer(k, v):
    """The products `[H, K, V]` of keys and values of heads."""
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def learned(y, x):
    """Return `{"d0", "d1", …}`, the gradients of a fixed random sum of `y`, for the tensors in `x` that want them."""
    tensors = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else [x]
    leaves = [part for part in tensors if part.requires_grad]
    if not leaves:
        return {}
    loss = (y * torch.randn(y.shape, generator=generator("y")).to(y.dtype)).sum()
    grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
    return {f"d{i}": grad for i, grad in enumerate(grads)}


def assert_streams(run, x, tolerance, state=None, cuts=None):
    """Two pieces (at every cut or at `cuts`, empty ones too), single tokens, and both in turn are the full pass.

    Outputs and last states agree, and the gradients of outputs for tensors in `x` that want them.
    """
    whole, last = run(x, state)
    length, last, grads = whole.shape[1], state_parts(last), learned(whole, x)
    singles = (range(length + 1), [0, *range(1, length - 2), length])
    for bounds in (*([0, cut, length] for cut in cuts or range(length + 1)), *singles):
        y, end = run_pieces(run, x, bounds, state)
        end = state_parts(end)
        # SKA's state has an inverse factor between single tokens, and the full pass leaves it out.
        got = {"y": y, **{name: end[name] for name in last}, **learned(y, x)}
        assert_close(got, {"y": whole, **last, **grads}, tolerance)


def assert_packs(run, draw, tolerance):
    """Packed sequences, one of them empty, equal single ones. A second call continues from states of any lengths.

    `draw(batch, length)` gives x. Where it wants gradients, these agree too, and none crosses to another sequence.
    """
    state, alone = None, [None] * 4
    for lengths in ([5, 0, 1, 7], [2, 3, 0, 1]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        x = draw(1, sum(lengths))
        y, state = run(x, state, cu_seqlens=bounds.int())
        separate = []
        for row, tokens in enumerate(slices(bounds.tolist())):
            expected, alone[row] = run(at(x, tokens), alone[row])
            separate.append(expected)
        separate = torch.cat(separate, 1)
        assert_close({"y": y, **learned(y, x)}, {"y": separate, **learned(separate, x)}, tolerance)
        for grad in learned(y[:, -1:], x).values():
            assert grad[:, : bounds[-2]].count_nonzero() == 0
    return state, alone


def assert_pads(run, draw, side, tolerance):
    """Real tokens have the outputs of unpadded rows, and pads are 0, whatever they hold. Decoding continues."""
    lengths, length = torch.tensor([4, 0, 11]), 11
    mask = torch.arange(length) < lengths.unsqueeze(1)
    mask = mask.flip(1) if side == "left" else mask
    x, steps = draw(3, length), draw(3, 3)
    y, state = run(x, None, attention_mask=mask.long())
    assert y[~mask].count_nonzero() == 0
    changed = x.detach().clone()
    changed[~mask] = 1000 if x.is_floating_point() else 0
    assert_same(run(changed, None, attention_mask=mask)[0], y)
    if x.requires_grad:
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        assert grad[~mask].count_nonzero() == 0
        assert grad[mask].any()
    continued, state = run_pieces(run, steps, range(4), state)
    for row, one in enumerate(slices(range(4))):
        expected, own = run(x[one, mask[row]], None)
        assert_close(y[row, mask[row]], expected[0], tolerance)
        assert_close(continued[row], run(steps[one], own)[0][0], tolerance)
    return state


def relative_error(got, expected):
    """Return the largest difference divided by the largest entry; infinite for a NaN, an infinity or another shape."""
    if got.shape != expected.shape or not torch.isfinite(got).all():
        return float("inf")
    if got.numel() == 0:
        return 0.0
    got, expected = got.double(), expected.double()
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def near_level(share, level, count):
    """Whether a measured share of `count` draws is within four standard deviations of its level."""
    return abs(share - level) <= 4 * (level * (1 - level) / count) ** 0.5 + 1e-9


def add_noise(module, scale=0.1):
    """Move every parameter, because parameters that start at zero would hide terms. Returns the module."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn_like(parameter)
    return module


def assert_close(got, expected, tolerance):
    """Check that tensors, or dicts of tensors, agree up to `tolerance` relative to the largest entry of each."""
    if not isinstance(expected, dict):
        got, expected = {"": got}, {"": expected}
    assert got.keys() == expected.keys()
    errors = {name: relative_error(got[name], expected[name]) for name in expected}
    assert all(error <= tolerance for error in errors.values()), f"{errors} above {tolerance}"


def assert_same(got, expected):
    """Check that tensors, or dicts of tensors, are equal to the bit."""
    if not isinstance(expected, dict):
        got, expected = {"": got}, {"": expected}
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, f"differ: {different}"


def assert_raises(error, match, function, *arguments, **options):
    """Check that a call raises `error` with a message that matches `match`."""
    with pytest.raises(error, match=match):
        function(*arguments, **options)


class OurCalls(TorchDispatchMode):
    """Records the calls of our custom ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, given=(), options=None):
        if op.namespace == "halflife":
            self.calls.append((op, given))
        return op(*given, **(options or {}))


def check_custom_ops(function, checks=("test_schema", "test_autograd_registration", "test_faketensor")):
    """torch's checks of all calls of our ops in `function`, on which torch.compile relies. Returns the ops' names."""
    kernels = sys.modules.get("halflife.ops.backends.triton.op")  # its ops run without torch if nothing traces them
    traced = mock.patch.object(kernels, "is_traced", return_value=True) if kernels else nullcontext()
    with OurCalls() as found, traced:
        function()
    for op, given in found.calls:
        forward = not op.name().endswith("_backward")
        given = [x.detach().requires_grad_(x.requires_grad and forward) if torch.is_tensor(x) else x for x in given]
        torch.library.opcheck(op, given, test_utils=checks)
    return {op.name().removeprefix("halflife::") for op, _ in found.calls}


def ska_layer(hidden_size, **options):
    """An SKA layer in float64. Its output map, which starts at zero, is drawn too."""
    torch.manual_seed(0)
    layer = layers.build("ska", hidden_size=hidden_size, **{"num_heads": 2, "rank": 6, "chunk_size": 3, **options})
    torch.nn.init.normal_(layer.out_proj.weight)
    return layer.double()


def walk(decay, parameters):
    """Move parameters by 100 random steps, as far as training would. Returns the decay."""
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        sum((p * torch.randn_like(p)).sum() for p in parameters).backward()
        optimizer.step()
    return decay
