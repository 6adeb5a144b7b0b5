"""Models of transformers, read in place: decays by hand from the weights, windows, listed layers, the command."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign_models import LAWS, MISSING, OPTIONS, build
from helpers import assert_raises, cases

from halflife import tasks
from halflife.analysis import survey
from halflife.analysis.capture import capture
from halflife.analysis.decays import measure_decays
from halflife.analysis.forecast import reading, recall
from halflife.analysis.foreign.families import MIXERS
from halflife.analysis.foreign.load import load_foreign
from halflife.analysis.foreign.model import ForeignModel, cache_argument, windows
from halflife.analysis.foreign.recurrent import RecurrentModel
from halflife.analysis.horizon import RetainedEnergy, horizon_lags, retained_energy
from halflife.analysis.model_spectrum import model_spectrum
from halflife.analysis.readable import layer_kinds
from halflife.models.timescales import layer_decays

TIGHT = {"rtol": 2e-5, "atol": 2e-6}
KINDS = {
    "qwen3_5_text": ["Gated DeltaNet"] * 3 + ["softmax attention"],
    "kimi_linear": ["Kimi delta attention"] * 3 + ["softmax attention"],
    "mamba2": ["Mamba-2"] * 2,
    "bamba": ["Mamba-2", "softmax attention", "Mamba-2", "Mamba-2"],
    "falcon_h1": ["Mamba-2 + softmax attention"] * 4,
    "granitemoehybrid": ["Mamba-2", "Mamba-2", "softmax attention", "Mamba-2"],
    "nemotron_h": ["Mamba-2", "no mixer", "Mamba-2", "softmax attention"],
    "zamba2": ["Mamba-2", "Mamba-2 + softmax attention"] * 2,
    "minimax": ["lightning attention", "softmax attention"] * 2,
    "recurrent_gemma": ["RG-LRU", "RG-LRU", "sliding-window attention", "RG-LRU"],
    "rwkv": ["RWKV-4"] * 2,
    "lara_mini": ["Gated DeltaNet", "sliding-window attention", "Gated DeltaNet", "softmax attention"],
}
KINDS |= dict.fromkeys(
    ("qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid"), KINDS["qwen3_5_text"]
) | dict.fromkeys(("bailing_hybrid", "glm5_next_text"), KINDS["kimi_linear"])  # fmt: skip


def read(model, ids, window):
    """Return the log-decays of each layer, joined over the windows, and the number of windows."""
    taken = {}
    foreign = ForeignModel(model, "it", window)
    with capture(foreign, decay=lambda layer, g: taken.setdefault(layer, []).append(g)):
        foreign.hidden(ids)
    return {layer: torch.cat(parts, 1) for layer, parts in taken.items()}, len(next(iter(taken.values())))


def layers_of(model):
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return getattr(decoder, "blocks", None) or decoder.layers


def mixer_at(layer, path):
    """The module of a layer at the end of a path. In Zamba2's hybrid layers it lies deeper."""
    return next(module for name, module in layer.named_modules() if name == path or name.endswith(f".{path}"))


@pytest.mark.parametrize("kind", OPTIONS)
@torch.no_grad()
def test_decays_by_hand(kind):
    """g is what the weights give for the recorded input of the mixer, in every layer, and at zero input at rest."""
    model, ids = build(kind), torch.randint(256, (2, 37))
    path, law = LAWS[kind]
    decays = dict(layer_decays(ForeignModel(model, kind)))
    mixers = {layer: mixer_at(layers_of(model)[layer], path) for layer in decays}
    inputs = {}
    hooks = [
        mixer.register_forward_pre_hook(
            lambda module, given, options, layer=layer: inputs.update({
                layer: given[0] if given else options["hidden_states"]
            }),
            with_kwargs=True,
        )
        for layer, mixer in mixers.items()
    ]  # fmt: skip
    got, _ = read(model, ids, 64)
    for hook in hooks:
        hook.remove()
    assert got.keys() == decays.keys() == inputs.keys()
    for layer, g in got.items():
        expected = law(mixers[layer], inputs[layer]).float()
        torch.testing.assert_close(g, expected, **TIGHT)
        assert g.shape == (2, 37, *decays[layer].shape)
        assert (g <= 0).all()
        resting = law(mixers[layer], torch.zeros_like(inputs[layer][:1, :1]))[0, 0]
        torch.testing.assert_close(decays[layer].timescales(), -1 / resting, rtol=1e-4, atol=0)
    if kind not in ("minimax", "rwkv"):  # whose decays are constants
        assert max(g.std(1).max() for g in got.values()) > 1e-3


@pytest.mark.parametrize("kind", OPTIONS)
def test_windows_with_carried_state_equal_one_pass(kind):
    model, ids = build(kind), torch.randint(256, (1, 70))
    whole, one = read(model, ids, 512)
    parts, several = read(model, ids, 16)
    assert (one, several) == (1, 5)
    for layer, g in parts.items():
        torch.testing.assert_close(g, whole[layer], **TIGHT)
    if kind not in ("minimax", "rwkv"):  # without the state, later windows differ
        last, _ = read(model, ids[:, 56:], 16)
        assert any((g - whole[layer][:, 56:]).abs().max() > 1e-3 for layer, g in last.items())


@pytest.mark.parametrize("kind", OPTIONS)
def test_layers_are_listed(kind):
    foreign = ForeignModel(build(kind), kind)
    assert layer_kinds(foreign) == KINDS[kind]
    assert [layer for layer, _ in layer_decays(foreign)] == [
        i for i, name in enumerate(KINDS[kind]) if (not name.endswith("attention") and name != "no mixer")
        or name in ("Kimi delta attention", "lightning attention") or "+" in name
    ]  # fmt: skip


def test_every_registered_class_is_tested():
    used = {type(module).__name__ for kind in OPTIONS for module in build(kind).modules()}
    assert set(MIXERS) - MISSING <= used


def test_every_class_of_transformers_with_a_known_name_is_registered():
    """The installed transformers has no other mixer with `A_log`, a forget gate, or slopes than those that are read."""
    import re

    import transformers

    found = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for name, body in re.findall(r"^class (\w+)\(nn\.Module\):(.*?)(?=^class |\Z)", file.read_text(), re.M | re.S):
            if re.search(r"self\.(A_log|forget_gate|slope_rate|rg_lru|time_decay) = ", body):
                found.add(name)
    gates = {name for name in found if name.endswith("ForgetGate")}  # modules of mixers
    mamba1 = {name for name in found if name.endswith("MambaMixer") and name not in MIXERS}
    assert found - gates - mamba1 | MISSING == set(MIXERS)
    assert mamba1 == {"MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"}


def test_a_model_that_takes_no_state_is_refused():
    assert_raises(ValueError, "Linear .* under none of the names cache, past", cache_argument, torch.nn.Linear(1, 1))


def test_measurements_do_not_depend_on_windows():
    """All statistics of a text are those of one pass, also with two sequences and horizons across windows."""
    model, ids = build("zamba2"), torch.randint(256, (2, 90))
    seen = []
    whole, parts = (measure_decays(ForeignModel(model, "it", window), ids, seen.append) for window in (128, 16))
    assert seen == [90, 90, *[15] * 12]
    assert len(whole) == 4
    for one, other in zip(whole, parts, strict=True):
        assert other.rates == pytest.approx(one.rates, rel=1e-4)
        assert other.horizon == pytest.approx(one.horizon, rel=1e-3)
        assert (other.median, other.erased) == pytest.approx((one.median, one.erased), rel=1e-4)
    assert any(1 < row.horizon < 45 for row in whole)


@pytest.mark.parametrize("cuts", [(1, 7, 30), (20,), (49,)])
def test_retained_energy_in_pieces(cuts, monkeypatch):
    monkeypatch.setattr("halflife.analysis.horizon.MAX_STARTS", 10)
    sums = torch.rand(50, 2, 3, dtype=torch.float64).neg().cumsum(0)
    lags = horizon_lags(50)
    energy, first = RetainedEnergy(50, lags), 0
    for piece in sums.tensor_split(cuts):
        energy.add(piece, first)
        first += len(piece)
    torch.testing.assert_close(
        energy.total, retained_energy(sums, lags, torch.zeros_like(sums), torch.full(sums.shape, 50))
    )


@pytest.mark.parametrize("length", [2, 3, 5, 16, 17, 33, 100])
def test_no_window_has_a_single_token(length):
    parts = windows(torch.arange(length).unsqueeze(0), 4)
    assert torch.cat(parts, 1).tolist() == [list(range(length))]
    assert all(2 <= part.shape[1] <= 4 for part in parts)


def test_base_spectrum_and_modes():
    foreign = ForeignModel(build("zamba2"), "zamba2")
    spectrum = model_spectrum(foreign, None, [1, 64])
    for layer, (_, decay) in zip(spectrum.layers, layer_decays(foreign), strict=True):
        scales = decay.timescales().tolist()
        assert layer.spectra["1"].timescales == layer.spectra["64"].timescales == pytest.approx(scales)
        assert layer.spectra["64"].too_slow == sum(scale > 64 * (1 + 1e-5) for scale in scales) / 8
        assert 1 <= layer.spectra["64"].modes <= 8


@pytest.fixture
def saved(tmp_path):
    """The folder of a tiny Zamba2, and a text."""
    build("zamba2").save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("slow and fast decay, " * 30)
    return tmp_path / "model"


def test_the_command(saved, tmp_path, capsys):
    from halflife.cli import main

    arguments = ["spectrum", str(saved), "--text", str(tmp_path / "text"), "--length", "128", "--sequences", "2"]
    main([*arguments, "--heads"])
    out = capsys.readouterr().out
    groups = "Mamba-2 in layers 0, 2; Mamba-2 + softmax attention in layers 1, 3."
    assert f"zamba2: {groups}" in out
    data = json.loads((saved / "spectrum" / "decays.json").read_text())
    (model,) = data["models"]
    assert model["mixers"] == KINDS["zamba2"]
    assert [layer["layer"] for layer in model["layers"]] == [0, 1, 2, 3]
    page = (saved / "spectrum" / "report.html").read_text()
    assert 'id="explorer"' in page
    assert groups in page
    embedded = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (shown,) = embedded["spectra"]["models"]
    got = [layer["trained"][0] for layer in shown["layers"]]
    expected = [decay.timescales().clamp(min=0.01).tolist() for _, decay in layer_decays(load_foreign(saved))]
    assert got == [pytest.approx(scales, rel=1e-3) for scales in expected]


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_class_through_the_survey(kind, tmp_path):
    """A saved model is loaded by transformers, with all weights, and its text measured."""
    build(kind).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("slow and fast decay, " * 30)
    (model,) = survey.measure_models([tmp_path / "model"], [tmp_path / "text"], length=64, sequences=2).models
    assert model.mixers == KINDS[kind]
    assert model.layers
    assert all(math.isfinite(layer.decays.mean) for layer in model.layers)


def test_the_text_part_of_a_model_with_images(tmp_path):
    """Qwen3.5 is released with a vision tower. Its text model is read."""
    from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=OPTIONS["qwen3_5_text"], vision_config=vision)
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    foreign = load_foreign(tmp_path)
    assert layer_kinds(foreign) == KINDS["qwen3_5_text"]
    A_log = whole.model.language_model.layers[1].linear_attn.A_log
    assert torch.equal(foreign.blocks[1].mixer.decay.mixer.A_log, A_log)


def test_missing_weights_are_an_error(saved):
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    tensors.pop("model.layers.0.mamba.A_log")
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    assert_raises(ValueError, r"do not fit config.json: model\.layers\.0\.mamba\.A_log is missing", load_foreign, saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "a pickle"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"damaged"), "truncated or no safetensors"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "its layers are softmax"),
        (lambda folder: (folder / "config.json").write_text(json.dumps(
            {"model_type": "new_one", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
        )), "such code is not run"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "new_one"}'), "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_an_error(saved, change, message):
    change(saved)
    assert_raises((ValueError, FileNotFoundError), message, load_foreign, saved)


def test_without_the_hub(tmp_path):
    (tmp_path / "text").write_text("a text")
    message = "there is no folder nobody/no-model, and the hub cannot be asked for it: .*offline"
    assert_raises(ConnectionError, message, survey.measure_models, [Path("nobody/no-model")], [tmp_path / "text"])


BIG = """
import resource, torch
from transformers import AutoConfig, AutoModelForCausalLM
from halflife.analysis.foreign.model import ForeignModel
from halflife.analysis.model_spectrum import model_spectrum
config = AutoConfig.for_model(
    "qwen3_5_text", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=24, head_dim=128,
    num_attention_heads=8, num_key_value_heads=2, linear_num_key_heads=8, linear_num_value_heads=8,
    tie_word_embeddings=True,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
weights = sum(weight.numel() for weight in model.parameters())
model_spectrum(ForeignModel(model, "big"), torch.randint(151936, (1, 4096)))
print(weights, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_half_a_billion_weights_fit_8_gb():
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, check=True)
    weights, most = map(int, done.stdout.split()[-2:])
    assert weights > 0.45e9
    assert most < 8e9


MQAR = {"name": "mqar", "vocab_size": 256, "length": 32, "num_pairs": 3}
PURE = {
    "mamba2": {}, "qwen3_5_text": {"layer_types": ["linear_attention"] * 4},
    "kimi_linear": {"layer_types": ["linear_attention"] * 4},
}  # fmt: skip


def recurrent(kind, **options):
    return RecurrentModel(ForeignModel(build(kind, **PURE[kind], **options), kind))


def split(model, lag):
    """The split state after the pairs and after as many other tokens as `lag`, and these tokens."""
    task = tasks.build(**MQAR)
    pairs, draw = recall._pairs(task, 2, 0)
    ids = recall._fillers(task, 2, draw, lag)
    start = reading.start(model, pairs)
    return pairs, ids, start, reading.split(model, ids, start)


@pytest.mark.parametrize("kind", PURE)
def test_parts_of_a_state(kind):
    """The whole is the state of one reading, and the parts add up to it. The others' part is the state from zeros."""
    model = recurrent(kind)
    pairs, ids, start, after = split(model, 9)
    _, direct = model.advance(torch.cat([pairs, ids], 1), None)
    empty = tuple({**layer, "memory": torch.zeros_like(layer["memory"])} for layer in start.state)
    end, (others,) = model.read_from(ids, start.state, [empty])
    for i, layer in enumerate(after.state):
        torch.testing.assert_close(layer["memory"], direct[i]["memory"], **TIGHT)
        torch.testing.assert_close(layer["memory"], end[i]["memory"], rtol=0, atol=0)
        torch.testing.assert_close(after.others[i]["memory"], others[i]["memory"], rtol=0, atol=0)
        torch.testing.assert_close(after.beginning[i]["memory"] + others[i]["memory"], layer["memory"], **TIGHT)
        assert layer["position"].tolist() == [15, 15]
        assert after.others[i]["memory"].abs().max() > 1e-4


def test_the_pairs_part_fades_by_the_captured_decays():
    """In Mamba-2 nothing but the decay changes what was written: P_end = P_start · e^{Σ g}, with g from the hooks."""
    model = recurrent("mamba2")
    pairs, ids, start, after = split(model, 9)
    taken = {}
    with capture(model, decay=lambda layer, g: taken.setdefault(layer, g)):
        model.hidden(torch.cat([pairs, ids], 1))
    for i, before in enumerate(start.beginning):
        passed = taken[i][:, pairs.shape[1] :].sum(1)  # [B, H]
        expected = before["memory"] * passed.exp()[..., None, None]
        torch.testing.assert_close(after.beginning[i]["memory"], expected, rtol=1e-3, atol=1e-5)


def test_forecast_of_a_model_of_transformers(tmp_path, capsys):
    from halflife.cli import main

    build("mamba2").save_pretrained(tmp_path / "model")
    main(["forecast", str(tmp_path / "model"), "--pairs", "3", "--length", "32", "--longest", "4", "--examples", "2"])
    assert "mamba2" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "model" / "forecast" / "forecast.json").read_text())["models"]
    assert (found["task"], found["num_pairs"], found["train_length"]) == ("mqar", 3, 32)
    assert len(found["heads"]) == 16


@cases(
    "kind, message", ("zamba2", "layer 1 is Mamba-2 [+] softmax attention"), ("recurrent_gemma", "layer 0 is RG-LRU")
)
def test_no_forecast(kind, message):
    assert_raises(ValueError, f"no forecast for {kind}: {message}", RecurrentModel, ForeignModel(build(kind), kind))
