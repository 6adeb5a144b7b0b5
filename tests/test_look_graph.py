"""The step with a lens gives the numbers of the lens, token by token."""

import pytest
import torch
from helpers import add_noise
from playground_step import SEEN, LensStep

import halflife
from halflife.export.graphs import plain
from halflife.models import LanguageModel, preset

TOKENS = 11
TOLERANCE = 4e-12


def tiny(name):
    config = preset(name, hidden_size=32, num_layers=2, num_heads=2, train_length=16, vocab_size=64)
    return add_noise(LanguageModel(config).eval(), 0.1)


def texts(step, run, ids):
    """The outputs of each token by their names."""
    given, found = list(step.inputs), []
    count = len(given) - 2
    for t, token in enumerate(ids.tolist()):
        slot = torch.zeros_like(given[1])
        slot[t] = 1
        results = run(torch.tensor([[token]]), slot, *given[2:])
        given[2:] = results[1 : 1 + count]
        found.append(dict(zip(step.output_names, results, strict=True)))
    return found


def assert_lens(model, ids, found, tolerance):
    """Compare results with the model and its lens, whose numbers are float32."""
    logits, _ = model(ids.view(1, -1))
    for t, results in enumerate(found):
        assert (results["logits"][0, 0] - logits[0, t]).abs().max() < tolerance * logits.abs().max()
    lens = halflife.look(model, ids)
    for one in lens.details(lens.heads, cursors=len(ids)):
        layer, head = one.head.place.layer, one.head.head
        weights, norms, sizes = (torch.stack([results[f"{layer}.{name}"][head] for results in found]) for name in SEEN)
        for got, expected in ((weights, one.weights), (norms / norms.diagonal(), one.left), (sizes, one.sizes)):
            scale = abs(expected.values).max()
            assert abs(got.double().numpy() - expected.values).max() < max(tolerance, 2.4e-7) * scale


@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet", "deltanet", "rwkv7"])
@torch.no_grad()
def test_a_step_gives_the_numbers_of_the_lens(name):
    model, ids = tiny(name).double(), torch.randint(0, 64, (TOKENS,))
    step = LensStep(model, slots=TOKENS)
    with plain(model):
        found = texts(step, step, ids)
    assert_lens(model, ids, found, TOLERANCE)


def test_models_without_one_op_a_layer_are_refused():
    with pytest.raises(ValueError, match="has 0 ops of linear_attention"):
        LensStep(tiny("mamba2+gate_rank"), slots=4)
