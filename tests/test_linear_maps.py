"""Linear maps are torch's own modules, and oneDNN takes their place for a time, where it is faster."""

import copy
import queue
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from helpers import assert_close, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from halflife import LanguageModel, Session, precision, preset
from halflife.data.byte_tokenizer import ByteTokenizer
from halflife.evaluation import evaluating, language
from halflife.initial import draws
from halflife.layers import init
from halflife.layers.rwkv7 import RWKV7, LoRA
from halflife.layers.ska import SKA
from halflife.models import PRESETS
from halflife.ops import linear as linear_module
from halflife.ops.backends import native
from halflife.ops.backends.native import build, products
from halflife.ops.linear import cast_weights, fast_linears, weight_of
from halflife.serve.engine import Engine
from halflife.serve.jobs import Done, Failed, Job, Settings

built = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 40, "num_heads": 2}
OF_SUMS = 0.052  # four times the largest difference between bfloat16 sums in two orders
PRODUCTS = ("forward", "input", "weight")


@pytest.fixture(autouse=True)
def has_products(monkeypatch):
    """A CPU with products of 16 bits, whatever this one has."""
    monkeypatch.setattr(precision, "_has_products", lambda dtype: True)


@pytest.fixture
def wins(monkeypatch):
    """A function that says which products oneDNN does faster."""

    def say(*values):
        monkeypatch.setattr(linear_module, "_helps", lambda: any(values))
        monkeypatch.setattr(linear_module, "faster", lambda: dict(zip(PRODUCTS, values, strict=True)))

    return say


def beside(plain, joined, parts, dim):
    """`split.beside`, which writes down whether it copied nothing."""
    whole = plain(parts, dim)
    joined.append(whole is not None)
    return whole


def maps(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("name", [*PRESETS, "mamba2+post+gate_rank", "mamba2+ska", "mamba2+log_linear"])
def test_every_linear_map_is_nn_linear_itself(name):
    """By this, bitsandbytes, torchao, PEFT and `quantize_dynamic` find layers."""
    with torch.device("meta"):
        model = LanguageModel(preset(name, **SIZES))
    assert maps(model)
    assert {type(module) for module in maps(model)} == {nn.Linear}


@built
@pytest.mark.parametrize("name", ["mamba2", "mesa", "rwkv7"])
def test_swap_and_restore(name, wins):
    """Outputs and gradients agree. After the block, every module is as before, also after an error."""
    wins(True, True, True)
    model, ids = LanguageModel(preset(name, **SIZES)), torch.randint(40, (2, 40))
    plain = [dict(vars(module)) for module in maps(model)]

    def run():
        loss = model(ids)[0].square().mean()
        return {"loss": loss, **dict(enumerate(torch.autograd.grad(loss, list(model.parameters()))))}

    expected = run()
    with fast_linears(model):
        assert all("forward" in vars(module) for module in maps(model))
        with fast_linears(model):  # again: the outer block restores
            found = run()
        assert_same(copy.deepcopy(model).state_dict(), model.state_dict())
    assert_close(found, expected, 1e-4)  # the gradients of decays are sums of both signs
    assert [vars(module).keys() for module in maps(model)] == [before.keys() for before in plain]
    assert_same(run(), expected)
    with pytest.raises(KeyError), fast_linears(model):
        raise KeyError
    assert not any("forward" in vars(module) for module in maps(model))


@built
@pytest.mark.parametrize("which", [(True, True, True), (True, False, True), (False, True, False)], ids=str)
@pytest.mark.parametrize("shape", [(2, 40, 48), (33, 1, 7), (50, 160)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_onednn(shape, which, bias, wins):
    wins(*which)
    layer, x = nn.Linear(shape[-1], 5, bias=bias), torch.randn(shape, requires_grad=True)
    run = partial(torch.autograd.functional.vjp, strict=True)
    weights = torch.randn(*shape[:-1], 5)
    exact = copy.deepcopy(layer).double()
    expected = run(exact, x.double(), weights.double())
    with fast_linears(layer):
        y, dx = run(layer, x, weights)
        layer(x).backward(weights)
    exact(x.detach().double()).backward(weights.double())
    assert_close({"y": y, "dx": dx}, {"y": expected[0], "dx": expected[1]}, 2e-6)
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, exact.get_parameter(name).grad, 2e-6)
    torch.library.opcheck(linear_module._linear, (x.detach().flatten(0, -2), layer.weight))


@built
def test_where_torchs_product_stays(wins):
    """Without a gain, with few rows, in other dtypes, under autocast and torch.func, and for subclasses of a tensor."""
    wins(True, True, True)
    layer, x = nn.Linear(8, 5), torch.randn(64, 8)

    class Marked(torch.Tensor):
        pass

    def same(layer, x):
        expected = layer(x)
        with fast_linears(layer):
            assert torch.equal(layer(x), expected)

    same(layer, x[:31])
    for dtype in (torch.bfloat16, torch.float64):
        same(copy.deepcopy(layer).to(dtype), x.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        same(layer, x)
    with fast_linears(layer):
        jacobian = torch.func.jacrev(layer)(x[:33])
    torch.testing.assert_close(jacobian[0, :, 0], layer.weight)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Marked))
    same(layer, x)
    wins(False, False, False)
    with fast_linears(layer):
        assert "forward" not in vars(layer)


@built
def test_adapters_keep_working(wins):
    """A wrapper in the place of a map, as PEFT's, calls the map inside it."""
    wins(True, True, True)
    model, ids = LanguageModel(preset("gated_deltanet", **SIZES)), torch.randint(40, (1, 40))

    class Adapted(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer, self.shift = base_layer, nn.Parameter(torch.ones(base_layer.out_features))

        def forward(self, x):
            return self.base_layer(x) + self.shift

    mixer = model.blocks[0].mixer
    before = model(ids)[0]
    for name in ("qkv_proj", "beta_proj"):
        setattr(mixer, name, Adapted(getattr(mixer, name)))
    expected = model(ids)[0]
    assert not torch.equal(expected, before)
    with fast_linears(model):
        assert_close(model(ids)[0], expected, 1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_dynamic_quantisation_finds_the_maps():
    model = LanguageModel(preset("mamba2", **SIZES))
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    names = {name for name, module in quantised.named_modules() if "quantized" in type(module).__module__}
    assert {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} <= names
    ids = torch.randint(40, (1, 9))
    assert_close(quantised(ids)[0], model(ids)[0], 0.2)


def test_a_session_reads_long_texts_by_it(monkeypatch, wins):
    """A single token has too few rows, and is read without the swap."""
    entered = []

    def spy(model):
        entered.append(model)
        return fast_linears(model)

    monkeypatch.setattr("halflife.models.session.fast_linears", spy)
    session = Session(LanguageModel(preset("mamba2", **SIZES)))
    session.feed([3] * 40)
    session.feed([5])
    assert entered == [session.model]


@built
def test_evaluation_and_the_server_use_it(wins):
    wins(True, True, True)
    model, swapped = LanguageModel(preset("mamba2", **SIZES)), []
    model.blocks[0].mixer.in_proj.register_forward_pre_hook(lambda map, _: swapped.append("forward" in vars(map)))
    ids = torch.randint(40, (1, 40))
    with evaluating(model):
        model(ids)
    language.by_position(model, [(ids, ids)])
    language.document_loss(model, [ids[0]])
    events = queue.Queue()
    engine = Engine(model, ByteTokenizer()).start()
    engine.submit(Job(ids[0].tolist(), Settings(max_tokens=1), events.put))
    while not isinstance(events.get(timeout=60), Done | Failed):
        pass
    engine.close()
    assert len(swapped) >= 4
    assert all(swapped[:4])
    model(ids)
    assert not swapped[-1]


def test_products_are_measured():
    assert set(products.measure()) == set(PRODUCTS)
    x, weight = torch.randn(6, 4), torch.randn(3, 4)
    torch.testing.assert_close(native.by_onednn(x, weight), x @ weight.t())


# ------------------------------------------------------------------------------------------ initial values


def test_laws():
    torch.manual_seed(0)
    assert init.drawn(64, 200, init.uniform(0.5)).weight.abs().max().item() == pytest.approx(0.5 / 8, rel=0.01)
    assert not init.drawn(8, 4, init.uniform(0)).weight.any()
    rows = init.drawn(16, 4, init.orthogonal).weight
    torch.testing.assert_close(rows @ rows.T, torch.eye(4))
    assert not init.drawn(8, 4, init.zero_bias, bias=True).bias.any()
    with torch.device("meta"):
        assert init.drawn(8, 4, init.orthogonal).weight.is_meta


class Ones(nn.Module):
    def __init__(self):
        super().__init__()
        self.x, self.calls = nn.Parameter(torch.empty(2)), 0
        self.reset_parameters()

    @draws
    def reset_parameters(self):
        self.calls += 1
        self.x.fill_(1)


def test_nothing_is_drawn_on_the_meta_device():
    with torch.device("meta"):
        module = Ones()
    assert module.calls == 0
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.x.tolist() == [1, 1]


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_draws_itself_again(name):
    """The laws of a layer hold after a reset, on memory with any content, and the same seed gives the same."""
    with torch.device("meta"):
        model = LanguageModel(preset(name, **SIZES))
    model.to_empty(device="cpu")
    drawn = []
    for _ in range(2):
        for x in model.state_dict().values():
            x.fill_(7)
        torch.manual_seed(0)
        model.reset_parameters()
        drawn.append({name: x.clone() for name, x in model.state_dict().items()})
    assert_same(*drawn)
    for key, x in drawn[0].items():
        assert not (x == 7).any(), key
        if key.endswith("decay_proj.up.bias") and name == "fox":
            assert not x.any()
        if key.endswith("mixer.out_proj.weight"):
            mixer = model.get_submodule(key.removesuffix(".out_proj.weight"))
            assert isinstance(mixer, (RWKV7, SKA)) == (not x.any())


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "llama"])
def test_weights_cast_together_are_those_of_autocast(name):
    """Outputs and gradients agree to the bit, also of a frozen weight, and parameters return after an error."""
    model, ids = LanguageModel(preset(name, **SIZES)), torch.randint(40, (2, 40))
    frozen = maps(model)[0].weight.requires_grad_(False)
    held = [module.weight for module in maps(model)]

    def run(context):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), context:
            logits = model(ids)[0]
            narrow = {module.weight.dtype for module in maps(model)}
            narrow |= {module.up.dtype for module in model.modules() if isinstance(module, LoRA)}
            assert [type(module) for module in maps(model)] == [nn.Linear] * len(held)
        logits.float().square().mean().backward()
        return narrow, [logits, *[x.grad for x in model.parameters() if x is not frozen]]

    plain, together = run(nullcontext()), run(cast_weights(model, ids))
    assert (plain[0], together[0]) == ({torch.float32}, {torch.bfloat16})
    for first, second in zip(plain[1], together[1], strict=True):
        assert_same(first, second)
    with pytest.raises(KeyError), torch.autocast("cpu", torch.bfloat16), cast_weights(model, ids):
        raise KeyError
    assert all(module.weight is weight for module, weight in zip(maps(model), held, strict=True))
    assert frozen.grad is None


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", ["gated_deltanet", "gla", "llama", "mamba2+gate_rank", "hgrn2"])
def test_maps_of_one_input_are_one_product(name, autocast, monkeypatch):
    """The second pass has fewer products; the gradients are those of single products, up to the rounding of sums.

    So they have under autocast, and in a model of 16 bits.
    """
    torch.manual_seed(0)
    model, ids = LanguageModel(preset(name, **SIZES)), torch.randint(40, (2, 40))
    model, x = (model, ids) if autocast else (model.bfloat16(), torch.ones(8, 1, dtype=torch.bfloat16))
    counts = []

    def gradients(context):
        model.zero_grad()
        with FlopCounterMode(display=False) as flops, ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
            for block in model.blocks:
                stack.enter_context(context(block, x))
            loss = model(ids)[0].float().logsumexp(-1).mean()
            loss.backward()
        counts.append(flops.get_total_flops())
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    alone = [gradients(lambda *_: nullcontext()), gradients(cast_weights)]
    calls = []
    plain = linear_module._Product.apply
    monkeypatch.setattr(
        linear_module._Product, "apply", lambda x, *weights: calls.append(weights) or plain(x, *weights)
    )
    monkeypatch.setattr(linear_module, "beside", partial(beside, linear_module.beside, joined := []))
    together = gradients(cast_weights)
    assert [len(weights) for weights in calls] == [len(g) for b in model.blocks for g in vars(b)["_one_product"]]
    assert calls
    assert joined.count(True) >= 2 * len(calls)  # the weights, forward and backward, are not copied
    assert counts[0] == counts[1] == counts[2]
    assert_same(alone[0], alone[1])
    assert_close(together, alone[0], OF_SUMS)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_checkpoint_runs_the_same_products_again(autocast):
    """In the first step too, which does not know yet which maps read one input, and after a pass that found out."""
    block = nn.ModuleDict({name: nn.Linear(4, 3, bias=False) for name in "ab"})
    x = torch.randn(32, 4, requires_grad=True)
    if not autocast:
        block, x = block.bfloat16(), x.detach().bfloat16().requires_grad_()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), cast_weights(block, x):
            return block["a"](x) * block["b"](x)

    for _ in range(2):
        (expected,) = torch.autograd.grad(run(x).sum(), x)
        for known in (None, vars(block)["_one_product"]):
            vars(block)["_one_product"] = known
            y = checkpoint(run, x, use_reentrant=False)
            with torch.no_grad():
                run(x)  # as a reference model that shares these weights, which finds out
            (found,) = torch.autograd.grad(y.sum(), x)
            assert_close(found, expected, OF_SUMS)
    assert vars(block)["_one_product"]


@pytest.mark.parametrize(("tokens", "gradients", "together"), [(32, True, 2), (31, True, 0), (32, False, 0)])
def test_few_tokens_do_not_pay_for_copies_of_weights(tokens, gradients, together):
    """Nor do those of a model in 16 bits that is only asked; the maps then keep their weights."""
    block = nn.ModuleDict({name: nn.Linear(4, 3, bias=False) for name in "ab"}).bfloat16()
    x, held = torch.ones(tokens, 4, dtype=torch.bfloat16), {part.weight for part in block.values()}
    vars(block)["_one_product"] = [[*block.values()]]
    with torch.set_grad_enabled(gradients), cast_weights(block, x):
        assert sum(part.weight not in held for part in block.values()) == together


@pytest.mark.parametrize("neighbours", [True, False])
def test_gradients_of_one_product(neighbours):
    """First and second derivatives in float64, of weights that lie beside each other and of others."""
    x, sizes = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True), (2, 1, 5)
    whole = torch.randn(sum(sizes), 4, dtype=torch.float64)
    weights = [w if neighbours else w.clone() for w in whole.split(sizes)]
    weights = [w.requires_grad_(i != 1) for i, w in enumerate(weights)]  # one is frozen
    assert [y.shape[-1] for y in linear_module._Product.apply(x, *weights)] == [*sizes]
    assert torch.autograd.gradcheck(linear_module._Product.apply, (x, *weights))
    assert torch.autograd.gradgradcheck(linear_module._Product.apply, (x, *weights))


def test_a_map_of_another_input_is_its_own_product():
    """A group is for one input: a map that then reads something else, or has been replaced, runs alone."""
    block = nn.ModuleDict({name: nn.Linear(4, 3, bias=False) for name in "ab"})
    x, y = torch.randn(2, 4), torch.randn(2, 4)

    def run(second):
        with torch.autocast("cpu", torch.bfloat16), cast_weights(block, x):
            return {"a": block["a"](x), "b": block["b"](second)}

    first = run(x)
    assert vars(block)["_one_product"] == [[block["a"], block["b"]]]
    assert_same(run(x), first)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same({"b": run(y)["b"]}, {"b": block["b"](y)})
    block["b"].weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert not linear_module._Products([*block.values()], vars(block)["_one_product"]).group
    block["b"] = nn.Linear(4, 5, bias=False)
    assert [part.shape[-1] for part in run(x).values()] == [3, 5]


def test_weights_that_are_not_cast():
    """Without autocast, in another dtype, or of a subclass, a map keeps its weight."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()), torch.ones(2)
    with cast_weights(model, x):
        assert model[0].weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), cast_weights(model, x):
        assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.bfloat16, torch.float64)
    model = type("Quantised", (nn.Linear,), {})(4, 4)
    with torch.autocast("cpu", torch.bfloat16), cast_weights(model, x):
        assert model.weight.dtype == torch.float32


def test_maps_that_are_a_weight_alone():
    """Those of a block under `cast_weights` are; one with a bias, a hook or another `forward` is not."""
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    x = torch.zeros(1, 4)
    assert weight_of(model[0]) is model[0].weight
    with fast_linears(model):
        assert weight_of(model[0]) is model[0].weight
    with torch.autocast("cpu", torch.bfloat16), cast_weights(model, x):
        assert weight_of(model[0]).dtype == torch.bfloat16
    assert weight_of(nn.Linear(4, 4)) is None
    assert weight_of(nn.LazyLinear(4, bias=False)) is None
    model[0].register_forward_hook(lambda *_: None)
    model[1].forward = lambda x: x + 1
    assert [weight_of(module) for module in model] == [None, None]


def test_second_derivatives_of_cast_weights():
    model, x, found = nn.Linear(4, 1, bias=False), torch.randn(3, 4), []
    for context in (nullcontext(), cast_weights(model, x)):
        with torch.autocast("cpu", torch.bfloat16), context:
            y = model(x).square().sum()
        (first,) = torch.autograd.grad(y, model.weight, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), model.weight)[0])
    assert_same(*found)
