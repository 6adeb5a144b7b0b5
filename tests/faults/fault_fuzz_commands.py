"""The command line with random options: a documented exit code, a sentence, and no file changed that is not its own."""

import contextlib
import hashlib
import io
import re
import shutil

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import halflife
from halflife.cli import main
from halflife.models import LanguageModel, checkpoint

CODES = (0, 2, 3)  # docs/commands.md; a signal or a broken pipe ends no command here
NUMBERS = ["0", "-1", "1", "2", "3", "7", "1e3", "0.5", "nan", "inf", "-inf", "1e400", "99999999999999999999", "x", ""]
PATHS = ["", ".", "missing", "notes.txt", "folder", "folder/deep", "model", "damaged", "empty", "notes.txt/below",
         "é [red]", "x" * 300, "/proc/self/mem", "broken.json", "-", "model/config.json"]  # fmt: skip
NAMES = ["", "mamba2", "mamba2+post", "+post", "mamba2+", "mamba2+post+post", "llama+post", "nope", "[red]", "é",
         "mqar", "niah:hard", "bytes", "cpu", "cuda", "tpu", "a=b", "training.lr=1",
         "post.reference_length=x"]  # fmt: skip
# Command → its words that are always there, and its options with their values; None is an option without a value.
TRAIN = ["--tokens", "64", "--context", "16", "--batch-size", "2", "--hidden-size", "16", "--num-layers", "1",
         "--num-heads", "2", "--quiet"]  # fmt: skip
COMPARE = ["--steps", "1", "--batch-size", "2", "--hidden-size", "16", "--num-layers", "1", "--num-heads", "2",
           "--quiet", "--test-examples", "2", "--train-length", "16", "--pairs", "1", "--output",
           "compared"]  # fmt: skip
COMMANDS = {
    "list": ([], {"": NAMES}),
    "memory": (["mamba2"], {"--lengths": NUMBERS, "--hidden-size": NUMBERS, "--num-layers": NUMBERS, "--dtype": NAMES,
                            "--num-heads": NUMBERS, "--vocab-size": NUMBERS, "--output": PATHS, "": NAMES}),
    "spectrum": (["model"], {"--text": PATHS, "--length": NUMBERS, "--sequences": NUMBERS, "--train-length": NUMBERS,
                             "--tokenizer": PATHS, "--output": PATHS, "--device": NAMES, "": PATHS}),
    "generate": (["model", "text"], {"--max-new-tokens": NUMBERS[:9], "--temperature": NUMBERS, "--top-k": NUMBERS,
                                     "--top-p": NUMBERS, "--seed": NUMBERS, "--device": NAMES, "": PATHS}),
    "convert": (["model"], {"": PATHS, "--to": NAMES}),
    "figures": ([], {"": PATHS, "--formats": NAMES}),
    "forecast": (["model"], {"": PATHS, "--longest": NUMBERS, "--window": NUMBERS, "--examples": NUMBERS,
                             "--output": PATHS}),
    "eval": (["model"], {"": PATHS, "--tasks": NAMES, "--lengths": NUMBERS, "--output": PATHS, "--limit": NUMBERS}),
    "train": (["mamba2", "--data", "notes.txt", "--output", "trained", *TRAIN],
              {"--data": PATHS, "--output": PATHS, "--resume": PATHS, "--config": PATHS, "--set": NAMES,
               "--tokens": NUMBERS, "--context": NUMBERS, "--batch-size": NUMBERS, "--tokenizer": PATHS,
               "--documents": NAMES,
               "--held-out": NUMBERS, "--size": NAMES, "--lr": NUMBERS, "--schedule": NAMES, "--warmup": NUMBERS,
               "--weight-decay": NUMBERS, "--clip": NUMBERS, "--seed": NUMBERS, "--save-every": NUMBERS,
               "--validate-every": NUMBERS, "--micro-batch-size": NUMBERS, "": NAMES}),
    "compare": (["mamba2", *COMPARE],
                {"--task": NAMES, "--experiment": NAMES, "--scale": NAMES, "--seeds": NUMBERS[:3], "--lr": NUMBERS,
                 "--resume": PATHS, "--config": PATHS, "--set": NAMES, "--output": PATHS, "--name": NAMES,
                 "--text": PATHS, "--train-length": NUMBERS, "--pairs": NUMBERS, "--lengths": NUMBERS,
                 "--test-pairs": NUMBERS,
                 "--group": NAMES, "--save-every": NUMBERS, "--only-seeds": NUMBERS, "--on": NAMES, "": NAMES}),
}  # fmt: skip


def any_line(draw):
    """A command line. Of an option that is given twice, the last value counts."""
    name = draw(st.sampled_from(list(COMMANDS)))
    words, options = COMMANDS[name]
    line = [name, *words]
    for _ in range(draw(st.integers(1, 3))):
        option = draw(st.sampled_from(list(options)))
        value = draw(st.sampled_from(options[option]))
        line += [option] * bool(option) + ([] if draw(st.integers(0, 19)) == 0 else [value])
    return line


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a text, damaged files and others that no command owns."""
    place = tmp_path_factory.mktemp("place")
    (place / "notes.txt").write_text("".join(f"line {i} of the notes\n" for i in range(200)))
    (place / "broken.json").write_text("[" * 100_000)
    (place / "empty").mkdir()
    (place / "folder/deep").mkdir(parents=True)
    (place / "folder/result.json").write_text('{"mine": 1}')
    (place / "folder/deep/report.html").write_text("mine")
    config = halflife.preset("mamba2+gate_rank", hidden_size=16, num_layers=1, vocab_size=256, num_heads=2)
    checkpoint.save(LanguageModel(config), place / "model")
    shutil.copytree(place / "model", place / "damaged")
    (place / "damaged/model.safetensors").write_bytes(b"\xff" * 50)
    return place


def content(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


REFUSALS = re.compile(r"^halflife: .|For full helptext", re.MULTILINE)  # a sentence of ours, or tyro's box


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=150, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
)
@given(st.data())
def test_a_command_works_or_says_why_not(place, tmp_path_factory, data):
    line = any_line(data.draw)
    here = tmp_path_factory.mktemp("here")
    shutil.copytree(place, here, dirs_exist_ok=True)
    before, out, error = content(here), io.StringIO(), io.StringIO()
    code = 0
    with contextlib.chdir(here), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main(line)
        except SystemExit as stop:
            code = stop.code
    try:
        after = content(here)
        changed = {name for name, digest in before.items() if after.get(name) != digest}
        assert not changed, f"halflife {' '.join(line)} changed {changed}"
        assert code in CODES, f"halflife {' '.join(line)} ended with {code}"
        if code == 2:
            assert REFUSALS.search(error.getvalue() + out.getvalue()), f"halflife {' '.join(line)} said nothing"
            assert not re.search(r"Traceback|Error\(", error.getvalue()), error.getvalue()
    finally:
        shutil.rmtree(here)
