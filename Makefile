# Each target works on a bare clone with nothing but Python >= 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
BACKENDS := $(patsubst %/pyproject.toml,%,$(wildcard backends/*/pyproject.toml))
EXTENSIONS := $(patsubst %/pyproject.toml,%,$(wildcard extensions/*/pyproject.toml))
# Those that need nothing heavier than torch.
LIGHT := backends/ddp backends/fsdp2 $(EXTENSIONS)
TRACKERS := $(patsubst %/pyproject.toml,%,$(wildcard trackers/*/pyproject.toml))
# Python compiles what it imports; pip would compile all that is installed.
PIP := PIP_NO_COMPILE=1 $(BIN)/python -m pip --disable-pip-version-check -q
# Tests start interpreters by the hundred: they read what the first one has compiled.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
# Test files that run at the same time, each in a process of pytest: what waits is overlapped.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: help quickstart test conformance faults megatron fp8 test-xla clients clients-recorded soak lint format docs site site-check dist release matrix drop-in bench downstream gpu clean

help:
	@echo "make quickstart   train on two processes, on real data"
	@echo "make test         the tests (ARGS='-k name' for some)"
	@echo "make conformance  the conformance suite on each of our plugins, and the tests of the author's kit"
	@echo "make faults       kills, signals, ranks that fail, two machines and a cut cable"
	@echo "make megatron     megatron-core on two ranks and on four, where there is no GPU through a shim"
	@echo "make fp8          fp8 by torchao, and by stand-ins of the other libraries"
	@echo "make test-xla     XLA on the CPU, in an environment of its own with the torch it is built for"
	@echo "make clients      Trainer and others on the drop-in, beside what they gave with the original"
	@echo "make lint         ruff, mypy, import layers, spelling, workflows, generated docs and lists"
	@echo "make format       let ruff format the tree, and list new distributions in pyproject.toml"
	@echo "make docs         regenerate the generated pages"
	@echo "make site         build the documentation into build/site; every public name must be documented"
	@echo "make site-check   open every page of the site in Chromium, which must be installed"
	@echo "make dist         build every wheel, install them into an empty environment and train"
	@echo "make release      bump, date, build, check, commit and tag one distribution (NAME=, VERSION=)"
	@echo "make matrix       the tests on other Pythons and torches, and on the lowest versions declared"
	@echo "make gpu          what wants an accelerator, in ten minutes, without a network; writes a table"
	@echo "make drop-in      the wheel that has the name accelerate, into dist"
	@echo "make bench        compare with Accelerate and Lightning Fabric"
	@echo "make downstream   the released plugins under the working core"
	@echo "make soak         all of these, and the long forms"

# torch first and from the constraints: a plain "torch" pulls gigabytes of CUDA.
$(VENV)/base.stamp: constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -U "pip>=25.1"
	$(PIP) install -c constraints.txt torch
	@touch $@

$(VENV)/run.stamp: $(VENV)/base.stamp pyproject.toml core/pyproject.toml $(LIGHT:%=%/pyproject.toml)
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation -e core $(LIGHT:%=-e %)
	$(PIP) install -c constraints.txt --group examples
	@touch $@

# The nine trackers bring a gigabyte of libraries, and DeepSpeed is built from source; only tests
# need them. It builds in an environment of its own. Transformer Engine's wheel alone cannot be
# imported, and megatron-core fails where it finds it: tests read its files. torch_xla wants an older
# torch, and has an environment of its own, too.
$(VENV)/dev.stamp: $(VENV)/run.stamp $(BACKENDS:%=%/pyproject.toml) $(TRACKERS:%=%/pyproject.toml)
	$(PIP) install -c constraints.txt deepspeed
	$(PIP) install -c constraints.txt --no-build-isolation $(addprefix -e ,$(filter-out $(LIGHT) backends/xla,$(BACKENDS))) $(TRACKERS:%=-e %)
	$(PIP) install --no-build-isolation --no-deps -e backends/xla
	$(PIP) install -c constraints.txt --group test --group lint
	$(PIP) install -c constraints.txt --no-deps --upgrade --target $(VENV)/unpacked transformer-engine
	$(PIP) install -c constraints.txt --no-deps --upgrade --target $(VENV)/guides lightning-fabric lightning-utilities peft
	@touch $@

quickstart: $(VENV)/run.stamp
	$(BIN)/accelerate-core launch --cpu --num_processes 2 examples/quickstart.py

# Folders with their own target; .ci/run runs all of them. Long ones come first.
CONFORMANCE := tests/conformance/test_third_party.py tests/testing tests/conformance
FAULTS := tests/faults tests/machines
CLIENTS := tests/clients
MEGATRON := tests/backends/megatron tests/examples/test_megatron_gpt.py
FP8 := tests/backends/fp8
XLA := tests/backends/xla
SITE_TESTS := tests/site
# `make dist` runs it on the wheels that it has built; here it would build each of them twice more.
WHEELS := tests/packaging/test_wheels.py
test: $(VENV)/dev.stamp
	$(PYTEST) -m "not soak" $(addprefix --ignore=,$(CONFORMANCE) $(FAULTS) $(CLIENTS) $(MEGATRON) $(FP8) $(SITE_TESTS) $(WHEELS)) $(ARGS)

conformance: $(VENV)/dev.stamp
	$(PYTEST) --dist loadscope --no-loadscope-reorder -m "not soak" $(CONFORMANCE) $(ARGS)

megatron: $(VENV)/dev.stamp
	$(PYTEST) -m "not soak" $(MEGATRON) $(ARGS)

fp8: $(VENV)/dev.stamp
	$(PYTEST) -m "not soak" $(FP8) $(ARGS)

# torch_xla is built for one torch, so it has an environment of its own; what is ours is edited in place.
XLA_MADE := build/xla
XLA_NEEDS := core extensions/compile extensions/dispatch backends/ddp backends/xla extensions/launch extensions/checkpoint extensions/tracking extensions/testing extensions/big_model
$(XLA_MADE).stamp: $(VENV)/base.stamp $(XLA)/environment.py $(XLA_NEEDS:%=%/pyproject.toml)
	$(BIN)/python $(XLA)/environment.py $(XLA_MADE) $(XLA_NEEDS)
	@touch $@

test-xla: $(XLA_MADE).stamp
	$(XLA_MADE)/bin/python -m pytest -m "not soak" $(XLA) --ignore $(XLA)/test_tpu_launch.py $(ARGS)

# One at a time: they hold a clock to how soon ranks end.
faults: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not soak" $(FAULTS) $(ARGS)

# Each in an environment of its own over the one above: `ours` has the drop-in's wheel under the name
# accelerate, `theirs` the original, which only recording needs. `-4.57` has an older transformers.
CLIENTS_MADE := build/clients
$(CLIENTS_MADE)/%.stamp: $(VENV)/dev.stamp $(wildcard $(CLIENTS)/requirements*.txt) $(CLIENTS)/environment.py
	$(BIN)/python $(CLIENTS)/environment.py $(CLIENTS_MADE)/$* $(FROM)
	@touch $@
CLIENTS_OURS := $(CLIENTS_MADE)/ours.stamp $(CLIENTS_MADE)/ours-4.57.stamp
CLIENTS_THEIRS := $(CLIENTS_MADE)/theirs.stamp $(CLIENTS_MADE)/theirs-4.57.stamp
$(CLIENTS_OURS): FROM = extensions/drop_in/accelerate
$(CLIENTS_OURS): $(shell find extensions/drop_in/accelerate extensions/drop_in/src/*/served -type f -not -name '*.pyc')
$(CLIENTS_THEIRS): FROM = accelerate==1.15.0

# One at a time: a client on two processes has both cores.
clients: $(CLIENTS_OURS)
	$(BIN)/python -m pytest -m "not soak" $(CLIENTS) $(ARGS)

clients-recorded: $(CLIENTS_THEIRS)
	$(BIN)/python $(CLIENTS)/record.py $(ARGS)

soak: $(VENV)/dev.stamp $(CLIENTS_OURS)
	$(BIN)/python -m pytest $(ARGS)
	$(BIN)/python tests/drop_in/original_tests.py --python $(CLIENTS_MADE)/ours/bin/python

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/zizmor --offline --no-progress --quiet .github/
	$(BIN)/python tools/workspace.py --check
	$(BIN)/python docs/generate.py --check

format: $(VENV)/dev.stamp
	$(BIN)/python tools/workspace.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp
	$(BIN)/python docs/generate.py

# Has an environment of its own, which needs no torch: the sources are read, not imported.
SITE_MADE := build/site-venv
SITE_PIP := $(SITE_MADE)/bin/python -m pip --disable-pip-version-check -q install
$(SITE_MADE).stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(SITE_MADE)
	$(SITE_PIP) -U "pip>=25.1"
	$(SITE_PIP) -c constraints.txt --group docs
	@touch $@

site: $(SITE_MADE).stamp
	$(SITE_MADE)/bin/python docs/site/public.py
	NO_MKDOCS_2_WARNING=1 $(SITE_MADE)/bin/mkdocs build --strict

site-check: site
	$(SITE_PIP) -c constraints.txt --group site
	$(SITE_MADE)/bin/python -m pytest --confcutdir $(SITE_TESTS) $(SITE_TESTS) $(ARGS)

dist: $(VENV)/dev.stamp
	rm -rf dist
	$(BIN)/python tools/release.py wheels --out dist
	$(BIN)/python -m pytest tests/packaging --ignore tests/packaging/test_downstream.py --wheels dist

# make release NAME=accelerate-ddp VERSION=0.2.0, and ARGS=--dry-run to see what it would do.
release: $(VENV)/dev.stamp
	$(BIN)/python tools/release.py cut $(NAME) $(VERSION) $(ARGS)

# Other Pythons and torches, and the lowest versions we declare; ARGS="--only lowest tests/core" for some.
matrix: $(VENV)/dev.stamp
	$(BIN)/python tools/matrix.py $(ARGS)

drop-in: $(VENV)/run.stamp
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist extensions/drop_in/accelerate

# Other libraries, and the commands that run them in pairs of processes.
PAIR = OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node 2
bench: $(VENV)/dev.stamp $(CLIENTS_MADE)/ours.stamp $(CLIENTS_MADE)/theirs.stamp
	$(PIP) install -c constraints.txt accelerate==1.15.0 lightning-fabric==2.6.6
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/step_counts.py
	$(PAIR) benchmarks/collectives.py
	$(PAIR) benchmarks/loaders.py
	$(BIN)/python benchmarks/sampler_scale.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/launch_start.py
	$(BIN)/python benchmarks/drop_in_start.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/big_model.py
	$(BIN)/python benchmarks/parity.py
	$(BIN)/python benchmarks/sharding.py
	$(BIN)/python benchmarks/tracking.py
	$(BIN)/python benchmarks/tracking_fidelity.py
	$(BIN)/python benchmarks/plot.py

# The plugins of the last release (or ARGS="--ref REF") under the core of this tree.
downstream: $(VENV)/dev.stamp
	$(BIN)/python tests/packaging/downstream.py $(ARGS)

# Installs nothing: a machine with an accelerator brings its own Python, torch and libraries.
GPU_PYTHON ?= python3
GPU_REPORT ?= build/gpu.md
gpu:
	PYTHONPATH="$$($(GPU_PYTHON) tests/gpu/paths.py build/gpu)$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(GPU_PYTHON) -m pytest tests/gpu -m "not anywhere" --gpu-report $(GPU_REPORT) $(ARGS)

clean:
	rm -rf $(VENV) dist build *_output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
