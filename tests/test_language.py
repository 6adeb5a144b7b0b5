"""Language models on text, with files, processes and signals. The numbers do not depend on how a run is executed."""

import csv
import dataclasses
import json
import math
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import tiny_runs
import torch
from helpers import assert_raises, cases, port
from tiny_runs import after_step
from transformers import TrainerState

from halflife import preset
from halflife.cli import main
from halflife.data.byte_tokenizer import ByteTokenizer
from halflife.data.corpus import Corpus, CorpusConfig
from halflife.data.paths import absolute_paths, relative_paths
from halflife.data.trust import confirm
from halflife.evaluation.language import by_position, document_loss, measure_texts, octave_means, perplexity
from halflife.files import folder_lock
from halflife.lab.experiments import train as language
from halflife.lab.experiments.values import parse_count
from halflife.layers import gate_statistics
from halflife.models import LanguageModel, checkpoint
from halflife.report.tables.language import print_language_run
from halflife.runs import language_run, samples
from halflife.runs.language_run import CorpusRun, MicroBatches
from halflife.runs.one import run_one
from halflife.training.callbacks import Metrics, ProgressBar
from halflife.training.checkpoints import last_checkpoint
from halflife.training.config import ExecutionConfig
from halflife.training.estimate import model_costs
from halflife.training.fit import Objective, StoppedBySignal, check_run_folder
from halflife.training.profile import Profile
from halflife.training.schedules import schedule
from halflife.training.sharding import SHARDS
from halflife.training.speed import Speed, keep_freed_memory

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["decay", "state", "memory", "forget", "recall", "slow", "fast", "and", "of", "the"]
    for i in range(40):
        body = " ".join(draw.choice(words) for _ in range(draw.randint(12, 120)))
        (folder / f"{i:02}.txt").write_text(body + ".\n")
    return folder


@pytest.fixture(scope="module")
def corpus(text, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return Corpus.open(CorpusConfig(sources=(text,), context=32, fractions=(0.15, 0.0), cache_dir=cache), show=False)


def tiny(corpus, model="mamba2+post", tokens=12 * 4 * 32, **options):
    every = {"validate_every": 4, "save_every": 4}
    defaults = {"learning_rate": 1e-2, "batch_size": 4, "sizes": SIZES, "warmup": 0.02, **every}
    return language.configure(model, corpus, tokens=tokens, **{**defaults, **options})


def run(config, corpus, folder, *, execution):
    return run_one(CorpusRun(config, corpus), folder, name="x", execution=execution)


@pytest.mark.parametrize("mode", ["packed", "concatenated"])
def test_short_rows_are_read_together(corpus, monkeypatch, mode):
    """Six rows of 5 tokens in a batch, and fewer in the last one: the mean over all rows, in few steps."""
    monkeypatch.setattr(language_run, "MEASURED_TOKENS", 30)
    config = dataclasses.replace(tiny(corpus), mode=mode, context=5, validation_tokens=16 * 20)
    model, split, calls = LanguageModel(config.model).eval(), corpus.split("validation"), []
    model.embedding.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        loss = language_run._validation(split, config)(Objective(model))
        count = len(calls)
        rows = split.batches(1, 5, config.seed, mode, steps=20)
        each = [(Objective(model)(**row)["loss"], (row["labels"] >= 0).sum()) for row in rows]
    expected = sum(value * n for value, n in each) / sum(n for _, n in each)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert count == 4


def test_rows_of_one_token_count_as_sixteen(corpus, monkeypatch):
    config = dataclasses.replace(tiny(corpus), context=1, validation_tokens=160)
    counted = []
    monkeypatch.setattr(language_run, "_join", lambda rows: counted.extend(rows) or rows[0])
    language_run._validation(corpus.split("validation"), config)(Objective(LanguageModel(config.model)))
    assert len(counted) == 10


def test_a_validation_during_training_drops_and_counts_nothing(corpus):
    config = tiny(corpus, "mamba2+gate_rank")
    model = LanguageModel(dataclasses.replace(config.model, embedding_dropout=0.5))
    validate = language_run._validation(corpus.split("validation"), config)
    expected = validate(Objective(model.eval()))
    objective = Objective(model.train())
    assert [validate(objective) for _ in range(2)] == [expected] * 2
    assert all(module.training for module in objective.modules())
    assert not gate_statistics(model)


def quiet(**options):
    return ExecutionConfig(show=False, **options)


def numbers(folder):
    """Return all numbers that must not depend on how a run was executed. Times are left out."""
    timed = ("tokens_per_second", "mfu")
    result = json.loads((folder / "result.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plain = [{k: v for k, v in line.items() if k not in timed} for line in [result, *lines]]
    return plain, (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(tiny(corpus), corpus, folder, execution=quiet())
    return folder


def test_the_loss_is_of_the_labels_and_adds_up_over_micro_batches(corpus):
    torch.manual_seed(0)
    config = tiny(corpus)
    objective = Objective(LanguageModel(config.model))
    whole = MicroBatches(corpus.split("train"), config, 1)[3]
    parts = MicroBatches(corpus.split("train"), config, 4)
    assert len(parts) == 4 * config.steps
    cut = [parts[12 + i] for i in range(4)]
    assert torch.equal(torch.cat([x["input_ids"] for x in cut], 1), whole["input_ids"])
    items = (whole["labels"] != -100).sum()
    expected = objective(**whole)["loss"]
    total = sum(objective(**x, num_items_in_batch=items)["loss"] for x in cut)
    assert torch.equal(objective(**whole, num_items_in_batch=items)["loss"], expected)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)  # measured: 2e-7
    logits, _ = objective.model(whole["input_ids"], cu_seqlens=whole["cu_seqlens"])
    scored = whole["labels"] != -100
    by_hand = -logits.log_softmax(-1)[scored].gather(1, whole["labels"][scored].unsqueeze(1)).mean()
    torch.testing.assert_close(by_hand, expected)
    without = {**whole, "labels": torch.full_like(whole["labels"], -100)}  # as of documents of a token each
    assert objective(**without, num_items_in_batch=torch.tensor(0))["loss"] == 0


def test_loss_by_position_streams_and_documents_are_read_whole(monkeypatch):
    torch.manual_seed(0)
    model = LanguageModel(preset("mamba2", vocab_size=31, **SIZES)).eval()
    ids = torch.randint(31, (3, 41))
    rows = [(ids[:2, :-1], ids[:2, 1:]), (ids[2:, :-1], ids[2:, 1:])]
    logits, _ = model(ids[:, :-1])
    expected = -logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).double()
    monkeypatch.setattr("halflife.evaluation.language.PIECE", 7)
    found = by_position(model, rows)
    torch.testing.assert_close(found, expected.mean(0), rtol=1e-5, atol=1e-5)
    assert perplexity(found, 5) == pytest.approx(math.exp(expected[:, :5].mean().item()), rel=1e-5)
    assert perplexity(torch.full((5,), 800.0), 5) == math.inf  # as a diverged model may have
    buckets = octave_means(found)
    assert [(a, b) for a, b, _ in buckets] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 40)]
    assert buckets[-1][2] == pytest.approx(found[32:].mean().item())
    documents = [ids[0, :3], ids[1, :2], ids[2], torch.tensor([], dtype=torch.long), ids[0, :1]]
    measured = document_loss(model, documents)
    assert (measured.tokens, measured.documents) == (2 + 1 + 40, 4)
    nats = expected[0, :2].sum() + expected[1, :1].sum() + expected[2].sum()
    assert measured.nats == pytest.approx(nats.item(), rel=1e-5)
    assert_raises(ValueError, "no rows", by_position, model, [])


def test_the_loss_of_a_text_has_an_error_and_the_level_of_a_guess(tmp_path):
    """Blocks of three tokens count as single observations, and the last two of 50 predicted tokens as none."""
    torch.manual_seed(0)
    model = LanguageModel(preset("mamba2", hidden_size=16, num_layers=1, num_heads=2, vocab_size=256)).eval()
    ids = torch.randint(256, (51,))
    (tmp_path / "a.txt").write_bytes(bytes(ids.tolist()))
    (tmp_path / "short.txt").write_bytes(b"abc")
    found = measure_texts(model, ByteTokenizer(), [tmp_path / "a.txt", tmp_path / "short.txt"])
    with torch.no_grad():
        logits, _ = model(ids[None, :-1])
    losses = -logits.log_softmax(-1).gather(-1, ids[None, 1:, None]).flatten().double()
    error = losses[:48].view(16, 3).mean(1).std().item() / 4
    one, bits = found[str(tmp_path / "a.txt")], 50 / 51 / math.log(2)
    assert one["bits_per_byte"] == pytest.approx(bits * losses.mean().item(), rel=1e-5)
    assert one["bits_stderr"] == pytest.approx(bits * error, rel=1e-4)
    assert one["perplexity_stderr"] == pytest.approx(one["perplexity"] * error, rel=1e-4)
    assert (one["bits_guess"], one["perplexity_guess"]) == (pytest.approx(8 * 50 / 51), 256)
    assert math.isnan(found[str(tmp_path / "short.txt")]["bits_stderr"])


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_operations_are_those_of_the_products(name):
    """Operations by hand: 6 for each weight of a matrix, and attention's two products over all other tokens."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2}
    config = preset(name, vocab_size=31, **sizes)
    model, operations = LanguageModel(config), model_costs(config).training_operations
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "norm" not in n)
    if name == "llama":
        assert operations(512) == pytest.approx(6 * weights + 3 * 2 * 2 * 2 * 512 * 64, rel=0.02)
    else:
        assert operations(512) == operations(4096)
        assert 1 < operations(512) / (6 * weights) < 2.5  # chunks and states add to it
    assert Speed(tokens=100, operations=3.0, rate=1200.0).of(0.5) == {"tokens_per_second": 200.0, "mfu": 0.5}


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_training_keeps_the_memory_that_it_frees(monkeypatch):
    """Tensors of the next step get no new pages from the kernel. Settings in the environment go first."""
    faults = []
    assert keep_freed_memory()
    for _ in range(24):  # the first ones fill holes that other tensors leave
        torch.ones(16 << 20)  # 64 MB
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    assert (faults[-1] - faults[-9]) * resource.getpagesize() <= 2 * 64 << 20  # of the last 8 tensors; else 512 MB
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()


@pytest.mark.parametrize(("name", "last"), [("cosine", 0.1), ("wsd", 0.1), ("linear", 0.1), ("constant", 1.0)])
def test_schedules_end_at_the_floor(name, last):
    from transformers import get_scheduler

    kind, options = schedule(name, 100, 2.0, floor=0.1, decay=0.2)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    found = get_scheduler(kind, optimizer, 10, 100, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(100):
        optimizer.step()
        found.step()
        rates.append(optimizer.param_groups[0]["lr"] / 2.0)
    assert rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(last)
    if name == "wsd":
        assert rates[78] == pytest.approx(1.0)
        assert rates[89] == pytest.approx(0.55)
    if name == "linear":
        assert schedule(name, 100, 2.0, floor=1.0, decay=0.2) == schedule("constant", 100, 2.0, floor=1.0, decay=0.2)


def test_a_run_writes_what_it_promises(corpus, whole):
    result = json.loads((whole / "result.json").read_text())
    assert [row["length"] for row in result["lengths"]] == [32, 64, 128, 256, 512]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 8, 12]
    logged = [line for line in lines if "loss" in line]
    assert all(line["tokens_per_second"] > 0 and 0 < line["mfu"] < 1 for line in logged)
    assert logged[-1]["loss"] < logged[0]["loss"]
    model = checkpoint.load(whole).eval()
    split = corpus.split("validation")
    rows = split.batches(1, 32, 0)
    nats = count = 0.0
    for i in range(len(rows)):
        items = (rows[i]["labels"] != -100).sum()
        nats += Objective(model)(**rows[i])["loss"].item() * items
        count += items
    assert result["validation"] == pytest.approx((nats / count).item(), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(result["validation"] / math.log(2), rel=1e-5)  # on the same rows
    whole_documents = result["documents"]["nats"] / result["documents"]["tokens"] / math.log(2)
    assert result["bits_per_byte_of_documents"] == pytest.approx(whole_documents)
    assert result["documents"]["tokens"] == split.tokens - split.documents
    assert not (whole / "checkpoints").exists()


def test_run_json_names_no_folder_of_this_machine(corpus, text, whole, tmp_path, monkeypatch):
    """Its paths are relative to the folder of the run, and a run of an earlier version, with absolute ones, is read."""
    saved = json.loads((whole / "run.json").read_text())
    assert saved["data"]["sources"] == [os.path.relpath(text, whole)]
    assert str(text.parent) not in json.dumps(saved)
    monkeypatch.chdir(tmp_path)
    config = language.load_config(whole)
    assert config.data["sources"] == [str(text)]
    assert config.data["files"] == [[str(path) for path in sorted(text.iterdir())]]
    assert check_run_folder(tiny(corpus), whole)  # the same run
    old = tmp_path / "old"
    old.mkdir()
    (old / "run.json").write_text(json.dumps(tiny(corpus).to_dict(), default=str))
    with pytest.raises(ValueError, match="give --trust-data"):  # it is not signed, and its text is elsewhere
        language.load_config(old)
    confirm(old / "run.json")
    assert language.load_config(old).data["sources"] == [str(text)]
    assert not check_run_folder(tiny(corpus), old)


def test_the_folder_of_a_tokenizer_is_relative_to_the_run_and_a_name_stays(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("words", "out", "elsewhere", "gpt2"):
        (tmp_path / folder).mkdir()
    data = CorpusConfig(sources=(text,), tokenizer="words").to_dict()
    assert data["tokenizer"] == str(tmp_path / "words")
    out = tmp_path / "out"
    saved = relative_paths(data, out)
    assert saved["tokenizer"] == "../words"
    assert relative_paths(data, tmp_path)["tokenizer"] == "./words"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert absolute_paths(saved, out)["tokenizer"] == absolute_paths(data, out)["tokenizer"] == str(tmp_path / "words")
    for name in ("bytes", "gpt2", "owner/name"):
        data = CorpusConfig(sources=(text,), tokenizer=name).to_dict()
        assert absolute_paths(relative_paths(data, out), out)["tokenizer"] == data["tokenizer"] == name


@pytest.mark.slow
def test_runs_with_the_folder_of_a_tokenizer_can_be_moved_with_it(text, tmp_path, monkeypatch, capsys):
    """`run.json` and the `config.json` of a comparison hold no path of this machine, and both go on elsewhere."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(text, here / "texts")
    inner = Tokenizer(models.BPE({byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(here / "words")
    monkeypatch.chdir(here)
    sizes = ["--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--quiet", "--batch-size", "2"]
    main(["train", "mamba2", "--data", "texts", "--tokenizer", "words", "--tokens", "1K", "--context", "32",
          "--held-out", "0.2", "--output", "run", *sizes])  # fmt: skip
    main(["compare", "mamba2", "--experiment", "post-lm", "--data", "texts", "--tokenizer", "words", "--steps", "4",
          "--train-length", "32", "--output", "sweep", *sizes])  # fmt: skip
    files = [*here.glob("run/*.json"), *here.glob("run/*.md"), *here.rglob("sweep/**/config.json")]
    assert not [file for file in [*files, *here.rglob("run.json")] if str(tmp_path) in file.read_text()]
    assert "Tokenizer `words`" in next(here.glob("run/*.md")).read_text()
    here.rename(there)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    main(["train", "--resume", "there/run", "--quiet"])
    main(["compare", "--resume", "there/sweep", "--quiet"])
    assert "report: " in capsys.readouterr().out


def test_ctrl_c_saves_and_a_second_one_stops_at_once(tmp_path, monkeypatch, capsys):
    after_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(StoppedBySignal, match="after step 3 of 12") as stopped:
        tiny_runs.run(tiny_runs.tiny("mamba2"), tmp_path / "once")
    assert stopped.value.number == signal.SIGINT
    assert last_checkpoint(tmp_path / "once" / "checkpoints").name == "checkpoint-3"
    assert "press Ctrl-C again" in capsys.readouterr().err
    after_step(monkeypatch, 3, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        tiny_runs.run(tiny_runs.tiny("mamba2"), tmp_path / "twice")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_bar_has_no_loss_before_the_first_one_is_logged(tmp_path):
    state = TrainerState(max_steps=4, global_step=1)
    bar = ProgressBar("x", Metrics(tmp_path, lambda _: 0.0, "loss", 4))
    bar.task = bar.progress.add_task("x", total=4, info="", clock="left")
    shown = []
    for logs in ({}, {"loss": 2.5}):
        bar.on_log(None, state, None, logs=logs)
        bar.on_step_end(None, state, None)
        shown.append(bar.progress.tasks[0].fields["info"])
    assert shown == ["loss –", "loss 2.50"]


def test_a_profile_leaves_out_the_validation_of_its_last_step(tmp_path, monkeypatch):
    lines, finish = [], Profile._finish

    def spy(self, writes):
        lines.append((self.folder / "metrics.jsonl").read_text())
        finish(self, writes)

    monkeypatch.setattr(Profile, "_finish", spy)
    config = tiny_runs.tiny("mamba2", steps=3, tests=())
    run_one(config.open(), tmp_path, name="x", execution=quiet(profile=True))
    assert lines == [""]
    assert (tmp_path / "profile.csv").exists()


@cases(
    "execution",
    pytest.param({"micro_batch_size": 1}, marks=pytest.mark.slow),
    {"micro_batch_size": 2, "recompute": ("norms", "op")},
)
def test_memory_can_be_saved_without_changing_the_numbers(corpus, whole, tmp_path, execution):
    run(tiny(corpus), corpus, tmp_path, execution=quiet(**execution))
    same_numbers(tmp_path, whole)


@pytest.fixture
def one_process():
    """As torchrun would start it. accelerate adds variables to the environment, which must not stay."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}):
        yield
    torch.distributed.destroy_process_group()


def test_a_run_of_shards_is_stopped_and_goes_on_to_the_same_numbers(corpus, whole, tmp_path, monkeypatch, one_process):
    shards = quiet(fsdp=True, micro_batch_size=2)
    with monkeypatch.context() as patch:
        tiny_runs.interrupt_after(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(corpus), corpus, tmp_path, execution=shards)
    assert [*(tmp_path / "checkpoints" / "checkpoint-4" / SHARDS).glob("*.safetensors")]
    assert not (tmp_path / "checkpoints" / "checkpoint-4" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="written with --fsdp; resume it so"):
        run(tiny(corpus), corpus, tmp_path, execution=quiet())
    run(tiny(corpus), corpus, tmp_path, execution=shards)
    same_numbers(tmp_path, whole)
    weights = [checkpoint.load(folder).state_dict() for folder in (tmp_path, whole)]
    torch.testing.assert_close(*weights, rtol=0, atol=4.4e-5)  # measured: 1.1e-5 on a CPU with AVX2


def same_numbers(folder, other, rtol=2e-5):
    """Numbers agree up to rounding in another order of summation (measured: 5e-6, of the norm of a gradient)."""
    (found, _), (expected, _) = numbers(folder), numbers(other)
    flat = [json.dumps(x, sort_keys=True) for x in (strip(found), strip(expected))]
    assert flat[0] == flat[1]  # the same lines have the same names
    for a, b in zip(floats(found), floats(expected), strict=True):
        assert a == pytest.approx(b, rel=rtol, abs=1e-7)


def strip(x):
    if isinstance(x, dict):
        return {k: strip(v) for k, v in x.items()}
    return [strip(v) for v in x] if isinstance(x, list) else ("float" if isinstance(x, float) else x)


def floats(x):
    if isinstance(x, dict):
        return [f for k in sorted(x) for f in floats(x[k])]
    return [f for v in x for f in floats(v)] if isinstance(x, list) else ([x] if isinstance(x, float) else [])


@pytest.mark.parametrize(("world", "micro"), [(1, 3), (1, 8), (1, 0), (3, None), (2, 4)])
def test_rows_that_cannot_be_shared_are_an_error(world, micro, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert_raises(ValueError, "shared equally", quiet(micro_batch_size=micro).num_micro_batches, 4)


def test_parts_do_not_depend_on_the_processes(monkeypatch):
    for world in (1, 2, 4):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert quiet(micro_batch_size=2).num_micro_batches(8) == 4
        assert quiet().num_micro_batches(8) == world


def test_another_text_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="not the text"):
        run(dataclasses.replace(tiny(corpus), digest="0" * 64), corpus, tmp_path, execution=quiet())
    assert not any(tmp_path.iterdir())


RESUMED = 1e-4  # relative error of a loss after 60 steps, some of them summed in another order


def arguments(text, folder, *more):
    return [
        "mamba2+post", "--data", str(text), "--held-out", "0.15", "--tokens", "1536", "--context", "32",
        "--batch-size", "4", "--hidden-size", "16", "--num-layers", "2", "--num-heads", "2", "--lr", "1e-2",
        "--validate-every", "4", "--save-every", "4", "--output", str(folder), "--quiet", *more,
    ]  # fmt: skip


@pytest.fixture
def environment(tmp_path_factory):
    return {**os.environ, "HALFLIFE_CACHE": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}


def test_the_command_trains_and_its_folder_is_a_model_of_transformers(text, tmp_path, capsys, monkeypatch, refused):
    from transformers import AutoModelForCausalLM

    import halflife.hf  # noqa: F401

    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "out"
    main(["train", *arguments(text, folder), "--track", "tensorboard", "--profile", "--prompts", "the state"])
    printed = capsys.readouterr().out
    assert "bits per byte" in printed
    assert "optimiser" in printed
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    profiled = {row["pass"]: row for row in csv.DictReader((folder / "profile.csv").read_text().splitlines())}
    assert sum(float(row["share"]) for row in profiled.values()) == pytest.approx(1, abs=1e-3)
    for name in ("convolution", "norms and gates", "op", "projections", "loss"):
        assert min(float(profiled[name][key]) for key in ("forward_ms", "backward_ms")) > 0, name
    assert float(profiled["optimiser"]["forward_ms"]) > 0 < float(profiled["decays"]["forward_ms"])
    for name in ("figures/loss.png", "figures/length.png", "samples.txt", "versions.json", "run.json", "README.md"):
        assert (folder / name).stat().st_size
    assert list((folder / "tensorboard").glob("events*"))
    assert (folder / "samples.txt").read_text().startswith("the state⟨")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(256, (1, 9))
    torch.testing.assert_close(loaded(ids).logits, checkpoint.load(folder)(ids)[0])
    main(["generate", str(folder), "the", "--greedy", "--max-new-tokens", "3", "--device", "cpu"])
    data = (text / "00.txt").read_bytes()
    main(["eval", str(folder), "--text", str(text / "00.txt"), "--output", str(tmp_path / "eval"), "--device", "cpu"])
    nats = torch.nn.functional.cross_entropy(
        checkpoint.load(folder)(torch.tensor([list(data)]))[0][0, :-1], torch.tensor(list(data[1:])), reduction="sum"
    ).item()
    found = json.loads((tmp_path / "eval" / "results.json").read_text())["text"][str(text / "00.txt")]
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(data), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(nats / (len(data) - 1)), rel=1e-4)
    assert "perplexity of a byte" in capsys.readouterr().out
    assert "--resume" in refused("train", *arguments(text, folder))  # the folder has a run already
    with folder_lock(folder):
        assert "another process is at work" in refused("train", "--resume", str(folder))
    main(["train", "--resume", str(folder), "--quiet"])  # a finished run prints its result again
    assert "bits per byte" in capsys.readouterr().out


def test_a_run_that_diverges_at_once_has_a_report_and_says_so(text, tmp_path, capsys, monkeypatch):
    """It has no loss to draw."""
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments(text, tmp_path / "out"), "--lr", "1e30"])
    assert stopped.value.code == 3
    assert "diverged: the loss is nan at step 4; try a lower --lr" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").stat().st_size


def test_what_to_type_next_holds_for_folders_with_spaces(capsys):
    result = {"parameters": 1, "tokens": 1, "bits_per_byte": 1.0, "bits_per_byte_of_documents": 1.0, "lengths": []}
    print_language_run({**result, "tokens_per_second": 1.0, "mfu": 1.0}, Path("my runs/x"))
    assert "halflife generate 'my runs/x' \"…\"" in capsys.readouterr().out


def test_a_sample_begins_with_one_document(text, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "PROMPT_TOKENS", 1000)  # longer than any document
    corpus = Corpus.open(CorpusConfig(sources=(text,), cache_dir=tmp_path, context=8, fractions=(0.2, 0.0)), show=False)
    documents = {path.read_bytes() for path in text.rglob("*.txt")}
    starts = samples.document_starts(corpus)
    assert len(starts) == 3
    assert {bytes(start.tolist()) for start in starts} <= documents


@cases(
    "more, message",
    (["--tokens", "many"], "no number of tokens"),
    (["--prompts", ""], "a prompt has at least one token"),
    (["--schedule", "step"], "cosine"),
    (["--size", "huge"], "decay-160m"),
    (["--documents", "shuffled"], "packed"),
    (["--documents", "continued"], "Choose from: packed, concatenated"),
    (["--data", "nowhere.txt"], "nowhere.txt"),
    (["--tokenizer", "nowhere"], "tokenizer"),
    (["--context", "100000"], "fewer than"),
    (["--held-out", "0"], "validation"),
    (["--lr", "0"], "learning_rate"),
    (["--floor", "2"], "floor"),
    (["--micro-batch-size", "3"], "micro-batches"),
    (["--mlp", "big"], "unknown mlp 'big'"),
)
def test_errors_are_one_line_and_leave_nothing(text, tmp_path, refused, monkeypatch, more, message):
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refused("train", *arguments(text, tmp_path / "out"), *more)
    assert not (tmp_path / "out" / "run.json").exists()


def test_numbers_of_tokens():
    numbers = [parse_count(x) for x in ("1000", "500K", "1.5m", "2B", "1_000")]
    assert numbers == [1000, 500_000, 1_500_000, 2 * 10**9, 1000]


def after_first_checkpoint(folder, process, step=4):
    for _ in range(1200):
        if (folder / "checkpoints" / f"checkpoint-{step}" / "complete.json").exists():
            return
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    raise TimeoutError(folder)


LONG_TOKENS = 7680  # of 60 steps
LONG = ("--tokens", str(LONG_TOKENS))


@pytest.fixture(scope="module")
def long(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    run(tiny(corpus, tokens=LONG_TOKENS), corpus, folder, execution=quiet())
    return folder


def start(processes, *own, command=("-m", "halflife.cli")):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port())]
    return [sys.executable, *(launcher if processes > 1 else []), *command, "train", *own]


def finish(processes, environment, *own, **how):
    done = subprocess.run(start(processes, *own, **how), env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_goes_on_to_the_same_numbers(text, long, tmp_path, environment, kind):
    process = subprocess.Popen(start(1, *arguments(text, tmp_path, *LONG)), env=environment, stderr=subprocess.PIPE)
    after_first_checkpoint(tmp_path, process)
    process.send_signal(kind)
    error = process.communicate()[1].decode()
    assert not (tmp_path / "result.json").exists()
    if kind == signal.SIGTERM:
        assert process.returncode == 143
        assert f"--resume {tmp_path}" in error
        step = int(error.split("after step ")[1].split()[0])
        assert (tmp_path / "checkpoints" / f"checkpoint-{step}" / "complete.json").exists()
    finish(1, environment, "--resume", str(tmp_path), "--quiet")
    (found, weights), (expected, same) = numbers(tmp_path), numbers(long)
    assert weights == same
    assert found == expected


COUNTED = """
import os
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode
from halflife.cli import main
from halflife.training.trainer import HalflifeTrainer

class Sums(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, op, types, given=(), options=None):
        self.total += "allreduce" in str(op) or "reduce_scatter" in str(op)
        return op(*given, **(options or {}))

train, sums = HalflifeTrainer.train, Sums()

def counted(trainer, *given, **options):
    with sums:
        return train(trainer, *given, **options)

HalflifeTrainer.train = counted
main()
Path(os.environ["SUMS"]).write_text(str(sums.total))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--fsdp",)])
def test_two_processes_give_the_numbers_of_one(text, whole, tmp_path, environment, how):
    """Gradients are summed over the processes once a step, however many micro-batches it has."""
    script, totals = tmp_path / "counted.py", []
    script.write_text(COUNTED)
    for name, parts in (("whole", ()), ("parts", ("--micro-batch-size", "1"))):
        environment["SUMS"] = str(tmp_path / "sums")
        finish(2, environment, *arguments(text, tmp_path / name, *how, *parts), command=(str(script),))
        same_numbers(tmp_path / name, whole)
        weights = [checkpoint.load(folder).state_dict() for folder in (tmp_path / name, whole)]
        torch.testing.assert_close(*weights, rtol=0, atol=9e-6)  # measured: 2.2e-6
        totals.append(int((tmp_path / "sums").read_text()))
    steps = max(line["step"] for line in map(json.loads, (whole / "metrics.jsonl").read_text().splitlines()))
    assert totals[0] == totals[1] >= 2 * steps  # the gradients, and whether a process was stopped


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--fsdp",)])
def test_two_processes_are_stopped_and_another_number_goes_on(text, long, tmp_path, environment, how):
    process = subprocess.Popen(
        start(2, *arguments(text, tmp_path, *LONG, *how)), env=environment, stderr=subprocess.PIPE
    )
    after_first_checkpoint(tmp_path, process)
    process.terminate()  # torchrun passes it on
    process.communicate()
    steps = [int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").iterdir()]
    assert 4 <= max(steps) < 60
    if how:  # each process has written its shard
        saved = tmp_path / "checkpoints" / f"checkpoint-{max(steps)}"
        assert len([*saved.glob("shards/*.safetensors")]) == 2
        assert not (saved / "model.safetensors").exists()
    one = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", str(port())] if how else []
    command = [sys.executable, *one, "-m", "halflife.cli", "train", "--resume", str(tmp_path), "--quiet", *how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = json.loads((long / "result.json").read_text())
    assert lines[-1]["step"] == 60
    found = json.loads((tmp_path / "result.json").read_text())
    for name in ("validation", "bits_per_byte", "bits_per_byte_of_documents"):
        assert found[name] == pytest.approx(expected[name], rel=RESUMED)
