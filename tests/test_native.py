"""The native kernels: the same bits for any number of threads, single tokens, custom ops, and how they are built."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from helpers import (
    OPS,
    assert_close,
    assert_raises,
    assert_same,
    call_of,
    each_granularity,
    each_op,
    leaves,
    op_inputs,
    rounded,
    run_op,
)
from pairwise import slow_beyond

from halflife import ops
from halflife.cli import main
from halflife.ops.backends.native import build, products

built = pytest.mark.skipif(build.why_not() is not None, reason=f"{build.why_not()}")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@built
@each_op
@each_dtype
@pytest.mark.parametrize(("granularity", "heads"), [("scalar", 1), ("vector", 3)])
@pytest.mark.parametrize("length", slow_beyond([300], [300, 1100]))
def test_threads_change_no_bit(op, granularity, dtype, heads, length):
    """One head is cut over chunks and columns of the state, three are cut over heads."""
    arguments = rounded(op_inputs(op, granularity, length, heads=heads, key=20, value=40), dtype)
    check_threads(op, arguments, (1, 2, 2))


def check_threads(op, arguments, counts):
    """Check that an op gives the same bits with each number of threads."""
    results = []
    for count in counts:
        with threads(count):
            results.append(run_op(op, arguments, backend="native"))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@built
@each_op
@each_dtype
@pytest.mark.parametrize("groups", slow_beyond([(2, 4)], [(1, 1), (2, 4)]))
def test_threads_change_no_bit_of_shared_gradients(op, dtype, groups):
    """Two heads of a group are done in a row; one thread has all of them, or some, or a part of their chunks."""
    arguments = rounded(op_inputs(op, "scalar", 70, batch=16, heads=4), dtype)
    arguments |= {name: arguments[name][:, :, :count] for name, count in zip("qk", groups, strict=True)}
    check_threads(op, arguments, (1, 2, 40))


@built
@each_op
@each_granularity
@each_dtype
@pytest.mark.parametrize("sizes", slow_beyond([(7, 80)], [(1, 1), (7, 80), (64, 64)]))
def test_single_tokens_equal_the_loop(op, granularity, dtype, sizes):
    key, value = sizes
    arguments = rounded(op_inputs(op, granularity, 1, batch=3, heads=3, key=key, value=value), dtype)
    got, expected = (
        dict(zip("os", OPS[op](**arguments, backend=backend, output_final_state=True), strict=True))
        for backend in ("native", "reference")
    )
    assert_close(got, expected, 4 * 2.5e-7 if dtype == torch.float32 else 8e-3)


@built
@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("reset", [0.0, -0.3, -torch.inf])
def test_single_tokens_of_gate_rank_equal_the_loop(update, reset):
    arguments = rounded(op_inputs("delta_rule", "scalar", 1, heads=3), torch.float32)
    state = arguments.pop("initial_state")
    arguments["g_fast"] = arguments.pop("g")
    if update == "linear":
        del arguments["beta"]
    arguments |= {"g_slow": torch.full_like(arguments["g_fast"], reset), "initial_state": (state, state.flip(-1))}
    (o, states), (expected, wanted) = (
        ops.gate_rank(**arguments, backend=backend, output_final_state=True) for backend in ("native", "reference")
    )
    assert_close({"o": o, "s": torch.cat(states)}, {"o": expected, "s": torch.cat(wanted)}, 4 * 2.5e-7)


@built
@each_op
def test_strided_inputs_are_read_in_place(op):
    """Queries that heads share, keys that are a part of a wider projection, and a sequence axis behind the heads."""
    arguments = rounded(op_inputs(op, "scalar", 70, heads=4, key=16), torch.float32)
    strided = dict(arguments)
    strided["q"] = arguments["q"] = arguments["q"][:, :, :1].expand(-1, -1, 4, -1)
    strided["k"] = torch.cat([arguments["k"], arguments["k"]], -1)[..., :16]
    strided["v"] = arguments["v"].transpose(1, 2).contiguous().transpose(1, 2)
    arguments["q"] = arguments["q"].contiguous()
    assert_same(run_op(op, strided, backend="native"), run_op(op, arguments, backend="native"))


@built
@each_op
@pytest.mark.parametrize("packed", [False, True])
def test_custom_ops_are_registered_right(op, packed):
    """Schemas, fake tensors and autograd, by torch's own check; `torch.compile` and `torch.export` rely on them."""
    arguments = rounded(op_inputs(op, "vector", 40, sequences=2 if packed else 1), torch.float32)
    call = call_of(op, arguments, cu_seqlens=torch.tensor([0, 17, 40]) if packed else None)
    tensors = [call.get(name) for name in ("q", "k", "v", "g", "beta", "a", "b")]
    tensors = [None if x is None else x.detach().requires_grad_() for x in tensors]
    gain = torch.rand(1, 40, 2).requires_grad_()
    given = (op, *tensors, None, gain, call.first_state(), call.packing.cu_seqlens, call.output_scale, 16, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.halflife.state_op.default, given, test_utils=checks)


@built
def test_the_product_of_values_and_gain_is_not_kept():
    arguments = leaves(rounded(op_inputs("linear_attention", "scalar", 70), torch.bfloat16))
    kept, gain = [], arguments["g"].detach().exp().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ops.linear_attention(**arguments, gain=gain, backend="native")
    assert [x.data_ptr() for x in kept if x.shape == arguments["v"].shape] == [arguments["v"].data_ptr()]


@built
def test_a_missing_gradient_is_no_gradient():
    """Only the state is used, or only the outputs."""
    arguments = {
        n: x.requires_grad_() for n, x in rounded(op_inputs("linear_attention", "scalar", 20), torch.float32).items()
    }
    for which in (0, 1):
        found = [
            torch.autograd.grad(
                ops.linear_attention(**arguments, backend=backend, output_final_state=True)[which].sum(),
                list(arguments.values()), allow_unused=True, materialize_grads=True,
            )
            for backend in ("native", "reference")
        ]  # fmt: skip
        assert_close(dict(enumerate(found[0])), dict(enumerate(found[1])), 4 * 7e-7)


def test_refusals_of_other_machines(monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    assert "x86-64 CPUs; this one is arm64" in str(build.why_not_here())
    assert_raises(build.CannotBuild, "arm64", build.build)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "need AVX2 or AVX-512; torch uses DEFAULT" in str(build.why_not_here())


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """No build, in this process and its children."""
    if build.why_not_here():
        pytest.skip(str(build.why_not_here()))
    monkeypatch.setenv("HALFLIFE_NATIVE", str(tmp_path))
    monkeypatch.setattr(build, "why_not", build.why_not.__wrapped__)
    monkeypatch.setattr(build, "folder", build.folder.__wrapped__)
    return tmp_path


def test_without_a_build_everything_runs_chunked(empty_cache):
    assert "native kernels are not built here (run: halflife build)" in str(build.why_not())
    assert ops.available_backends("linear_attention")[0] == "chunked"
    with pytest.raises(ValueError, match="halflife build"):
        ops.linear_attention(*(torch.zeros(1, 3, 1, 4) for _ in range(3)), backend="native")
    assert ops.linear_attention(*(torch.zeros(1, 3, 1, 4) for _ in range(3)))[0].shape == (1, 3, 1, 4)


def test_without_a_compiler(empty_cache, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit) as ended:
        main(["build"])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "there is no C++ compiler 'no-such-compiler'; install one (Debian: apt-get install g++)" in error
    assert "The ops run without native kernels, by their chunked form." in error
    assert not list(empty_cache.glob("*/*"))


def test_a_compiler_that_fails_leaves_nothing(empty_cache, monkeypatch):
    broken = empty_cache / "broken"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.CannotBuild, match=r"cannot compile the kernels: x.cpp:1: error: out of luck"):
        build.build(report=lambda line: None)
    assert not [path for path in empty_cache.iterdir() if path.is_dir()]


def test_a_library_that_fails_its_check_is_not_taken(empty_cache, monkeypatch):
    """Neither a wrong one nor one that does not load."""
    monkeypatch.setattr(build, "compile_library", lambda target, report: target / build.LIBRARY)
    (empty_cache / build.LIBRARY).write_bytes(b"no library")
    with pytest.raises(build.CannotBuild, match=r"the native kernels fail their check: .*cannot load"):
        build.build(report=lambda line: None)
    assert build.why_not() is not None


@built
def test_a_build_is_made_once(capsys):
    main(["build"])
    assert "native kernels are built: " in capsys.readouterr().out


def test_sources_are_compiled_linked_checked_and_recorded(empty_cache, monkeypatch):
    """By a compiler that writes its arguments; the kernels of this machine are another build."""
    fake = empty_cache / "c++"
    answer = 'test "$1" = --version && echo fake 1.0 && exit'
    fake.write_text(f'#!/bin/sh\n{answer}\nfor last; do :; done; echo "$@" > "$last"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    checked, lines = [], []
    monkeypatch.setattr(build, "_check", lambda library: checked.append(library.read_text()))
    monkeypatch.setattr(products, "measure", lambda: {"rows": 1})
    monkeypatch.setattr(build, "why_not", cache(build.why_not))
    library = build.build(report=lines.append)
    sources = len(list(build.SOURCES.glob("*.cpp")))
    assert f"compiling native kernels: {sources} of {sources} files" in lines
    assert checked == [library.read_text()]
    assert checked[0].count(".o ") == sources
    assert "-ltorch_cpu" in checked[0]
    assert {path.name for path in library.parent.iterdir()} == {build.LIBRARY, build.PASSED}
    record = json.loads((library.parent / build.PASSED).read_text())
    assert (record["compiler"], record["onednn"]) == ("fake 1.0", {"rows": 1})
    assert build.why_not() is None
    (library.parent / build.PASSED).unlink()
    build.why_not.cache_clear()
    assert "failed their check (run: halflife build --force)" in build.why_not()
    assert_raises(ImportError, "cannot load .*halflife build --force", build.use, library)


@pytest.mark.slow
def test_kernels_for_avx2_pass_their_check(tmp_path):
    """As on a CPU without AVX-512 and without micro-kernels: vectors of 8 numbers, and the portable products."""
    if build.why_not_here():
        pytest.skip(str(build.why_not_here()))
    older = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "HALFLIFE_NATIVE": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "halflife.cli", "build"],
        env=os.environ | older,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "native kernels are ready" in run.stdout, run.stderr[-3000:]
    record = json.loads(next(tmp_path.glob("*/passed.json")).read_text())
    assert "-DCPU_CAPABILITY_AVX2" in record["flags"]


@pytest.mark.slow
def test_sanitizers_are_silent(tmp_path):
    """Every op forward and backward under both sanitizers: odd sizes, packed, few heads, extreme decays."""
    if build.why_not_here():
        pytest.skip(str(build.why_not_here()))
    library = build.compile_library(tmp_path, extra=build.SANITIZE)
    runtime = [
        subprocess.run([build.compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    preload = ":".join(run.stdout.strip() for run in runtime)
    run = subprocess.run(
        [sys.executable, os.path.join(os.path.dirname(__file__), "sanitized.py"), str(library)],
        env={**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "clean"
    assert "runtime error" not in run.stderr
