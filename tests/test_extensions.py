"""Modules of users: what they register is known to commands, to workers and to resumed runs."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from halflife import extensions
from halflife.cli import main
from halflife.cli.options import resumable
from halflife.decay import DECAYS

MODULE = '''
from halflife.decay import DECAYS
from halflife.decay.simple import SimpleDecay


@DECAYS.add("{name}")
class Mine(SimpleDecay):
    """A decay of a user."""
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the current folder, which registers a decay of the same name."""
    name = f"mine_{abs(hash(tmp_path)) % 10**6}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(extensions.VARIABLE, "")
    yield name
    DECAYS._entries.pop(name, None)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_a_command_knows_what_an_extension_registers(module, capsys, order):
    parts = [["--import", module], ["list"]][order]
    main([word for part in parts for word in part])
    out = capsys.readouterr().out
    assert module in out
    assert "A decay of a user." in out


def test_a_new_process_knows_it_too(module):
    """As a worker does, which imports halflife and nothing else."""
    code = f"import halflife; print(halflife.decay.build('{module}', num_heads=2, head_dim=4))"
    extensions.add(module)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Mine" in done.stdout


def test_the_command_that_resumes_names_the_extension(module, capsys, tmp_path):
    extensions.add(module)
    begun = tmp_path / "run.json"
    begun.touch()
    with pytest.raises(SystemExit), resumable("halflife train --resume x", begun):
        raise KeyboardInterrupt
    assert f"resume with: halflife --import {module} train --resume x" in capsys.readouterr().err


def test_an_entry_point_is_loaded(module, monkeypatch):
    point = metadata.EntryPoint(module, module, extensions.GROUP)
    monkeypatch.syspath_prepend(".")  # an installed module is on the path
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "halflife" else [])
    extensions.load()
    assert module in DECAYS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--import"], "--import needs the name of a module"),
        (["list", "--import", "no_such_module"], "cannot import the extension no_such_module: No module named"),
    ],
)
def test_an_extension_that_is_missing_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"halflife: {message}")


def test_an_error_of_the_system_is_a_sentence(monkeypatch, capsys):
    def run():
        raise FileNotFoundError(2, "No such file or directory", "x.txt")

    monkeypatch.setattr("halflife.cli.read_command", lambda _: type("Command", (), {"run": staticmethod(run)}))
    with pytest.raises(SystemExit):
        main(["list"])
    assert capsys.readouterr().err == "halflife: x.txt: no such file or directory\n"
