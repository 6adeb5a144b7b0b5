"""The command line as a user types it: output, files, exit codes, one-line errors."""

import json
import os
import random
import re
import resource
import subprocess
import sys
import warnings

import pytest
import torch
import yaml
from helpers import cases

import halflife
from halflife.cli import COMMANDS, WELCOME, command_class, main, parse, read_command
from halflife.cli.groups import options_of
from halflife.cli.options import take_overrides
from halflife.cli.train import OPTIONS
from halflife.decay import DECAYS
from halflife.evaluation.bundles import BUNDLES
from halflife.extras import EXTRAS
from halflife.lab.experiments.decay_rows import VARIANTS
from halflife.models import MODIFIERS, PRESETS
from halflife.report.tables import about
from halflife.report.tables.about import PURPOSES
from halflife.tasks import TASKS

TINY = [
    "--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--vocab-size", "128", "--train-length", "8",
    "--pairs", "2", "--steps", "4", "--batch-size", "4", "--test-examples", "8",
]  # fmt: skip


@cases(
    "arguments, sets",
    (["--set", "a=1", "--set", "b=2"], ("a=1", "b=2")),
    (["--set", "a=1", "b=2", "--quiet", "--set", "c=-3"], ("a=1", "b=2", "c=-3")),
    (["--set=a=1", "--quiet", "--set=b=2", "--set", "c=3"], ("a=1", "b=2", "c=3")),
)
def test_repeated_options_add_up(arguments, sets):
    """Without that the first `--set` would be dropped without a word."""
    command = parse(["compare", "mamba2", "--lr", "0.1", *arguments, "--lr", "0.2"])
    assert (command.models, command.lr, command.job.set) == (("mamba2",), (0.1, 0.2), sets)


def test_repeated_options_add_up_however_they_are_written():
    command = parse(["compare", "x", "--data", "a", "--text=b", "--data=c", "--test_tasks", "d", "--test-tasks", "e"])
    assert (command.settings.text, command.settings.test_tasks) == (("a", "b", "c"), ("d", "e"))


@cases(
    "arguments, message",
    (["train", "mamba2", "--data", "x", "--gpus", "8"], "--gpus belongs to --dry-run"),
    (["compare", "mamba2", "--gpus", "8"], "--gpus belongs to --dry-run"),
    (["compare", "--resume", "x", "--gpus", "8"], "--gpus belongs to --dry-run"),
    (["compare", "no_model", "--name", "x", "--output", "nowhere"], "leave out --name x"),
    (["compare", "mamba2", "--lengths", "8", "--dry-run"], "'lengths' is a setting of other tasks or experiments"),
)
def test_an_option_that_nothing_would_read_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_the_options_of_a_model_say_that_commands_have_other_recipes(capsys):
    main(["list", "mamba2"])
    assert "`train` and experiments have recipes of their own" in " ".join(capsys.readouterr().out.split())


def test_a_warning_is_one_line_without_a_path(monkeypatch, capsys):
    def run(self):
        print(warnings.formatwarning("the slow state stays empty", UserWarning, __file__, 1), end="")

    monkeypatch.setattr(command_class("list"), "run", run)
    main(["list"])
    assert capsys.readouterr().out == "halflife: warning: the slow state stays empty\n"
    assert __file__ in warnings.formatwarning("x", UserWarning, __file__, 1)  # other code keeps Python's form


def test_without_arguments_it_says_what_to_type_next(capsys):
    """That is no error, and each of its commands exists."""
    main([])
    shown = capsys.readouterr().out
    assert shown == WELCOME + "\n"
    commands = [line.split("  ")[1].strip() for line in shown.splitlines() if line.startswith("  halflife")]
    assert len(commands) == 5
    for command in commands:
        parse(command.split()[1:])


def test_memory_answers_without_arguments(tmp_path, capsys):
    main(["memory", "--output", str(tmp_path / "memory")])
    assert re.search(r"gated_deltanet", capsys.readouterr().out)


def test_compare_end_to_end(tmp_path, capsys):
    folder = tmp_path / "run"
    main(["compare", "mamba2", "mamba2+post", *TINY, "--seeds", "2", "--output", str(folder)])
    out = capsys.readouterr().out
    for expected in (
        "mamba2+post",
        "4 runs, ",  # the estimate before they begin
        " of training on this machine",
        "in: in distribution",
        "capacity",
        "lag",
        "tokens/s",
        "chance",
        "ignoring the key",
        "mean",
    ):
        assert expected in out
    assert str(folder) in out
    assert (folder / "report.html").stat().st_size > 10_000
    assert len(list((folder / "figures").glob("*.png"))) == 3
    assert len(list(folder.glob("*/*/model.safetensors"))) == 4
    main(["compare", "--resume", str(folder), "--quiet"])
    table = out[out.index("tokens/s") : out.index("report")]
    assert table in capsys.readouterr().out  # nothing is trained again, so the printed speeds are the same


@cases(
    "arguments, message",
    (["compare", "--scale", "smoke"], "at least one model"),
    (["compare", "mamba22"], "Did you mean 'mamba2'"),
    (["compare", "mamba2", "--scale", "big"], "smoke, small, paper"),
    (["compare", "--steps", "4", "--resume", "x"], "leave out steps"),
    (["compare", "mamba2", "--resume", "x"], "no comparison"),
    (["compare", "--resume", "nowhere"], "no comparison"),
    (["compare", "mamba2", "--train-length", "6"], "pairs"),
    (["compare", "--task", "echo-mqar"], "use --experiment echo-mqar"),
    (["compare", "--experiment", "echo-mqr"], "Did you mean 'echo-mqar'? Choose from: decay-design, post-mqar"),
    (["compare", "mamba2", "--experiment", "mqar"], "use --task mqar"),
    (["compare", "--task", "niah", "--experiment", "echo-mqar"], "not both"),
    (["compare", "mamba2", "--set", "training.seed=1"], "--seeds"),
    (["compare", "mamba2", "--set", "mixer.state_size"], "group.option=value"),
    (["compare", "mamba2", "--config", "nowhere.yaml"], "there is no file nowhere.yaml"),
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)
    assert not list(tmp_path.iterdir())


def test_list_names_everything(capsys):
    main(["list"])
    out = capsys.readouterr().out
    assert all(name in out for registry in (PRESETS, MODIFIERS, DECAYS, TASKS, BUNDLES, VARIANTS) for name in registry)


def test_info_checks_this_machine(capsys, quick_check):
    main(["info", "--details"])
    first, _, details = capsys.readouterr().out.partition("backends on cpu")
    assert len(first.splitlines()) <= 24
    for expected in ("torch ", "ops and passes by", "comparisons with the token loops, all right"):
        assert expected in first
    for expected in ("linear_attention", "chunked, reference", "selfcheck on cpu: all right"):
        assert expected in details
    assert set(EXTRAS.values()) == set(PURPOSES)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_info_says_that_other_accelerators_run_plain_pytorch(kind, monkeypatch):
    """With a faked accelerator, on it and on the CPU beside it."""
    monkeypatch.setattr(about, "bf16_speedup", lambda device: 1.0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    on, beside = ({text for _, text in about.summary(device, "").rows} for device in (kind, "cpu"))
    assert f"{kind} has no kernels of ours, and is untested: compare with --device cpu" in on
    assert any(text.startswith("0 of ") for text in on)
    assert f"{kind}, which runs plain PyTorch alone, untested (--device {kind})" in beside
    assert not any("a GPU" in text for text in (*on, *beside))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["train", "--help"]], ids=" ".join)
def test_a_command_starts_within_a_second_of_torch(arguments):
    """In seconds of the processor, the least of three measurements."""
    torch = min(processor_seconds("-c", "import torch") for _ in range(3))
    assert min(processor_seconds("-m", "halflife.cli", *arguments) for _ in range(3)) < torch + 1


def processor_seconds(*arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_of_every_command_shows_examples(capsys):
    for arguments in ([], *([name] for name in COMMANDS)):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--help"])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert f"halflife {' '.join(arguments)}".strip() in out


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    draw = random.Random(0)
    for i in range(40):
        words = " ".join(draw.choice(("decay", "state", "memory", "slow")) for _ in range(draw.randint(12, 120)))
        (tmp_path / "text" / f"{i:02}.txt").write_text(words)
    return tmp_path


TRAIN = {
    "model": "mamba2+post", "data": "text", "context": 32, "tokens": "1K", "batch-size": 4, "hidden_size": 16,
    "num-layers": 2, "num_heads": 2, "held_out": 0.15, "validate_every": 4, "save_every": 4,
}  # fmt: skip


def configured(command):
    changed, overrides = take_overrides(command, OPTIONS)
    return changed._configure(overrides, show=False)


def test_a_file_has_any_option_and_the_command_line_wins(text):
    written = {
        **TRAIN,
        "lr": 1e-2,
        "set": {"post": {"reference_length": 8}, "training.clip": 2, "post.last_position": 40},
    }
    (text / "run.yaml").write_text(yaml.safe_dump(written))
    (text / "run.json").write_text(json.dumps({**TRAIN, "set": ["post.reference_length=8"]}))
    command = read_command(["train", "--config", "run.yaml", "--lr", "3e-3", "--set", "post.reference_length=16"])
    assert (command.model, command.text.data) == ("mamba2+post", ("text",))
    assert (command.recipe.batch_size, command.recipe.lr) == (4, 3e-3)
    run = configured(command)
    post = {"train_length": 32, "reference_length": 16, "last_position": 40}
    assert run.model.mixer_options == {"num_heads": 2, "post": post}
    assert (run.learning_rate, run.clip, run.steps) == (3e-3, 2, 8)
    assert read_command(["train", "gla", "--config", "run.json"]).model == "gla"


def test_names_for_set_that_are_options(text):
    (text / "run.yaml").write_text(yaml.safe_dump(TRAIN))
    run = configured(
        read_command(["train", "--config", "run.yaml", "--set", "training.steps=5", "model.num_layers=1",
                      "training.learning_rate=1e-4", "model.vocab_size=300", "training.seed=3"])
    )  # fmt: skip
    assert (run.steps, run.model.num_layers, run.learning_rate, run.model.vocab_size) == (5, 1, 1e-4, 300)
    assert run.seed == run.data["seed"] == 3


@pytest.mark.parametrize(("name", "count"), [("train", 44), ("compare", 45)])
def test_options_of_groups_have_no_prefix(name, count, capsys):
    options = options_of(command_class(name)())
    assert len(options) == count
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown, others = capsys.readouterr().out, ("model", "models", "from_weights")
    assert not [one for one in options if one not in others and f"--{one.replace('_', '-')}" not in shown]


@cases(
    "written, message",
    ("toknes: 2K", "unknown option in run.yaml: 'toknes'. Did you mean 'tokens'? Choose from: model, data"),
    ("lr: fast", "lr in run.yaml must be a number; got 'fast'"),
    ("resume: x", "unknown option in run.yaml: 'resume'"),
    ("- a", "must hold a mapping"),
    ("model: [", "run.yaml is no YAML"),
    ("model: {name: mamba2}", "must be text or null"),
    ("set: 3", "group.option=value"),
    ("set: [[1]]", "set in run.yaml must be a list, each entry text"),
    ("set: [mixer.power]", "group.option=value"),
    ("set: {mixer: {powr: 1}}", "unknown mixer option of mamba2 'powr'"),
)
def test_wrong_files(written, message, text, refused):
    (text / "run.yaml").write_text(written)
    given = ["mamba2", "--data", "text"] if written.startswith("set") else []
    assert message in refused("train", *given, "--config", "run.yaml")


def test_a_resumed_run_takes_no_file(text, refused):
    assert "leave out config" in refused("train", "--resume", "out", "--config", "run.yaml")


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"halflife {halflife.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["list"]])
def test_output_without_a_reader_ends_quietly(arguments, monkeypatch, capfd):
    """As under `| head -1`, every write to stdout is a broken pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as stop:
            main(arguments)
    assert stop.value.code == 141
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "needs"), [
    ("look", "a folder"), ("convert", "a source and a target"), ("figures", "a run"), ("tokenizer", "a text"),
    ("diagnose", "a folder"), ("serve", "a checkpoint"), ("export", "a checkpoint and --onnx"),
    ("compare", "models or --experiment"), ("train", "a model and --data"),
])  # fmt: skip
def test_a_command_without_what_it_needs_shows_its_examples(name, needs, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith(f"halflife: {name} needs {needs}. ")
    assert f"halflife {name} " in said.split("examples:")[1]


def test_an_unknown_command_and_a_missing_folder_say_what_there_is(refused, tmp_path, monkeypatch):
    assert "unknown command 'memry'. Did you mean 'memory'?" in refused("memry")
    monkeypatch.chdir(tmp_path)
    assert "there is no folder nope; make one with: halflife compare mamba2" in refused("spectrum", "nope")
    assert "there is no folder nope; make one with: halflife compare mamba2" in refused("figures", "nope")
    assert "there is no folder nope; make one with: halflife train mamba2" in refused("generate", "nope", "The")
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.json").write_text("{}")
    assert "there is no folder nope; the newest here: runs/mine" in refused("spectrum", "nope")
