"""Recall of an untrained SKA layer whose queries start as keys: with one power, a query recalls the next token."""

import pytest
import torch

from halflife.layers import build
from halflife.ops import koopman_attention


def read_out(power, query_init, mix="koopman"):
    """Return `[tokens, tokens]`: the similarity of the answer to token i, asked again at the end, to all values."""
    torch.manual_seed(0)
    size = 24
    layer = build(
        "ska", hidden_size=size, num_heads=1, rank=size, power=power, mix=mix, query_init=query_init, chunk_size=1
    )
    tokens = torch.linalg.qr(torch.randn(size, size)).Q[:16]  # orthonormal, so that values are distinct
    with torch.no_grad():
        layer.v_proj.weight.copy_(torch.eye(size))
        layer.out_proj.weight.copy_(torch.eye(size))
    asked = torch.stack([torch.cat([tokens, token[None]]) for token in tokens])
    return layer(asked)[0][:, -1].detach() @ tokens.T


def test_one_power_recalls_the_next_token():
    found = read_out(1, "key")
    assert (found[:-1].argmax(1) == torch.arange(1, 16)).all()  # no token follows the last one
    best = found.topk(2).values[:-1]
    assert (best[:, 0] > 50 * best[:, 1].abs()).all()


def test_no_power_recalls_the_token_itself():
    assert (read_out(0, "key").argmax(1) == torch.arange(16)).all()


def test_two_powers_recall_the_token_after_the_next():
    assert (read_out(2, "key")[:-2].argmax(1) == torch.arange(2, 16)).all()


def test_tokens_that_are_held_are_recalled_by_two_powers():
    """If each token of a pair fills four steps, K = 2 recalls better than K = 1. The operator moves on too slowly."""
    pairs, rank, right = 16, 48, {}
    for power in (1, 2):
        hits = 0
        for seed in range(8):
            draws = torch.randn(2 * pairs, rank, generator=torch.Generator().manual_seed(seed)).double()
            tokens = torch.nn.functional.normalize(draws, dim=-1)
            held = tokens.repeat_interleave(4, 0)[None, :, None]
            read, _ = koopman_attention(tokens[None, ::2, None], held, held, power=power, mode="prefix")
            hits += int(((read[0, :, 0] @ tokens[1::2].T).argmax(1) == torch.arange(pairs)).sum())
        right[power] = hits / (8 * pairs)
    assert right[2] == pytest.approx(0.984, abs=0.001)
    assert right[1] == pytest.approx(0.680, abs=0.001)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_queries_of_the_paper_recall_by_chance(power):
    """With the paper's initialisation, 16 tokens are recalled no better than by chance."""
    found = read_out(power, "own")
    hits = [(found.argmax(1) == (torch.arange(16) + shift)).sum() for shift in (0, 1, 2)]
    assert max(hits) <= 4


def test_learned_mixture_starts_half_way():
    mixed, plain, full = (read_out(1, "key", mix) for mix in ("learned", "ridge", "koopman"))
    torch.testing.assert_close(mixed, (plain + full) / 2)


def test_queries_that_start_as_keys_have_the_parameters_of_the_others():
    sizes = [sum(p.numel() for p in build("ska", hidden_size=32, query_init=i).parameters()) for i in ("key", "own")]
    assert sizes[0] == sizes[1]
