"""The loss without all logits at once, against the loss with them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from halflife import LanguageModel, preset
from halflife.evaluation.language import by_position, document_loss
from halflife.hf import HalflifeForCausalLM
from halflife.models import loss
from halflife.models.loss import ChunkedLoss, mean_loss, token_losses
from halflife.ops.cross_entropy import losses_and_errors
from halflife.tasks import IGNORED
from halflife.training import sharding
from halflife.training.fit import Objective


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of three tokens, for a vocabulary of 32."""
    monkeypatch.setattr(loss, "LOGITS", 3 * 32)


def tensors(n, dtype, vocabulary=32, width=5):
    hidden = torch.randn(n, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(vocabulary, (n,))


def both(function, hidden, weight, labels, factor=3.0):
    """The loss, and its gradients as the backward pass scales them."""
    value = function(hidden, weight, labels)
    return [value.detach(), *torch.autograd.grad(factor * value, (hidden, weight))]


def plain(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)), labels)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 30])
def test_the_loss_and_its_gradients_in_float64(chunks, n):
    inputs = tensors(n, torch.float64)
    for found, expected in zip(both(ChunkedLoss.apply, *inputs), both(plain, *inputs), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("function", [ChunkedLoss.apply, mean_loss])
@pytest.mark.parametrize("n", [2, 12])
def test_ignored_labels_count_for_nothing(chunks, function, n):
    hidden, weight, labels = tensors(n, torch.float64)
    labels[1::2] = IGNORED
    for found, expected in zip(
        both(function, hidden, weight, labels), both(plain, hidden, weight, labels), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
    assert not any(x.any() for x in both(function, hidden, weight, torch.full_like(labels, IGNORED)))


class Fixed(LanguageModel):
    """A model whose hidden states are given."""

    def __init__(self, hidden, weight):
        nn.Module.__init__(self)
        self.given, self.head = hidden, None
        self.__dict__["embedding"] = SimpleNamespace(weight=weight)

    def hidden(self, *_, **__):
        return self.given, ()


class NoReads(TorchDispatchMode):
    """Raises where the host of a device would read a value or wait for a shape."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten, packet = torch.ops.aten, function.overloadpacket
        masked = packet is aten.index and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masked or packet in (aten._local_scalar_dense, aten.nonzero):
            raise RuntimeError(f"the host waits for {function}")
        return function(*args, **(kwargs or {}))


def test_a_device_is_not_waited_for(chunks, monkeypatch):
    monkeypatch.setattr(loss, "_scored", lambda *given: given)  # as on a device
    hidden, weight, labels = tensors(12, torch.float32)
    labels[1::2] = IGNORED
    expected = both(plain, hidden, weight, labels)
    with NoReads():
        found = both(mean_loss, hidden, weight, labels)
        assert_raises(RuntimeError, "waits for", lambda: hidden[labels != IGNORED])
    torch.testing.assert_close(found, expected)
    with FakeTensorMode():  # of a GPU, on which a mask of hidden states would raise, too
        labels = torch.zeros(2, 15, dtype=torch.long, device="cuda")
        model = Fixed(torch.empty(2, 15, 5, device="cuda"), torch.empty(1, 5, device="cuda"))
        assert Objective(model)(labels, labels, num_items_in_batch=labels.sum())["loss"].shape == ()


def test_a_model_over_two_gpus(monkeypatch):
    """The Trainer counts the labels on the first one, and the head is on the second."""
    mode = FakeTensorMode()
    first, second = (partial(FakeTensor, mode, device=torch.device("cuda", i)) for i in range(2))
    labels, items = (first(torch.zeros(shape, dtype=torch.long, device="meta")) for shape in ((2, 5), ()))
    hidden, mean = (second(torch.zeros(shape, device="meta")) for shape in ((2, 5, 8), ()))
    monkeypatch.setattr(loss, "mean_loss", lambda *_: mean)
    model = SimpleNamespace(loss_function=ForCausalLMLoss, lm_head=None)
    with mode:
        assert HalflifeForCausalLM._chunked_loss(model, hidden, None, labels, items).device == hidden.device


def test_gradcheck(chunks):
    hidden, weight, labels = tensors(7, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: ChunkedLoss.apply(h, w, labels), (hidden, weight))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-7), (torch.bfloat16, 2e-2)])
def test_lower_precision(chunks, dtype, tolerance):
    hidden, weight, labels = tensors(30, dtype)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    found, expected = both(mean_loss, hidden, weight, labels), both(plain, *wide, labels)
    assert found[0].dtype == torch.float32
    assert [x.dtype for x in found[1:]] == [dtype] * 2
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_extreme_logits_and_a_part_without_gradient(chunks):
    hidden, weight, labels = tensors(8, torch.float32)
    value = mean_loss(1e4 * hidden, weight, labels)
    torch.testing.assert_close(value, plain(1e4 * hidden, weight, labels))
    value = mean_loss(hidden, weight.detach(), labels)
    torch.testing.assert_close(
        torch.autograd.grad(value, hidden), torch.autograd.grad(plain(hidden, weight, labels), hidden)
    )


def test_an_ignored_label_has_the_loss_0_whatever_the_logits():
    logits, labels = torch.randn(3, 5), torch.tensor([IGNORED, 2, 3])
    logits[0] = torch.tensor([-torch.inf, 1, 2, 3, 4])
    losses, errors = losses_and_errors(logits, labels, torch.tensor(1.0))
    assert losses[0] == 0
    assert not errors[0].any()
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none"))


def test_few_logits_are_computed_at_once(monkeypatch):
    monkeypatch.setattr(ChunkedLoss, "apply", lambda *_: pytest.fail("chunked"))
    inputs = tensors(10, torch.float32)
    assert mean_loss(*inputs) == plain(*inputs)


def test_no_tensor_has_all_logits(chunks):
    """With autograd: the largest tensor that any operation returns has a chunk of logits, or a parameter's size."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            found = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]
            largest = max([largest, *(x.numel() for x in found)])
            return out

    hidden, weight, labels = tensors(100, torch.float32, width=2)
    with Watch():
        mean_loss(hidden, weight, labels).backward()
        token_losses(hidden.detach(), weight.detach(), labels)
    assert largest <= max(3 * 32, hidden.numel(), weight.numel(), len(labels))


def test_losses_of_tokens(chunks):
    hidden, weight, labels = tensors(20, torch.float32)
    labels[::3] = IGNORED
    with torch.no_grad():
        expected = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none")
        torch.testing.assert_close(token_losses(hidden, weight, labels), expected)


def model(**sizes):
    return LanguageModel(preset("mamba2", **{"hidden_size": 16, "num_layers": 1, "vocab_size": 32, **sizes})).double()


def gradients(module, run):
    module.zero_grad()
    value = run()
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("tie", [True, False])
def test_training_with_a_tied_head_and_without(monkeypatch, tie):
    objective = Objective(model(tie_embeddings=tie))
    ids = torch.randint(32, (2, 9))
    labels = ids.roll(-1, 1)
    labels[:, -2:] = IGNORED
    expected = gradients(objective, lambda: objective(ids, labels)["loss"])
    monkeypatch.setattr(loss, "LOGITS", 3 * 32)
    found = gradients(objective, lambda: objective(ids, labels)["loss"])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def test_training_under_autocast(monkeypatch):
    objective = Objective(model().float())
    ids = torch.randint(32, (2, 9))

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return objective(ids, ids)["loss"]

    expected = gradients(objective, run)
    monkeypatch.setattr(loss, "LOGITS", 3 * 32)
    found = gradients(objective, run)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, grad in found[1].items():
        assert (grad - expected[1][name]).norm() <= 2e-2 * expected[1][name].norm() + 1e-6, name


def test_autocast_leaves_float64(chunks):
    inputs = tensors(7, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mean_loss(*inputs), ChunkedLoss.apply(*inputs))


@pytest.mark.parametrize("tie", [True, False])
def test_sharded_parameters(chunks, tie):
    """One process of FSDP2, which gathers and scatters as many do."""
    whole, ids = model(tie_embeddings=tie).float(), torch.randint(32, (2, 9))
    shards = model(tie_embeddings=tie).float()
    shards.load_state_dict(whole.state_dict())
    expected = gradients(objective := Objective(whole), lambda: objective(ids, ids)["loss"])
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = Objective(shards)
        sharding.fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        value = sharded(ids, ids)["loss"]
        value.backward()
        torch.testing.assert_close(value.detach(), expected[0])
        for name, p in sharded.named_parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, expected[1][name], msg=name)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("items", [None, 5])
def test_the_door_to_transformers(monkeypatch, tie, items):
    wrapped = HalflifeForCausalLM.of(model(tie_embeddings=tie)).train()
    ids = torch.randint(32, (2, 9))
    labels = ids.clone()
    labels[0, 3:] = IGNORED
    expected = gradients(wrapped, lambda: wrapped(ids, labels=labels, num_items_in_batch=items).loss)
    monkeypatch.setattr(loss, "LOGITS", 3 * 32)
    assert wrapped(ids, labels=labels).logits is not None  # whatever their number
    wrapped.config.chunked_loss = True
    found = gradients(wrapped, lambda: wrapped(ids, labels=labels, num_items_in_batch=items).loss)
    # transformers rounds the logits to float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, check_dtype=False)
    assert wrapped(ids, labels=labels).logits is None
    shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    torch.testing.assert_close(wrapped(ids, shift_labels=shifted).loss, wrapped(ids, labels=labels).loss)
    assert wrapped(ids).logits.shape == (2, 9, 32)
    assert wrapped.eval()(ids, labels=labels).logits.shape == (2, 9, 32)
    wrapped.train().loss_function = lambda logits, **_: logits.sum()
    assert_raises(ValueError, "another one", wrapped, ids, labels=labels)


def test_a_micro_batch_without_labels_adds_nothing(monkeypatch):
    """The trainer of transformers divides by the labels of all micro-batches, so one may have none."""
    wrapped, ids = HalflifeForCausalLM.of(model()).train(), torch.randint(32, (2, 9))
    wrapped.config.chunked_loss = True
    none = torch.full_like(ids, IGNORED)
    assert wrapped(ids, labels=none, num_items_in_batch=5).loss == 0
    monkeypatch.setattr(loss, "LOGITS", 3 * 32)
    found, grads = gradients(wrapped, lambda: wrapped(ids, labels=none, num_items_in_batch=5).loss)
    assert found == 0
    assert all(not grad.any() for grad in grads.values())


def test_evaluation(monkeypatch):
    net, ids = model().float().eval(), torch.randint(32, (2, 17))
    labels = ids.roll(-1, 1)

    def measured():
        rows = by_position(net, [(ids, labels)])
        return rows, torch.tensor(document_loss(net, [ids[0], ids[1], ids[0, :5]]))

    expected = measured()
    monkeypatch.setattr(loss, "LOGITS", 3 * 32)
    torch.testing.assert_close(measured(), expected, rtol=1e-6, atol=1e-6)


class Adapted(nn.Module):
    """A head in the place of a linear map, as libraries of adapters put it."""

    def __init__(self, map):
        super().__init__()
        self.base_layer, self.out_features, self.shift = map, map.out_features, nn.Parameter(torch.randn(32))

    def forward(self, x):
        return self.base_layer(x) + self.shift


@pytest.mark.parametrize("kind", ["plain", "hooked", "adapted"])
def test_heads_that_are_modules(chunks, kind):
    """A head that is more than its weight is called, once a chunk, and its parameters get gradients."""
    hidden, weight, labels = tensors(7, torch.float32)
    map = nn.Linear(5, 32, bias=False)
    map.weight = nn.Parameter(weight.detach())
    head = Adapted(map) if kind == "adapted" else map
    if kind == "hooked":
        map.register_forward_hook(lambda module, inputs, y: 2 * y)
    expected, parameters = F.cross_entropy(head(hidden), labels), [hidden, *head.parameters()]
    gradients = torch.autograd.grad(expected, parameters)
    found = mean_loss(hidden, head, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, parameters), gradients)
    with torch.no_grad():
        torch.testing.assert_close(token_losses(hidden, head, labels).mean(), expected.detach())
