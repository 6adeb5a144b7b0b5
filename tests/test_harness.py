"""lm-evaluation-harness: scores and texts, compared with the model's logits and with the harness's adapter."""

import json
import math
import re
import sys
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
import torch
import yaml
from combinations import SIZES
from helpers import add_noise, assert_raises, cases
from pairwise import slow_beyond
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from halflife import LanguageModel, Session, preset
from halflife.cli import main
from halflife.cli.checkpoint import special_tokens
from halflife.cli.evaluate import HARNESS_RESULTS
from halflife.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from halflife.evaluation import batched, harness
from halflife.evaluation.bundles import BUNDLES, averages, expand
from halflife.extras import install
from halflife.hf import HalflifeForCausalLM
from halflife.models import checkpoint

NAMES = ["mamba2", "rwkv7", "llama", "mamba2+ska", "simple+tpe"]
LETTERS = " \nabcdefghijklmnopqrstuvwxyz.?!"
DOCS = [
    {"text": "one two", "choices": [" three", " four five", " six"], "gold": 0, "last": " mat", "whole": "A cat sat."},
    {"text": "red green", "choices": [" a", " b", " c"], "gold": 2, "last": " day", "whole": "Hello"},
    {"text": "x", "choices": [" y", " z", " yy"], "gold": 1, "last": " you", "whole": "A longer text, of two. Yes."},
    {"text": "a b a b a", "choices": [" b", " a", "."], "gold": 0, "last": " b", "whole": "é ≠ 😀"},
]
TASKS = {
    "choices_here": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices",
        "doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "last_here": {
        "output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{last}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc"}],
    },
    "text_here": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{whole}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "write_here": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{last}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 6}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def build(name, **options):
    return add_noise(LanguageModel(preset(name, **{**SIZES, **options})).eval())


def likelihood(model, context, continuation):
    """Compute log p(continuation | context), and whether it is greedy, from the logits of one forward pass."""
    logits = model(torch.tensor([[*context, *continuation]]))[0][0, len(context) - 1 : -1].log_softmax(-1)
    target = torch.tensor(continuation)
    return logits.gather(1, target[:, None]).sum().item(), torch.equal(logits.argmax(-1), target)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The tasks above in the harness's format. Its thousands of tasks, which take seconds, and the hub are not read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "tasks" / "manager.py"))
    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda run: ("pip", ""))  # this call takes seconds
    own = tmp_path / "tasks"
    own.mkdir()
    (own / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(own / "docs.jsonl")}}}
    for name, task in TASKS.items():
        config = {"task": name, "test_split": "test", "target_delimiter": "", **source, **task}
        (own / f"{name}.yaml").write_text(yaml.dump(config))
    (own / "both.yaml").write_text(yaml.dump({
        "group": "both_here", "task": ["choices_here", "last_here"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }))  # fmt: skip
    (own / "far.yaml").write_text(yaml.dump({"task": "far_away", "dataset_path": "no/where", **TASKS["last_here"]}))
    return own


def letters():
    own = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<end>", *LETTERS])}, unk_token="<end>"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    own.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>")


@pytest.mark.parametrize("name", slow_beyond(["rwkv7", "mamba2+ska"], NAMES))
def test_loglikelihoods_are_those_of_the_logits(name, monkeypatch):
    """Contexts are shared or not, of one token or many; pieces cross all boundaries; one continuation is empty."""
    monkeypatch.setattr(batched, "PIECE_TOKENS", 20)
    monkeypatch.setattr(batched, "MAX_LOGITS", 3 * SIZES["vocab_size"])
    model, pairs = build(name).double(), []
    with torch.no_grad():
        for length, endings in ((1, (3, 9, 1)), (2, (2,)), (13, (1, 5, 1)), (40, (2, 30))):
            context = torch.randint(SIZES["vocab_size"], (length,)).tolist()
            pairs += [(context, torch.randint(SIZES["vocab_size"], (n,)).tolist()) for n in endings]
            pairs.append((context, list(Session(model).feed(context).sample(3, temperature=0))))
        expected = [likelihood(model, *pair) for pair in pairs]
    assert sum(greedy for _, greedy in expected) >= 4
    for batch_size in (1, 4):
        found = batched.loglikelihoods(model, [*pairs, ([1], [])], batch_size=batch_size)
        assert found.pop() == (0.0, True)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        # Losses are computed in float32: four times the largest error, 7.7e-8.
        assert max(abs(a / b - 1) for (a, _), (b, _) in zip(found, expected, strict=True)) < 3.1e-7


def test_what_is_read_at_once_is_bounded(monkeypatch):
    monkeypatch.setattr(batched, "PIECE_TOKENS", 16)
    model, seen = build("mamba2"), []
    model.embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    batched.loglikelihoods(model, [([1] * 100, [2] * 50), ([3] * 90, [4])], batch_size=2)
    batched.generate(model, [[1] * 100, [2] * 7], 3, lambda tokens: False)
    assert max(seen) == 16
    assert sum(seen) == 99 + 50 + 89 + 1 + 107 + 2 * 2  # every token is read once


@pytest.mark.parametrize("name", slow_beyond(["mamba2", "llama"], NAMES))
def test_generate_writes_what_a_session_does(name, monkeypatch):
    """One batch has prompts of unequal lengths that end at different times."""
    monkeypatch.setattr(batched, "PIECE_TOKENS", 24)
    model = build(name).double()
    prompts = [torch.randint(SIZES["vocab_size"], (n,)).tolist() for n in (1, 17, 5, 30)]
    expected = [list(Session(model).feed(prompt).sample(9, temperature=0)) for prompt in prompts]
    stops = {expected[1][2], expected[2][5]}
    cut = [next((i + 1 for i, token in enumerate(row) if token in stops), 9) for row in expected]
    assert len(set(cut)) > 1
    found = batched.generate(model, prompts, 9, lambda tokens: tokens[-1] in stops)
    assert found == [row[:n] for row, n in zip(expected, cut, strict=True)]
    assert batched.generate(model, prompts, 0, lambda tokens: False) == [[], [], [], []]
    sampled = batched.generate(model, prompts, 9, lambda tokens: False, vocab_size=3, temperature=5.0, top_k=3)
    assert {token for row in sampled for token in row} == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_no_text(temperature):
    model = build("mamba2")
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    given = {"temperature": temperature}
    assert_raises(ValueError, "not finite", batched.generate, model, [[1], [2, 3]], 3, lambda tokens: False, **given)


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


PAIRS = requests(
    "loglikelihood", ("the cat", " sat"), ("", "on it"), ("the cat ", "sat down"), ("the cat", " ran"),
    ("a" * 50, "b"), ("x", "\n"),
)  # fmt: skip
TEXTS = requests("loglikelihood_rolling", ("the cat sat on the mat",), ("a",), ("b" * 40,))


def prompts(*until):
    return requests(
        "generate_until", ("the cat", {"until": [*until], "max_gen_toks": 12}),
        ("once upon a time", {"until": [*until], "max_gen_toks": 12}),
        ("x", {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 1}),
        ("yes", {"until": "qq", "max_gen_toks": 4}),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("max_length", slow_beyond([16], [None, 16]))
def test_the_adapter_of_transformers_says_the_same(max_length):
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = build("mamba2", vocab_size=len(LETTERS) + 1), letters()
    # The cache of logits is off: it returns wrong logits if windows repeat, as in a constant text.
    theirs = HFLM(
        HalflifeForCausalLM.of(model), tokenizer=tokenizer, max_length=max_length or 4096, batch_size=2,
        logits_cache=False,
    )  # fmt: skip
    for batch_size in (1, 4):
        ours = harness.harness_model(
            model, HuggingFaceTokenizer(tokenizer, "letters"), batch_size=batch_size, max_length=max_length
        )
        found, expected = ours.loglikelihood(PAIRS), theirs.loglikelihood(PAIRS)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        close([x for x, _ in found], [x for x, _ in expected])
        close(ours.loglikelihood_rolling(TEXTS), theirs.loglikelihood_rolling(TEXTS))
        free = ours.generate_until(prompts())
        assert list(map(len, free)) == [12, 12, 5, 4]
        stopped = prompts(free[0][7:9], free[1][3:5])
        assert (texts := ours.generate_until(stopped)) == theirs.generate_until(stopped)
        assert texts[:2] != free[:2]
        # Counted by hand: 50 + 1 letters of context; twice, "the cat" and "once upon a time" with 12 new letters.
        assert ours.truncated == (5 if max_length else 0)


def close(found, expected):
    # The tolerance is four times the largest error, 1.3e-7.
    assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) < 5.2e-7


def test_what_an_answer_leaves_no_room_for_is_an_error():
    model = build("mamba2", vocab_size=256)
    ours = harness.harness_model(model, ByteTokenizer(), max_length=4)
    (value, _), (cut, _) = ours.loglikelihood(requests("loglikelihood", ("abc", "de"), ("xxxabc", "de")))
    assert value == cut
    assert ours.truncated == 1
    with pytest.raises(ValueError, match="max_length 4 leaves no context before 4 tokens"):
        ours.loglikelihood(requests("loglikelihood", ("a", "abcde")))
    assert_raises(ValueError, "at least 1", harness.harness_model, model, ByteTokenizer(), batch_size=0)


def test_a_text_begins_after_its_end_token_or_a_newline():
    for tokenizer, first in ((ByteTokenizer(), 10), (ByteTokenizer(end_of_document=True), 256)):
        model = build("mamba2", vocab_size=tokenizer.vocab_size)
        ours = harness.harness_model(model, tokenizer)
        close(
            [*ours.loglikelihood_rolling(TEXTS[:1]), ours.loglikelihood(PAIRS[1:2])[0][0]],
            [likelihood(model, [first], list(text.encode()))[0] for text in (TEXTS[0].args[0], PAIRS[1].args[1])],
        )
    # A tokenizer that only knows words has neither.
    words = Tokenizer(models.WordLevel({"red": 0, "green": 1}, unk_token="red"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=words), "words")
    ours = harness.harness_model(build("mamba2"), plain)
    assert len(ours.loglikelihood(requests("loglikelihood", ("red", " green")))) == 1
    assert_raises(ValueError, "neither an end token nor a newline", ours.loglikelihood_rolling, TEXTS)


def test_settings_of_texts():
    """A task may ask for sampling, but not for beams."""
    model = build("mamba2", vocab_size=257)
    ours = harness.harness_model(model, ByteTokenizer(end_of_document=True), batch_size=8)
    asked = {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 3.0, "num_beams": 1}
    texts = ours.generate_until(requests("generate_until", *[("the cat", asked)] * 8))
    assert len(set(texts)) > 4
    with pytest.raises(ValueError, match=r"num_beams.*temperature, top_k, top_p"):
        ours.generate_until(requests("generate_until", ("the cat", {**asked, "num_beams": 10})))


def direct(model):
    """Compute the metrics of `TASKS` from the model's logits; tokens are bytes, and a newline precedes a text."""
    right = normed = 0
    for doc in DOCS:
        values = [likelihood(model, [*doc["text"].encode()], [*choice.encode()])[0] for choice in doc["choices"]]
        right += max(range(3), key=lambda i: values[i]) == doc["gold"]
        normed += max(range(3), key=lambda i: values[i] / len(doc["choices"][i])) == doc["gold"]
    last = [likelihood(model, [*doc["text"].encode()], [*doc["last"].encode()]) for doc in DOCS]
    whole = sum(likelihood(model, [10], [*doc["whole"].encode()])[0] for doc in DOCS)
    exact = 0
    for doc in DOCS:
        written = bytes(Session(model).feed(doc["text"]).sample(6, temperature=0)).decode("utf-8", "replace")
        exact += written.split(".")[0] == doc["last"]
    return {
        ("choices_here", "acc"): right / 4,
        ("choices_here", "acc_norm"): normed / 4,
        ("last_here", "perplexity"): math.exp(-sum(value for value, _ in last) / 4),
        ("last_here", "acc"): sum(greedy for _, greedy in last) / 4,
        ("text_here", "bits_per_byte"): -whole / math.log(2) / sum(len(doc["whole"].encode()) for doc in DOCS),
        ("text_here", "word_perplexity"): math.exp(-whole / sum(len(doc["whole"].split()) for doc in DOCS)),
        ("write_here", "exact_match"): exact / 4,
    }


def taught():
    model = build("mamba2", vocab_size=256)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(20):
        for doc in (DOCS[0], DOCS[3]):
            ids = torch.tensor([[*(doc["text"] + doc["last"] + ".").encode()]])
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0][0], ids[0, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.requires_grad_(False)


@pytest.mark.filterwarnings("ignore")
def test_eval_from_the_command_line(folder, tmp_path, capsys):
    model = taught()
    checkpoint.save(model, tmp_path / "model")
    expected = direct(model)
    assert 0 < expected["write_here", "exact_match"] < 1
    assert 0 < expected["last_here", "acc"] < 1
    capsys.readouterr()
    main([
        "eval", str(tmp_path / "model"), "--tasks", "choices_here,last_here", "text_here", "write_here",
        "--include", str(folder), "--device", "cpu", "--batch-size", "3", "--quiet",
    ])  # fmt: skip
    out = capsys.readouterr().out
    (output,) = (tmp_path / "model" / "eval").iterdir()
    results = json.loads((output / "results.json").read_text())
    found = {(row["task"], row["metric"]): row["value"] for row in results["rows"]}
    assert found.keys() == set(expected)
    for key, value in expected.items():
        # Four times the largest error of two CPUs, 1.9e-6, of a perplexity of 6e11.
        assert found[key] == pytest.approx(value, rel=7.5e-6)
    assert results["harness"]["n-samples"]["text_here"]["effective"] == 4
    assert results["settings"]["batch_size"] == 3
    assert {"torch", "halflife"} < results["versions"].keys()
    table = (output / "table.md").read_text()
    for row in results["rows"]:
        assert f"| {row['task']} | {row['metric']} | " in table
        assert row["task"] in out
    assert f"written to {output}" in out.replace("\n", " ")
    mixed = [str(tmp_path / "model"), "--tasks", "text_here", "--include", str(folder), "--bf16", "--device", "cpu"]
    main(["eval", *mixed, "--output", str(tmp_path / "mixed"), "--quiet"])
    rows = json.loads((tmp_path / "mixed" / "results.json").read_text())["rows"]
    (bits,) = (row["value"] for row in rows if row["metric"] == "bits_per_byte")
    error = abs(bits / expected["text_here", "bits_per_byte"] - 1)
    assert 0 < error < 2.7e-3  # four times the error, 6.6e-4


@pytest.mark.filterwarnings("ignore")
def test_limits_shots_seeds_and_groups(folder):
    model, tokenizer = build("mamba2", vocab_size=256), ByteTokenizer()
    settings = {"include_path": folder, "limit": 2, "num_fewshot": 2}
    runs = [harness.evaluate(model, tokenizer, ["last_here"], seed=seed, **settings) for seed in (1, 1, 2)]
    first, again, other = ([row["value"] for row in harness.metric_rows(run)] for run in runs)
    assert first == again != other
    assert runs[0]["n-shot"]["last_here"] == 2
    assert runs[0]["n-samples"]["last_here"]["effective"] == 2
    model.train()
    cut = harness.evaluate(model, tokenizer, ["both_here"], max_length=10)
    assert model.training
    # Counted by hand: "one two" before two of its choices, "red green" before " day".
    assert cut["truncated"] == 3
    shown = {(row["task"], row["metric"]): row["value"] for row in harness.metric_rows(cut)}
    parts = [shown["choices_here", "acc"], shown["last_here", "acc"]]
    assert shown["both_here", "acc"] == sum(parts) / 2


@pytest.mark.filterwarnings("ignore")
def test_errors_of_tasks(folder, monkeypatch):
    model, tokenizer = build("mamba2", vocab_size=256), ByteTokenizer()
    for tasks, settings, message in (
        (["choice_here"], {}, "unknown task 'choice_here'; similar names, of [0-9,]+: choices_here"),
        (["far_away"], {"include_path": folder}, "the task far_away cannot get its data: .*no/where"),
        ([], {}, "need a task"),
        (["text_here"], {"limit": 0}, "limit > 0"),
        (["text_here"], {"batch_size": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            harness.evaluate(model, tokenizer, tasks, **settings)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="no folder"):
        harness.evaluate(model, tokenizer, ["text_here"], include_path=folder / "nowhere")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert_raises(ImportError, re.escape(install("eval")), harness.evaluate, model, tokenizer, ["text_here"])


@cases(
    "arguments, message",
    ([], "at least one task"),
    (["--tasks", "wikitext", "--lengths", "600"], "--lengths: only tasks of RULER"),
    (["--text", "book.txt", "--limit", "5"], "--limit: only tasks of the harness"),
    (["--tasks", "niah_single_1", "--lengths", "600"], "a tokenizer of Hugging Face"),
)
def test_eval_errors_are_one_line(arguments, message, tmp_path, refused):
    checkpoint.save(build("mamba2", vocab_size=256), tmp_path)
    before = sorted(tmp_path.iterdir())
    assert message in refused("eval", str(tmp_path), *arguments, "--device", "cpu", "--quiet")
    assert sorted(tmp_path.iterdir()) == before


def test_bundles_are_the_papers():
    """PoST's seven, the Decay paper's ten, Echo's seven and GateRank's ten tasks, and the harness has each of them."""
    sizes = {name: len(bundle.tasks) for name, bundle in BUNDLES.items()}
    assert sizes == {"post-lm": 7, "decay-lm": 10, "echo-lm": 7, "gate-rank-lm": 10, "s-niah": 6}
    averaged = {name: sum(metric is not None for metric in bundle.metrics.values()) for name, bundle in BUNDLES.items()}
    assert averaged == {"post-lm": 7, "decay-lm": 8, "echo-lm": 6, "gate-rank-lm": 9, "s-niah": 0}
    assert expand(["s-niah", "piqa", "post-lm"])[:8] == [*BUNDLES["s-niah"].tasks, "piqa", "lambada_openai"]
    folder, text = Path(lm_eval.tasks.__file__).parent, ""
    for name in ("lambada", "hellaswag", "piqa", "arc", "winogrande", "openbookqa", "wikitext", "super_glue/boolq",
                 "siqa", "sciq", "ruler"):  # fmt: skip
        text += "".join(file.read_text() for file in sorted((folder / name).glob("*.yaml")))
    for bundle in BUNDLES.values():
        for task in bundle.tasks:
            assert re.search(rf"(^task|- ): {task}$|^  - {task}$", text, re.MULTILINE), task


def test_the_average_is_that_of_the_papers_table():
    """PoST, Table 3: Mamba-2 180M has 21.6, 31.1, 62.9, 50.4, 24.7, 49.6 and 30.6, and an average of 38.7."""
    tasks = BUNDLES["post-lm"].metrics.items()
    printed = dict(zip(BUNDLES["post-lm"].tasks, (21.6, 31.1, 62.9, 50.4, 24.7, 49.6, 30.6), strict=True))
    rows = [{"task": task, "metric": metric, "filter": "none", "value": printed[task]} for task, metric in tasks]
    (row,) = averages(["post-lm", "s-niah", "piqa"], rows)
    assert (row["task"], row["metric"], round(row["value"], 1)) == ("post-lm", "mean of 7 accuracies", 38.7)
    assert averages(["post-lm"], rows[1:]) == []


def test_needles_of_the_harness_get_lengths_and_a_tokenizer(tmp_path, monkeypatch, capsys):
    checkpoint.save(build("mamba2", vocab_size=len(letters())), tmp_path)
    letters().save_pretrained(tmp_path)
    asked = []
    metrics = {"4096,none": -1, "1024,none": 0.5, "alias": "x"}

    def evaluate(model, tokenizer, tasks, **settings):
        asked.append((tasks, settings["metadata"]))
        results = {"results": {tasks[0]: metrics}, "n-shot": {}}
        return {**dict.fromkeys(HARNESS_RESULTS), **results, "truncated": 0}

    monkeypatch.setattr(harness, "evaluate", evaluate)
    for lengths in ([], ["--lengths", "512"]):
        main(["eval", str(tmp_path), "--tasks", "s-niah", *lengths, "--device", "cpu", "--quiet"])
    main(["eval", str(tmp_path), "--tasks", "piqa", "--device", "cpu", "--quiet"])
    tokenizer, needles = {"tokenizer": str(tmp_path)}, list(BUNDLES["s-niah"].tasks)
    assert asked == [
        (needles, {**tokenizer, "max_seq_lengths": [1024, 2048, 4096]}),
        (needles, {**tokenizer, "max_seq_lengths": [512]}), (["piqa"], {}),
    ]  # fmt: skip
    results = [json.loads((folder / "results.json").read_text()) for folder in (tmp_path / "eval").iterdir()]
    assert [row["metric"] for row in results[0]["rows"]] == ["1024"]  # −1 says that there is no such length
    capsys.readouterr()


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("special", [
    {}, {"add_bos_token": True}, {"add_bos_token": False}, {"prefix_token_id": 7},
    {"add_bos_token": False, "prefix_token_id": 0},
])  # fmt: skip
def test_special_tokens_are_those_of_the_harness_own_models(special):
    """Also in a text that has them already, and in a chat."""
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = build("mamba2", vocab_size=98), with_bos()
    theirs = HFLM(
        HalflifeForCausalLM.of(model), tokenizer=tokenizer, max_length=4096, logits_cache=False, **special
    )  # fmt: skip
    ours = harness.harness_model(model, HuggingFaceTokenizer(tokenizer, "some/letters"), **special)
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
    found, expected = ours.loglikelihood(pairs), theirs.loglikelihood(pairs)
    close([x for x, _ in found], [x for x, _ in expected])
    whole = requests("loglikelihood_rolling", *((text,) for text in texts if text))
    close(ours.loglikelihood_rolling(whole), theirs.loglikelihood_rolling(whole))
    asked = requests("generate_until", *((text, {"until": ["~"], "max_gen_toks": 6}) for text in texts if text))
    assert ours.generate_until(asked) == theirs.generate_until(asked)
    assert ours.tokenizer_name == "some__letters"
    assert ours.chat_template(True) == theirs.chat_template(True) == CHAT


@pytest.mark.filterwarnings("ignore")
def test_a_special_token_in_until_ends_a_text():
    """As the end of a turn in a chat, which `decode` leaves out."""
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = build("mamba2", vocab_size=98), with_bos()
    asked = requests("generate_until", *((text, {"until": ["<|turn|>"], "max_gen_toks": 12}) for text in ("cat", "a")))
    ours = harness.harness_model(model, HuggingFaceTokenizer(tokenizer, "letters"))
    token = tokenizer.convert_tokens_to_ids(ours.generate_until(asked)[0][3])
    weight = model.embedding.weight.data
    weight[[2, token]] = weight[[token, 2]]  # so that the text has a turn where it had this character
    theirs = HFLM(HalflifeForCausalLM.of(model), tokenizer=tokenizer, max_length=4096, batch_size=1)
    texts = ours.generate_until(asked)
    assert texts == theirs.generate_until(asked)
    assert len(texts[0]) < 12


def test_a_chat_needs_a_template():
    model = harness.harness_model(build("mamba2", vocab_size=256), ByteTokenizer())
    assert_raises(ValueError, "'bytes' has no chat template", model.apply_chat_template, [])


def test_what_was_trained_here_begins_after_an_end_token(tmp_path):
    """Its documents have no other special token, whatever its tokenizer adds by default."""
    tokenizer = HuggingFaceTokenizer(with_bos(), "letters")
    assert special_tokens(tmp_path, tokenizer) == {}
    (tmp_path / "run.json").write_text('{"context": 64}')
    model = build("mamba2", vocab_size=98)
    trained = harness.harness_model(model, tokenizer, **special_tokens(tmp_path, tokenizer))
    assert (trained.tok_encode("a"), trained.prefix_token_id) == ([68], 0)
