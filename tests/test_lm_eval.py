"""`lm_eval --model halflife` and our RULER tasks in lm-evaluation-harness, with the real package in this process."""

import subprocess
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
import yaml
from helpers import assert_raises
from lm_eval.api.registry import get_model

from halflife import LanguageModel, preset
from halflife.cli.lm_eval import TASKS, register
from halflife.cli.lm_eval.ruler import documents, mean, score
from halflife.data.tokenizers import ByteTokenizer
from halflife.evaluation import ruler as evaluation
from halflife.models import checkpoint
from halflife.tasks import ruler

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
ESSAY = " ".join(f"Some day number {i} was eventful." for i in range(1000))
quiet = pytest.mark.filterwarnings("ignore")  # warnings of the harness and its imports


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return checkpoint.save(LanguageModel(preset("mamba2", **SIZES)), tmp_path_factory.mktemp("model"), "bytes")


def test_the_harness_builds_our_model_from_its_registry(folder):
    register()
    register()  # a second time changes nothing
    cls = get_model("halflife")
    model = cls.create_from_arg_string(f"pretrained={folder},max_length=64", {"batch_size": "2", "device": "cpu"})
    assert (model.batch_size, model.max_length) == (2, 64)
    whole, ids = checkpoint.load(folder), torch.tensor([list(b"\nab")])
    expected = whole(ids)[0][0, :2].log_softmax(-1).gather(1, ids[0, 1:, None]).sum().item()
    assert model._loglikelihood_tokens([(None, [10], [97, 98])])[0][0] == pytest.approx(expected, rel=1e-5)
    for arguments in (f"pretrained={folder},dtype=float16", f"pretrained={folder},max_length=0"):
        assert_raises(ValueError, "max_length", cls.create_from_arg_string, arguments, {"batch_size": "2"})
    assert_raises(ValueError, "got auto", cls.create_from_arg_string, f"pretrained={folder}", {"batch_size": "auto"})


def test_each_task_has_its_file_with_the_length_of_its_answers():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in TASKS.glob("*.yaml")}
    assert set(files) == {f"offline_{name}" for name in ruler.names()}
    for name in ruler.names():
        task = files[f"offline_{name}"]
        example = ruler.example(name, 9000, len, seed=0, index=0, essay=ESSAY)
        assert task["dataset_kwargs"] == {"name": name}
        assert task["generation_kwargs"]["max_gen_toks"] == example.new_tokens


def test_scores_count_references_and_lengths_apart(folder):
    document = {"outputs": ["Bold", "cat"], "length": 1024}
    assert score(document, ["a BOLD dog"])["found"] == 0.5
    assert score(document, ["a BOLD dog"])["1024"] == 0.5
    assert score(document, ["a BOLD dog"])["512"] == -1
    assert mean([0.5, -1, 1.0]) == 0.75
    assert mean([-1, -1]) == -1
    rows = documents(name="niah_single_1", pretrained=str(folder), max_seq_lengths=[700], examples=2, seed=3)["test"]
    expected = [ruler.example("niah_single_1", 700, len, seed=3, index=i) for i in (0, 1)]
    assert [row["input"] for row in rows] == [each.prompt for each in expected]
    assert_raises(ValueError, "give --model_args", documents, name="niah_single_1")


@quiet
@pytest.mark.slow
def test_our_tasks_have_the_scores_of_our_own_evaluation(folder, tmp_path, monkeypatch):
    """In the harness's own command; the answers of an untrained model are the same text in both."""
    from lm_eval import simple_evaluate

    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda run: ("pip", ""))  # this call takes seconds
    register()
    metadata = {"max_seq_lengths": [600, 1024], "examples": 2, "pretrained": str(folder)}
    manager = lm_eval.tasks.TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    found = simple_evaluate(
        model="halflife", model_args=f"pretrained={folder}", tasks=["offline_niah_single_1"], task_manager=manager,
        batch_size=2, bootstrap_iters=0,
    )  # fmt: skip
    samples = found["samples"]["offline_niah_single_1"]
    model = checkpoint.load(folder).eval()
    ours = evaluation.evaluate(model, ByteTokenizer(), ["niah_single_1"], [600, 1024], examples=2)
    assert [each["found"] for each in samples] == [each["score"] for each in ours.details]
    prompts = [ruler.example("niah_single_1", n, len, index=i).prompt for n in (600, 1024) for i in (0, 1)]
    assert [each["arguments"][0][0] for each in samples] == prompts
    results = found["results"]["offline_niah_single_1"]
    assert results["found,none"] == sum(row["score"] for row in ours.rows) / 2
    assert (results["1024,none"], results["256,none"]) == (ours.rows[1]["score"], -1)


@pytest.mark.slow
def test_the_command_of_the_harness_knows_model_and_tasks(folder, tmp_path):
    command = [sys.executable, "-m", "halflife.cli.lm_eval"]
    root = Path(__file__).parent.parent
    shown = subprocess.run([*command, "--tasks-folder"], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(TASKS)
    options = ["--model", "halflife", "--model_args", f"pretrained={folder}", "--tasks", "offline_niah_single_1"]
    metadata = ["--metadata", '{"max_seq_lengths": [600], "examples": 2}', "--device", "cpu", "--batch_size", "2"]
    done = subprocess.run([*command, *options, *metadata], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "offline_niah_single_1" in done.stdout
    assert "found" in done.stdout
