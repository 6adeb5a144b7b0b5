"""`halflife theory` prints, writes and draws the results of `halflife.lab.theory`. Errors are clear."""

import json
import math
import shutil
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from helpers import assert_raises, cases, generator

from halflife.cli import main
from halflife.decay import minimax
from halflife.files import read_json, write_json
from halflife.lab.theory import correlations, costs, covariances, gradients, normalization, spectra, stationarity
from halflife.lab.theory.compute import TOPICS, compute, write
from halflife.lab.theory.figures import FIGURES, draw_all
from halflife.lab.theory.settings import TheorySettings
from halflife.lab.theory.tables import TABLES
from halflife.models import LanguageModel, checkpoint, preset

SIZES = ("--channels", "3", "--length", "60", "--lengths", "20", "60", "--counts", "2", "--quiet")
LOSSES = [(1, 1, 3.0), (2, 2, 2.5), (3, 4, 2.0), (5, 8, 1.7), (9, 16, 1.6), (17, 32, 1.9)]  # trained on 16


def text(length=1 << 13, beta=0.3):
    """Bytes whose signs are sums of switches at all scales, so that R(s) falls slowly, as in fractional noise."""
    draw = generator("text")
    total = torch.zeros(length)
    for octave in range(12):
        scale = 2**octave
        switches = torch.randn(length // scale + 1, generator=draw) * scale ** (-beta / 2)
        total += switches.repeat_interleave(scale)[:length]
    return bytes(torch.where(total > 0, ord("b"), ord("a")).tolist())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A text, and a folder like that of a run of `halflife train`."""
    root = tmp_path_factory.mktemp("theory")
    (root / "text.txt").write_bytes(text())
    torch.manual_seed(0)
    checkpoint.save(
        LanguageModel(preset("tnl", hidden_size=8, num_layers=1, num_heads=2, vocab_size=256)), root / "run"
    )
    positions = [{"first": a, "last": b, "loss": loss} for a, b, loss in LOSSES]
    lengths = [{"length": 16, "perplexity": 1.0}, {"length": 32, "perplexity": 1.0}]
    write_json(root / "run" / "result.json", {"positions": positions, "lengths": lengths, "rows": 4})
    return root


@pytest.fixture(scope="module")
def made(inputs):
    folder = inputs / "out"
    files = ["--text", str(inputs / "text.txt"), "--runs", str(inputs / "run"), "--output", str(folder)]
    with (inputs / "printed.txt").open("w") as printed, redirect_stdout(printed), pytest.MonkeyPatch.context() as few:
        few.setattr(minimax, "FURTHER_STARTS", ())  # of searches, of which each takes a third of a second
        few.setattr(minimax, "_FOUND", {})
        main(["theory", *SIZES, *files])
    return folder


def test_files(made):
    pictures = {f"theory_{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg")}
    assert {path.name for path in made.iterdir()} == {"theory.json", "theory_ends.json", *pictures}
    assert list(TOPICS) == list(read_json(made / "theory.json"))
    assert {*TABLES, *FIGURES} == {*TOPICS}

    def no(constant):
        raise AssertionError(f"{constant} is no number of JSON")

    json.loads((made / "theory.json").read_text(), parse_constant=no)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_show_something(made, name):
    from matplotlib.image import imread

    pixels = np.asarray(imread(made / f"theory_{name}.png"))[..., :3]
    height, width = pixels.shape[:2]
    inked = (pixels < 0.9).any(-1)
    assert 0.01 < inked.mean() < 0.9
    quarters = inked[: height // 2, : width // 2], inked[height // 2 :, width // 2 :]
    assert all(quarter.mean() > 0.003 for quarter in quarters)
    edges = inked[0], inked[-1], inked[:, 0], inked[:, -1]
    assert not any(edge.any() for edge in edges)  # nothing is cut off


@pytest.mark.slow
def test_figures_are_redrawn_from_the_data_alone(made, tmp_path):
    data = read_json(made / "theory.json")
    files = draw_all(data, tmp_path)
    assert len(files) == 2 * len(FIGURES)
    for file in files:
        assert file.read_bytes() == (made / file.name).read_bytes()


def test_a_second_command_keeps_the_other_topics(made, tmp_path, capsys):
    folder = shutil.copytree(made, tmp_path / "made")
    before = read_json(made / "theory.json")
    main(["theory", *SIZES, "--seed", "7", "--only", "gaps", "errors", "--output", str(folder)])
    shown = capsys.readouterr().out
    assert "gaps of random log-rates" in shown
    assert "channels with time-scales" not in shown
    after = read_json(folder / "theory.json")
    assert list(after) == list(before)
    assert [name for name in TOPICS if after[name] != before[name]] == ["errors", "gaps"]
    assert (folder / "theory_errors.png").read_bytes() != (made / "theory_errors.png").read_bytes()


def test_numbers_are_those_of_the_functions(made):
    data = read_json(made / "theory.json")
    low, high = minimax.best_endpoints(3, 60)
    errors = data["errors"]
    assert (errors["channels"], errors["lengths"]) == ([2, 3], [20, 60])
    paper, best = (errors["errors"][name]["60"][1] for name in ("geometric on [1/T, 1]", "geometric, best ends"))
    assert paper == minimax.minimax_error(minimax.geometric_rates(3, 60), 60)
    assert best == minimax.minimax_error(minimax.geometric_rates(3, 60, low, high), 60)
    rows = data["ends"]["rows"]
    assert [(row["low"], row["high"]) for row in rows[:3]] == [(1, 1), (0.1, 6), (0.5, 4)]
    assert rows[0]["integers"] == paper
    assert rows[0]["interval"] == minimax.minimax_error(minimax.geometric_rates(3, 60), 60, continuous=True)
    assert (rows[3]["low"] / 60, rows[3]["high"]) == pytest.approx((low, high))
    ends = [found["ends"] for found in data["positions"]]
    assert [end for pair in ends for end in pair] == pytest.approx([1 / 60, 1, low, high, 0.01 / 60, 6])
    assert data["positions"][0]["errors"]["static"][-1] == paper
    assert data["gaps"]["bound"] == pytest.approx([math.log(60) / (n * n - 1) for n in (2, 3)])
    assert (data["channels"]["counted"][0], data["channels"]["counted"][-1]) == (1, 3)
    # With t_ref = 1 the time-scales at t are those of [1, T t].
    assert data["channels"]["theorem"]["counted"][-1] == 3
    assert data["channels"]["default"]["counted"][-1] == 2  # 1, 60 and 3,600 tokens
    assert data["responses"]["positions"] == [4, 6, 60]
    slowest = [data["responses"]["default"]["frozen"][-1][0][-1], data["responses"]["frozen"][-1][0][-1]]
    assert slowest == pytest.approx([math.exp(-1 / 60), math.exp(-1)])
    assert data["energy"]["default"]["as run"][0][-1] == pytest.approx(60 / (1 + 2 / 60), rel=0.05)
    assert data["normalization"] == normalization.relative_energies(3, 60)
    assert data["gradients"] == gradients.gradient_flow()
    assert data["phases"] == covariances.phase_attenuation()
    assert data["gram"] == covariances.gram_bounds()
    assert data["costs"] == costs.cost_table()
    assert data["energy"]["positions"][-1] == 60
    assert data["energy"]["as run"][0][-1] == pytest.approx(60 / 3, rel=0.05)  # t / (1 + 2r)
    # 7 octaves of 1.3 carry as much as 13 of 0.7: the middle one of three channels stands at their end.
    assert data["taper"]["0.3"]["best"] == pytest.approx([1, 7 / 20, 0])
    assert data["taper"]["0.3"]["sharp"] == pytest.approx([0, 0.5 - 7 / 20, 0])


def test_numbers_of_text_and_runs(made, inputs):
    data = read_json(made / "theory.json")
    found = data["autocovariance"]["sequences"]
    assert list(found) == ["bits", "embeddings of tnl"]
    ids = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    alone = correlations.power_law(ids.double())
    # Two bytes differ by one vector, whichever stands for them: R is the same but for a factor.
    for sequence in found.values():
        assert sequence["exponent"] == pytest.approx(alone["exponent"], rel=1e-9)
        assert (sequence["low"], sequence["high"]) == pytest.approx((alone["low"], alone["high"]), rel=1e-9)
    assert found["bits"]["autocovariance"][0] == pytest.approx(2 * alone["autocovariance"][0])  # 97 and 98: two bits
    assert data["autocovariance"]["tokens"] == len(ids)
    blocks, density = data["blocks"], data["density"]
    assert (blocks["tokens"], blocks["beta"]) == (len(ids), found["bits"]["exponent"])
    assert blocks["exponents"] == stationarity.block_exponents(ids, correlations.bits(256))["exponents"]
    assert density["claimed slope"] == found["bits"]["exponent"] - 1
    assert density["slope"] == stationarity.spectral_density(ids, correlations.bits(256))["slope"]
    information = data["information"]["tnl"]
    assert (information["scales"], information["trained"], information["rows"]) == ([2, 4, 8], 16, 4)
    assert information["information"] == pytest.approx([x / math.log(2) for x in (0.5, 0.3, 0.1)])
    assert information["slack"] == pytest.approx(0.2 / 0.3)


def test_bits():
    assert correlations.bits(5).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert correlations.bits(256).shape == (256, 8)
    assert correlations.bits(1).shape == (1, 1)


def test_energies_at_some_positions_are_those_of_all():
    rates, tapers = torch.ones(2).double(), minimax.taper(2)
    every, some = (spectra.energies(rates, tapers, 50, trials=20, points=points) for points in (None, 9))
    assert some["positions"] == [1, 2, 3, 4, 7, 12, 19, 31, 50]
    at = torch.tensor(some["positions"]) - 1
    for kind in ("continuous", "frozen", "as run", "simulated"):
        assert torch.tensor(some[kind]).tolist() == torch.tensor(every[kind])[:, at].tolist()


@pytest.mark.slow
def test_every_setting_counts():
    small = {"channels": 3, "length": 20, "lengths": (10.0,), "counts": (2,)}
    topics = ["errors", "gaps", "taper"]
    plain = compute(TheorySettings(**small), topics)
    assert plain == compute(TheorySettings(**small), topics)
    for name, value in (("beta", 0.9), ("lengths", (11.0,)), ("counts", (1,)), ("seed", 1)):
        assert compute(TheorySettings(**small | {name: value}), ["errors"])["errors"] != plain["errors"], name
    for name, value in (("channels", 4), ("length", 21), ("seed", 1)):
        assert compute(TheorySettings(**small | {name: value}), ["gaps"])["gaps"] != plain["gaps"], name


def test_what_the_tables_say(made, inputs):
    shown = (inputs / "printed.txt").read_text()
    data = read_json(made / "theory.json")
    lines = shown.splitlines()
    row = next(line for line in lines if line.strip().startswith("geometric on [1/T, 1]")).split()
    errors = data["errors"]["errors"]["geometric on [1/T, 1]"]["20"]
    assert [float(cell) for cell in row[-2:]] == pytest.approx(errors, rel=0.05)  # two digits are shown
    claimed = [f"{math.pi**2 / math.log(length):.3g}" for length in (20, 60)]
    assert all(any(cell in line.split() for line in lines) for cell in claimed)
    assert f"{data['autocovariance']['sequences']['bits']['exponent']:.2f}" in shown
    assert "0.721" in next(line for line in lines if line.strip().startswith("tnl"))
    assert "too narrow" in shown
    assert lines[-1].startswith(f"written to {made}: theory.json, theory_errors.png")


@cases(
    "arguments, message",
    (["--only", "gap"], "unknown topic 'gap'. Did you mean 'gaps'? Choose from: errors, ends"),
    (["--only", "autocovariance"], "autocovariance needs a text: --text FILE"),
    (["--only", "blocks"], "blocks needs a text: --text FILE"),
    (["--only", "density"], "density needs a text: --text FILE"),
    (["--only", "information"], "information needs runs of `halflife train`: --runs DIR"),
    (["--text", "missing.txt"], "there is no file missing.txt"),
    (["--runs", "missing"], "there is no folder missing"),
    (["--channels", "0"], "need at least 2 channels"),
    (["--length", "1"], "a length of 10"),
    (["--beta", "0"], "β > 0"),
    (["--beta", "nan"], "β > 0"),
    (["--lengths", "100", "1"], "need lengths from 2"),
    (["--counts", "0"], "counts from 1"),
    (["--tokens", "0"], "and a token"),
    (["--channels", "16", "--length", "2000000"], "--channels × --length may be at most 16,000,000"),
)
def test_errors_are_one_line(arguments, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    assert message in refused("theory", *SIZES, *arguments)
    assert not list(tmp_path.iterdir())  # nothing is written


def test_files_that_say_nothing(inputs, tmp_path):
    checkpoint.save(checkpoint.load(inputs / "run"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"run has no losses by position: it is no finished run of `halflife train`"):
        compute(TheorySettings(runs=(tmp_path / "run",)), ["information"])
    (tmp_path / "white.txt").write_bytes(bytes(torch.randint(97, 122, (4000,), generator=generator("white")).tolist()))
    with pytest.raises(ValueError, match=r"the text shows no power law: only \d octaves"):
        compute(TheorySettings(text=(tmp_path / "white.txt",)), ["autocovariance"])
    (tmp_path / "theory.json").write_text('{"gaps": ')
    assert_raises(ValueError, r"theory\.json is truncated", write, {}, tmp_path)


def test_the_start_of_a_text(inputs):
    found = compute(TheorySettings(text=(inputs / "text.txt",), tokens=4096), ["autocovariance"])["autocovariance"]
    ids = torch.frombuffer(bytearray(text()[:4096]), dtype=torch.uint8)
    assert found["tokens"] == 4096
    assert found["sequences"]["bits"]["exponent"] == pytest.approx(correlations.power_law(ids)["exponent"], rel=1e-9)


def test_a_table_explains_its_columns():
    data = {"ends": (1e-3, 1), "length": 1000, "positions": [16], "errors": {"adapted": [0.1], "as run": [0.2]}}
    (table,) = TABLES["positions"]([data])
    assert all(f"{heading}: " in table.note for heading in data["errors"])
