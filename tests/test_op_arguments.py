"""Tensors that an op cannot take are refused in a sentence, before any kernel sees them."""

import inspect
import re
import traceback
from pathlib import Path

import pytest
import torch
from helpers import OPS, assert_raises, cases, each_op, generator, op_inputs, state_parts, unchecked
from torch._subclasses.fake_tensor import FakeTensorMode

import halflife
from halflife import ops
from halflife.models import LanguageModel
from halflife.ops.arguments import check_number
from halflife.ops.spec import OPS as SPECS
from halflife.ops.spec import Shape, _letter
from halflife.packing import check_integers

EVERY = {**OPS, "gate_rank": ops.gate_rank, "koopman_attention": ops.koopman_attention}
each_of_all = pytest.mark.parametrize("op", EVERY)


def small(op, dtype=torch.float32, **sizes):
    """Arguments of any op, T = 4 and two heads."""
    if op in OPS:
        arguments = op_inputs(op, "scalar", sizes.get("length", 4), batch=sizes.get("batch", 1), key=3, value=2)
        del arguments["initial_state"]
    else:
        draw = generator("arguments", op)
        shape = (sizes.get("batch", 1), sizes.get("length", 4), 2)
        arguments = {name: torch.randn(*shape, 3, generator=draw).double() for name in "qkv"}
        if op == "gate_rank":
            arguments |= {name: -torch.rand(shape, generator=draw).double() for name in ("g_slow", "g_fast")}
    return {name: x.to(dtype) for name, x in arguments.items()}


@pytest.mark.parametrize("name", [name for name in SPECS.names() if callable(getattr(ops, name, None))])
def test_docstrings_have_the_shapes_of_the_specification(name):
    """Each tensor of an op stands in its docstring with every shape that it may have."""
    described = inspect.getdoc(unchecked(getattr(ops, name))).partition("Args:\n")[2].partition("\n\n")[0]
    paragraphs = re.split(r"\n    (?=\w)", "\n" + described)
    for tensor, shape in SPECS[name].tensors.items():
        (paragraph,) = [text for text in paragraphs if tensor in re.split(r",\s*", text.partition(":")[0])]
        for axes in shape.choices:
            letters = [str(_letter(*axis)).replace("J +", "K +") for axis in axes]
            assert letters == ["1"] or f"[{', '.join(letters)}]" in paragraph, tensor


@each_of_all
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_only_floating_point_numbers(op, dtype):
    for name in small(op):
        arguments = small(op)
        arguments[name] = arguments[name].to(dtype)
        with pytest.raises(ValueError, match=f"^{name} must hold floating-point numbers.*{dtype}"):
            unchecked(EVERY[op])(**arguments)


@pytest.mark.parametrize("convert", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_only_tensors(convert):
    """The functions that every op calls first. Under pytest the annotations of the ops would refuse a list before."""
    with pytest.raises(TypeError, match=r"v must be a torch\.Tensor; got (list|ndarray)"):
        Shape("B").check("v", convert(torch.ones(2)), {}, None)
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch\.Tensor of integers; got (list|ndarray)"):
        check_integers("cu_seqlens", convert(torch.tensor([0, 4])))
    assert_raises(ValueError, "cu_seqlens must be integers", check_integers, "cu_seqlens", torch.tensor([False, True]))
    assert_raises(TypeError, "scale must be a number; got str", check_number, "scale", "x")


def test_gates_are_no_options():
    q = k = v = torch.ones(1, 3, 2, 4)
    g, beta, ridge = torch.zeros(1, 3, 2), torch.ones(1, 3, 2), torch.ones(2, 4)
    calls = {
        "g_slow": (ops.gate_rank, (None, g)),
        "g_fast": (ops.gate_rank, (g, None)),
        "beta": (ops.ridge_attention, (g, None, ridge)),
        "ridge": (ops.ridge_attention, (g, beta, None)),
        "weights": (ops.log_linear_attention, (g, None)),
    }
    for name, (op, gates) in calls.items():
        assert_raises(TypeError, rf"{name} must be a torch\.Tensor; got None", unchecked(op), q, k, v, *gates)


@each_of_all
def test_one_device(op):
    with pytest.raises(ValueError, match="on one device; got cpu, and v on meta"):
        EVERY[op](**{**small(op), "v": small(op)["v"].to("meta")})


@each_of_all
@pytest.mark.parametrize("name", ["qk", "v"])
def test_a_head_has_a_channel(op, name):
    arguments = small(op)
    arguments |= {part: arguments[part][..., :0] for part in name}
    if op == "dplr" and name == "qk":
        arguments |= {part: arguments[part][..., :0] for part in "ab"}
    assert_raises(ValueError, "at least one channel", EVERY[op], **arguments)


@each_of_all
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}])
def test_no_sequences_and_no_tokens_are_fine(op, sizes):
    for backend in ops.available_backends(op):
        arguments = {name: x.requires_grad_() for name, x in small(op, **sizes).items()}
        o, _ = EVERY[op](**arguments, output_final_state=True, backend=backend)
        assert o.shape == arguments["v"].shape
        if o.requires_grad:
            o.sum().backward()


@pytest.mark.parametrize("op", [*OPS, "gate_rank"])
def test_a_positive_log_decay_is_refused_by_every_backend(op):
    for name in ("g_slow", "g_fast") if op == "gate_rank" else ("g",):
        for backend in ("auto", *ops.available_backends(op)):
            arguments = small(op)
            arguments[name][0, 2, 1] = 1e-3
            with pytest.raises(ValueError, match=rf"^{name} is a log-decay.*the largest is 0\.001"):
                EVERY[op](**arguments, backend=backend)


@each_op
def test_nan_is_no_sign(op):
    """Training that diverges ends by its loss, not by an error of an op."""
    arguments = small(op)
    arguments["g"][0, 2, 1] = torch.nan
    assert OPS[op](**arguments)[0].isnan().any()


def test_tensors_without_values_are_not_checked():
    with FakeTensorMode():
        arguments = {name: torch.empty(x.shape) for name, x in small("delta_rule").items()}
        assert ops.delta_rule(**arguments, backend="chunked")[0].shape == arguments["v"].shape


@each_of_all
def test_shapes_on_the_meta_device(op):
    arguments = {name: x.to("meta") for name, x in small(op).items()}
    o, state = EVERY[op](**arguments, output_final_state=True)
    assert (o.shape, o.device.type) == (arguments["v"].shape, "meta")
    assert all(x.device.type == "meta" for x in state_parts(state).values())


@pytest.mark.parametrize("op", [*OPS, "gate_rank"])
def test_vmap_and_forward_derivatives_take_the_token_loop(op):
    """The kernels would return tangents of 0."""
    arguments = small(op, torch.float64)
    names, stacked = list(arguments), [torch.stack([x, x / 2]) for x in arguments.values()]

    def run(*x):
        return EVERY[op](**dict(zip(names, x, strict=True)))[0]

    both = torch.vmap(run)(*stacked)
    for i in range(2):
        assert torch.allclose(both[i], run(*(x[i] for x in stacked)), atol=1e-12)
    single = [x.float() for x in arguments.values()]
    direction = [torch.zeros_like(single[0]) + 1, *(torch.zeros_like(x) for x in single[1:])]
    _, tangent = torch.func.jvp(run, tuple(single), tuple(direction))
    change = run(single[0] + 1, *single[1:]) - run(*single)  # o is linear in q
    assert torch.allclose(tangent, change, atol=1e-4)
    gradient = torch.func.grad(lambda q: run(q, *single[1:]).sum())(single[0])
    assert gradient.isfinite().all()
    for backend in set(ops.available_backends(op)) - {"reference", "mask"}:
        with pytest.raises(ValueError, match=r"no rules for torch\.func"):
            torch.vmap(lambda *x, b=backend: EVERY[op](**dict(zip(names, x, strict=True)), backend=b)[0])(*stacked)


def test_koopman_attention_has_no_forward_derivatives():
    arguments = small("koopman_attention")
    with pytest.raises(ValueError, match=r"no rules for torch\.func"):
        torch.func.grad(lambda q: ops.koopman_attention(**{**arguments, "q": q})[0].sum())(arguments["q"])


@each_of_all
def test_other_arguments(op):
    setting = "gamma" if op == "koopman_attention" else "scale"
    for options, error, message in (
        ({setting: float("nan")}, ValueError, f"{setting} must be finite"),
        ({"chunk_size": -1, "backend": "reference"}, ValueError, "chunk_size must be an integer"),
    ):
        with pytest.raises(error, match=message) as caught:
            EVERY[op](**small(op), **options)
        raised = traceback.extract_tb(caught.value.__traceback__)[-1].filename
        assert Path(raised).parent.name in ("ops", "koopman")


@cases(
    "ids, error, message",
    (torch.tensor([[11]]), ValueError, "between 0 and 10; got 11 to 11"),
    (torch.tensor([[3, -1]]), ValueError, "between 0 and 10; got -1 to 3"),
    (torch.tensor([[True]]), ValueError, "must be integers"),
    (torch.tensor([[1j]]), ValueError, "must be integers"),
    (torch.zeros(1, 2, dtype=torch.long, device="meta"), ValueError, "meta device"),
)
def test_ids_of_a_model(ids, error, message):
    model = tiny_model()
    assert_raises(error, message, model, ids)
    if ids.device.type != "meta":
        assert_raises(ValueError, "tokens must", halflife.Session(model).feed, ids[0])


def test_ids_are_a_tensor():
    model = tiny_model()
    assert_raises(TypeError, r"ids must be a torch\.Tensor; got list", unchecked(type(model).hidden), model, [[1, 2]])


def test_ids_of_any_integer_dtype():
    model = tiny_model()
    expected = model(torch.tensor([[1, 2]]))[0]
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(model(torch.tensor([[1, 2]], dtype=dtype))[0], expected)


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = LanguageModel(tiny_model().config)
    logits, _ = model(torch.zeros(1, 3, dtype=torch.long, device="meta"))
    assert (logits.shape, logits.device.type) == ((1, 3, 11), "meta")


def tiny_model():
    return LanguageModel(halflife.preset("mamba2", hidden_size=16, num_layers=1, vocab_size=11, num_heads=2)).eval()
