"""The memory lens: weights and shares equal those of the token loop for every op, and layers agree with differences."""

import dataclasses
import json
import re
import webbrowser
import zlib
from base64 import b64decode
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_raises, call_of, cases, generator

import halflife
from halflife.analysis.decays import measure_decays
from halflife.analysis.foreign.model import ForeignModel
from halflife.analysis.horizon import horizon, horizon_lags
from halflife.analysis.look import load_for_lens, look
from halflife.analysis.look.lens import half_lives
from halflife.analysis.look.observe import READ, Place, observe
from halflife.analysis.look.readings import OpReading, faded
from halflife.cli import main
from halflife.cli.measure.look import _best_label
from halflife.cli.options import open_page
from halflife.data.byte_tokenizer import ByteTokenizer
from halflife.models import checkpoint
from halflife.ops import available_backends
from halflife.ops.backends import dispatch
from halflife.ops.log_linear.rows import levels
from halflife.ops.spec import OPS
from halflife.packing import Packing
from halflife.report.look import find_pairs
from halflife.report.look_picture import EDGE, SHARPNESS, WIDTH, cells, drawable, mixed
from halflife.report.tables.look import look_sentence, look_table
from halflife.tasks import build

T, H, K, V = 11, 4, 6, 5
EXACT = 1e-10  # in float64; the errors measured are below 1e-14
LARGEST_PAGE = 3_000_000  # bytes
CASES = (
    ("linear_attention", "none"), ("linear_attention", "scalar"), ("linear_attention", "vector"),
    ("delta_rule", "none"), ("delta_rule", "scalar"), ("delta_rule", "vector"), ("dplr", "none"), ("dplr", "scalar"),
    ("dplr", "vector"), ("gate_rank", "linear"), ("gate_rank", "delta"), ("log_linear_attention", "scalar"),
    ("ridge_attention", "scalar"),
)  # fmt: skip


def inputs(op, kind):
    """Float64 tensors of a call with two groups of queries and keys for four heads."""
    draw = generator(op, kind)

    def randn(*shape):
        return torch.randn(1, T, *shape, generator=draw, dtype=torch.float64)

    tensors = {"q": randn(2, K), "k": F.normalize(randn(2, K), dim=-1), "v": randn(H, V)}
    g = {"none": None, "vector": -randn(H, K).square() / 8}.get(kind, -randn(H).square() / 8)
    if op == "gate_rank":
        resets = torch.where(randn(H) > 0.5, -0.3, 0.0).double()
        beta = randn(H).sigmoid() if kind == "delta" else None
        return {**tensors, "g_slow": resets, "g_fast": g, "beta": beta}
    tensors["g"] = g
    if op in ("delta_rule", "ridge_attention"):
        tensors["beta"] = randn(H).sigmoid()
    if op == "dplr":
        tensors |= {"a": -randn(H, K) / 4, "b": randn(H, K) / 4}
    if op == "log_linear_attention":
        tensors["weights"] = randn(H, 5).exp()
    if op == "ridge_attention":
        tensors["ridge"] = randn(H, K)[0, 0].exp()
    return tensors


def loop(op, x):
    """The weights, without scale, and the norms of what is left, `[H, T, T]`, from matrices that act on the keys."""
    weights, norms = torch.zeros(2, H, T, T, dtype=torch.float64)
    for h in range(H):
        q, k = (x[name][0, :, h // 2] for name in "qk")
        decay = torch.ones(T, K).double()
        if x.get("g") is not None:
            decay = x["g"][0, :, h].reshape(T, -1).exp().expand(T, K)
        total = x["g"][0, :, h].cumsum(0) if x.get("g") is not None and x["g"].ndim == 3 else None
        columns = torch.zeros(2 * K, T).double()  # of the fast and the slow state; others have the first one alone
        gram = torch.zeros(K, K).double()
        for t in range(T):
            step = torch.eye(2 * K).double()
            written, read = k[t], torch.cat([q[t], torch.zeros(K).double()])
            if op == "gate_rank":
                fade, g_slow = x["g_fast"][0, t, h].exp(), x["g_slow"][0, t, h]
                step[:K, :K] *= fade
                if g_slow != 0:
                    step[K:, K:] *= g_slow.exp()
                    step[K:, :K] = g_slow.exp() * fade * torch.eye(K).double()
                    step[:K, :K] = 0
                if x["beta"] is not None:
                    both = torch.cat([k[t], k[t]])
                    erase = torch.eye(2 * K).double()
                    erase[:K] -= x["beta"][0, t, h] * torch.outer(k[t], both)
                    step, written = erase @ step, x["beta"][0, t, h] * k[t]
                read = torch.cat([q[t], q[t]])
            else:
                step[:K, :K] = decay[t].diag()
                if op == "delta_rule":
                    beta = x["beta"][0, t, h]
                    step[:K, :K] -= beta * torch.outer(k[t], k[t] * decay[t])
                    written = beta * k[t]
                elif op == "dplr":
                    step[:K, :K] += torch.outer(x["b"][0, t, h], x["a"][0, t, h])
                elif op == "ridge_attention":
                    beta = x["beta"][0, t, h]
                    gram = decay[t, 0] * gram + beta * torch.outer(k[t], k[t])
                    read[:K] = torch.linalg.solve(gram + x["ridge"][h].diag(), q[t])
                    written = beta * k[t]
            columns = step @ columns
            columns[:K, t] = written
            weights[h, t] = read @ columns
            norms[h, t] = (columns[:K] + columns[K:]).norm(dim=0)
            if op == "log_linear_attention":
                level = levels(torch.tensor(t), torch.arange(t + 1), 4)
                factors = x["weights"][0, t, h].gather(0, level)
                weights[h, t, : t + 1] = factors * (total[t] - total[: t + 1]).exp() * (k[: t + 1] @ q[t])
    return weights, norms / norms.diagonal(dim1=1, dim2=2).unsqueeze(1)


@cases("op, kind", *CASES)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_op_has_the_weights_and_the_rest_of_its_token_loop(op, kind, backend):
    x = inputs(op, kind)
    settings = {"iterations": 30, "tolerance": 1e-15} if op == "ridge_attention" else {"scale": 0.7}
    reading = OpReading(call_of(op, x, **settings), backend, T)
    weights, left = loop(op, x)
    torch.testing.assert_close(reading.weights(), settings.get("scale", 1) * weights, rtol=0, atol=EXACT)
    at = torch.arange(T)
    torch.testing.assert_close(reading.left(at, at).double(), left, rtol=0, atol=EXACT)
    torch.testing.assert_close(reading.of([3, 1]).weights(), reading.weights()[[3, 1]], rtol=0, atol=EXACT)
    some, few = torch.tensor([2, 3, 7]), torch.tensor([0, 5, 10])
    torch.testing.assert_close(reading.left(some, few).double(), left[:, few][:, :, some], rtol=0, atol=EXACT)


@cases("op, kind", *(case for case in CASES if "native" in available_backends(case[0])))
def test_kernels_have_the_weights_too(op, kind):
    x = inputs(op, kind)
    settings = {"iterations": 30, "tolerance": 1e-6} if op == "ridge_attention" else {"scale": 1}
    single = {name: None if part is None else part.float() for name, part in x.items()}
    reading = OpReading(call_of(op, single, **settings), "native", T)
    weights, left = loop(op, x)
    torch.testing.assert_close(reading.weights().double(), weights, rtol=0, atol=4 * 3.2e-7)
    at = torch.arange(T)
    torch.testing.assert_close(reading.left(at, at).double(), left, rtol=0, atol=4 * 2e-7)


def test_every_op_with_a_state_and_values_is_read():
    """Convolutions have a state of their last inputs, and Koopman attention is read by its layer."""
    assert {name for name, _ in CASES} == set(READ)
    assert {name for name in OPS if OPS[name].state and "v" in OPS[name].tensors} == set(READ)


def tiny(name, **options):
    return helpers.tiny(name, **{"vocab_size": 64, **options}).double()


def outputs(mixer, reading, x, change=None):
    """What the heads of a mixer read, `[T, H, V]`, with a change of its values."""
    found, choose = [], dispatch.implementation_of

    def chosen(call, backend):
        implementation = choose(call, backend)

        def run(call):
            if call.op != reading.kind or found:
                return implementation(call)
            found.append(None)  # calls that the op itself makes stay as they are
            call = dispatch.folded(call)
            found[0], state = implementation(call if change is None else call.with_tensors(v=call["v"] + change))
            return found[0], state

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "implementation_of", chosen)
        mixer(x)
    return found[0][0]


@cases("name", "mamba2", "mamba2+gate_rank", "gated_deltanet", "gla", "rwkv7", "mesa", "mamba2+log_linear")
def test_weights_are_the_differences_of_a_layer(name):
    """A change of one token's value changes what every token reads by its weight."""
    model, ids = tiny(name), torch.randint(0, 64, (12,))
    given, readings = [], {}
    mixer = model.blocks[1].mixer
    mixer.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    observe(model, ids, lambda place, reading: readings.update({place: reading}))
    reading = readings[Place(1)]
    weights = reading.weights()
    with torch.no_grad():
        before = outputs(mixer, reading, given[0])
        change = torch.zeros_like(reading.tensors["v"])
        change[0, 4] = 1e-3 * torch.randn_like(change[0, 4])
        after = outputs(mixer, reading, given[0], change)
    expected = weights[:, :, 4].T.unsqueeze(-1) * change[0, 4]
    torch.testing.assert_close(after - before, expected, rtol=0, atol=1e-12)
    assert expected[4:].abs().max() > 1e-6


@cases("name, kind", ("llama", "attention"), ("fox", "attention"), ("mamba3", "trapezoid"), ("simple+ska", ""))
def test_other_memories_read_by_their_weights(name, kind):
    """Attention, Mamba-3's trapezoid and Koopman attention: weights times values are what the layer reads."""
    model, ids, found = tiny(name), torch.randint(0, 64, (70,)), {}
    observe(model, ids, lambda place, reading: found.update({place: reading}))
    reading = next(one for one in found.values() if one.kind in (kind or "koopman_attention"))
    weights = reading.weights()
    if kind == "attention":
        cache = reading.given[1]
        expected = type(reading.mixer).attend(reading.mixer, *reading.given)
        values = cache["values"]
    elif kind == "trapezoid":
        values = reading.given[4]
        expected, _ = reading.function(*reading.given, **{**reading.options, "skip": None, "z": None})
        expected = expected.unflatten(-1, values.shape[2:])
    else:
        values = reading.given[2]
        expected = reading.function.forward(*reading.given, **reading.options).y
    read = torch.einsum("htj,jhv->thv", weights, values[0])
    torch.testing.assert_close(read, expected[0], rtol=0, atol=EXACT)
    assert weights.triu(1).abs().max() == 0
    assert weights.abs().max() > 1e-3
    one = reading.of([1])
    torch.testing.assert_close(one.weights()[0], weights[1], rtol=0, atol=EXACT)


def test_mamba3_writes_into_the_fast_state_after_the_reset_of_the_next_token():
    """With GateRank: what is left is the norm of both states of the op, and the horizon is that of what is left."""
    model, ids, found = tiny("mamba3+gate_rank", num_layers=1, num_heads=2), torch.randint(0, 64, (30,)), {}
    with torch.no_grad():
        model.blocks[0].mixer.gate_rank.slow_gate.bias.fill_(-0.5)
        model.blocks[0].mixer.decay.dt_bias.add_(6)
    observe(model, ids, lambda place, reading: found.update({place: reading}))
    reading, at = found[Place(0)], torch.arange(30)
    left = reading.left(at, at).detach()
    memory, x, q, k, _, g, _, gain, *_ = reading.given
    before = F.pad(reading.identity(slice(0, 30))[:, :-1], (0, 0, 0, 0, 1, 0))
    with torch.no_grad():
        _, new = memory(x, q, k, before, g, None, {}, Packing.of(None, 1, 30), gain=gain, scale=1)
    entered = (gain * k.norm(dim=-1) / g.exp())[0, 1:].T  # without the decay of the token at which it enters
    norms = (new["memory"] + new["slow"])[0].norm(dim=1)[:, :-1] / entered
    torch.testing.assert_close(left[:, -1, :-1], norms, rtol=0, atol=EXACT)
    assert reading.resets[:, 1:].any()
    assert not torch.allclose(left, faded(g, 2, at, at), atol=1e-3)
    for h, head in enumerate(measure_decays(model, ids[None])[0].heads):
        energy = torch.stack([left[h].diagonal(-int(lag))[:15].square().mean() for lag in horizon_lags(30)])
        assert head.horizon == pytest.approx(horizon(horizon_lags(30), energy), rel=1e-6)
        assert head.horizon < 15


def test_what_the_forget_gate_leaves_weighs_keys_that_no_query_prefers():
    model, found = tiny("fox"), {}
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.qkv_proj.weight[: mixer.splits[0]] = 0
    observe(model, torch.randint(0, 64, (20,)), lambda place, reading: found.update({place: reading}))
    reading, at = found[Place(0)].of([1]), torch.arange(20)
    left = reading.left(at, at)
    torch.testing.assert_close(left / left.sum(-1, keepdim=True), reading.weights(), rtol=0, atol=EXACT)
    assert left[0, -1, 0] < 1e-3


def test_a_window_forgets_at_once():
    model, found = tiny("llama", mixer_options={"window": 4}), {}
    observe(model, torch.randint(0, 64, (10,)), lambda place, reading: found.update({place: reading}))
    reading = found[Place(0)]
    at = torch.arange(10)
    left, weights = reading.left(at, at)[0], reading.weights()[0]
    inside = (at.unsqueeze(1) - at < 4) & (at.unsqueeze(1) >= at)
    assert torch.equal(left.bool(), inside)
    assert torch.equal(weights > 0, inside)


@cases("name", "deltaproduct", "deltaproduct+vector")
def test_several_writes_of_a_token_count_together(name):
    """DeltaProduct writes twice for each token; a change of both values changes the reads by the weight.

    What the decay alone would leave is the write of both steps under the decays of later tokens.
    """
    model, ids, found = tiny(name), torch.randint(0, 64, (9,)), {}
    observe(model, ids, lambda place, reading: found.update({place: reading}))
    reading = found[Place(0)]
    assert reading.steps == 2
    x, at = reading.tensors, torch.arange(9)
    beta, q, k = (x[name][0, :, 0] for name in ("beta", "q", "k"))
    g = x["g"][0, :, 0].reshape(18, -1, 1)
    columns = torch.zeros(k.shape[1], 9).double()
    alone, (weights, norms, faded) = columns, torch.zeros(3, 9, 9).double()
    for row in range(18):
        columns, alone = g[row].exp() * columns, g[row].exp() * alone
        columns = columns - beta[row] * torch.outer(k[row], k[row] @ columns)
        columns[:, row // 2] += beta[row] * k[row]
        if row % 2:
            weights[row // 2], norms[row // 2] = q[row] @ columns * reading.call.output_scale, columns.norm(dim=0)
            alone[:, row // 2] = columns[:, row // 2]
            faded[row // 2] = alone.norm(dim=0)
    torch.testing.assert_close(reading.weights()[0], weights, rtol=0, atol=EXACT)
    torch.testing.assert_close(reading.left(at, at)[0], norms / norms.diagonal(), rtol=0, atol=EXACT)
    torch.testing.assert_close(reading.faded(at, at)[0], faded / faded.diagonal(), rtol=0, atol=EXACT)


def test_what_cannot_be_shown_says_why():
    lens = look(tiny("mamba2+gate_rank", num_layers=1), torch.arange(8))
    assert not lens.refused
    model = tiny("mamba3_mimo")
    assert_raises(ValueError, "each channel of a value has weights of its own", look, model, torch.arange(8))
    assert_raises(ValueError, "layer 7, head 0 is not shown: the model has no such head", lens.find, 7, 0)
    message = r"documents of \(3, 4\) tokens do not make up a text of 8"
    assert_raises(ValueError, message, look, model, torch.arange(8), documents=(3, 4))


def test_documents_are_blocks():
    model, ids = tiny("gated_deltanet"), torch.randint(0, 64, (14,))
    both = look(model, ids, documents=(6, 8))[1, 0]
    for first, last in ((0, 6), (6, 14)):
        alone = look(model, ids[first:last])[1, 0]
        for name in ("weights", "left", "faded"):
            whole, part = (np.asarray(getattr(one, name)) for one in (both, alone))
            np.testing.assert_allclose(whole[first:last, first:last], part, atol=1e-6)
            assert not whole[6:, :6].any()
    assert (both.faded.values >= both.left.values - 1e-6).all()


def test_half_lives_are_those_of_constant_decays():
    """RetNet's heads decay by 1 − 2^−5, 1 − 2^−6, …; attention forgets nothing."""
    lens = look(tiny("retnet", num_layers=1), torch.randint(0, 64, (800,)))
    with torch.no_grad():
        g = lens.model.blocks[0].mixer.decay(torch.zeros(1, 1, 2))[0, 0]
    expected = [np.log(0.5) / float(x) for x in g]
    assert [one.half_life for one in lens.heads] == pytest.approx(expected, rel=1e-6)
    assert {one.half_life for one in look(tiny("llama"), torch.arange(20)).heads} == {float("inf")}
    left, age = torch.tensor([[[1.0], [0.8], [0.2], [0.1]]]).double(), torch.tensor([[0], [1], [3], [4]])
    assert half_lives(left, age).item() == pytest.approx(1 + 2 * np.log(0.5 / 0.8) / np.log(0.2 / 0.8))
    assert half_lives(left[:, :2], age[:2]).item() == float("inf")


def test_a_model_that_diverged_is_refused():
    model = tiny("mamba2")
    model.embedding.weight.data.fill_(float("nan"))
    message = "no layer can be shown: layer 0: its values are no numbers, as after a training that diverged"
    assert_raises(ValueError, message, look, model, torch.arange(8))


def test_half_lives_of_documents_lie_beyond_their_own_halves():
    """Attention forgets nothing, and of a document of ten tokens no more than that is known."""
    model, ids = tiny("llama"), torch.arange(20)
    assert {one.beyond for one in look(model, ids).heads} == {10}
    lens = look(model, ids, documents=(10, 10))
    assert {one.beyond for one in lens.heads} == {5}
    assert {row[3] for row in look_table(lens).rows} == {">5"}
    assert {9, 19} <= set(next(lens.details(lens.heads, cursors=2)).cursors.tolist())


def test_koopman_layers_beside_a_mixer_have_details():
    lens = look(tiny("mamba2+ska").float(), torch.randint(0, 64, (70,)))
    head = next(one for one in lens.heads if one.kind == "koopman_attention")
    detail = next(lens.details([head]))
    assert np.abs(detail.weights.values[69]).max() > 1e-4
    assert head.stored[0] > 0


def test_heads_with_a_window_store_it_and_no_more():
    model, ids = tiny("mamba2+swa").float(), torch.randint(0, 64, (1, 70))
    lens = look(model, ids[0])
    heads = [one for one in lens.heads if one.kind == "attention"]
    layer = model(ids)[1][heads[0].place.layer]
    bytes_of_caches = sum(x.nbytes for x in layer.values() if x.ndim > 3)
    own = [one.stored for one in heads if one.place == heads[0].place]
    assert (sum(fixed for fixed, _ in own), {growing for _, growing in own}) == (bytes_of_caches, {0})
    said = look_sentence("x", dataclasses.replace(lens, heads=tuple(heads)))
    assert said.endswith("is softmax attention, which keeps the tokens of its window alone.")


@pytest.mark.slow
def test_a_long_text_of_many_heads_fits_on_a_page():
    """The page leaves heads out, and it still has the three that it names and those that were asked for."""
    model = tiny("gated_deltanet", hidden_size=64, num_heads=16, vocab_size=256).float()
    lens = halflife.look(model, torch.randint(0, 256, (4096,)), tokenizer=ByteTokenizer())
    asked = lens.ranked()[7]
    page = lens.html([asked])
    data, arrays = stored(page)
    assert LARGEST_PAGE / 2 < len(page) < LARGEST_PAGE
    names = [str(lens.heads[part["head"]]) for part in data["details"]]
    assert {str(head) for head in (asked, lens.ranked()[0], lens.ranked()[-1])} <= set(names)
    assert len(names) < 32
    assert arrays["left"].shape == (64 * 4096,)


def stored(page):
    """The data of a page, and the arrays of its first head."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    blob = zlib.decompress(b64decode(data["details"][0]["blob"]))
    arrays = {
        name: np.frombuffer(blob, f"<{kind}" if kind[1] != "1" else kind, size, at)
        for name, (kind, at, size) in data["details"][0]["arrays"].items()
    }
    return data, arrays


def test_a_page_has_the_numbers():
    model, ids = tiny("gated_deltanet").float(), torch.randint(0, 64, (24,))
    lens = halflife.look(model, ids)
    page = lens.html()
    data, arrays = stored(page)
    head = lens.heads[data["details"][0]["head"]]
    detail = next(lens.details([head]))
    assert head == lens.ranked()[0]
    np.testing.assert_allclose(
        arrays["left"].reshape(24, 24) / 255, detail.left.values.clip(0, 1), atol=0.5 / 255 + 1e-6
    )
    shares = np.zeros((24, 24))
    values = arrays["read_value"].reshape(24, -1) / 127 * arrays["read_scale"][:, None]
    np.put_along_axis(shares, arrays["read_index"].reshape(24, -1).astype(int), values, 1)
    np.testing.assert_allclose(shares, detail.shares() * np.sign(detail.weights.values), atol=0.5 / 127 + 1e-6)
    assert "http" not in page.replace("http-equiv", "")
    assert "srcdoc" in lens._repr_html_()
    assert "share of the write that is left: cursor 24 × token 24" in repr(detail.left)


def test_pairs_are_found_and_marked():
    inputs = torch.tensor([5, 40, 6, 41, 1, 2, 6, 3, 5, 3])
    labels = torch.full((10,), -100)
    labels[6], labels[8] = 41, 40
    logits = torch.zeros(10, 64)
    logits[6, 41] = 9
    logits[8, 41] = 9
    known, forgotten = find_pairs(inputs, labels, logits)
    assert (known.written, known.asked, known.value, known.known) == (3, 6, "41", True)
    assert known.probability == pytest.approx(float(logits[6].softmax(0)[41]), abs=1e-4)
    assert (forgotten.written, forgotten.asked, forgotten.known) == (1, 8, False)
    words = build("s5", length=8, group="s3").generate(1, 0)  # asked at every token from the first one on
    assert all(pair.asked > 1 for pair in find_pairs(words.inputs[0], words.labels[0], torch.zeros(8, 6)))


def test_pictures_have_no_control_characters():
    """XML refuses most of them, and no font draws them."""
    (cell,) = cells(["a\x00\x1b\tb\r\n"], gaps=False)
    assert cell.text == "a·· b·↵"
    assert drawable("\x01\ud800é\uffff") == "··é·"


def test_the_command(tmp_path, capsys):
    checkpoint.save(tiny("mamba2+gate_rank", vocab_size=256).float(), tmp_path / "model")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}: the state <decays>.\n")
    arguments = [str(tmp_path / "model"), "--text", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--device", "cpu"]
    main(["look", *arguments, "--heads", "1.0"])
    page = (tmp_path / "model" / "look.html").read_text()
    data, _ = stored(page)
    assert "".join(data["tokens"]) == "a: the state <decays>.\nb: the state <decays>.\n"
    assert data["documents"] == [0, 23]
    assert len(page) < LARGEST_PAGE
    assert "gate rank" in capsys.readouterr().out


def test_the_command_draws_says_which_model_it_is_and_refuses(tmp_path, capsys, refused):
    for name in ("one", "two"):
        checkpoint.save(tiny("mamba2", vocab_size=256, num_layers=1).float(), tmp_path / "run" / name)
    (tmp_path / "a.txt").write_text("the state decays")
    arguments = ["look", str(tmp_path / "run"), "--text", str(tmp_path / "a.txt"), "--device", "cpu", "--tokens", "5"]
    main([*arguments, "--picture", str(tmp_path / "a.png"), "--film", str(tmp_path / "a.gif"), "--open"])
    said = capsys.readouterr().out
    assert "This is mamba2 one. Others, with --model: mamba2 two." in said
    for path in (tmp_path / "a.png", tmp_path / "a.gif", tmp_path / "run" / "look.html"):
        assert path.stat().st_size
        assert f"written: {path}" in said
    for wrong, message in (
        (["--tokens", "1"], "2 tokens or more"), (["--heads", "x"], "layer.head, as 2.1; got 'x'"),
        (["--picture", "a.doc"], "a.doc"), (["--model", "mamba2 on"], "Did you mean 'mamba2 one'"),
    ):  # fmt: skip
        assert message in refused(*arguments, *wrong)


@pytest.mark.parametrize("variable", [None, "DISPLAY", "HALFLIFE_OPEN", "CI", "SSH_CONNECTION", "tty"])
def test_a_page_is_opened_at_a_terminal_of_a_desktop_alone(variable, tmp_path, monkeypatch, capsys):
    """Each of these is enough to open none. A browser that cannot be started is no error."""
    opened = []
    for name in ("CI", "SSH_CONNECTION", "HALFLIFE_OPEN", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("DISPLAY", ":0")
    if variable and variable != "tty":
        monkeypatch.setenv(variable, {"DISPLAY": "", "HALFLIFE_OPEN": "0"}.get(variable, "1"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: variable != "tty")
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    open_page(tmp_path / "look.html")
    assert opened == ([(tmp_path / "look.html").as_uri()] if variable is None else [])
    assert ("HALFLIFE_OPEN=0" in capsys.readouterr().out) == (variable is None)

    def fails(url):
        raise webbrowser.Error("no browser")

    monkeypatch.setattr("webbrowser.open", fails)
    open_page(tmp_path / "look.html")


def test_a_lens_beside_a_report_links_to_it(tmp_path):
    lens = halflife.look(tiny("mamba2", vocab_size=256).float(), torch.arange(6))
    assert "report.html" not in lens.save(tmp_path / "look.html").read_text()
    (tmp_path / "report.html").touch()
    assert '<a href="report.html">' in lens.save(tmp_path / "look.html").read_text()


def test_a_model_that_was_trained_several_times_is_found_by_its_name(tmp_path, monkeypatch):
    """It is that of the first seed at the selected rate."""
    found = {
        f"a lr{rate:g}-seed{seed}": tmp_path / f"a/lr{rate:g}-seed{seed}" for rate in (0.1, 0.01) for seed in (0, 1)
    }
    found["b"] = tmp_path / "b/lr1-seed0"
    assert _best_label(tmp_path, "a", found) == "a"  # no comparison
    (tmp_path / "results.csv").touch()
    scores = [
        SimpleNamespace(model="a", learning_rate=r, seed=s, selected=r < 0.1) for r in (0.1, 0.01) for s in (1, 0)
    ]
    monkeypatch.setattr("halflife.runs.folder.read", lambda folder: SimpleNamespace(scores=scores))
    assert _best_label(tmp_path, "a", found) == "a lr0.01-seed0"
    assert (_best_label(tmp_path, "b", found), _best_label(tmp_path, "c", found)) == ("b", "c")


def test_models_of_transformers_are_read_in_place(tmp_path):
    """A model that is read in place has the numbers of the same model converted as a whole."""
    import foreign_models

    original, ids = foreign_models.build("qwen3_5_text"), torch.randint(0, 256, (37,))
    original.save_pretrained(tmp_path)
    in_place = look(ForeignModel(original, "qwen", window=16), ids)
    converted = look(load_for_lens(tmp_path), ids)
    assert [(one.place, one.head) for one in converted.heads] == [(one.place, one.head) for one in in_place.heads]
    assert not in_place.refused
    assert {one.place.layer for one in in_place.heads if one.kind == "attention"} == {3}
    for place in ((0, 1), (2, 3), (3, 2)):
        for name in ("weights", "left"):
            ours, theirs = (np.asarray(getattr(lens[place], name)) for lens in (converted, in_place))
            np.testing.assert_allclose(ours, theirs, atol=4 * 2e-5)
            assert ours.max() > 0.01


@cases(
    "kind",
    "qwen3_next",
    "qwen3_5_moe_text",
    "kimi_linear",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "falcon_h1",
)
def test_hybrids_of_transformers_show_all_layers_or_say_why(kind, tmp_path):
    import foreign_models

    foreign_models.build(kind).save_pretrained(tmp_path)
    lens = look(load_for_lens(tmp_path), torch.randint(0, 256, (40,)))
    said = {
        "nemotron_h": {"it has no mixer"},
        "zamba2": {"its softmax attention is shared with other layers, or does not run by sdpa"},
    }
    assert set(lens.refused.values()) == said.get(kind, set())
    for detail in lens.details([lens.heads[0], lens.heads[-1]]):
        assert np.abs(detail.weights.values).max() > 1e-4


def test_mixers_without_a_conversion_are_refused_by_name():
    import foreign_models

    model = ForeignModel(foreign_models.build("minimax"), "minimax")
    assert_raises(ValueError, "the mixers of a minimax are not converted; .* qwen3_next", look, model, torch.arange(9))


def test_a_picture_and_a_film_have_the_shares(tmp_path):
    pytest.importorskip("PIL")
    from PIL import Image

    model = tiny("mamba2", vocab_size=256).float()
    lens = halflife.look(model, list(b"#<a> b\nc d"), tokenizer=ByteTokenizer())
    text = lens.picture(tmp_path / "look.svg").read_text()
    boxes = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="8.4" height="19" fill="(#\w+)"( stroke)?', text)
    assert len(boxes) == 3 * 10
    slowest = next(lens.details(lens.ranked()[:1]))
    assert [fill for *_, fill, _ in boxes[:10]] == [mixed(share) for share in slowest.left.values[-1].tolist()]
    assert [bool(stroke) for *_, stroke in boxes[:10]] == [False] * 9 + [True]
    assert {x for x, *_ in boxes[:7]} == {f"{EDGE + WIDTH * i:.1f}" for i in range(7)}
    assert boxes[7][0] == boxes[0][0]  # after the end of the line
    assert "&lt;" in text
    assert mixed(0) == "#ffffff"
    with Image.open(lens.picture(tmp_path / "look.png")) as picture:
        x, y = (SHARPNESS * (float(z) + 1) for z in boxes[0][:2])
        assert "#{:02x}{:02x}{:02x}".format(*picture.getpixel((int(x) + 1, int(y) + 1))) == boxes[0][2]
    with Image.open(lens.film(tmp_path / "look.png")) as film:
        assert film.n_frames == 10  # one for each token of a short text
    assert_raises(ValueError, "must end in .webp, .png, .gif", lens.film, "look.svg")
    assert len(cells(["12", "345"] * 40, True)) == 80
    assert cells(["12", "345"] * 40, True)[-1].row == 3
