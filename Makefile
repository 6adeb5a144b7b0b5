# make demo   install the package, and see three models remember and forget
# make test   install what the tests need as well, and run them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet

.PHONY: native demo test slow doors faults test-oldest test-newest coverage lint format docs bench gpu dist constraints
.PHONY: chromium clean gpu-offline gpu-cache

# The stamps are newer than these files once everything that they name is installed.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[cli,train,report]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# Kernels for this CPU, compiled once. Without a C++ compiler everything runs, slower; the line printed says so.
native: $(VENV)/installed
	-$(BIN)/halflife build

# The lens opens in a browser where there is one; HALFLIFE_OPEN=0 prevents it. HALFLIFE_DEMO=quick trains two models for 400 steps, in a minute.
demo: MODELS = $(if $(filter quick,$(HALFLIFE_DEMO)),retnet gated_deltanet --steps 400,retnet mamba2 gated_deltanet)
demo: native
	$(BIN)/halflife compare $(MODELS) --task mqar --scale smoke --name demo
	$(BIN)/halflife look "$$(ls -td runs/*-demo | head -1)" --model gated_deltanet --open

# The report page is tested in a browser. Who is not root installs one, or sees why those tests are skipped.
chromium:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	|| (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null || true

# Two workers with one thread each; a file's tests share its fixtures, so a file stays with one worker.
PYTEST := pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Tests start a hundred Python processes. Each would compile the package anew where the environment forbids bytecode.
test slow doors faults test-oldest test-newest coverage: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/installed-dev chromium native
	$(BIN)/python -m $(PYTEST)

# Beyond `dev`, the slow tests need packages such as wandb, mlflow and those that run notebooks.
$(VENV)/installed-slow: $(VENV)/installed-dev
	$(PIP) --constraint constraints.txt --editable '.[dev-slow]'
	touch $@

slow: $(VENV)/installed-slow chromium native
	$(BIN)/python -m $(PYTEST) -m slow --durations 0 --durations-min 10

# What people do with models of transformers, with the real libraries. The last lines say how much of it works.
doors: $(VENV)/installed-slow native
	$(BIN)/python -m $(PYTEST) -m 'slow or not slow' tests/doors

# Kills, damaged files, limits and foreign input. The last line says how many faults were survived.
faults: $(VENV)/installed-dev native
	$(BIN)/python -m pytest -p no:cacheprovider --quiet tests/faults/fault_*.py

# The fast tests with the oldest torch that pyproject.toml allows, and with the newest of all that pip can find. On a
# machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves the CUDA builds: 6 to 7 GB each.
test-oldest: TORCH := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/torch==\1.*/p' pyproject.toml)
# The interpreter of Triton 3.6, which belongs to torch 2.11, fails with numpy 2.4.
test-oldest: NUMPY := numpy<2.4
test-oldest: UNPINNED := /^torch==/d;/^numpy==/d
test-newest: TORCH := torch
test-newest: NUMPY := numpy
test-newest: UNPINNED := d
test-oldest test-newest: chromium
	$(PYTHON) -m venv $(VENV)-$@
	sed '$(UNPINNED)' constraints.txt > $(VENV)-$@/constraints.txt
	$(VENV)-$@/bin/python -m pip install --quiet --upgrade --constraint $(VENV)-$@/constraints.txt \
	  '$(TORCH)' '$(NUMPY)' --editable '.[dev]'
	-$(VENV)-$@/bin/halflife build
	$(VENV)-$@/bin/python -m $(PYTEST)
	$(VENV)-$@/bin/python -m pytest tests/test_offline.py -m slow -k compiles

# The source archive and the wheel, both the same to the byte wherever they are built.
dist: $(VENV)/installed-dev
	rm -rf dist
	$(BIN)/python -m hatchling build

# Write the versions in .venv into constraints.txt, after an upgrade whose tests are green.
constraints: $(VENV)/installed-slow
	$(BIN)/python .ci/constraints.py > constraints.new
	mv constraints.new constraints.txt
	touch $(VENV)/installed $(VENV)/installed-dev $(VENV)/installed-slow

coverage: $(VENV)/installed-dev chromium native
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The runtime of the playground, 14 MB, which the site has and the repository has not.
RUNTIME := docs/playground/vendor
ONNXRUNTIME := onnxruntime-web@1.30.0
ONNXRUNTIME_SHA256 := d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71
$(RUNTIME)/installed: Makefile
	mkdir -p $(RUNTIME)
	cd $(RUNTIME) && npm pack --silent $(ONNXRUNTIME) > /dev/null
	cd $(RUNTIME) && echo "$(ONNXRUNTIME_SHA256)  $$(ls *.tgz)" | sha256sum --check --quiet
	cd $(RUNTIME) && tar --extract --strip-components 2 --file *.tgz \
	  package/dist/ort.wasm.bundle.min.mjs package/dist/ort-wasm-simd-threaded.mjs package/dist/ort-wasm-simd-threaded.wasm
	rm $(RUNTIME)/*.tgz
	touch $@

docs: $(VENV)/installed-dev $(RUNTIME)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/installed-dev native
	$(BIN)/python benchmarks/ops.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/layers.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/decode.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/throughput.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/throughput.py --bf16 --write docs/benchmarks.md
	$(BIN)/python benchmarks/streaming.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/loss.py --write docs/benchmarks.md

# Needs torch, einops, triton and this folder alone; no install, so that it runs on a bare GPU machine.
gpu gpu-cache: ANY = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(ANY) benchmarks/gpu.py

# The kernels of `make gpu`, compiled into .triton-gpu without a GPU. Needs the GPU machine's release of Triton.
gpu-cache:
	$(ANY) benchmarks/gpu_cache.py

# The same kernels compiled for three cards without one, and what models ask of a card. Writes docs/gpu.md.
gpu-offline: $(VENV)/installed-dev
	$(BIN)/python benchmarks/offline.py

clean:
	rm -rf $(VENV) $(VENV)-test-* build dist *.egg-info
