"""A sequence over several processes equals that of one process: outputs, states and all gradients."""

import json
import os
import subprocess
import sys
import threading
from copy import deepcopy
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from combinations import SIZES, combinations
from corpora import write_texts
from helpers import assert_close, assert_raises
from pairwise import slow_beyond
from torch.distributed import HashStore, ProcessGroupGloo
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from halflife.cli import main
from halflife.hf import HalflifeForCausalLM
from halflife.layers.mixer import Mixer
from halflife.models import PRESETS, LanguageModel, preset
from halflife.parallel import _UNDER_WAY, UNDER_WAY, Piece, Pieces, context_parallel
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import Objective
from halflife.training.plan import Card, Needs

FAST = ["mamba2+post+gate_rank", "gated_deltanet", "rwkv7", "llama", "mamba2+ska"]
EXACT = 4e-11  # four times the largest error of all names, 1.0e-11 in a gradient of tnl_l+post_norm
VOCABULARY = SIZES["vocab_size"]
BOUNDS = torch.tensor([0, 4, 10, 13, 13, 20, 30])


def on_ranks(size, work):
    """The results of `work(group)` on each of `size` ranks, which are threads here."""
    store, found, groups = HashStore(), [None] * size, [None] * size  # a group that ends takes its messages with it

    def run(rank):
        try:
            groups[rank] = ProcessGroupGloo(store, rank, size, timedelta(minutes=2))
            found[rank] = work(groups[rank])
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = LanguageModel(preset(name, **SIZES)).to(dtype)
    for x in model.parameters():  # zeros hide terms
        x.data += 0.05 * torch.randn_like(x)
    return model


def draw(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def measured(logits, labels, state, model, rows=slice(None)):
    """What two runs are compared by, without the gradients that other ranks have parts of."""
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    parts = {f"{i} {key}": x[rows].detach() for i, layer in enumerate(state) for key, x in layer.items()}
    return {"logits": logits.detach(), **{key: x for key, x in parts.items() if x.is_floating_point()}}


def gradients(model):
    return {key: x.grad for key, x in model.named_parameters() if x.grad is not None}


def compare(name, size, length, bounds=None, call=None, **options):
    """Compare a model on `size` ranks with itself on one; return the bytes that each rank has sent."""
    model, rows = build(name), 2 if bounds is None else 1
    ids, labels = draw(2, rows, length)
    copies = [deepcopy(model) for _ in range(size)]
    last = slice(None) if bounds is None else slice(-1, None)
    want = measured(*forward(model, ids, labels, bounds, call, **options), last) | gradients(model)

    def work(group):
        copy = copies[group.rank()]
        context = context_parallel(copy, group)
        parts = {key: context.piece.of(x) for key, x in options.items()}
        cut = None if bounds is None else context.piece.boundaries(bounds)
        got = measured(*forward(copy, context.piece.of(ids), context.piece.of(labels), cut, call, **parts), last)
        context.add_gradients(copy)
        assert len(_UNDER_WAY.get(group, ())) <= UNDER_WAY  # what was received is not kept
        return got, context.sent

    found = on_ranks(size, work)
    logits = torch.cat([got["logits"] for got, _ in found], 1)
    assert_close({**found[-1][0], "logits": logits, **gradients(copies[0])}, want, EXACT)
    for copy in copies[1:]:
        assert_close(gradients(copy), gradients(copies[0]), 0.0)
    return [sent for _, sent in found]


def forward(model, ids, labels, bounds, call, **options):
    hidden, state = model.hidden(ids, None, bounds, call=call, **options)
    return model.logits(hidden), labels, state, model


def in_pieces(name):
    """Whether a model reads pieces as the whole. Norms of the whole sequence, or of the first call, do not."""
    return "ska_paper" not in name and not name.startswith("echo_paper")


@pytest.mark.parametrize("name", FAST)
def test_pieces_on_ranks_equal_the_whole(name):
    compare(name, 2, 21)


@pytest.mark.parametrize("name", FAST)
def test_documents_end_anywhere(name):
    compare(name, 3, 30, BOUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("base", PRESETS)
def test_every_combination_on_ranks(base):
    for name in filter(in_pieces, combinations(base)[0]):
        compare(name, 2, 21)
        compare(name, 3, 30, BOUNDS)
        compare(name, 4, 22)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_any_number_of_ranks_and_ranks_without_tokens(name, size):
    compare(name, size, 4)
    compare(name, size, 67)


def test_padding_and_activation_checkpoints():
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :13], mask[1, 18:] = 0, 0
    compare("mamba2+post+gate_rank", 2, 21, attention_mask=mask)
    compare("rwkv7", 2, 21, call=partial(checkpoint, use_reentrant=False))


@pytest.mark.parametrize("name", slow_beyond(["gated_deltanet"], ["mamba2+post+gate_rank", "gated_deltanet", "rwkv7"]))
def test_bytes_do_not_depend_on_the_length(name):
    short, long = (sum(compare(name, 2, length)) for length in (21, 150))
    assert abs(long - short) <= 64  # digits of numbers in the descriptions


def test_a_state_is_given_to_the_first_rank():
    model = build("gated_deltanet")
    ids = draw(2, 40)
    with torch.no_grad():
        state = model(ids[:, :19])[1]
        want = model(ids)[0][:, 19:]

    def work(group):
        copy = deepcopy(model)
        context = context_parallel(copy, group)
        with torch.no_grad():
            return copy(context.piece.of(ids[:, 19:]), state if group.rank() == 0 else None)[0]

    assert_close({"o": torch.cat(on_ranks(2, work), 1)}, {"o": want}, EXACT)


def test_models_of_transformers():
    model, ids = HalflifeForCausalLM.of(build("mamba2")), draw(2, 21)
    want = model(ids).logits.detach()

    def work(group):
        copy = deepcopy(model)
        context = context_parallel(copy, group)
        mask = torch.ones(2, 21, dtype=torch.long).index_fill(1, torch.tensor([0]), 0)
        assert_raises(ValueError, "pieces on several processes are rows", copy, ids, attention_mask=mask)
        return copy(context.piece.of(ids)).logits.detach()

    assert_close({"logits": torch.cat(on_ranks(2, work), 1)}, {"logits": want}, EXACT)


class Rows(list, Dataset):
    pass


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["rows", "packed"])
@pytest.mark.parametrize("name", [*FAST, "echo_paper"])
def test_a_measurement_reads_long_rows_in_pieces(name, bounds, monkeypatch):
    """Also of a model that reads them as a whole, whose memory grows with them."""
    torch.manual_seed(0)
    objective = Objective(LanguageModel(preset(name, **SIZES)).double().eval())
    ids = torch.randint(VOCABULARY, (1 if bounds is not None else 2, 30))
    labels = torch.where(torch.rand(ids.shape) < 0.2, -100, torch.randint(VOCABULARY, ids.shape))
    lengths = []
    with torch.no_grad():
        whole = objective(ids, labels, bounds)["loss"]
        monkeypatch.setattr("halflife.training.fit.READ_AT_ONCE", 7)
        objective.model.embedding.register_forward_hook(lambda _, given, __: lengths.append(given[0].shape[1]))
        torch.testing.assert_close(objective(ids, labels, bounds)["loss"], whole, rtol=1e-13, atol=0)
    assert lengths == ([30] if name == "echo_paper" else [6] * 5)
    assert objective.model.context_parallel is None


def test_pieces_of_batches():
    batch = {"input_ids": torch.arange(30).view(1, 30), "cu_seqlens": BOUNDS}
    pieces = Pieces(Rows([batch, batch]), 3)
    assert len(pieces) == 6
    found = [pieces[i] for i in range(3, 6)]
    assert torch.equal(torch.cat([x["input_ids"] for x in found], 1), batch["input_ids"])
    assert [x["cu_seqlens"].tolist() for x in found] == [[0, 4, 10], [0, 0, 3, 3, 10], [0, 0, 10]]
    assert [Piece(rank, 4).bounds(3) for rank in range(4)] == [(0, 0), (0, 1), (1, 2), (2, 3)]


def test_what_cannot_be_is_refused(monkeypatch):
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    for name in ("echo_paper", "mamba2+ska_paper"):
        assert_raises(ValueError, "otherwise than as a whole: blocks.1.mixer", context_parallel, build(name), group)
    assert_raises(ValueError, "Linear holds no model", context_parallel, torch.nn.Linear(1, 1), group)
    assert_raises(ValueError, "no process group", context_parallel, build("mamba2"))
    assert_raises(ValueError, "start the command with torchrun", ExecutionConfig, context_parallel=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert_raises(ValueError, "does not divide 4 processes", ExecutionConfig, context_parallel=3)
    assert_raises(ValueError, "so it shards over rows", ExecutionConfig, context_parallel=4, fsdp=True)
    assert ExecutionConfig(context_parallel=2).num_micro_batches(6) == 2
    assert_raises(ValueError, "2 processes of 2 pieces", ExecutionConfig(context_parallel=2).num_micro_batches, 5)


@pytest.mark.parametrize("name", slow_beyond(["llama"], ["mamba2+post+gate_rank", "gated_deltanet", "llama"]))
def test_a_plan_has_the_bytes_that_are_sent(name):
    """Of a step on two ranks, without the descriptions of messages; a state is rounded to float32 there."""
    model, ids = build(name, torch.float32), draw(2, 129)
    copies = [deepcopy(model) for _ in range(2)]

    def work(group):
        context = context_parallel(copies[group.rank()], group)
        model = copies[group.rank()]
        measured(*forward(model, context.piece.of(ids[:, :-1]), context.piece.of(ids[:, 1:]), None, None))
        return context.sent

    settings = {"steps": 1, "batch_size": 2, "learning_rate": 1e-3}
    needs = Needs.of(TrainConfig(model=model.config, **settings), 64)  # what a rank has read
    assert sum(on_ranks(2, work)) == pytest.approx(needs.sent_states(2, 2), rel=0.06)


def test_plans_fit():
    config = TrainConfig(model=preset("mamba2", **SIZES), steps=10, batch_size=4, learning_rate=1e-3)
    needs = Needs.of(config, 1 << 20)
    card = Card(memory=needs.memory(2, 2, 1 << 20), product=1e12, wire=1e11)
    plans = [needs.plan(count, card) for count in (1, 2, 4, 8, 16, 12)]
    assert [plan.context for plan in plans] == [1, 2, 2, 2, 4, 3]
    memory = [plan.weights + plan.activations + plan.states for plan in plans]
    assert [bytes <= card.memory for bytes in memory] == [False, *[True] * 5]
    for plan in plans:
        lengths = plan.longest, plan.longest + 1
        assert [needs.memory(plan.gpus, plan.gpus, n) <= card.memory for n in lengths] == [True, False]
        work = needs.costs.training_operations(1 << 20) * 4 * (1 << 20)
        wait = (2 + plan.context - 1) / 2
        assert plan.step_seconds == pytest.approx(
            work * wait / (plan.gpus * 1e12) + (plan.sent_weights + plan.sent_states) / 1e11
        )
    again = Needs.of(config, 1 << 20, recompute=True)
    assert again.memory(1, 1, 1 << 20) < needs.memory(1, 1, 1 << 20)
    assert again.step_seconds(1, 1, card) == pytest.approx(4 / 3 * needs.step_seconds(1, 1, card))
    shards = Needs.of(config, 1 << 20, fsdp=True)
    assert shards.weights(1) == needs.weights(4)
    assert shards.weights(1024) < needs.weights(1024)
    assert shards.sent_weights(8, 8) == needs.sent_weights(8, 8)  # of one group, nothing is sharded
    gathered = 3 * needs.parameters - needs.outside
    assert shards.sent_weights(4, 1) == pytest.approx(0.75 * 4 * gathered)


SHARDED = """
import json, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from halflife.models import LanguageModel, ModelConfig
from halflife.training import sharding
from halflife.training.config import TrainConfig
from halflife.training.plan import Needs

class Sent(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, op, types, given=(), options=None):
        if "allgather" in str(op) or "reduce_scatter" in str(op):  # of n ranks, each sends its part to n - 1
            self.total += min(given[0].nbytes, given[1].nbytes) * (ranks - 1)
        return op(*given, **(options or {}))

torch.distributed.init_process_group("gloo")
ranks, config = torch.distributed.get_world_size(), ModelConfig.from_json({config!r})
model, sent = LanguageModel(config), Sent()
sharding.fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
with sent:
    model(torch.zeros(1, 16, dtype=torch.long))[0].sum().backward()
needs = Needs.of(TrainConfig(model=config, steps=1, batch_size=1, learning_rate=1e-3), 16, fsdp=True)
assert abs(sent.total / needs.sent_weights(ranks, 1) - 1) < 0.1  # with padding
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_plan_has_the_bytes_of_shards(tmp_path, ranks):
    script, config = tmp_path / "sharded.py", preset("mamba2+post", **{**SIZES, "hidden_size": 64}).to_json()
    script.write_text(SHARDED.replace("{config!r}", repr(config)))
    assert torchrun(ranks, command=(str(script),)) == (0, ANY)


PEAK = """
import torch
from pathlib import Path
from halflife.models import LanguageModel, ModelConfig
from halflife.training.estimate import peak_memory
torch.set_num_threads(1)
config = ModelConfig.from_json({config!r})
model, ids = LanguageModel(config), torch.zeros(1, 32768, dtype=torch.long)

def step(n):
    hidden = model.hidden(ids[:, :n])[0]
    hidden.backward(torch.empty_like(hidden))

def resident(name):
    return 1024 * int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])

step(256)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
step(32768)
print((resident("VmHWM") - before) / peak_memory(config).at(32768))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system counts no peak of memory")
@pytest.mark.parametrize("name", ["mamba2+post", "gated_deltanet", "gla", "mamba2+post+gate_rank", "llama"])
def test_predicted_memory_is_that_of_a_process(name):
    """Without what glibc keeps of freed tensors below 32 MiB, 12 % for llama."""
    config = preset(name, vocab_size=256, hidden_size=64, num_layers=2).to_json()
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([sys.executable, "-c", PEAK.format(config=config)], capture_output=True, text=True, env=exact)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_every_layer_that_reads_otherwise_says_so():
    for name in (name for base in PRESETS for name in combinations(base)[0]):
        model = LanguageModel(preset(name, **SIZES))
        refused = [part for part in model.modules() if isinstance(part, Mixer) and not part.reads_in_pieces]
        assert bool(refused) == (not in_pieces(name)), name


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text"), "{i} is followed by the next number. " * 50)


def arguments(text, folder, *own):
    return [
        "train", "mamba2+gate_rank", "--data", f"{text}/*.txt", "--held-out", "0.2", "--tokens", "4K",
        "--context", "64", "--batch-size", "4", "--hidden-size", "16", "--num-layers", "2", "--quiet",
        "--output", str(folder), *own,
    ]  # fmt: skip


def torchrun(processes, *given, command=("-m", "halflife.cli")):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*start, *command, *given], capture_output=True, text=True)
    return done.returncode, done.stderr[-2000:]


def same_losses(*folders):
    lines = [[json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    for key in ("loss", "grad_norm", "validation_loss"):
        a, b = ([line[key] for line in own if key in line] for own in lines)
        assert a == pytest.approx(b, rel=1e-5)
        assert a
    a, b = (json.loads((folder / "result.json").read_text())["bits_per_byte"] for folder in folders)
    assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [(), ("--fsdp",)], ids=str)
@pytest.mark.parametrize("documents", ["concatenated", "packed"])
def test_training_has_the_losses_of_one_process(text, tmp_path, documents, shards):
    """Four processes share rows and pieces, in micro-batches whose gradients are added."""
    one, four = tmp_path / "one", tmp_path / "four"
    main(arguments(text, one, "--documents", documents))
    own = ("--documents", documents, "--context-parallel", "2", "--micro-batch-size", "1", *shards)
    assert torchrun(4, *arguments(text, four, *own)) == (0, ANY)
    same_losses(one, four)


STOPPED = """
from halflife.cli import main
from halflife.training.trainer import HalflifeTrainer
save = HalflifeTrainer._save_checkpoint

def save_and_end(trainer, *given):
    save(trainer, *given)
    raise SystemExit(9)

HalflifeTrainer._save_checkpoint = save_and_end
main()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*never resets")
def test_shards_go_on_with_other_processes(text, tmp_path):
    """Five steps by 2 rows × 2 pieces, five by 2 rows, and the rest by 3 pieces of 2 rows."""
    one, four, script = tmp_path / "one", tmp_path / "four", tmp_path / "stopped.py"
    main(arguments(text, one, "--save-every", "5"))
    script.write_text(STOPPED)
    pieces = ("--fsdp", "--context-parallel")
    for processes, given in (
        (4, arguments(text, four, "--save-every", "5", *pieces, "2")),
        (2, ["train", "--resume", str(four), "--fsdp"]),
    ):
        assert torchrun(processes, *given, command=(str(script),))[0]
    assert [path.name for path in sorted(four.glob("checkpoints/*"))] == ["checkpoint-10", "checkpoint-5"]
    assert torchrun(6, "train", "--resume", str(four), "--quiet", *pieces, "3") == (0, ANY)
    same_losses(one, four)
