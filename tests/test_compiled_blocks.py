"""Compiled blocks: the numbers of blocks that are not, and no graph is compiled after the first lengths."""

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from corpora import write_texts
from helpers import assert_close

from halflife.cli import main
from halflife.models import LanguageModel, compiled, preset
from halflife.ops.backends.recompute import calling

HERE = Path(__file__).parent
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
# Rows shorter than a chunk of 64 tokens have a graph of their own each.
ROWS = [(2, length, None) for length in (64, 64, 96, 80, 72, 100)]
PACKED = [(1, 64, bounds) for bounds in ([0, 5, 64], [0, 2, 9, 64], [0, 4, 5, 9, 64], [0, 64], [0, 1, 64], [0, 64])]
# Four times the largest error of compiled blocks in float32, in a gradient of Mamba-2's steps without native kernels.
# With them aot_eager changes no bit.
EXACT = 1.4e-5
BY_INDUCTOR = 9e-5  # four times the largest error, in a gradient of Mamba-2's rates


def gradients(model, rows, length, bounds, call=None):
    model.zero_grad()
    ids = torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(length))
    hidden, state = model.hidden(ids, None, None if bounds is None else torch.tensor(bounds), call=call)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(length + 1))  # a norm has no gradient
    ((hidden * weights).sum() + sum(x.sum() for part in state for x in part.values() if x.requires_grad)).backward()
    return {"y": hidden.detach(), **{name: x.grad for name, x in model.named_parameters() if x.grad is not None}}


def compare(name, batches, settled, recompute=("blocks",), exact=EXACT):
    """Compare with eager blocks; nothing is compiled after `settled` batches. Returns the number of graphs."""
    torch.manual_seed(0)
    eager = LanguageModel(preset(name, **SIZES))
    model, call = deepcopy(eager), calling(recompute)
    with compiled.compiled_blocks(model, recompute) as graphs:
        counts = []
        for batch in batches:
            assert_close(gradients(model, *batch), gradients(eager, *batch, call), exact)
            counts.append(graphs())
        with torch.no_grad():  # measurements run eagerly, and compile nothing
            model(torch.zeros(3, 7, dtype=torch.long))
        assert [*counts[settled - 1 :], graphs()] == [counts[-1]] * (len(counts) - settled + 2)
    assert not any("forward" in vars(block) for block in model.blocks)
    assert not torch._dynamo.utils.counters["graph_break"]
    return counts[-1]


def in_a_process(code, backend="aot_eager"):
    """Run code without the checks of types, which torch cannot compile."""
    begin = f"from test_compiled_blocks import *; compiled.BACKEND = {backend!r}; torch.set_num_threads(1)"
    done = subprocess.run([sys.executable, "-c", f"{begin}; {code}"], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_nothing_is_compiled_after_two_lengths():
    in_a_process("assert compare('mamba2', ROWS, 3) == 2")  # for all blocks together


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("norms", "conv", "op"), ("blocks",)])
@pytest.mark.parametrize(
    "name", ["mamba2+post+gate_rank", "gated_deltanet", "rwkv7", "llama", "mamba2+attention", "mamba2+ska"]
)
def test_rows_and_documents(name, recompute):
    in_a_process(f"compare({name!r}, ROWS, 3, {recompute}); compare({name!r}, PACKED, 4, {recompute})")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batches", "settled"),
    [
        ("mamba2+post+gate_rank", ROWS, 3),
        ("mamba2+log_linear", [(2, 64, None), (2, 96, None), (2, 64, None)], 2),
        ("fox", [(2, 64, None), (2, 96, None), (2, 64, None)], 2),
        ("mamba3", [(2, 64, None), (2, 96, None), (2, 64, None)], 2),
        ("mamba2+ska", ROWS, 3),
    ],
)
def test_by_inductor(name, batches, settled):
    in_a_process(f"compare({name!r}, {batches}, {settled}, exact=BY_INDUCTOR)", "inductor")


TRAIN = "from halflife.cli import main; from halflife.models import compiled; compiled.BACKEND = {!r}; main()"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_with_shards_and_checkpoints(tmp_path, backend):
    """Two processes with everything have the losses of one process without."""
    write_texts(tmp_path, "{i} is followed by the next number. " * 100)
    (tmp_path / "train.py").write_text(TRAIN.format(backend))
    shared = [
        "train", "mamba2+gate_rank", "--data", f"{tmp_path}/*.txt", "--documents", "concatenated", "--held-out",
        "0.2", "--tokens", "8K", "--context", "64", "--batch-size", "4", "--hidden-size", "16", "--num-layers", "3",
        "--quiet",
    ]  # fmt: skip
    main([*shared, "--output", str(tmp_path / "one")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    own = ["--output", str(tmp_path / "two"), "--fsdp", "--recompute", "blocks", "--compile"]
    done = subprocess.run([*torchrun, *shared, *own], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for key in ("loss", "grad_norm", "validation_loss"):
        a, b = ([line[key] for line in lines if key in line] for lines in (one, two))
        assert a == pytest.approx(b, rel=1e-5)
    graphs = [line["compiled_graphs"] for line in two if "compiled_graphs" in line]
    assert graphs == [2] * len(graphs)  # of all blocks: the first step, and those in which GateRank has counts
    assert graphs
