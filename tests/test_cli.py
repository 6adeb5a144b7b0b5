"""The command line as a user types it: output, files, exit codes, one-line errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from halflife.cli import main
from halflife.decay import DECAYS
from halflife.models import MODIFIERS, PRESETS
from halflife.tasks import TASKS

TINY = [
    "--hidden-size",
    "16",
    "--num-layers",
    "1",
    "--num-heads",
    "2",
    "--vocab-size",
    "128",
    "--train-length",
    "8",
    "--pairs",
    "2",
    "--steps",
    "4",
    "--batch-size",
    "4",
    "--test-examples",
    "8",
]


def test_compare_end_to_end(tmp_path, capsys):
    folder = tmp_path / "run"
    main(["compare", "mamba2", "mamba2+post", *TINY, "--seeds", "2", "--lr", "1e-3", "1e-2", "--output", str(folder)])
    out = capsys.readouterr().out
    for expected in (
        "mamba2+post",
        "in: in distribution",
        "capacity",
        "persist",
        "tokens/s",
        "chance",
        "ignoring the key",
        "mean",
    ):
        assert expected in out
    assert str(folder) in out
    assert (folder / "report.html").stat().st_size > 10_000
    assert len(list((folder / "figures").glob("*.png"))) == 3
    assert len(list(folder.glob("*/*/model.safetensors"))) == 8
    main(["compare", "--resume", str(folder), "--quiet"])
    table = out[out.index("tokens/s") : out.index("report")]
    assert table in capsys.readouterr().out  # nothing is trained again: speeds too are as they were


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare"], "at least one model"),
        (["compare", "mamba22"], "Did you mean 'mamba2'"),
        (["compare", "mamba2", "--scale", "big"], "smoke, small, paper"),
        (["compare", "mamba2", "--resume", "x"], "leave out models"),
        (["compare", "--resume", "nowhere"], "no comparison"),
        (["compare", "mamba2", "--train-length", "6"], "pairs"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.startswith("halflife: ")
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_list_names_everything(capsys):
    main(["list"])
    out = capsys.readouterr().out
    assert all(name in out for registry in (PRESETS, MODIFIERS, DECAYS, TASKS) for name in registry)


def test_info_checks_this_machine(capsys):
    main(["info"])
    out = capsys.readouterr().out
    for expected in ("torch", "linear_attention", "chunked, reference", "selfcheck on cpu: all right"):
        assert expected in out


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out or "--resume" in out


def test_installed_command():
    command = Path(sys.executable).parent / "halflife"
    assert "compare" in subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
