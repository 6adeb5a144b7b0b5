"""`lm_eval --model halflife` and our RULER tasks in lm-evaluation-harness, with the real package in this process."""

import json
import subprocess
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
import yaml
from helpers import assert_raises
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.config.evaluate_config import EvaluatorConfig
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from halflife import LanguageModel, preset
from halflife.cli.lm_eval import TASKS, register
from halflife.cli.lm_eval.model import HARNESS_DEVICE
from halflife.cli.lm_eval.ruler import documents, mean, score
from halflife.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from halflife.evaluation import batched
from halflife.evaluation import ruler as evaluation
from halflife.evaluation.harness import harness_model
from halflife.hf import HalflifeForCausalLM
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
    assert_raises(ValueError, "got many", cls.create_from_arg_string, f"pretrained={folder}", {"batch_size": "many"})
    for given in ("auto", "auto:4"):
        assert cls.create_from_arg_string(f"pretrained={folder}", {"batch_size": given}).batch_size == 64
    few = cls.create_from_arg_string(f"pretrained={folder}", {"batch_size": "auto", "max_batch_size": 4})
    assert few.batch_size == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="here cuda:0 is a device")
def test_the_device_that_the_harness_gives_by_default_need_not_exist(folder):
    register()
    create = get_model("halflife").create_from_arg_string
    assert EvaluatorConfig().device == HARNESS_DEVICE
    assert create(f"pretrained={folder}", {"device": HARNESS_DEVICE})._device.type == "cpu"
    assert_raises(ValueError, "no device 'cuda:1'", create, f"pretrained={folder}", {"device": "cuda:1"})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory")])
def test_batches_are_halved_where_memory_is_short(error, monkeypatch):
    rows, sizes = [[*range(11)], [*range(11, 14)]], []

    def work(batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise error
        return [-i for i in batch]

    assert list(batched.in_batches(work, rows, 8)) == [(i, -i) for i in range(14)]
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 1, 2, 1]
    with pytest.raises(type(error)):
        list(batched.in_batches(lambda batch: (_ for _ in ()).throw(error), rows, 8))


CHAT = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"


def with_bos(model_max_length=64):
    """Letters. A text begins with <s> by default, and <|turn|> divides a chat."""
    names = ["<end>", "<s>", "<|turn|>", *map(chr, range(32, 127))]
    own = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<end>"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    own.decoder = decoders.Fuse()
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<end>", bos_token="<s>", additional_special_tokens=["<|turn|>"],
        chat_template=CHAT, model_max_length=model_max_length,
    )  # fmt: skip


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


@quiet
@pytest.mark.parametrize("special", [
    {}, {"add_bos_token": True}, {"add_bos_token": False}, {"prefix_token_id": 7},
    {"add_bos_token": False, "prefix_token_id": 0},
])  # fmt: skip
def test_special_tokens_are_those_of_the_harness_own_models(special):
    """Also in a text that has them already, and in a chat."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    model, tokenizer = LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 98})).eval(), with_bos()
    theirs = HFLM(
        HalflifeForCausalLM.of(model), tokenizer=tokenizer, max_length=4096, logits_cache=False, **special
    )  # fmt: skip
    ours = harness_model(model, HuggingFaceTokenizer(tokenizer, "some/letters"), **special)
    asked = [{"role": "user", "content": "x"}]
    both = [{"role": "system", "content": "be"}, *asked]
    chats = [ours.apply_chat_template(chat) for chat in (asked, both)]
    assert chats[1] == theirs.apply_chat_template(both) == "<s><|turn|>system:be<|turn|>user:x<|turn|>assistant:"
    texts = ["the cat", "", "<end>a<end>b", "$x" * 50]
    if special != {"prefix_token_id": 7}:  # then theirs begins some texts with two of <s>
        texts += ["<s>the", *chats]
    for text in texts:
        for add in (None, True, False):
            assert ours.tok_encode(text, add_special_tokens=add) == theirs.tok_encode(text, add_special_tokens=add)
    pairs = requests("loglikelihood", *((text, " sat") for text in texts), ("", "<s>x"))
    close = {"rel": 5.2e-7}  # four times the largest error, 1.3e-7
    found, expected = ours.loglikelihood(pairs), theirs.loglikelihood(pairs)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], **close)
    whole = requests("loglikelihood_rolling", *((text,) for text in texts if text))
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), **close)
    asked = requests("generate_until", *((text, {"until": ["~"], "max_gen_toks": 6}) for text in texts if text))
    assert ours.generate_until(asked) == theirs.generate_until(asked)
    assert ours.tokenizer_name == "some__letters"
    assert ours.chat_template(True) == theirs.chat_template(True) == CHAT


def test_a_chat_needs_a_template():
    model = harness_model(LanguageModel(preset("mamba2", **SIZES)), ByteTokenizer())
    assert_raises(ValueError, "'bytes' has no chat template", model.apply_chat_template, [])


def test_what_was_trained_here_begins_after_an_end_token(folder, tmp_path):
    """Its documents have no other special token, whatever its tokenizer adds by default."""
    torch.manual_seed(0)
    path = checkpoint.save(LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 98})), tmp_path / "model")
    HuggingFaceTokenizer(with_bos(), "letters").save(path)
    register()
    create = get_model("halflife").create_from_arg_string
    assert create(f"pretrained={path}").tok_encode("a") == [1, 68]
    assert create(f"pretrained={path},add_bos_token=False").tok_encode("a") == [68]
    (path / "run.json").write_text('{"context": 64}')
    trained = create(f"pretrained={path}")
    assert (trained.tok_encode("a"), trained.prefix_token_id) == ([68], 0)
    given = create(f"pretrained={path},add_bos_token=True,prefix_token_id=1")
    assert (given.tok_encode("a"), given.prefix_token_id) == ([1, 68], 1)


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
    metadata = ["--metadata", '{"max_seq_lengths": [600], "examples": 2}']
    for more in (["--batch_size", "2"], ["--batch_size", "auto"]):  # without a --device, as the documents say
        done = subprocess.run([*command, *options, *metadata, *more], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "offline_niah_single_1" in done.stdout
        assert "found" in done.stdout


@pytest.mark.slow
def test_the_command_of_the_harness_applies_a_chat_template(tmp_path):
    torch.manual_seed(0)
    path = checkpoint.save(LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 98})), tmp_path / "model")
    HuggingFaceTokenizer(with_bos(100_000), "letters").save(path)
    command = [
        sys.executable, "-m", "halflife.cli.lm_eval", "--model", "halflife", "--model_args", f"pretrained={path}",
        "--tasks", "offline_niah_single_1", "--metadata", '{"max_seq_lengths": [700], "examples": 2}',
        "--apply_chat_template", "--batch_size", "auto", "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    prompt = json.loads(samples.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.startswith("<s><|turn|>user:")
