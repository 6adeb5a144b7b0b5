"""The Decay paper's grid on text: variants, the budget, findings, the command, resuming."""

import gzip
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from corpora import write_texts
from helpers import assert_raises, cases

from halflife import LanguageModel
from halflife.data.corpus import Corpus, CorpusConfig
from halflife.data.documents import PYTHON, standard_library
from halflife.lab.experiments import EXPERIMENTS, compare, decay_design
from halflife.lab.experiments.decay_design import FINDINGS, finding_sentences, findings_table, verdict
from halflife.lab.experiments.evidence import decay_regression
from halflife.lab.experiments.language_models import base as language
from halflife.lab.experiments.language_models.base import loss_table
from halflife.models import checkpoint
from halflife.models.timescales import timescales
from halflife.report.figures.decays import against_paper
from halflife.runs.one import run_one
from halflife.runs.records import Comparison
from halflife.runs.sweep import Cell
from halflife.training.config import ExecutionConfig

TINY = {
    "steps": 6, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "train_length": 16, "batch_size": 2,
    "save_every": 2, "test_tokens": 64, "validation_tokens": 64,
}  # fmt: skip
GRID = EXPERIMENTS["decay-design"]()


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFLIFE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = "the state forgets what it cannot hold in {i} tokens; " * 8
    folder = write_texts(tmp_path_factory.mktemp("text"), words, count=39)
    (folder / "bytes.txt.gz").write_bytes(gzip.compress(bytes(range(1, 256)) * 4))
    return folder


@pytest.fixture(scope="module")
def settings(text):
    return GRID.open_data(GRID.settings_at("smoke", {**TINY, "text": (str(text),)}))


def config(settings, name="vector/mamba2", seed=0):
    return GRID.configure(settings, Cell(name, 1e-2, seed))


def run(settings, folder, **cell):
    return run_one(config(settings, **cell).open(), folder, name="x", execution=ExecutionConfig(show=False))


def test_python_has_five_megabytes_of_text():
    files = standard_library()
    assert files == sorted(files)
    assert sum(file.stat().st_size for file in files) > 5e6
    assert not any("site-packages" in str(file) or "/test/" in str(file) for file in files)


def test_the_standard_library_is_a_source(monkeypatch, tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.py").write_text(f"x = {i}\n" * 9)
    monkeypatch.setattr("halflife.data.documents.standard_library", lambda: sorted(tmp_path.glob("*.py")))
    corpus = Corpus.open(CorpusConfig(sources=(PYTHON,), fractions=(0.1, 0.1)), show=False)
    assert corpus.documents == 20
    saved = corpus.config.to_dict()
    assert saved["sources"] == [PYTHON]  # a name and no path
    assert CorpusConfig.from_dict(json.loads(json.dumps(saved))) == corpus.config


def test_the_settings_hold_the_digest_and_absolute_paths(text, settings, monkeypatch):
    monkeypatch.chdir(text.parent)
    relative = GRID.open_data(GRID.settings_at("smoke", {**TINY, "text": (text.name,)}))
    assert relative == settings
    assert settings.text == (str(text),)
    assert settings.digest == Corpus.open(settings.corpus(), show=False).digest
    assert config(settings).digest == settings.digest


def test_the_three_splits_share_no_document(settings):
    corpus = Corpus.open(settings.corpus(), show=False)
    sizes = [corpus.split(name).documents for name in ("train", "validation", "test")]
    assert sum(sizes) == 40
    assert all(sizes)


def test_a_run_learns_writes_and_is_not_run_twice(settings, tmp_path):
    result = run(settings, tmp_path)
    (test,) = result["tests"]
    assert test["loss"] < math.log(256)
    assert test["loss"] == pytest.approx(result["bits_per_byte"] * math.log(2))
    assert result["parameters"] == checkpoint.load(tmp_path).num_parameters()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_loss" in line][-1] == 6
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json", "model.safetensors", "run.json", "metrics.jsonl", "result.json", "tokenizer.json",
        "tokenizer_config.json", "spectrum.json",
    }  # fmt: skip
    model = checkpoint.load(tmp_path)
    ((saved,), (trained,)) = json.loads((tmp_path / "spectrum.json").read_text())["layers"], timescales(model, [1, 256])
    assert list(saved["init"]["timescales"]) == ["1", "16", "32", "64", "128", "256"]
    assert {at: saved["trained"]["timescales"][at] for at in trained.timescales} == trained.timescales
    torch.manual_seed(0)
    (initial,) = timescales(LanguageModel(model.config), [1])
    assert saved["init"]["timescales"]["1"] == initial.timescales["1"] != trained.timescales["1"]
    assert run(settings, tmp_path) == result
    assert_raises(ValueError, "another configuration", run, settings, tmp_path, seed=1)


def test_the_loss_is_that_of_the_test_split(settings, tmp_path):
    """The loss is computed by hand on the rows of the test split, one after the other."""
    result = run(settings, tmp_path)
    model = checkpoint.load(tmp_path).eval()
    split = Corpus.open(settings.corpus(), show=False).split("test")
    rows = split.batches(1, 16, 0, "concatenated", steps=64 // 16)
    nats = count = 0.0
    for i in range(len(rows)):
        logits, _ = model(rows[i]["input_ids"])
        scored = rows[i]["labels"] != -100
        nats -= logits.log_softmax(-1)[scored].gather(1, rows[i]["labels"][scored].unsqueeze(1)).sum().item()
        count += scored.sum().item()
    assert result["tests"][0]["loss"] == pytest.approx(nats / count, rel=1e-5)


@pytest.mark.parametrize("name", decay_design.VARIANTS)
def test_every_variant_of_the_paper_builds_and_trains(name, settings):
    cell = config(settings, name)
    model = LanguageModel(cell.model)
    logits, _ = model(torch.randint(256, (2, 9)))
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert cell.model.name == name


def test_findings_compare_variants_of_the_core():
    named = {name for finding in FINDINGS for pair in finding.pairs for name in pair}
    assert named <= set(decay_design.VARIANTS)
    assert set(decay_design.CORE) <= set(decay_design.VARIANTS)
    for finding in FINDINGS:
        assert any(set(pair) <= set(decay_design.CORE) for pair in finding.pairs), finding.statement


def test_variants_differ_by_the_decay_alone():
    """All variants have the parameters of the vector Mamba-2 block within 10 % (Decay, App. A.2)."""
    small = GRID.scales["small"]
    with torch.device("meta"):
        counts = {n: LanguageModel(GRID.model(n, small)).num_parameters() for n in decay_design.VARIANTS}
    assert min(counts.values()) > 3e6
    assert all(abs(count / counts["vector/mamba2"] - 1) < 0.1 for count in counts.values()), counts


@pytest.mark.parametrize(
    ("differences", "equal", "expected"),
    [
        ([0.1, 0.2], False, "yes"), ([-0.1, -0.2], False, "no"), ([0.1, -0.1], False, "seeds differ"),
        ([0.02, -0.02], True, "yes"), ([0.02, 0.03], True, "no"),
    ],
)  # fmt: skip
def test_verdicts(differences, equal, expected):
    assert verdict(differences, equal) == expected


def test_the_papers_own_losses_bear_out_its_findings():
    """One pair contradicts its finding: TPE is better than Mamba-2's scalar decay by 0.029, and the table says so."""
    papers = {name: variant.paper for name, variant in decay_design.VARIANTS.items()}
    failed = {
        pair for finding in FINDINGS for pair in finding.pairs
        if verdict([papers[pair[1]] - papers[pair[0]]], finding.equal) != "yes"
    }  # fmt: skip
    assert failed == {("tpe/mamba2", "scalar/mamba2")}


def test_findings_compare_forms_that_were_run():
    """Of rows as run, and of none beside a printed form of the other; with the paper's own difference."""
    results = {name: {"0": {"test": loss}} for name, loss in (
        ("vector/gla:released", 2.0), ("scalar/gla:released", 2.1), ("vector/hgrn2:released", 2.0),
        ("scalar/hgrn2", 2.2), ("vector/mamba2", 1.9), ("scalar/mamba2", 1.8),
    )}  # fmt: skip
    table = findings_table(results, {name: decay_design.paper_loss(name) for name in results})
    assert "| vector/gla:released, scalar/gla:released | +0.1000 | +0.033 | yes | yes |" in table
    assert "| vector/mamba2, scalar/mamba2 | -0.1000 | +0.013 | no | yes |" in table
    assert "hgrn2" not in table
    assert finding_sentences(results) == [
        "The finding “vector decay is better than scalar” holds here in 1 of 2 comparisons."
    ]


def test_the_table_of_losses_tells_a_seed_that_diverged():
    def row(model, seed, loss):
        run = {"model": model, "seed": seed, "loss": loss, "selected": True}
        return {**run, "parameters": 1234, "tokens_per_second": 100 if loss == loss else math.nan}

    found = {"whole": (1.2, 1.3, 1.4), "part": (1.0, math.nan, 1.5), "none": (math.nan,)}
    rows = [row(model, seed, loss) for model, runs in found.items() for seed, loss in enumerate(runs)]
    table = loss_table(rows, {"whole": 2.5, "part": None, "none": None})
    assert "| whole | 1,234 | 100 | 1.2000, 1.3000, 1.4000 | 1.3000 [1.2000, 1.4000] | 2.500 |" in table
    assert "| part | 1,234 | 100 | 1.0000, diverged, 1.5000 | 1.2500 (2 of 3 seeds) | – |" in table
    assert "| none | 1,234 | – | diverged | – (0 of 1 seeds) | – |" in table


@pytest.mark.parametrize("name", ["decay-design", "decay-lm"])
@pytest.mark.parametrize(("tokenizer", "unit"), [("bytes", "byte"), ("gpt2", "token")])
def test_the_printed_losses_have_units(name, tokenizer, unit, tmp_path, monkeypatch):
    """A loss per byte stands beside the paper's, which is per token."""
    experiment = EXPERIMENTS[name]()
    settings = replace(experiment.settings_at("smoke", {}), tokenizer=tokenizer)
    monkeypatch.setattr(experiment, "saved_settings", lambda folder: settings)
    monkeypatch.setattr(language, "read_comparison", lambda folder: Comparison(folder, {"models": []}, {}, [], []))
    row = {"model": "llama", "seed": 0, "loss": 1.5, "selected": True, "parameters": 9, "state_size": 9}
    text = experiment.summary(tmp_path, [{**row, "tokens_per_second": 1.0}])
    assert "1.5000 | 2.921 |" in text
    assert f"in nats per {unit}; the paper's is nats per token" in text


OPTIONS = ("steps", "save_every", "hidden_size", "num_layers", "num_heads", "train_length", "batch_size")


def arguments(text, folder, *more):
    sizes = [f"--{name.replace('_', '-')}={TINY[name]}" for name in OPTIONS]
    return ["compare", *more, "--experiment", "decay-design", "--quiet", "--output", str(folder), *sizes, "--text",
            str(text)]  # fmt: skip


def losses(folder):
    found = json.loads((folder / "results.json").read_text())["results"]
    return {name: {seed: run["test"] for seed, run in runs.items()} for name, runs in found.items()}


def test_a_comparison_without_settings_is_damaged(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"experiment": "decay-design", "variants": [], "sizes": {}}))
    assert_raises(ValueError, r"config\.json is damaged: it has no settings", compare.run_comparison, tmp_path)


def test_a_comparison_is_summed_up_drawn_and_measured(text, tmp_path, monkeypatch):
    """Beside the paper's losses, and with a regression of its decays, for which two rows are enough here."""
    monkeypatch.setattr(decay_regression, "FEWEST_ROWS", 2)
    models, settings = ["vector/mamba2", "scalar/mamba2", "llama"], {**TINY, "steps": 2, "text": (str(text),)}
    folder = compare.create_comparison(
        models, experiment="decay-design", settings=settings, learning_rates=[1e-2], output=tmp_path / "x"
    )
    rows = compare.run_comparison(folder, show=False)
    saved, summary = json.loads((folder / "results.json").read_text()), (folder / "summary.md").read_text()
    assert {name: runs["0"]["test"] for name, runs in saved["results"].items()} == {
        row["model"]: row["loss"] for row in rows
    }
    assert saved["paper"] == {name: decay_design.paper_loss(name) for name in models}
    assert "1 layers, hidden size 16, 2 heads. Training: 2 steps of 2 × 16 bytes" in summary
    difference = saved["results"]["scalar/mamba2"]["0"]["test"] - saved["results"]["vector/mamba2"]["0"]["test"]
    assert f"| vector/mamba2, scalar/mamba2 | {difference:+.4f} | +0.013 |" in summary
    (panel,) = against_paper(saved).panels
    assert {series.name: (*series.x, *series.y) for series in panel.series} == {
        name: (saved["paper"][name], saved["results"][name]["0"]["test"]) for name in models
    }
    assert {path.stem for path in (folder / "figures").iterdir()} == {
        "results", "training", "length", "spectrum", "decay_regression"
    }  # fmt: skip
    assert "| median of λ after training | 2 |" in summary
    measured = json.loads((folder / "decay_regression.json").read_text())["runs"]
    assert [one["model"] for one in measured] == models[:2]  # the other has no decay
    assert all(0 < one[when]["median"] < 1 for one in measured for when in ("init", "trained"))


def test_groups_stand_for_their_variants(text, tmp_path):
    folder = compare.create_comparison(
        ["core", "llama"], experiment="decay-design", settings={**TINY, "text": (str(text),)}, output=tmp_path / "x"
    )
    assert json.loads((folder / "config.json").read_text())["models"] == [*decay_design.CORE, "llama"]


@cases(
    "more, message",
    (["vector/mamba3"], "Did you mean 'vector/mamba2'"),
    (["--scale", "big"], "unknown scale 'big'.*smoke, small, large"),
    (["--seeds", "0"], "at least 1"),
    (["core", "vector/mamba2"], "each model once"),
    (["--hidden-size", "15"], "num_heads must divide"),
    (["--train-length", "0"], "at least 1"),
)
def test_bad_choices_fail_at_once(text, tmp_path, refused, more, message):
    given = [option for option in arguments(text, tmp_path / "x") if option.split("=")[0] not in more]
    error = refused(given[0], *more, *given[1:])
    assert re.search(message, error), error
    assert not (tmp_path / "x").exists()


def test_missing_text_and_another_text_are_refused(text, settings, tmp_path):
    assert_raises(FileNotFoundError, "nowhere", GRID.open_data, GRID.settings_at("smoke", {"text": ("nowhere.txt",)}))
    (tmp_path / "other.txt").write_text("x" * 999)
    other = config(settings)
    other.data["sources"] = [str(tmp_path / "other.txt")]
    with pytest.warns(UserWarning, match="one document"), pytest.raises(ValueError, match="not the text of the run"):
        other.open()
