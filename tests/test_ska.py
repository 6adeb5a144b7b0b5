"""The layer of spectral Koopman attention: its action mask, its Clebsch–Gordan lift, its options, its start."""

from functools import partial

import pytest
import torch
from helpers import assert_close, assert_raises, assert_same, assert_streams, cases, generator, ska_layer, slices

from halflife import LanguageModel, layers, preset
from halflife.layers.parts import clebsch_gordan
from halflife.ops import koopman_attention

HIDDEN, LENGTH, HEADS = 16, 13, 2
build = partial(ska_layer, HIDDEN)
EXACT = 4 * 7e-13  # in float64, relative to the largest entry; the operators of a few keys have the condition 1/ε


def inputs(batch=2, length=LENGTH):
    return torch.randn(batch, length, HIDDEN, generator=generator("ska", batch, length), dtype=torch.float64)


def action_mask(batch=2, length=LENGTH):
    return torch.rand(batch, length, generator=generator("mask", batch, length)) < 0.6


def heads_of(layer, x):
    """Return queries, keys and values of the layer's projections, `[B, T, H, …]`. Queries start as the keys."""
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    return q + k if layer.query_init == "key" else q, k, v


def output(layer, q, k, v):
    y, _ = koopman_attention(q, k, v, **layer.readout.settings(), **layer.options)
    return layer.out_proj((layer.readout.eta[:, None] * y).flatten(-2))


@pytest.mark.parametrize("lift", ["none", "cg"])
def test_masked_tokens_are_never_written(lift):
    """Masked tokens act as if their keys and values were zero. They still have outputs, from their queries."""
    layer, x, mask = build(lift=lift), inputs(), action_mask()
    q, k, v = heads_of(layer, x)
    q, k = (clebsch_gordan(q), clebsch_gordan(k)) if lift == "cg" else (q, k)
    written = mask[..., None, None]
    y, _ = layer(x, shared={"action_mask": mask})
    assert_close(y, output(layer, q, k * written, v * written), EXACT)
    changed = torch.where(mask.unsqueeze(-1), x, 100 * x + 1)
    assert_same(layer(changed, shared={"action_mask": mask})[0][mask], y[mask])


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
def test_without_pairs_a_masked_token_equals_a_removed_one(dtype):
    """Ridge regression does not depend on the order. The operator M does, because a cut would pair other keys."""
    x, mask = inputs(batch=1), action_mask(batch=1)
    given = {"action_mask": mask.to(dtype)}
    ridge, pairs = build(power=0, refresh="token"), build(power=1, refresh="token")
    assert_close(ridge(x, shared=given)[0][mask], ridge(x[mask].unsqueeze(0))[0][0], EXACT)
    assert (pairs(x, shared=given)[0][mask] - pairs(x[mask].unsqueeze(0))[0][0]).abs().max() > 0.1


def test_a_mask_of_ones_changes_nothing_and_one_of_zeros_writes_nothing():
    layer, x = build(), inputs()
    assert_same(layer(x, shared={"action_mask": torch.ones(2, LENGTH)})[0], layer(x)[0])
    y, state = layer(x, shared={"action_mask": torch.zeros(2, LENGTH)})
    assert not y.any()
    assert not any(state[name].any() for name in ("gram", "transition", "values", "norm", "pending_keys"))


@pytest.mark.parametrize("refresh", ["chunk", "token"])
def test_a_masked_sequence_streams_like_the_whole(refresh):
    """Single tokens take the rank-one path where every token has an operator."""
    layer, x, mask = build(refresh=refresh), inputs(), action_mask()
    assert_streams(lambda x, state: layer(x[0], state, shared={"action_mask": x[1]}), (x, mask), EXACT)


def test_a_masked_sequence_packed_and_padded():
    layer, lengths = build(), [5, 0, 8]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x, mask = inputs(1), action_mask(1)
    packed, _ = layer(x, cu_seqlens=bounds, shared={"action_mask": mask})
    padded, masks, seen = x.new_full((3, 9, HIDDEN), 1e3), torch.ones(3, 9), torch.zeros(3, 9)
    for row, tokens in enumerate(slices(bounds.tolist())):
        alone, _ = layer(x[:, tokens], shared={"action_mask": mask[:, tokens]})
        assert_close(packed[:, tokens], alone, EXACT)
        if lengths[row]:  # on the right
            padded[row, -lengths[row] :], masks[row, -lengths[row] :] = x[0, tokens], mask[0, tokens].float()
            seen[row, -lengths[row] :] = 1
    y, _ = layer(padded, attention_mask=seen, shared={"action_mask": masks})
    assert_close(y[seen.bool()], packed[0], EXACT)
    assert not y[seen == 0].any()


def test_a_mask_of_later_tokens_moves_nothing():
    layer, x, mask = build().float(), inputs().float(), action_mask()
    later = mask.clone()
    later[:, 7:] = ~mask[:, 7:]
    given, changed = (layer(x, shared={"action_mask": m})[0] for m in (mask, later))
    assert_same(changed[:, :7], given[:, :7])
    assert not torch.equal(changed, given)


def test_a_mask_that_does_not_fit():
    for attention_mask in (None, torch.ones(2, LENGTH)):
        with pytest.raises(ValueError, match=r"action_mask must be \[B, T\] = \(2, 13\); got \(2, 12\)"):
            build()(inputs(), attention_mask=attention_mask, shared={"action_mask": torch.ones(2, LENGTH - 1)})


def model(name):
    torch.manual_seed(0)
    built = LanguageModel(preset(name, hidden_size=HIDDEN, num_layers=3, vocab_size=11, num_heads=HEADS))
    for block in built.blocks:
        if block.mixer.reads_action_mask:
            torch.nn.init.normal_(block.mixer.out_proj.weight)
            block.mixer.options["chunk_size"] = 3
    return built.double()


def test_a_model_hands_its_mask_to_its_koopman_layers():
    lm, mask = model("mamba2+ska"), action_mask()
    ids = torch.randint(11, (2, LENGTH), generator=generator("ids"))
    (where,) = (i for i, block in enumerate(lm.blocks) if block.mixer.reads_action_mask)
    seen = []
    lm.blocks[where].mixer.register_forward_hook(lambda _, args, kwargs, out: seen.append(kwargs), with_kwargs=True)
    masked, _ = lm(ids, action_mask=mask)
    assert torch.equal(seen[0]["shared"]["action_mask"], mask)
    assert (masked - lm(ids)[0]).abs().max() > 1e-3
    assert_same(lm(ids, action_mask=torch.ones_like(mask))[0], lm(ids)[0])
    first, state = lm(ids[:, :5], action_mask=mask[:, :5])
    second, _ = lm(ids[:, 5:], state, action_mask=mask[:, 5:])
    assert_close(torch.cat([first, second], 1), masked, EXACT)


@pytest.mark.parametrize("name", ["mamba2+ska", "llama+ska"])
def test_a_padded_model_unpads_its_mask(name):
    lm, mask = model(name), action_mask()
    ids = torch.randint(11, (2, LENGTH), generator=generator("ids"))
    seen = torch.arange(LENGTH) >= torch.tensor([[0], [4]])
    y, _ = lm(ids, attention_mask=seen, action_mask=mask)
    for row in range(2):
        alone, _ = lm(ids[row, seen[row]][None], action_mask=mask[row, seen[row]][None])
        assert_close(y[row, seen[row]], alone[0], EXACT)


def test_a_model_without_koopman_layers_refuses_a_mask():
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"action_mask is for layers of Koopman attention .* this model has none"):
        model("mamba2")(ids, action_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"action_mask must be \[B, T\] = \(1, 4\); got \(1, 3\)"):
        model("mamba2+ska")(ids, action_mask=torch.ones(1, 3))


def test_the_lift_by_complex_numbers():
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    z = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
    expected = torch.cat([z.abs() ** 2, (z * z).real, (z * z).imag], -1)
    assert clebsch_gordan(x).shape == (3, 5, 12)
    assert_close(clebsch_gordan(x), expected, 4 * 1e-15)


def test_turning_pairs_leaves_the_invariants_and_doubles_the_angle_of_the_harmonics():
    """Theorem B.2 and Eq. 32 of Echo hold."""
    x, angles = torch.randn(6, 4, 2, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64) * 7 - 3.5

    def turned(pairs, by):
        cosine, sine = by.cos(), by.sin()
        a, b = pairs.unbind(-1)
        return torch.stack([cosine * a - sine * b, sine * a + cosine * b], -1)

    before, after = (clebsch_gordan(pairs.flatten(-2)) for pairs in (x, turned(x, angles)))
    assert_close(after[:, :4], before[:, :4], 4 * 1e-15)
    harmonics = torch.stack([before[:, 4:8], before[:, 8:]], -1)
    assert_close(torch.stack([after[:, 4:8], after[:, 8:]], -1), turned(harmonics, 2 * angles), 4 * 1e-15)
    gram = before[:, :4].T @ before[:, :4]
    assert_close(after[:, :4].T @ after[:, :4], gram, 4 * 1e-15)  # Corollary B.3


def test_a_lifted_layer_is_the_op_on_lifted_heads():
    """Keys are lifted from 2 r / 3 projected numbers. The state has the rank r."""
    layer, x = build(rank=9, lift="cg"), inputs()
    q, k, v = heads_of(layer, x)
    assert q.shape[-1] == k.shape[-1] == 6
    y, state = layer(x)
    assert_close(y, output(layer, clebsch_gordan(q), clebsch_gordan(k), v), EXACT)
    assert state["gram"].shape == (2, HEADS, 9, 9)


def test_a_narrow_layer_is_lifted_in_float32():
    layer = build(lift="cg").bfloat16()
    seen = {}
    layer.k_proj.register_forward_hook(lambda _, args, out: seen.update(k=out))
    _, state = layer(inputs().bfloat16())
    keys = clebsch_gordan(seen["k"].double().unflatten(-1, (HEADS, -1)))[:, :12]
    assert_close(state["gram"], torch.einsum("bthr,bths->bhrs", keys, keys), 4 * 3e-7)


@cases(
    "options, message",
    ({"mix": "mean"}, "unknown mix 'mean'.*koopman, ridge, learned, powers"),
    ({"lift": "cgg"}, "unknown lift 'cgg'.*none, cg"),
    ({"query_init": "value"}, "unknown query_init 'value'.*key, own"),
    ({"refresh": "never"}, "unknown refresh 'never'.*chunk, token"),
    ({"normalization": "batch"}, "unknown normalization 'batch'.*causal, sequence"),
    ({"rank": 0}, "rank of layer ska must be a whole number, 1 or more"),
    ({"rank": 8, "lift": "cg"}, "rank must be a multiple of 3 for lift 'cg'; got 8"),
    ({"chunk_size": 0}, "chunk_size of layer ska must be a whole number, 1 or more"),
    ({"power": -1}, "power of layer ska must be a whole number, 0 or more"),
    ({"power": 0, "mix": "powers"}, "power must be at least 1; got 0"),
    ({"gamma": 0.0}, "gamma must be positive"),
    ({"ridge": 0.0}, "ridge must be greater"),
    ({"num_heads": 5}, "num_heads must divide hidden_size"),
    ({"mode": "prefix", "refresh": "token"}, "options of mode 'chunk'"),
    ({"mode": "masked", "decode_refresh": "token"}, "options of mode 'chunk'"),
    ({"decode_refresh": "tokens"}, "unknown refresh 'tokens'"),
    ({"operator": "white"}, "unknown operator"),
    ({"mode": "both"}, "unknown mode"),
)
def test_options_without_meaning(options, message):
    """The error comes when the layer is built, not when it first runs."""
    assert_raises(ValueError, message, build, **options)


def test_a_ridge_layer_makes_no_powers():
    x = inputs()
    ridge, plain = build(mix="ridge", power=3), build(power=0)
    assert_same(ridge(x)[0], plain(x)[0])


def test_a_learned_sum_of_powers_starts_at_the_first_and_learns_all():
    x = inputs()
    layer = build(mix="powers", power=3)
    assert_same(layer(x)[0], build(mix="koopman", power=1)(x)[0])
    layer(x)[0].square().mean().backward()
    assert layer.readout.weights.shape == (4, layer.num_heads)
    assert layer.readout.weights.grad.all()


def test_a_fixed_gain_is_no_parameter():
    x, learned, fixed = inputs(), build(), build(gamma=1.25)
    assert_same(fixed(x)[0], learned(x)[0])  # the learned one starts at 1.25
    assert not any("gamma" in name for name, _ in fixed.named_parameters())
    assert not torch.equal(build(gamma=1.5)(x)[0], fixed(x)[0])


def test_a_short_convolution_streams_and_packs():
    layer, x = build(conv_size=3, mix="ridge", query_init="own", chunk_size=2), inputs()
    assert_streams(layer, x, EXACT)
    whole = layer(x)[0]
    bounds = torch.arange(len(x) + 1) * x.shape[1]
    assert_same(layer(x.flatten(0, 1)[None], cu_seqlens=bounds)[0].view_as(whole), whole)
    assert not torch.allclose(build(mix="ridge", query_init="own", chunk_size=2)(x)[0], whole)


def read_out(power, query_init, mix="koopman"):
    """Return `[tokens, tokens]`: the similarity of the answer to token i, asked again at the end, to all values."""
    torch.manual_seed(0)
    size = 24
    options = {"num_heads": 1, "rank": size, "chunk_size": 1, "power": power, "mix": mix, "query_init": query_init}
    layer = layers.build("ska", hidden_size=size, **options)
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


@pytest.mark.parametrize("power", [0, 2])
def test_no_power_recalls_the_token_itself_and_two_the_one_after_the_next(power):
    assert (read_out(power, "key")[: 16 - power].argmax(1) == torch.arange(power, 16)).all()


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
    one, other = (layers.build("ska", hidden_size=32, query_init=start) for start in ("key", "own"))
    assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in other.parameters())
