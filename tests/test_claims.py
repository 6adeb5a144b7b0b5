"""docs/claims.md is what docs/claims.py writes, its numbers come from files, and its verdicts follow the rules."""

import csv
import json
import re
import shlex
import sys
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import cases
from pairwise import slow_beyond

from halflife import LanguageModel
from halflife.cli import read_command
from halflife.lab.experiments import EXPERIMENTS
from halflife.lab.experiments.decay_rows import VARIANTS, as_run
from halflife.lab.experiments.echo import TABLE_3
from halflife.runs.sweep import Cell

DOCS = Path(__file__).parent.parent / "docs"

sys.path.insert(0, str(DOCS))
import claims  # noqa: E402 (a script of the documents, not of the package)

_, COMMANDS, PAPERS = claims.load()
EVERY = [claim for each in PAPERS.values() for claim in each]


@cache
def readings():
    """Every claim and what its files say."""
    return [(claim, claims.read(claim)) for claim in EVERY]


@cache
def asked(command):
    """What a command line of `halflife` asks for."""
    return read_command(shlex.split(command)[1:])


def models_of_rules(claim):
    """The strings of the expressions that the verdict rests on, directly or through names. Models are among them."""
    wanted, found = list(claim.rules), set()
    for expression in wanted:
        found |= set(re.findall(r'"([^"]+)"', expression))
        wanted += [claim.names[name] for name in claims._uses(expression) & claim.names.keys()]
    return found


def test_the_page_is_what_the_script_writes():
    assert claims.PAGE.read_text(encoding="utf-8") == claims.page()


def test_every_verdict_has_its_evidence():
    """Read the files without docs/claims.py: who is not open has a file, and trained models have seeds and rates."""
    for claim, reading in readings():
        assert reading.verdict in claims.VERDICTS
        assert set(reading.files) <= set(COMMANDS)
        if reading.verdict == "open":
            assert reading.reason, claim.says
            continue
        assert claim.rules, claim.says
        assert reading.files, claim.says
        for name in reading.files:
            if name.endswith(".csv"):
                of_tests = re.sub("_steps|_positions", "", name)  # beside these at the selected rates
                rows, tried = (claims.read_table(claims.RESULTS / each) for each in (name, of_tests))
                assert len({row["seed"] for row in rows}) >= 3
                assert len({row["learning_rate"] for row in tried}) >= 3


def test_verdicts_on_trained_models_name_them():
    """Models are in the cell of the evidence. PoST on Mamba-2 and Gated DeltaNet is read with Δ fixed, as printed."""
    rows = dict(re.findall(r"^\| (\d+) \| (.*)$", claims.PAGE.read_text(encoding="utf-8").split("## Rules")[0], re.M))
    for number, (claim, reading) in enumerate(readings(), 1):
        if any(name.endswith(".csv") for name in reading.files):
            assert reading.models, claim.says
        if len(reading.models) <= claims.MOST_MODELS:
            assert all(f"`{model}`" in rows[str(number)] for model in reading.models), claim.says
        for base in ("mamba2", "gated_deltanet"):
            trained = {f"{base}:post", f"{base}:frozen"} & {*reading.models}
            assert trained != {f"{base}:post"}, claim.says
        assert not {"mamba2:post", "gated_deltanet:post"} & models_of_rules(claim), claim.says


def test_runs_train_the_models_that_the_rules_read():
    """A run of the experiment whose file a rule reads has every model of the rule, in the form that was run."""
    asking = 0
    for claim in EVERY:
        if not claim.settle.startswith("halflife compare"):
            continue
        run = asked(claim.settle)
        experiment = EXPERIMENTS[run.experiment]()
        trained = {*experiment.expanded(run.models or experiment.models_at(run.scale))}
        for name in models_of_rules(claim):
            if run.experiment == "decay-lm" and name in VARIANTS:
                assert as_run(name) in trained, (claim.says, name)
                asking += 1
            if run.experiment == "post-taken-apart-text" and name.partition(":")[0] == "mamba2":
                assert name in trained, (claim.says, name)
                asking += 1
    assert asking > 30


def test_what_is_true_before_training_says_so():
    for claim in PAPERS["Decay design space"]:
        starts = [name for name, expression in claim.names.items() if '"init"' in expression]
        assert bool(starts) == ("true before training" in claim.number), claim.says
    start, trained = (claims.Files().decays("ablation/mamba2-no-Δ", when) for when in ("init", "trained"))
    assert start.shape == trained.shape
    assert start.max() < 0.4


def test_no_number_is_typed():
    for claim in EVERY:
        typed = re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}|Mamba-2|RWKV-7|HGRN2", "", claim.number)
        assert not re.search(r"\d", typed), claim.number


def test_numbers_are_those_of_the_files():
    """Some cells of the page, computed here from the files."""
    page = claims.PAGE.read_text(encoding="utf-8")
    theory = json.loads((DOCS / "results" / "theory.json").read_text())
    errors = theory["positions"][0]["errors"]
    most = max(run / static for run, static in zip(errors["as run"], errors["static"], strict=True))
    assert f"In the recurrence the error is up to {most:.0f} times the static one." in page
    with (DOCS / "results" / "gate_rank_niah.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seeds = [
        100 * float(row["accuracy"])
        for row in rows
        if (row["model"], row["test"], row["length"], row["num_pairs"]) == ("mamba2", "niah:hard", "256", "8")
        and row["selected"] == "True"
    ]
    means = sorted(sum(resample) / 5 for resample in product(seeds, repeat=5))
    low, high = means[int(0.025 * len(means))], means[int(0.975 * len(means))]
    assert f"against {sum(seeds) / 5:.1f} [{low:.1f}, {high:.1f}] %" in page


# Experiment of a run that would settle a claim → what the paper says of its models: base or model → millions of
# parameters, and the tolerance; None where it says nothing.
SAID = {
    "post-lm": ({"mamba2": 188.9, "rwkv7": 180, "gated_deltanet": 212.3}, 0.05),
    "decay-lm": ({"": 160}, 0.06),
    "gate-rank-lm": ({"": 760}, 0.03),
    "echo-lm": ({"echo_paper": 180, "": None}, 0.03),
    "echo-mqar": ({"": 50}, 0.06),
    "echo-transfer": (
        {"mamba3_echo": 1.110144, "mamba3_echo+attention": 0.998016, "mamba3_echo+ska_paper": 0.981632}, 1e-4
    ),
    "post-mqar": ({}, 0),  # `as_printed` has the states
    "gate-rank-s5": ({}, 0),  # its paper says one layer, and no width
    "koopman-powers": ({}, 0),  # these two are ours
    "post-taken-apart-text": ({}, 0),
    "echo-tiers": ({}, 0),  # Figure 3 says 400k, which Table 5 does not give; test_paper_scales has ours
}  # fmt: skip
DEPTHS = {"post-mqar": 2, "gate-rank-s5": 1, "echo-transfer": 4, "echo-mqar": 16, "echo-lm": 24, "decay-lm": 12}
STATES = {"64k": (512, 4, 65_536), "32k": (512, 8, 32_768), "16k": (256, 4, 16_384)}  # of PoST's Appendix C: d, h, d²/h
RUNS = sorted({claim.settle for claim in EVERY if claim.settle.startswith("halflife compare")})


def check_states(name, config):
    """PoST, Appendix C: two layers without MLP, and d²/h numbers of state in each."""
    width, heads, numbers = STATES[name.partition(":")[2]]
    assert (config.hidden_size, config.vocab_size, config.mlp) == (width, 8192, "none"), name
    layers = LanguageModel(config)(torch.zeros(1, 2, dtype=torch.long))[1]
    assert [layer["memory"].numel() for layer in layers] == [numbers] * 2, name
    assert numbers == width**2 // heads


def check_tiers(name, config):
    """Echo, Tables 5 and G.2: widths, heads and layers by task, N 16, r 24, d_ff 256, SKA beside the last two.

    Features of the SSM have its N numbers and no lift.
    """
    depth = 4 if "amnesia" in name else 3
    with torch.device("meta"):
        block = LanguageModel(config).blocks[-1]
    assert (config.hidden_size, config.num_layers, block.mixer.num_heads) == (96, depth, depth), name
    assert (config.vocab_size, block.mixer.decay.head_dim, block.mlp.down.in_features) == (128, 16, 256)
    if "ska" in name:
        own = config.hybrid["options"]
        rank, lift = 16 if "shared" in name else 24, "cg_projected" if name.startswith("cg") else "none"
        eta = float(name.removeprefix("cg-")[4:7])
        assert (own["rank"], own.get("lift", "none"), own["eta_init"]) == (rank, lift, eta)
        assert (config.hybrid["layers"], config.hybrid["attach"]) == ([depth - 2, depth - 1], "beside")


def check_s5(name, config):
    """GateRank, §4.4: one attention layer."""
    assert (config.num_layers, [*config.hybrids]) == (1, []), name


PRINTED = {"post-mqar": check_states, "echo-tiers": check_tiers, "gate-rank-s5": check_s5}


@pytest.mark.parametrize(
    "command", slow_beyond([run for run in RUNS if "decay-lm" not in run and "echo-mqar" not in run], RUNS)
)
def test_runs_that_would_settle_a_claim_have_the_papers_models(command):
    """Every run is built at the sizes that it would have, without weights."""
    run = asked(command)
    experiment, (said, tolerance) = EXPERIMENTS[run.experiment](), SAID[run.experiment]
    settings = experiment.settings_at(run.scale, {})
    for name in experiment.expanded(run.models or experiment.models_at(run.scale)):
        config = experiment.configure(settings, Cell(name, 1e-3, 0)).model
        assert config.num_layers == DEPTHS.get(run.experiment, config.num_layers)
        PRINTED.get(run.experiment, lambda *_: None)(name, config)
        base = name.partition(":")[0]
        millions = said.get(base, said.get(base.partition("+")[0], said.get("")))
        if millions is not None:
            with torch.device("meta"):
                count = LanguageModel(config).num_parameters() / 1e6
            assert count == pytest.approx(millions, rel=tolerance), name
        for kind in config.hybrids:
            if kind["mixer"] == "ska" and run.scale.startswith("paper"):
                assert kind["options"]["power"] == 2, name


def test_contradictions_are_computed():
    """The means of the cells of GateRank's Table 2, and Echo's formula 2 r² + P r + r, of 12 heads in 2 layers."""
    cells = {
        "53.71": (99.4, 99, 41.6, 20.6, 33.5, 28.15), "42.26": (99.2, 80.4, 11.4, 17.6, 24, 20.95)
    }  # fmt: skip
    for mean, scores in cells.items():
        assert f"{sum(scores) / 6:.2f}" == mean
        assert mean in claims.SLIPS
    means = [f"{sum(scores) / len(TABLE_3):.1f}" for scores in zip(*TABLE_3.values(), strict=True)]
    assert "means of its cells are {}, {} and {}.".format(*means) in claims.SLIPS
    # PoST's Table 4: six needles of Mamba-2 at 1K, 2K and 4K tokens, without PoST and with it.
    needles = {
        "180M": ((44, 15.4, 0, 9, 8.5, 4.9), (95.6, 71, 4.8, 17, 12.6, 11.1),
                 (5.6, 3.6, 0, 6, 5.5, 4.5), (47.4, 13.2, 0.6, 16, 12.6, 12),
                 (0.2, 0.8, 0, 1.6, 1.4, 1.7), (2, 8.4, 1.8, 6.4, 3.1, 3.5)),
        "440M": ((98.2, 94.8, 31.4, 16.2, 14.3, 8.6), (99.8, 98.8, 60.4, 15.2, 9.4, 3.5),
                 (63.8, 24.2, 13.6, 13.4, 12, 4), (77.6, 34.2, 30.4, 19.6, 15.4, 10.5),
                 (30.4, 2.6, 4, 3.4, 3.2, 1.2), (16.2, 7.2, 1.4, 2.2, 1.1, 0.2)),
    }  # fmt: skip
    for size, cells in needles.items():
        gains = [(sum(own) - sum(base)) / 6 for base, own in zip(cells[::2], cells[1::2], strict=True)]
        said = re.search(rf"([\d.]+), ([\d.]+) and ([−\d.]+)(?: points[^(]*)? \({size}\)", claims.SLIPS)
        assert [float(x.replace("−", "-")) for x in said.groups()] == pytest.approx(gains, abs=0.05 + 1e-9), size
    sizes = [4 * 12 * 2 * (2 * r**2 + 64 * r + r) / 1000 for r in (56, 48)]
    assert "{:.0f} or {:.0f} kB".format(*sizes) in claims.SLIPS
    by_tpe = sorted(
        VARIANTS[f"scalar/{row}"].paper - VARIANTS[f"tpe/{row}"].paper for row in ("mamba2", "gla", "hgrn2", "tnl-l")
    )
    assert f"others by {by_tpe[0]:.3f} to {by_tpe[-1]:.3f}," in claims.SLIPS
    by_vector = VARIANTS["scalar/mamba2"].paper - VARIANTS["vector/mamba2"].paper
    assert f"that of Mamba-2 by {by_vector:.3f}." in claims.SLIPS


def test_rules_on_losses_are_true_of_the_papers_own(monkeypatch):
    """At 160M (Tables 6, 8, 9), where TPE alone contradicts its statement, and TNL with TPE has no loss."""

    def printed(files, variant, base):
        return np.full((2, 3), (VARIANTS[variant].paper or np.nan) - VARIANTS[base].paper)

    monkeypatch.setattr(claims.Files, "loss_above", printed)
    failing, read = [], 0
    for claim in EVERY:
        files = claims.Files()
        known = files.names()
        if not any("loss_above" in each for each in (*claim.rules, *claim.names.values())):
            continue
        for name, expression in claim.names.items():
            known[name] = claims._evaluate(expression, files, known)
        failing += [rule for rule in claim.rules if not claims._evaluate(rule, files, known)]
        read += len(claim.rules)
    assert read > 25
    assert len(failing) == 1
    assert "in tpe" in failing[0]


def test_statements_on_simple_decay_read_every_start():
    every = {f"simple/{p}" for p in (0.8, 0.9, 0.95, 0.99)}
    read = {claim.where for claim, reading in readings() if every <= set(reading.models)}
    assert {"§5.5, Eq. 4", "§5.5, Table 3", "§5.5"} <= read


@cases("before, after, expected", (0.9, 0.7, "holds"), (0.5, 0.3, "holds in part"))
def test_layers_above_are_counted(monkeypatch, before, after, expected):
    """That fewer layers of GLA are above 0.8 does not follow from smaller medians."""
    medians = {"vector/gla": before, "share/gla": after, "vector/lightnet": 0.97, "share/lightnet": 0.99}
    monkeypatch.setattr(claims.Files, "decays", lambda files, row, when="trained": np.full((2, 3), medians[row]))
    (claim,) = (claim for claim in EVERY if claim.says.startswith("With shared keys fewer layers of GLA"))
    assert claims.read(claim).verdict == expected


def test_the_rank_that_is_learned_has_more_than_two_values():
    """Else the statement would follow from two others, the rank of one state and that of several segments."""
    (claim,) = (claim for claim in PAPERS["GateRank"] if claim.says.startswith("The rank of the mask is learned"))
    assert claims.read(claim).verdict == "holds in part"


def test_commands_parse():
    runs = {claim.settle for claim in EVERY} - {""}
    for command in {*COMMANDS.values(), *runs}:
        program, *arguments = shlex.split(command)
        if program == "make":
            assert f"\n{arguments[0]}:" in (DOCS.parent / "Makefile").read_text()
            continue
        assert program == "halflife"
        assert asked(command)
    assert set(json.loads(claims.COSTS.read_text())) == {run for run in runs if run.startswith("halflife compare")}


def test_files_have_the_models_of_their_commands():
    for name in (name for name in COMMANDS if name.endswith(".csv")):
        run = asked(COMMANDS[name])
        experiment = EXPERIMENTS[run.experiment]() if run.experiment else None
        models = experiment.expanded(run.models or experiment.models_at(run.scale)) if experiment else run.models
        assert {row["model"] for row in claims.results(name)} == set(models), name


def test_no_open_claim_waits_for_a_run_that_was_made():
    """The same experiment, scale and steps would settle nothing more, whichever of its models are trained."""

    def run(command):
        if not command.startswith("halflife compare"):
            return command
        return asked(command).experiment, asked(command).scale, asked(command).settings.steps

    for claim, reading in readings():
        if reading.verdict == "open":
            assert run(claim.settle) not in {run(COMMANDS[name]) for name in reading.files}, claim.says


def written(folder, seeds=3, rates=3, base=0.95):
    """Write results of a model that is better than its base by 0.1 to 0.3."""
    lines = ["model,learning_rate,seed,selected,test,length,num_pairs,accuracy"]
    for seed in range(seeds):
        for rate in range(rates):
            for model, gain in (("new", 0.1 * (1 + seed)), ("base", 0)):
                for test, accuracy in (("in_distribution", base), ("capacity", 0.4 + gain)):
                    lines.append(f"{model},{rate},{seed},{rate == 0},{test},8,,{accuracy}")
    (folder / "trained.csv").write_text("\n".join(lines) + "\n")


def verdict(folder, monkeypatch, *rules, given=(), fair=True, **names):
    monkeypatch.setattr(claims, "RESULTS", folder)
    claims.results.cache_clear()
    a, b = (f'accuracy("trained.csv", "{name}", "capacity")' for name in ("new", "base"))
    claim = claims.Claim(
        "here", "it is so", rules=rules, given=dict.fromkeys(given, ""), names={"a": a, "b": b, **names}, fair=fair
    )
    reading = claims.read(claim)
    claims.results.cache_clear()
    return reading.verdict, reading.reason


LEARNED = 'learned("trained.csv", "base")'


@cases(
    "rules, expected",
    (["low(a - b) > 0.05"], "holds"),
    (["low(a - b) > 0.15"], "fails"),
    (["low(a - b) > 0", "high(a - b) > 0.5"], "holds in part"),
    ([], "open"),
)
def test_verdicts_follow_from_rules(tmp_path, monkeypatch, rules, expected):
    written(tmp_path)
    assert verdict(tmp_path, monkeypatch, *rules, given=[LEARNED])[0] == expected


def test_no_needs_a_fair_chance(tmp_path, monkeypatch):
    written(tmp_path)
    assert verdict(tmp_path, monkeypatch, "low(a - b) > 0", fair=False) == ("holds", "")
    for rules in (["low(a - b) > 0.15"], ["low(a - b) > 0", "high(a - b) > 0.5"]):
        assert verdict(tmp_path, monkeypatch, *rules, fair=False) == ("open", "the setting of the paper was not run")


def test_controls_are_asked_for(tmp_path, monkeypatch):
    written(tmp_path)
    given = ['measured("trained.csv", "base@state(new)")']
    assert verdict(tmp_path, monkeypatch, "low(a - b) > 0", given=given)[0] == "open"
    assert verdict(tmp_path, monkeypatch, "low(a - b) > 0", given=['measured("trained.csv", "new")'])[0] == "holds"


def test_too_little_evidence_is_open(tmp_path, monkeypatch):
    rule = "low(a - b) > 0"
    written(tmp_path, seeds=2)
    assert verdict(tmp_path, monkeypatch, rule) == ("open", "2 seeds")
    written(tmp_path, seeds=3, rates=1)
    assert verdict(tmp_path, monkeypatch, rule) == ("open", "1 learning rate")
    written(tmp_path, seeds=2, rates=2)
    assert verdict(tmp_path, monkeypatch, rule) == ("open", "2 seeds and 2 learning rates")
    written(tmp_path, base=0.5)
    assert verdict(tmp_path, monkeypatch, rule, given=[LEARNED]) == ("open", "`base` has not learned its task")
    with pytest.raises(ValueError, match=r"trained.csv has no row of new, capacity, length 9"):
        verdict(tmp_path, monkeypatch, 'low(accuracy("trained.csv", "new", "capacity", 9)) > 0')


def test_a_model_that_was_not_trained_leaves_a_claim_open(tmp_path, monkeypatch):
    """The rule is there before the run, and is read once the file has the model."""
    written(tmp_path)
    rules, absent = ("low(a - b) > 0", "low(c - b) > 0"), {"c": 'accuracy("trained.csv", "newer", "capacity")'}
    assert verdict(tmp_path, monkeypatch, *rules, **absent) == ("open", "`newer` was not trained")
    table = tmp_path / "trained.csv"
    table.write_text(table.read_text().replace("new,", "newer,") + table.read_text().partition("\n")[2])
    assert verdict(tmp_path, monkeypatch, *rules, **absent) == ("holds", "")


@cases(
    "command, rate, expected",
    ("halflife compare --experiment post-lm --scale paper --seeds 3", 6e-4, ("holds", "")),
    ("halflife compare --experiment post-lm --scale paper --seeds 3", 1e-3, ("open", "1 learning rate")),
    ("halflife compare --experiment post-lm --scale small --seeds 3", 6e-4, ("open", "1 learning rate")),
    ("halflife compare --experiment post-lm --scale paper --steps 9 --seeds 3", 6e-4, ("open", "1 learning rate")),
    ("halflife compare --experiment echo-lm --scale paper --seeds 3", 3e-4, ("open", "1 learning rate")),
)
def test_the_rate_of_the_paper_is_enough_in_its_setting(tmp_path, monkeypatch, command, rate, expected):
    """Echo prints no rate for its language models: that of Table 6 is for Appendix G."""
    written(tmp_path, rates=1)
    table = tmp_path / "trained.csv"
    table.write_text(re.sub(r"^(new|base),0,", rf"\1,{rate},", table.read_text(), flags=re.M))
    monkeypatch.setattr(claims, "load", lambda: ("", {"trained.csv": command}, {}))
    assert verdict(tmp_path, monkeypatch, "low(a - b) > 0") == expected


def test_open_language_models_have_rates_enough():
    """Every run of language models that would settle a claim has three rates, or that which the paper prints."""
    for command in RUNS:
        run = asked(command)
        if run.experiment.endswith("-lm"):
            rates = run.lr or EXPERIMENTS[run.experiment]().learning_rates("mamba2", run.scale)
            assert len(rates) >= claims.RATES or set(rates) == claims._printed_rates(command), command


def test_an_open_claim_says_why_in_words():
    """No cell of a claim has code, but for names of models; and every condition has words."""
    evidence = claims.PAGE.read_text(encoding="utf-8").split("## Where a paper")[0]
    assert not re.search(r"`[^`]*[()=<>][^`]*` is ", evidence)
    for condition, words in [item for own in claims.load()[2].values() for one in own for item in one.given.items()]:
        assert re.fullmatch(r"(`[^`]+`|[^`]+)[^()`]*", claims._words(condition, words)), condition
