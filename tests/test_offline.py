"""Compiled GPU kernels keep their limits, every kernel has a row, and the figures are those of today's code."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import cases

from halflife.models.presets.presets import PRESETS

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

ROOT = Path(__file__).parent.parent
DATA = json.loads((ROOT / "benchmarks/results/offline.json").read_text())
FIGURES = {"registers", "spills", "shared", "programs", "wgmma", "mma", "cp_async", "bytes"}
MODEL = {
    "launches",
    "bf16_launches",
    "bytes",
    "syncs",
    "graph_breaks",
    "saved_bytes",
    "decode_launches",
    "predicted_ms",
}


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def script(name):
    return importlib.import_module(name)


def test_every_kernel_has_rows_of_its_present_code():
    """`make gpu-offline` makes them; a changed or new kernel, or a change of what launches it, needs a new run."""
    assert script("offline_sources").sources() == DATA["sources"]
    assert {name.split(",")[0].split(" ")[0] for name in DATA["kernels"]} == set(DATA["sources"])


def test_no_kernel_is_worse_than_its_limits():
    worse = {}
    for name, row in DATA["kernels"].items():
        assert set(row) == {"sm_90", "sm_80", "gfx942"}, name
        assert all(set(figures) >= FIGURES for figures in row.values()), name
        worse[name] = script("offline_limits").worse(row, DATA["facts"][name], DATA["missed_today"].get(name, {}))
    assert not {name: wrong for name, wrong in worse.items() if wrong}


# Launches of a layer and step, forward and backward, under autocast and in a model in bfloat16.
MOST_LAUNCHES = {
    "mamba2": 45, "gated_deltanet": 50, "mamba2+post+gate_rank": 60, "rwkv7": 120, "gla": 45, "mamba2+ska": 90,
}  # fmt: skip


def test_layers_keep_their_targets():
    """Launches; 35 GB a step of four layers of mamba2 on 8 × 2,048 tokens; kept bytes at most 1.2 times fla's."""
    rows = DATA["models"]
    assert {name: most for name, most in MOST_LAUNCHES.items() if rows[name]["launches"] > most} == {}
    assert {name: most for name, most in MOST_LAUNCHES.items() if rows[name]["bf16_launches"] > most} == {}
    assert rows["mamba2"]["bytes"] * 4 * 8 / 16 <= 35e9
    kept = json.loads((ROOT / "benchmarks/results/recompute.json").read_text())["layers"]
    shares = {name: row["gpu"]["nothing"] / row["fla"] for name, row in kept.items() if row["fla"]}
    assert shares
    assert {name: share for name, share in shares.items() if share > 1.2} == {}
    assert {name for name, row in rows.items() if row["syncs"] or row["decode_syncs"] or row["graph_breaks"]} == set()


def test_missed_limits_are_missed():
    """An entry that is better by now is written anew, so that it cannot become worse again."""
    limits = script("offline_limits")
    now = {name: limits.misses(row, DATA["facts"][name]) for name, row in DATA["kernels"].items()}
    assert DATA["missed_today"] == {name: wrong for name, wrong in now.items() if wrong}


def test_ops_and_models_ask_for_no_more_than_before():
    """Bytes of ops that miss their target; launches, waits, graph breaks and kept bytes of a layer of a model."""
    limits = script("offline_limits")
    now = limits.missed_bytes(DATA["ops"])
    assert set(now) <= set(DATA["ops_today"])
    assert limits.more(now, DATA["ops_today"]) == []
    assert set(DATA["models"]) == set(DATA["models_today"]) == set(script("offline").MODELS)
    assert set(PRESETS) - {"echo", "echo_paper"} <= set(DATA["models"])  # the layers of mamba2+ska
    assert limits.more(DATA["models"], DATA["models_today"]) == []
    row = {"launches": 3}
    assert limits.more({"a": row, "b": [2, 2]}, {"a": {"launches": 2}, "b": [1, 2]}) == [
        "a: {'launches': 3} where {'launches': 2} was reached",
        "b: [2, 2] where [1, 2] was reached",
    ]
    assert limits.least({"a": row, "b": [2, 2]}, {"a": {"launches": 2}}) == {"a": {"launches": 2}, "b": [2, 2]}


@cases(
    "change, allowed, wrong",
    ({}, {}, []),
    ({"spills": 3}, {}, ["sm_90: spills 3"]),
    ({"spills": 3}, {"sm_90": {"spills": 3}}, []),
    ({"spills": 4}, {"sm_90": {"spills": 3}}, ["sm_90: spills 4"]),
    ({"programs": 1}, {"sm_90": {"spills": 3}}, ["sm_90: programs 1"]),
    ({"programs": 0}, {"sm_90": {"programs": 1}}, ["sm_90: programs 0"]),
    ({"wgmma": 0}, {}, ["sm_90: wgmma 0"]),
    ({"cp_async": 0}, {}, ["sm_90: cp_async 0"]),
)
def test_limits(change, allowed, wrong):
    row = {"sm_90": {"spills": 0, "programs": 2, "wgmma": 4, "mma": 0, "cp_async": 2, **change}}
    assert script("offline_limits").worse(row, {"products": True, "walk": True}, allowed) == wrong


def test_a_hash_follows_code_and_not_comments(tmp_path):
    text = (
        "import triton\nN = 3\n@triton.jit\ndef helper(x):\n    return x + N\n@triton.jit\ndef my_kernel(x, TILE):\n"
        "    helper(x)\ndef host(x, tile):\n    launch(my_kernel, (1,))(x, tile)\n"
        "TILES = 16, 32\ndef tile_of(x):\n    return TILES[x]\ndef op(x):\n    host(x, tile_of(x))\n"
    )
    read = script("offline_sources").sources

    def hashed(text):
        (tmp_path / "file.py").write_text(text)
        return read(tmp_path)

    first = hashed(text)
    assert set(first) == {f"{tmp_path.name}.file.my_kernel"}
    assert hashed(text.replace("def helper(x):\n", 'def helper(x):\n    """Add."""\n    # comment\n')) == first
    for old, new in (("N = 3", "N = 4"), ("x + N", "x - N"), ("(1,)", "(2,)"), ("16, 32", "16, 64")):
        assert hashed(text.replace(old, new)) != first


def test_the_page_shows_the_figures():
    page = (ROOT / "docs/gpu.md").read_text()
    assert all(f"`{name}`" in page for name in (*DATA["sources"], *DATA["models"]))
    assert all(f"| {name} |" in page for name in DATA["loss"])
    prose = [line for line in page.splitlines() if not line.startswith(("|", "#"))]
    assert len(" ".join(prose).split()) <= 400
    assert all(set(row) >= MODEL for row in DATA["models"].values())


CODE = """
import json, sys
sys.path[:0] = ["benchmarks"]
import torch, offline, offline_loss, offline_models
found = {}
for name in sys.argv[2:]:
    case = offline.CASES[name]
    for launch in [x for part in offline.launches_of(case, *case.shapes[0]) for x in part]:
        found[offline.name_of(launch, name)] = offline.row_of(launch, 3e12)[0]
rates = {"copy": 3e12, "product": 7e14, "triton": 1e12}
models = {name: offline_models.row_of(name, rates) for name in json.loads(sys.argv[1])}
print(json.dumps([found, models, offline_loss.rows(rates)]))
"""


@pytest.mark.slow
def test_the_figures_are_those_of_this_code():
    """Of two cases and six models, in a process of its own, whose Triton has no GPU."""
    triton = pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([*MOST_LAUNCHES]), "linear, scalar, 64", "linear, gate_rank, 64"],
        capture_output=True, text=True, check=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    found, models, loss = json.loads(done.stdout)
    for name, row in loss.items():
        assert {**row, "predicted_ms": DATA["loss"][name]["predicted_ms"]} == DATA["loss"][name]
    counted = "launches", "forward_launches", "bf16_launches", "bytes", "syncs", "graph_breaks", "decode_launches"
    for name, row in models.items():
        assert {key: row[key] for key in counted} == {key: DATA["models"][name][key] for key in counted}, name
    for name, row in found.items():
        if triton.__version__ == DATA["versions"]["triton"]:
            same = [{k: v for k, v in x["sm_90"].items() if k != "predicted_ms"} for x in (row, DATA["kernels"][name])]
            assert same[0] == same[1], name
        assert row["sm_90"]["bytes"] == DATA["kernels"][name]["sm_90"]["bytes"]


COMPILING = """
import sys
sys.path[:0] = ["benchmarks"]
import offline, torch
from triton.backends.nvidia.compiler import CUDABackend
CUDABackend.make_cubin = lambda *_: b""  # the assembler has no part in it, and takes most of the time
seen = set()
for target, dtype in (("sm_90", torch.float16), ("sm_80", torch.bfloat16)):
    calls = offline.offline_tokens.launches() | offline.offline_passes.launches()
    for case, call in offline.CASES.items():
        own = call._replace(dtype=dtype)
        parts = [part for shape in own.shapes for part in offline.launches_of(own, *shape, target)]
        calls[case] = [launch for part in parts for launch in part]
    for case, launches in calls.items():
        for launch in launches:
            if (name := (offline.name_of(launch, case), target)) not in seen:
                seen.add(name)
                offline.offline_kernels.compiled(launch, target)
print(len(seen))
"""


@pytest.mark.slow
def test_every_kernel_compiles_with_this_release_of_triton(tmp_path):
    """`make test-oldest` and `make test-newest` have others, each of which fails on something that others take."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 400


def test_bytes_of_a_launch():
    """Arguments that are loaded and stored, from a kernel's first code, and entries of stride 0 once."""
    kernels = script("offline_kernels")
    text = """
  tt.func public @k(%x: !tt.ptr<f32> loc("x"), %y: !tt.ptr<f32> loc("y"), %n: i32 loc("n")) {
    %0 = tt.splat %x : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %1 = tt.addptr %0, %i : tensor<4x!tt.ptr<f32>>, tensor<4xi32>
    %2 = scf.for %a = %b to %c step %d iter_args(%p = %1) -> (tensor<4x!tt.ptr<f32>>) : i32 {
      %3 = tt.load %p, %m : tensor<4x!tt.ptr<f32>>
      tt.store %p, %3 : tensor<4x!tt.ptr<f32>>
    }
    %4 = tt.load %y : !tt.ptr<f32>
"""
    found = kernels.roles(text)
    assert found == {"x": {"load", "store"}, "y": {"load"}}
    wide = torch.empty(4, 1, 8).expand(4, 5, 8)
    launch = kernels.Launch(None, (1,), {"x": torch.empty(10), "y": wide, "n": 3}, {})
    assert kernels.moved(launch, found) == 2 * 40 + 4 * 8 * 4


GRIDS = """
import sys
sys.path[:0] = ["benchmarks"]
import offline, torch
from halflife import LanguageModel, preset
wrong = set()
for name in sys.argv[1:]:
    with torch.device("meta"):
        model = LanguageModel(preset(name, hidden_size=256, num_layers=2, vocab_size=256))
        ids = torch.zeros(1, 4_000_000, dtype=torch.long)
    launches = []
    with offline.offline_models.on_a_gpu(), offline.offline_kernels.captured(launches):
        model(ids)[0].float().sum().backward()
    assert launches
    wrong |= {(name, x.name, x.grid) for x in launches if max(x.grid[1:], default=0) > 65_535}
print(sorted(wrong))
"""


@pytest.mark.slow
def test_cuda_takes_the_grids_of_millions_of_tokens():
    """In float32, whose chunks are short: a card takes at most 65,535 programs on the second and third axes."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    models = ["mamba2", "mamba2+post+gate_rank", "gated_deltanet", "gla", "rwkv7", "mamba2+ska", "mamba3", "kda"]
    done = subprocess.run(
        [sys.executable, "-c", GRIDS, *models], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert done.stdout == "[]\n"
