"""Modules of users: what they register is known to commands, to workers and to resumed runs."""

import os
import subprocess
import sys
from importlib import metadata

import pytest
from helpers import cases
from tiny_runs import tiny

from halflife import LanguageModel, extensions, preset
from halflife.cli import main
from halflife.cli.options import resumable, to_type
from halflife.decay import DECAYS
from halflife.files import read_json, write_json
from halflife.lab.experiments.compare import Comparison, create_comparison
from halflife.models import checkpoint
from halflife.registry import Registry
from halflife.runs.sweep import Job, run_job
from halflife.training.fit import check_run_folder

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
    with pytest.raises(SystemExit), resumable(to_type("train", "--resume", "x"), begun):
        raise KeyboardInterrupt
    assert f"resume with: halflife --import {module} train --resume x" in capsys.readouterr().err


def test_a_run_names_its_extensions_and_a_resumed_one_imports_them(module, tmp_path, monkeypatch):
    """`run.json` and the `config.json` of a comparison; a module in the folder of the run is refused."""
    extensions.add(module)
    run = tiny()
    written = run.saved_in(tmp_path / "run")
    assert written["imports"] == [module]
    comparison = create_comparison(["mamba2"], output=tmp_path / "comparison")
    assert read_json(comparison / "config.json")["imports"] == [module]
    forget(module, monkeypatch)
    extensions.recall(written, tmp_path / "run")
    assert module in DECAYS
    write_json(tmp_path / "run" / "run.json", written)
    assert not check_run_folder(run, tmp_path / "run")  # it belongs to this run
    forget(module, monkeypatch)
    assert Comparison.load(comparison)
    assert module in DECAYS
    forget(module, monkeypatch)
    with pytest.raises(ImportError, match=f"names the extension {module} and holds it; give --import {module}"):
        extensions.recall(written, tmp_path)


@pytest.mark.parametrize("package", [True, False])
def test_a_module_below_the_current_folder_is_refused_in_the_folder_of_a_run(tmp_path, monkeypatch, package):
    """`runs.x.evil` lies in runs/x, whether runs is a package or a bare folder."""
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "evil.py").write_text("raise SystemExit('it ran')")
    if package:
        (tmp_path / "runs" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ImportError, match=r"names the extension runs\.x\.evil and holds it"):
        extensions.recall({"imports": ["runs.x.evil"]}, run)


def test_an_entry_without_a_docstring_has_an_empty_summary():
    entries = Registry("entry")
    entries.add("bare")(lambda: None)
    assert entries.summary("bare") == ""


def test_a_worker_imports_the_extensions_of_its_job(module, tmp_path, monkeypatch):
    extensions.add(module)
    job = Job(tiny(), tmp_path / "run", "x")
    forget(module, monkeypatch)
    monkeypatch.setattr("halflife.runs.sweep.run_one", lambda *_, **__: {"known": module in DECAYS})
    assert run_job(job) == {"known": True}


def test_a_model_with_a_decay_of_a_user_says_which_extension_it_needs(module, tmp_path, monkeypatch):
    extensions.add(module)
    options = {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "mixer_options": {"decay": module}}
    checkpoint.save(LanguageModel(preset("simple", **options)), tmp_path / "model")
    checkpoint.load(tmp_path / "model")
    forget(module, monkeypatch)
    with pytest.raises(ValueError, match=rf"unknown decay '{module}'.*made with extensions; give --import {module}"):
        checkpoint.load(tmp_path / "model")


def forget(module, monkeypatch):
    """Leave the state of a process that has not imported the module."""
    DECAYS._entries.pop(module)
    sys.modules.pop(module)
    monkeypatch.setenv(extensions.VARIABLE, "")


def test_an_entry_point_is_loaded(module, monkeypatch):
    point = metadata.EntryPoint(module, module, extensions.GROUP)
    monkeypatch.syspath_prepend(".")  # an installed module is on the path
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "halflife" else [])
    extensions.load()
    assert module in DECAYS


@cases(
    "arguments, message",
    (["--import"], "--import needs the name of a module"),
    (["list", "--import", "./mine.py"], "cannot import the extension ./mine.py: give the name of a module"),
    (["list", "--import", "no_such_module"], "cannot import the extension no_such_module: No module named"),
)
def test_an_extension_that_is_missing_is_one_line(arguments, message, refused, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert refused(*arguments).startswith(f"halflife: {message}")


def test_an_error_of_the_system_is_a_sentence(monkeypatch, refused):
    def run():
        raise FileNotFoundError(2, "No such file or directory", "x.txt")

    monkeypatch.setattr("halflife.cli.read_command", lambda _: type("Command", (), {"run": staticmethod(run)}))
    assert refused("list") == "halflife: there is no file x.txt\n"
