"""Killed processes, full disks, damaged and foreign files. `make faults` runs those that take longer (tests/faults)."""

import dataclasses
import json
import math
import os
import shutil
import signal
import stat
import time

import pytest
import torch
from helpers import assert_raises, cases
from tiny_runs import after_step, comparable, run, tiny

from halflife import preset
from halflife.files import NUMBER, atomic_path, fits, read_bytes, read_json, remove_orphans, write_json, write_text
from halflife.report.page.language import _numbers
from halflife.report.tables.comparison import comparison_tables
from halflife.runs.folder import read_result
from halflife.runs.records import scores_of, write_scores
from halflife.training import callbacks
from halflife.training.checkpoints import checksums, last_checkpoint
from halflife.training.fit import StoppedBySignal
from halflife.training.sharding import SHARDS


def test_two_processes_with_one_number_write_two_temporary_files(tmp_path):
    with atomic_path(tmp_path / "a") as first, atomic_path(tmp_path / "a") as second:
        assert first != second
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "a").read_text() == "1"  # the inner one is moved first
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_files_have_the_permissions_of_the_umask(tmp_path):
    def replaced(path):  # as safetensors writes
        os.close(os.open(tmp_path / "other", os.O_CREAT, 0o600))
        os.replace(tmp_path / "other", path)

    before = os.umask(0o027)
    try:
        for name, write in (("text", lambda path: path.write_text("x")), ("weights", replaced)):
            with atomic_path(tmp_path / name) as temporary:
                write(temporary)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("move"), replace(*paths)))
    write_text(tmp_path / "a", "x")
    assert events == ["file", "move", "folder"]


def test_temporary_files_of_killed_processes_are_swept(tmp_path):
    left = (".model.safetensors.123.tmp", ".run.json.0a1b2c.tmp", ".tmpAb12Cd")
    kept = ("run.json", "notes.tmp", ".tmp", ".tmpfolder-of-mine", ".hidden")
    for name in (*left, *kept):
        (tmp_path / name).write_text("x")
    (tmp_path / ".a.tmp").mkdir()
    remove_orphans(tmp_path, older_than=60)
    assert len(list(tmp_path.iterdir())) == len(left) + len(kept) + 1
    remove_orphans(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, ".a.tmp"}
    remove_orphans(tmp_path / "nowhere")


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "a.json", {"a": [math.nan, 1.5, (math.inf,)], "b": None})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, 1.5, [None]], "b": None}


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 100_000, b"{", b""], ids=["bytes", "deep", "half", "empty"])
def test_damaged_json_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    assert_raises(ValueError, r"a\.json", read_json, tmp_path / "a.json")


def test_a_small_archive_of_a_large_text_is_refused(tmp_path, monkeypatch):
    import gzip

    monkeypatch.setattr("halflife.files.UNPACKED", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * 1001))
    assert_raises(ValueError, r"a\.gz unpacks to more than", read_bytes, tmp_path / "a.gz")


def test_a_folder_in_the_place_of_a_text_is_named(tmp_path):
    assert_raises(ValueError, "is a folder; name the files in it", read_bytes, tmp_path)


def stop(folder, step, config=None, number=signal.SIGTERM):
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, step, lambda: os.kill(os.getpid(), number))
        with pytest.raises(StoppedBySignal) as stopped:
            run(config or tiny(), folder)
    return stopped.value


@pytest.fixture
def cut(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "cut")


def steps(folder):
    return sorted(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("checkpoint-*"))


def test_old_checkpoints_with_times_in_the_future_replace_no_new_one(cut, whole):
    later = time.time() + 1e6
    for path in cut.rglob("*"):
        os.utime(path, (later, later))
    stop(cut, 11)
    assert steps(cut) == [8, 11]
    run(tiny(), cut)
    assert comparable(cut) == comparable(whole)


MARKS = [b"{}", b"[]", b"\xff\xfe", b"{", b'{"trainer_state.json": 1}']


@cases(
    "name, data, message",
    *(("complete.json", mark, "is damaged") for mark in MARKS),
    ("shard-of-another", b"", "shard"),
)
def test_a_mark_that_does_not_hold_for_all_files_is_no_checkpoint(cut, name, data, message):
    (cut / "checkpoints" / "checkpoint-8" / name).write_bytes(data)
    with pytest.warns(UserWarning, match=f"checkpoint-8.*{message}"):
        assert last_checkpoint(cut / "checkpoints").name == "checkpoint-4"


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("damaged", [(8,), (4, 8)])
def test_a_run_whose_checkpoints_are_damaged_goes_on_to_the_same_numbers(cut, whole, monkeypatch, damaged):
    for step in damaged:
        (cut / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"x")
    kept = []
    after_step(monkeypatch, 12, lambda: kept.extend(steps(cut)))
    run(tiny(), cut)
    assert kept == [4, 8]
    assert comparable(cut) == comparable(whole)


@cases(
    "file",
    "optimizer.pt",
    *(pytest.param(f, marks=pytest.mark.slow) for f in ("model.safetensors", "trainer_state.json")),
)
def test_a_checkpoint_that_cannot_be_loaded_is_left_for_the_one_before(cut, whole, file):
    folder = cut / "checkpoints" / "checkpoint-8"
    (folder / file).write_bytes(b"half")
    write_json(folder / "complete.json", checksums(folder))  # as if it had been written so
    with pytest.warns(UserWarning, match="checkpoint-8 cannot be loaded"):
        run(tiny(), cut)
    assert comparable(cut) == comparable(whole)


def test_a_checkpoint_of_shards_is_not_resumed_without_fsdp(cut):
    folder = cut / "checkpoints" / "checkpoint-8"
    (folder / SHARDS).mkdir()
    write_json(folder / "complete.json", checksums(folder))
    assert_raises(ValueError, "checkpoint-8 was written with --fsdp; resume it so", run, tiny(), cut)


def test_a_checkpoint_that_is_half_written_is_not_there(cut, whole, monkeypatch):
    """The process is killed while it writes the files of a checkpoint; what it left does not enter the next one."""
    left = cut / "checkpoints" / ".partial" / "checkpoint-12"
    left.mkdir(parents=True)
    (left / "shard-of-a-dead-process").write_text("x")
    listed = []
    after_step(monkeypatch, 12, lambda: listed.extend((cut / "checkpoints").iterdir()))
    run(tiny(), cut)
    assert {path.name for path in listed} == {"checkpoint-4", "checkpoint-8", ".partial"}
    assert comparable(cut) == comparable(whole)


def test_a_full_disk_is_told_and_the_run_goes_on_later(cut, whole, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert_raises(OSError, r"checkpoint of step 12.*No space left.*bytes are free.*Make room", run, tiny(), cut)
    assert steps(cut) == [4, 8]
    run(tiny(), cut)
    assert comparable(cut) == comparable(whole)


def test_what_a_killed_process_left_is_removed_by_the_next(cut, whole):
    (cut / ".model.safetensors.12.tmp").write_text("x")
    run(tiny(), cut)
    shutil.copytree(cut.parent / "cut", cut.parent / "done")
    (cut / "checkpoints" / "checkpoint-12").mkdir(parents=True)  # killed after result.json
    run(tiny(), cut)
    assert {path.name for path in cut.iterdir()} == {path.name for path in whole.iterdir()}


def test_a_damaged_line_of_the_metrics_is_counted_and_the_others_stay(cut, whole):
    path = cut / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\xff{\n", b'"a"\n', *lines[1:]]))
    with pytest.warns(UserWarning, match=r"metrics.jsonl has 2 damaged lines"):
        run(tiny(), cut)
    assert comparable(cut) == comparable(whole)


@cases("number", "SIGTERM", *(pytest.param(n, marks=pytest.mark.slow) for n in ("SIGHUP", "SIGUSR1", "SIGXCPU")))
def test_a_signal_between_two_lines_of_the_metrics_changes_no_number(tmp_path, whole, number):
    stopped = stop(tmp_path, 6, number=getattr(signal, number))
    assert stopped.number == getattr(signal, number)
    assert steps(tmp_path) == [4, 6]
    run(tiny(), tmp_path)
    assert comparable(tmp_path) == comparable(whole)


def test_the_gates_of_a_stopped_run_are_counted_on(tmp_path):
    config = tiny("gated_deltanet+gate_rank", steps=8)
    run(config, tmp_path / "whole")
    stop(tmp_path / "cut", 6, config)
    run(config, tmp_path / "cut")
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    assert "gates" in (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_a_signal_in_the_last_step_stops_the_run(tmp_path, whole):
    assert "after step 12 of 12" in str(stop(tmp_path, 12))
    assert not (tmp_path / "result.json").exists()
    run(tiny(), tmp_path)
    assert comparable(tmp_path) == comparable(whole)


def test_an_ignored_signal_stays_ignored(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        after_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGHUP))
        run(tiny(steps=4), tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize("what", ["weight", "gradient"])
def test_a_divergence_in_the_last_step_is_seen(tmp_path, monkeypatch, what):
    def spoil(model, step):
        if what == "weight":
            next(model.parameters()).data.fill_(math.nan)
        return check(model, step)

    check = callbacks.check_weights
    if what == "weight":
        monkeypatch.setattr(callbacks, "check_weights", spoil)
    else:
        step = torch.optim.AdamW.step
        count = iter(range(100))

        def exploded(self, *args):
            if next(count) == 9:  # the tenth and last step: its loss is finite
                for group in self.param_groups:
                    for x in group["params"]:
                        x.grad.fill_(math.nan)
            return step(self, *args)

        monkeypatch.setattr(torch.optim.AdamW, "step", exploded)
    result = run(tiny(steps=10), tmp_path)
    assert "not finite after step 10" in result["diverged"]
    text = (tmp_path / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["validation"] is None
    again = run(tiny(steps=10), tmp_path)
    assert math.isnan(again["validation"])
    assert all(math.isnan(test["accuracy"]) for test in again["tests"])


def test_the_loss_of_the_last_steps_is_written(tmp_path):
    run(tiny(steps=10), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [4, 8, 10]


@pytest.mark.parametrize(("key", "value"), [("learning_rate", 0.5), ("model.norm_eps", 0.1)])
def test_an_edited_run_is_refused_by_name(cut, key, value):
    data, changed = json.loads((cut / "run.json").read_text()), tiny()
    if key == "learning_rate":
        data[key], changed = value, tiny(learning_rate=value)
    else:
        data["model"]["norm_eps"] = value
        changed = dataclasses.replace(changed, model=dataclasses.replace(changed.model, norm_eps=value))
    (cut / "run.json").write_text(json.dumps(data))
    before = {path: path.stat().st_mtime_ns for path in cut.rglob("*")}
    assert_raises(ValueError, rf"run.json was changed after checkpoint-. .*{key} = .* and {value}", run, changed, cut)
    assert {path: path.stat().st_mtime_ns for path in cut.rglob("*")} == before


def test_numbers_that_were_not_finite_are_nan(whole, tmp_path):
    lengths = [{"length": 8, "perplexity": None, "last_perplexity": 2.0}]
    change = {"tokens_per_second": None, "mfu": None, "lengths": lengths}
    write_json(tmp_path / "result.json", {**json.loads((whole / "result.json").read_text()), **change})
    result = read_result(tmp_path)
    assert all(math.isnan(x) for x in (result["tokens_per_second"], result["mfu"], result["lengths"][0]["perplexity"]))
    assert _numbers(result, "byte")["tokens/s"] == "–"


@cases(
    "name, change, message",
    ("result.json", {"tests": [{"test": "x"}]}, r"result\.json is damaged: tests cannot be"),
    ("result.json", {"parameters": "many"}, r"result\.json is damaged: parameters cannot be"),
    ("result.json", {"state_size": 10**400}, r"result\.json is damaged: state_size cannot be"),
)
def test_json_of_wrong_content_is_named(whole, tmp_path, name, change, message):
    write_json(tmp_path / name, {**json.loads((whole / name).read_text()), **change})
    assert_raises(ValueError, message, read_result, tmp_path)


@pytest.mark.parametrize(
    ("value", "schema", "right"),
    [
        (True, int, False), (1, (int, float), True), (None, NUMBER, True), ([1, "x"], [int], False),
        ({"a": {"b": 1.5}}, {str: {str: NUMBER}}, True), ({"a": 1}, {str: str}, False), ([], {"a?": int}, False),
        ({"b": 1}, {"a?": int}, True), ({}, {"a": int}, False), ({"a": "1"}, {"a?": int}, False),
    ],
)  # fmt: skip
def test_schemas(value, schema, right):
    assert fits(value, schema) is right


@pytest.mark.parametrize("options", [{"norm_eps": -1.0}, {"mixer_options": {"norm_eps": math.nan}}])
def test_an_epsilon_that_is_not_positive_is_refused(options):
    assert_raises(ValueError, "norm_eps must be positive", preset, "mamba2", hidden_size=16, num_layers=1, **options)


def test_a_speed_that_is_unknown_is_an_empty_cell(tmp_path):
    """A run that was killed after its last step is not timed when it goes on."""
    result = {"parameters": 3, "state_size": 2, "tokens_per_second": None, "validation": 0.5}
    result["tests"] = [{"test": "capacity", "length": 8}]
    scores = scores_of(result, model="mamba2", learning_rate=0.1, seed=0, selected=True)
    write_scores(tmp_path / "results.csv", scores)
    assert (tmp_path / "results.csv").read_text().splitlines()[1].startswith("mamba2,0.1,0,True,3,2,,capacity,8,")
    both = [dataclasses.replace(scores[0], seed=seed, accuracy=0.5) for seed in (0, 1)]
    rows = [dataclasses.asdict(both[0]), dataclasses.asdict(both[1]) | {"tokens_per_second": 7.0}]
    assert [row[-1].text for row in comparison_tables(rows)[0].rows] == ["–", "7", "7"]
