"""`halflife diagnose`: what models allow, and the words for how their layers forget."""

import dataclasses
import html
import json
import math
import re

import foreign_models
import numpy as np
import pytest
import torch

from halflife.analysis.diagnosis import Allowed, what_is_allowed
from halflife.analysis.look import HeadLens
from halflife.analysis.look.lens import Head, Measured
from halflife.analysis.look.observe import Place
from halflife.cli import main
from halflife.models import LanguageModel, checkpoint, preset
from halflife.report.tables import diagnosis
from halflife.report.tables.look import lost_by

MQAR = {"name": "mqar", "vocab_size": 64, "length": 16, "num_pairs": 3}


@pytest.fixture
def run(tmp_path):
    for name in ("mamba2", "llama"):
        config = preset(name, hidden_size=16, num_layers=2, num_heads=2, vocab_size=64, train_length=16)
        folder = checkpoint.save(LanguageModel(config), tmp_path / "run" / name)
        (folder / "run.json").write_text(json.dumps({"seed": 3, "validation": [MQAR]}))
    return tmp_path / "run"


def test_command(run, capsys):
    main(["diagnose", str(run), "--longest", "4", "--quiet"])
    first, second, _, *said = capsys.readouterr().out.splitlines()
    assert first.startswith("llama (2 × attention): spectrum: no layer has a decay; forecast: the state of layer 0")
    assert second == "mamba2 (2 × mamba2): spectrum: yes; forecast: yes; memory: yes."
    assert said[0].startswith("llama: No layer has a decay that can be read. Its state of one sequence takes")
    assert "more with each token" in said[0]
    assert said[1].startswith("mamba2: ")
    assert " tokens, at zero input. Its state of one sequence takes " in said[1]
    assert said[2].startswith("mamba2, seed 3, ")
    assert re.fullmatch(r"There is no forecast of llama: the state of layer 0 \(attention\) holds [\w, ]+\.", said[3])
    assert said[4].startswith("llama: layer 0, head 0 is softmax attention, which keeps all 256 tokens.")
    assert re.fullmatch(
        r"mamba2: half of what the slowest head \(layer \d, head \d\) writes is left after [\d>.,]+ tokens; at the end "
        r"of 256 tokens [\d.]+ % of the first half is lost, 0.0 % of it overwritten and the rest faded. "
        r"It recalls \d of 3 pairs.", said[5],
    )  # fmt: skip
    assert all((run / "diagnosis" / f"look-{name}.html").exists() for name in ("llama", "mamba2"))
    page = html.unescape((run / "diagnosis" / "report.html").read_text()).replace("\xa0", " ")
    assert [words for words in said[:6] if words not in page] == []
    assert (run / "diagnosis" / "forecast.json").exists()


def test_models_of_another_library_say_what_they_allow(tmp_path):
    for kind in ("mamba2", "qwen3_next"):
        foreign_models.build(kind).save_pretrained(tmp_path / kind)
    allowed = what_is_allowed([tmp_path])
    assert (allowed["mamba2"].spectrum, allowed["mamba2"].forecast, allowed["mamba2"].memory) == ("", "", "")
    assert allowed["mamba2"].state_bytes > 0
    hybrid = allowed["qwen3_next"]
    assert hybrid.spectrum == ""
    assert hybrid.forecast.startswith("layer 3 is softmax attention")
    assert hybrid.memory
    lines = list(diagnosis.allowed_lines(allowed))
    assert "3 × Gated DeltaNet, 1 × softmax attention" in lines[1]


@pytest.mark.parametrize(
    ("horizons", "words"),
    [((3.2, 11.5), "All heads forget within 12 tokens, on the text."),
     ((3.2, 200.0), "The slowest heads forget within 200 tokens, on the text."),
     ((11.5, 900.0), "Layer 1 keeps 900 tokens; the other layers forget within 12, on the text."),
     ((math.inf, 600.0), "Layer 0 keeps >1,024, layer 1 keeps 600 tokens, on the text.")],
)  # fmt: skip
def test_verdicts(horizons, words):
    layers = [{"layer": i, "horizon": one, "longest_lag": 1024} for i, one in enumerate(horizons)]
    own = Allowed(["mamba2"] * 2, "", "", "", 2048, 0)
    model = {"layers": layers, "positions": [1]}
    said = f"m: {words} Its state of one sequence takes 2 KiB."
    assert diagnosis.verdict("m", own, model) == said
    hybrid = dataclasses.replace(own, mixers=["mamba2", "mamba2", "attention"])
    assert diagnosis.verdict("m", hybrid, model) == re.sub("(heads|other layers)", r"\1 with a decay", said)


def test_no_spectrum_has_a_reason(run, tmp_path, refused):
    own = Allowed(["mamba2"], "", "", "", 2048, 0)
    found = {"spectrum": "its tokenizer is missing", "forecast": "nothing to forecast: m: no text"}
    said = diagnosis.findings({"m": own}, found)
    assert said[0] == "m: There is no spectrum: its tokenizer is missing. Its state of one sequence takes 2 KiB."
    (empty := tmp_path / "empty.txt").touch()
    assert f"{empty} is empty" in refused("diagnose", str(run), "--text", str(empty), "--quiet")
    assert "--longest" in refused("diagnose", str(run), "--longest", "0", "--quiet")


def test_the_state_is_that_of_the_dtype_with_all_levels(tmp_path):
    config = preset("mamba2+log_linear", hidden_size=16, num_layers=1, num_heads=2, vocab_size=64)
    model = LanguageModel(config)
    checkpoint.save(model, tmp_path / "one")
    (found,) = what_is_allowed([tmp_path]).values()
    _, (state,) = model.hidden(torch.zeros(1, 3, dtype=torch.long))
    levels = state["memory"].nbytes * 15 / state["memory"].shape[2]
    assert (found.state_bytes, found.token_bytes) == (levels + state["conv"].nbytes, 0)
    assert "of several levels" in found.forecast


def test_what_is_lost_was_overwritten_or_faded():
    """Of two writes in the first half, one lost three quarters: two of four parts to the decay, one to other tokens."""
    left, faded = ([0.25, 1, 0, 0], [0.5, 1, 0, 0])
    assert lost_by(head([3], [left], [faded]), [4]) == (pytest.approx(0.75 / 2), pytest.approx(0.25 / 0.75))


def test_what_is_lost_of_documents_is_lost_at_their_own_ends():
    """The second document begins without a state, which is no loss of the first one."""
    left = [[0.25, 1, 0, 0, 0, 0], [0] * 4 + [0.5, 0]]
    faded = [[0.5, 1, 0, 0, 0, 0], [0] * 4 + [0.5, 0]]
    lost, overwritten = lost_by(head([3, 5], left, faded), [4, 2])
    assert (lost, overwritten) == (pytest.approx(1.25 / 3), pytest.approx(0.25 / 1.25))


def head(cursors, left, faded):
    left, faded, none = (Measured(np.array(grid), "", "1", ()) for grid in (left, faded, []))
    one = Head(Place(0), 0, "delta_rule", 1.0, 2, 0.5, (0, 0))
    return HeadLens(one, np.array(cursors), left, faded, none, none, None)
