"""SKA and Echo as the paper prints them, against its listings, in float64: Appendix F, Eqs. 11 to 13, §3.5, G.1."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import add_noise, assert_close, assert_raises, assert_streams, cases, generator, ska_layer

from halflife import LanguageModel, layers, preset
from halflife.lab.experiments import EXPERIMENTS
from halflife.layers.parts import clebsch_gordan
from halflife.ops.koopman import convert_state, koopman_attention
from halflife.packing import Packing
from halflife.runs.sweep import Cell

HEADS, RANK, WIDTH, HIDDEN = 2, 5, 3, 16
build = partial(ska_layer, HIDDEN, chunk_size=4)
EXACT = 4 * 2e-9  # operators of few keys have the condition 1/ε
SIZES = {"hidden_size": 32, "num_layers": 3, "vocab_size": 31, "num_heads": 4, "train_length": 16}
RIDGE = 1e-3


def inputs(length, batch=2):
    draw = generator("ska forms", length, batch)
    q, k = torch.randn(2, batch, length, HEADS, RANK, generator=draw, dtype=torch.float64)
    return q, k, torch.randn(batch, length, HEADS, WIDTH, generator=draw, dtype=torch.float64)


def sums(keys, values, mask):
    """Step 3 of Appendix F for one head: G, M and C over the unmasked tokens, pairs where both are."""
    gram, transition = torch.zeros(2, RANK, RANK, dtype=torch.float64)
    covariance = torch.zeros(WIDTH, RANK, dtype=torch.float64)
    for t in range(len(keys)):
        if mask[t]:
            gram = gram + torch.outer(keys[t], keys[t])
            covariance = covariance + torch.outer(values[t], keys[t])
        if t and mask[t] and mask[t - 1]:
            transition = transition + torch.outer(keys[t], keys[t - 1])
    return gram + RIDGE * torch.eye(RANK, dtype=torch.float64), transition, covariance


def appendix_f(keys, values, query, mask, largest, gamma, power):
    """Steps 2 to 10 for one query of one head; `largest` is ν."""
    gram, transition, covariance = sums(keys / largest, values, mask)
    factor = torch.linalg.cholesky(gram)
    once = torch.linalg.solve_triangular(factor, transition, upper=False)
    whitened = torch.linalg.solve_triangular(factor, once.T, upper=False).T
    whitened = gamma * whitened / max(1.0, torch.linalg.matrix_norm(whitened, 2).item())
    readout = torch.linalg.solve(gram, covariance.T).T
    filtered = torch.linalg.solve_triangular(factor, (query / largest).unsqueeze(1), upper=False)
    for _ in range(power):
        filtered = whitened @ filtered
    return (readout @ factor @ filtered).squeeze(1)


def main_text(keys, values, query, mask, largest, gamma, power):
    """Eqs. 11 to 13 for one query of one head, with six power iterations from the vector of ones."""
    gram, transition, covariance = sums(keys / largest, values, mask)
    factor, inverse = torch.linalg.cholesky(gram), torch.linalg.inv(gram)
    operator, readout = transition @ inverse, covariance @ inverse
    x = torch.ones(RANK, dtype=torch.float64)
    for _ in range(6):
        x = operator @ (operator.T @ x)
        x = x / x.norm()
    operator = gamma / max((operator.T @ x).norm().item(), 1.0) * operator
    return readout @ factor @ torch.linalg.matrix_power(operator, power) @ torch.linalg.inv(factor) @ (query / largest)


def by_chunk(listing, q, k, v, mask, chunk_size, largest, **settings):
    """Every query reads the chunks before its own."""
    y = torch.zeros_like(v)
    for b in range(len(q)):
        for t in range(q.shape[1]):
            stop = t // chunk_size * chunk_size
            for h in range(HEADS if stop else 0):
                args = k[b, :stop, h], v[b, :stop, h], q[b, t, h], mask[b, :stop], largest[b, h]
                y[b, t, h] = listing(*args, **settings)
    return y


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_appendix_f(chunk_size, backend):
    """ν is the largest norm of all keys, masked ones and later ones included."""
    q, k, v = inputs(10)
    mask = torch.rand(2, 10, generator=generator("mask")) < 0.6
    k[:, 4] *= 5  # the largest keys
    mask[0, 4] = False
    largest = k.norm(dim=-1).amax(1)
    expected = by_chunk(appendix_f, q, k, v, mask, chunk_size, largest, gamma=1.3, power=2)
    y, _ = koopman_attention(
        q, k, v, gamma=1.3, mask=mask, chunk_size=chunk_size, normalization="paper", backend=backend
    )
    assert_close(y, expected, EXACT)


@pytest.mark.parametrize("backend", ["chunked", "reference", "auto"])
@pytest.mark.parametrize("refresh", ["chunk", "token"])
def test_the_norm_is_frozen_while_decoding(refresh, backend):
    """The first call sets ν. Later keys may be longer, and ν stays."""
    q, k, v = inputs(11)
    k[:, 6:] *= 7
    mask, largest = torch.ones(2, 11), k[:, :6].norm(dim=-1).amax(1)
    size = 1 if refresh == "token" else 4
    expected = by_chunk(appendix_f, q, k, v, mask, size, largest, gamma=1.0, power=2)
    options = {"chunk_size": 4, "refresh": refresh, "normalization": "paper", "backend": backend}
    y, state = koopman_attention(q[:, :6], k[:, :6], v[:, :6], output_final_state=True, **options)
    pieces = [y]
    for t in range(6, 11):
        one = slice(t, t + 1)
        y, state = koopman_attention(
            q[:, one], k[:, one], v[:, one], initial_state=state, output_final_state=True, **options
        )
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), expected, EXACT)
    assert_close(state["norm"].sqrt(), largest, 1e-12)


def test_a_packed_paper_norm_is_each_sequences_own():
    q, k, v = inputs(12, batch=1)
    k[:, 7:] *= 9
    y, _ = koopman_attention(q, k, v, chunk_size=2, normalization="paper", cu_seqlens=torch.tensor([0, 7, 7, 12]))
    for piece in (slice(0, 7), slice(7, 12)):
        alone, _ = koopman_attention(q[:, piece], k[:, piece], v[:, piece], chunk_size=2, normalization="paper")
        assert_close(y[:, piece], alone, EXACT)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("power", [1, 2])
def test_main_text_operator(power, backend):
    q, k, v = inputs(10)
    largest = k.norm(dim=-1).amax(1)
    expected = by_chunk(main_text, q, k, v, torch.ones(2, 10), 3, largest, gamma=1.2, power=power)
    y, _ = koopman_attention(
        q, k, v, gamma=1.2, power=power, chunk_size=3, operator="main_text", normalization="paper", backend=backend
    )
    assert_close(y, expected, EXACT)


def test_main_text_operator_while_decoding():
    for refresh in ("chunk", "token"):
        options = {"chunk_size": 3, "refresh": refresh, "operator": "main_text", "output_final_state": True}
        assert_streams(lambda x, state, o=options: koopman_attention(*x, initial_state=state, **o), inputs(9), EXACT)


def test_the_form_of_the_main_text_runs_in_plain_torch_alone():
    x = [part.float() for part in inputs(4)]
    for backend in ("triton", "native"):
        with pytest.raises(ValueError, match=r"'main_text'. Those that can: auto, chunked, reference"):
            koopman_attention(*x, operator="main_text", backend=backend)
    assert_raises(ValueError, "unknown operator", koopman_attention, *inputs(4), operator="white")


@pytest.mark.parametrize("pending", [0, 1, 3])
def test_states_convert(pending):
    """From an operator per chunk of 4 to one per token, at every number of waiting tokens, and back."""
    q, k, v = inputs(14)
    start = 8 + pending
    head, tail = slice(0, start), slice(start, None)
    _, state = koopman_attention(q[:, head], k[:, head], v[:, head], chunk_size=4, output_final_state=True)
    token = convert_state(state, 1)
    y, _ = koopman_attention(q[:, tail], k[:, tail], v[:, tail], refresh="token", initial_state=token)
    whole, _ = koopman_attention(q, k, v, refresh="token")
    assert_close(y, whole[:, tail], EXACT)
    back = convert_state(token, 4)
    assert back["pending_keys"].shape[1] == 3
    y, _ = koopman_attention(q[:, tail], k[:, tail], v[:, tail], chunk_size=4, initial_state=back)
    first, _ = koopman_attention(q[:, start : start + 4], k[:, head], v[:, head], mode="prefix")
    assert_close(y[:, :4], first, EXACT)


def tokens(length, batch=2):
    return torch.randn(batch, length, HIDDEN, generator=generator("layer", batch, length), dtype=torch.float64)


def test_prefix_mode_has_no_latency():
    """A prefix shorter than a chunk is read at once, and each later token reads all tokens before it."""
    x, prefix, chunk = tokens(5), build(mode="prefix").eval(), build().eval()
    assert not chunk(x[:, :3])[0].any()
    y, state = prefix(x[:, :3])
    assert (y.abs().amax(-1) > 1e-3).all()
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (prefix.q_proj, prefix.k_proj, prefix.v_proj))
    q = q + k
    for t in range(3, 5):
        y, state = prefix(x[:, t : t + 1], state)
        read, _ = koopman_attention(
            q[:, t : t + 1], k[:, :t], v[:, :t], mode="prefix", power=1, **prefix.readout.settings()
        )
        assert_close(y, prefix.out_proj((prefix.readout.eta[:, None] * read).flatten(-2)), EXACT)


@pytest.mark.parametrize("mode", ["prefix", "masked"])
def test_whole_modes_pack(mode):
    layer, x = build(mode=mode), tokens(9, batch=1)
    packed, _ = layer(x, cu_seqlens=torch.tensor([0, 4, 4, 9]))
    assert_close(packed, torch.cat([layer(x[:, :4])[0], layer(x[:, 4:])[0]], 1), EXACT)


def test_masked_mode_reads_both_directions():
    """All tokens read one operator of the tokens in the mask; it has no state."""
    layer, x = build(mode="masked"), tokens(7)
    mask = torch.rand(2, 7, generator=generator("both")) < 0.6
    y, state = layer(x, shared={"action_mask": mask})
    reversed_mask = torch.ones(2, 7)
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    read, _ = koopman_attention(q + k, k, v, mode="masked", mask=mask, power=1, **layer.readout.settings())
    assert_close(y, layer.out_proj((layer.readout.eta[:, None] * read).flatten(-2)), EXACT)
    assert_close(layer(x)[0], layer(x, shared={"action_mask": reversed_mask})[0], EXACT)
    assert_raises(ValueError, "no state to continue from", layer, x, state)


def test_training_by_chunk_and_decoding_by_token():
    """§3.5: prefill and training read by chunk, and a single token reads every token before it."""
    layer, plain, every, x = build(decode_refresh="token"), build(), build(refresh="token"), tokens(9)
    for module in (layer, plain, every):
        module.load_state_dict(build().state_dict())
    assert_close(layer(x)[0], plain(x)[0], EXACT)
    training, state = layer(x[:, :6])
    assert_close(layer(x[:, 6:7], state)[0], plain(x)[0][:, 6:7], EXACT)  # in training mode still by chunk
    layer.eval()
    y, state = layer(x[:, :6])
    for t in range(6, 9):
        y, state = layer(x[:, t : t + 1], state)
        assert_close(y, every(x)[0][:, t : t + 1], EXACT)
    assert training.shape == (2, 6, HIDDEN)
    _, state = layer(x[:, :6])
    packed, _ = layer(x[:, 6].unsqueeze(0), state, cu_seqlens=torch.tensor([0, 1, 2]))  # as padded batches decode
    assert_close(packed[0], every(x)[0][:, 6], EXACT)


@pytest.mark.parametrize(("rank", "pairs"), [(6, 3), (5, 3)])
def test_the_projected_lift(rank, pairs):
    """Φ ψ(k) with one learned Φ of 3 N / 2 features for all heads (Appendix B.4)."""
    layer, x = build(rank=rank, lift="cg_projected"), tokens(9)
    assert layer.phi.weight.shape == (rank, 3 * pairs)
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (clebsch_gordan(part) @ layer.phi.weight.T for part in (q + k, k))
    read, _ = koopman_attention(q, k, v, chunk_size=4, power=1, **layer.readout.settings())
    assert_close(layer(x)[0], layer.out_proj((layer.readout.eta[:, None] * read).flatten(-2)), EXACT)
    layer(x)[0].square().sum().backward()
    assert layer.phi.weight.grad.any()


def test_eta_init():
    assert build(eta_init=2.5).readout.eta.tolist() == [2.5] * HEADS


@pytest.mark.parametrize("name", ["echo_paper", "mamba2+ska_paper"])
def test_paper_presets(name):
    config = preset(name, **SIZES)
    options = config.hybrid["options"]
    assert [options[key] for key in ("power", "mix", "query_init", "normalization", "decode_refresh")] == [
        2, "koopman", "own", "paper", "token"
    ]  # fmt: skip
    assert config.mlp == ("koopman_paper" if name == "echo_paper" else "swiglu")


def test_echo_paper_decodes_by_token_with_a_frozen_norm():
    """After a prompt of two tokens, in a chunk of 64, the next token reads the prompt; and pieces decode alike."""
    model = LanguageModel(preset("echo_paper", **SIZES)).double().eval()
    for block in model.blocks:
        if hasattr(block.mixer, "readout"):
            torch.nn.init.normal_(block.mixer.out_proj.weight)
    ids = torch.randint(31, (2, 6))
    _, state = model(ids[:, :2])
    norm = state[1]["norm"].clone()
    for t in range(2, 6):
        logits, state = model(ids[:, t : t + 1], state)
        assert torch.equal(state[1]["norm"], norm)
    assert state[1]["pending_keys"].shape[1] == 0
    silent = LanguageModel(preset("echo", **SIZES)).double()
    assert logits.shape == silent(ids[:, :1])[0].shape


def test_ska_beside_a_mixer():
    """G.1: `x + mixer(norm(x))`, then `x + ska(x)` on the residual stream, then the MLP."""
    config = preset("mamba2", **SIZES)
    hybrid = {"mixer": "ska", "options": {"num_heads": 4, "rank": 6, "chunk_size": 2}, "layers": [1, 2]}
    fields = {**config.to_dict(), "hybrid": {**hybrid, "attach": "beside"}}
    model = LanguageModel(type(config).from_dict(fields)).double()
    assert [type(block.mixer).__name__ for block in model.blocks] == ["Mamba2"] * 3
    assert [block.beside is not None for block in model.blocks] == [False, True, True]
    for block in model.blocks[1:]:
        torch.nn.init.normal_(block.beside.out_proj.weight)
    x, block = torch.randn(2, 7, 32, dtype=torch.float64), model.blocks[1]
    residual = x + block.mixer(block.mixer_norm(x))[0]
    residual = residual + block.beside(residual)[0]
    assert_close(block(x, None, Packing(2, 7), {})[0], residual + block.mlp(block.mlp_norm(residual)), 1e-12)
    ids = torch.randint(31, (2, 7))
    whole, _ = model(ids)
    first, state = model(ids[:, :3])
    assert_close(torch.cat([first, model(ids[:, 3:], state)[0]], 1), whole, EXACT)
    masked, _ = model(ids, action_mask=torch.zeros(2, 7))
    assert not torch.allclose(masked, whole)
    with pytest.raises(ValueError, match="unknown attachment"):
        type(config).from_dict({**fields, "hybrid": {**hybrid, "attach": "besides"}})


@pytest.mark.parametrize("gated", [False, True])
def test_koopman_mlp_with_a_clamped_modulus(gated):
    """Eq. 14 with λ / max(|λ|, 1): on the unit circle R is orthogonal, and outside it is scaled back."""
    mlp = layers.KoopmanMLP(8, 6, gated=gated, clamped=True).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        mlp.eigenvalues.real.copy_(torch.tensor([0.3, 2.0, -0.6]))
        mlp.eigenvalues.imaginary.copy_(torch.tensor([0.1, 1.0, 0.8]))
    g, turned = F.silu(mlp.lift(x)), torch.zeros(4, 6, dtype=torch.float64)
    for i, (a, b) in enumerate([(0.3, 0.1), (2 / 5**0.5, 1 / 5**0.5), (-0.6, 0.8)]):
        block = torch.tensor([[a, b], [-b, a]], dtype=torch.float64)
        turned[:, 2 * i : 2 * i + 2] = g[:, 2 * i : 2 * i + 2] @ block.T
    turned = turned * mlp.gate(x).sigmoid() if gated else turned
    assert_close(mlp(x), mlp.read(turned), 1e-7)  # the parameters were float32 numbers
    start = layers.KoopmanMLP(8, 6, clamped=True).eigenvalues()
    assert_close(torch.hypot(*start), torch.ones(3), 1e-6)


def layer_of(**options):
    """A layer in float64 with noise in every parameter, and its input."""
    layer = layers.build(
        "ska", hidden_size=HIDDEN, num_heads=HEADS, rank=RANK, value_dim=WIDTH, chunk_size=3, query_init="own",
        **options,
    ).double()  # fmt: skip
    return add_noise(layer, 0.5), torch.randn(2, 10, HIDDEN, dtype=torch.float64)


def test_keys_of_unit_norm():
    """Remark 5: every key and query is divided by its own norm, and the ridge is ε."""
    layer, x = layer_of(normalization="token", power=2, mix="koopman", gamma=1.2)
    q, k, v = (proj(x).unflatten(-1, (HEADS, -1)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    ones = torch.ones(2, HEADS)
    y = by_chunk(appendix_f, q, k, v, torch.ones(2, 10), 3, ones, gamma=1.2, power=2) * layer.readout.eta.unsqueeze(-1)
    assert_close(layer(x)[0], layer.out_proj(y.flatten(-2)), EXACT)
    assert_streams(layer, x, EXACT)
    with torch.no_grad():
        layer.k_proj.weight.mul_(7)
    assert_close(layer(x)[0], layer.out_proj(y.flatten(-2)), EXACT)


def test_a_sigmoid_gate():
    """The gate multiplies the projected output (§6.1, G.1) and streams."""
    layer, x = layer_of(gate="sigmoid")
    y = layer(x)[0]
    plain = layers.build("ska", hidden_size=HIDDEN, num_heads=HEADS, rank=RANK, value_dim=WIDTH, chunk_size=3).double()
    plain.query_init = "own"
    plain.load_state_dict({name: w for name, w in layer.state_dict().items() if "gate_proj" not in name})
    assert_close(y, plain(x)[0] * (x @ layer.gate_proj.weight.T + layer.gate_proj.bias).sigmoid(), EXACT)
    assert_streams(layer, x, EXACT)


@cases(
    "base, attach",
    ("mamba2", "instead"), ("mamba3_echo", "beside"),
    pytest.param("mamba2", "beside", marks=pytest.mark.slow),
    pytest.param("mamba3_echo", "instead", marks=pytest.mark.slow),
)  # fmt: skip
def test_features_of_the_ssm(base, attach):
    """SKA reads the queries, keys and values of the Mamba layer before it: C, B and x, and has no projections."""
    experiment = EXPERIMENTS["echo-transfer"]()
    settings = experiment.settings_at("smoke", {})
    config = experiment.model(f"{base}+ska:K2-full-own-shared", settings)
    config = dataclasses.replace(config, hybrid={**config.hybrid, "attach": attach})
    model = add_noise(LanguageModel(config)).double()
    place = min(config.hybrid["layers"])
    block = model.blocks[place]
    before, ska = (block.mixer, block.beside) if attach == "beside" else (model.blocks[place - 1].mixer, block.mixer)
    assert {name for name, _ in ska.named_children()} == {"readout", "out_proj"}
    read = []
    ska.readout.register_forward_pre_hook(lambda _, given: read.append(given[:3]))
    ids = torch.randint(config.vocab_size, (2, 9))
    logits, _ = model(ids)
    q, k, v = read[0]
    assert q.shape == k.shape == (2, 9, settings.num_heads, config.hybrid["options"]["rank"])
    assert v.shape[-1] == 2 * settings.hidden_size // settings.num_heads
    given = []
    handle = before.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(ids)
    handle.remove()
    xbc = before.in_proj(given[0]).split(before.splits, -1)[1]
    x = before.conv(xbc, None, Packing(2, 9))[0][..., : v.shape[2] * v.shape[3]]
    assert_close(v.flatten(-2), x, EXACT)
    logits.square().sum().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    norms = {f"blocks.{layer}.mixer_norm.weight" for layer in config.hybrid["layers"]}
    assert idle == (norms if attach == "instead" else set())  # the layer reads no input of its own
    with torch.no_grad():
        first, state = model(ids[:, :5])
        assert_close(torch.cat([first, model(ids[:, 5:], state)[0]], 1), logits, EXACT)


def test_features_of_no_ssm():
    layer, x = layer_of(features="mixer")
    assert_raises(ValueError, "Mamba layer before this one that has share_features=True", layer, x)
    shared = {"ssm_query": x[..., :4].unsqueeze(2), "ssm_key": x[..., :4].unsqueeze(2), "ssm_value": x.unsqueeze(2)}
    assert_raises(ValueError, r"2 heads, keys of 5 \(rank\) and values of 3", lambda: layer(x, shared=shared))
    assert_raises(
        ValueError, "without lift and conv_size", layers.build, "ska", hidden_size=16, features="mixer",
        query_init="own", conv_size=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "model", "own"),
    [
        ("echo-transfer", "mamba2+ska", "rms"), ("echo-mqar", "mamba2+ska_paper:4x64", "rms"),
        ("echo-tiers", "cg-ska-1.5:toolcalling-easy", "layer"),
    ],
)  # fmt: skip
def test_a_norm_of_choice(name, model, own):
    experiment = EXPERIMENTS[name]()
    for norm in ("rms", "layer"):
        settings = experiment.settings_at("smoke", {"overrides": {} if norm == own else {"model.norm": norm}})
        assert experiment.configure(settings, Cell(model, 1e-3, 0)).model.norm == norm


@pytest.mark.parametrize("name", ["cg-ska-1.5-gated", "cg-ska-1.5-token", "ska-1.5-shared"])
def test_what_failed_in_the_tiers(name):
    experiment = EXPERIMENTS["echo-tiers"]()
    config = experiment.configure(experiment.settings_at("smoke", {}), Cell(f"{name}:toolcalling-easy", 1e-3, 0)).model
    plain = experiment.configure(
        experiment.settings_at("smoke", {}), Cell(f"{name.rpartition('-')[0]}:toolcalling-easy", 1e-3, 0)
    ).model
    ids = torch.randint(128, (1, 9))
    models = [LanguageModel(one) for one in (config, plain)]
    assert all(model(ids)[0].isfinite().all() for model in models)
    counts = [model.num_parameters() for model in models]
    assert (counts[0] == counts[1]) == name.endswith("token")
