# Every target works on a fresh clone and needs only Python >= 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
BACKENDS := $(patsubst %/pyproject.toml,%,$(wildcard backends/*/pyproject.toml))
EXTENSIONS := $(patsubst %/pyproject.toml,%,$(wildcard extensions/*/pyproject.toml))
# Packages that need nothing heavier than torch.
LIGHT := backends/ddp backends/fsdp2 $(filter-out extensions/ray,$(EXTENSIONS))
TRACKERS := $(patsubst %/pyproject.toml,%,$(wildcard trackers/*/pyproject.toml))
# Without this, pip compiles every installed module. Python compiles only the modules it imports.
PIP := PIP_NO_COMPILE=1 $(BIN)/python -m pip --disable-pip-version-check -q
# Tests start hundreds of interpreters, which reuse the modules that the first one compiled.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
# Number of test files that run at the same time, so that waiting time overlaps.
JOBS ?= 3
ENGINE_JOBS ?= 3
# Hypothesis generates the same examples in every run, so that a change never fails for an older reason.
# `make soak` generates new ones.
EXAMPLES := --hypothesis-profile=ci
# pytest-xdist would start with the files that have the most tests. tests/conftest.py sorts the files by time.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(EXAMPLES)

.PHONY: help quickstart test examples conformance faults engines skypilot megatron fp8 test-xla clients clients-recorded soak lint format docs site site-check dist release matrix drop-in bench downstream gpu clean

help:
	@echo "make quickstart   train on two processes, on real data"
	@echo "make test         the tests (ARGS='-k name' selects some)"
	@echo "make examples     the examples, and the code on documentation pages, as printed"
	@echo "make conformance  the conformance suite on each of our plugins, and the tests of accelerate-testing"
	@echo "make faults       tests of kills, signals, hangs, failing ranks, lost machines and a cut cable"
	@echo "make engines      real SLURM, MPI, ssh and Ray on simulated machines; installs them on Debian as root"
	@echo "make megatron     megatron-core on two and four ranks, through a shim if there is no GPU"
	@echo "make fp8          fp8 with torchao, and with stand-ins for the other libraries"
	@echo "make test-xla     XLA on the CPU, in a separate environment with the torch that it was built for"
	@echo "make clients      Trainer and other clients on the drop-in, compared with their results on Hugging Face Accelerate"
	@echo "make lint         ruff, mypy, pyright, import layers, spelling, wording, workflows, generated docs and lists"
	@echo "make format       format the tree with ruff, and add new distributions to the lists in pyproject.toml"
	@echo "make docs         regenerate the generated pages"
	@echo "make site         build the documentation into build/site; every public name must be documented"
	@echo "make site-check   open every page of the site in Chromium, which must be installed"
	@echo "make dist         build all wheels, install them into an empty environment and train"
	@echo "make release      bump, date, build, check, commit and tag one distribution (NAME=, VERSION=)"
	@echo "make matrix       the tests on other versions of Python and torch, and on the lowest declared versions"
	@echo "make gpu          the tests that need an accelerator: ten minutes, no network; writes a table"
	@echo "make drop-in      build the wheel named accelerate into dist"
	@echo "make bench        compare with Accelerate and Lightning Fabric"
	@echo "make downstream   test the released plugins with the core of this tree"
	@echo "make skypilot     check task files with SkyPilot itself, in an environment of its own"
	@echo "make soak         all tests in one run, including the long ones"

# Install torch first and with the constraints, because a plain "torch" pulls in gigabytes of CUDA.
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

# Only the tests need these: the nine trackers bring a gigabyte of libraries, and pip builds DeepSpeed
# from source in an isolated environment. Transformer Engine's wheel can't be imported without its other
# wheels, and megatron-core fails if it finds it, so the tests only read its unpacked files. torch_xla
# needs an older torch, so it has a separate environment. Ray is only needed by tests/engines.
$(VENV)/dev.stamp: $(VENV)/run.stamp $(BACKENDS:%=%/pyproject.toml) extensions/ray/pyproject.toml $(TRACKERS:%=%/pyproject.toml)
	$(PIP) install -c constraints.txt deepspeed
	$(PIP) install -c constraints.txt --no-build-isolation $(addprefix -e ,$(filter-out $(LIGHT) backends/xla,$(BACKENDS))) $(TRACKERS:%=-e %)
	$(PIP) install --no-build-isolation --no-deps -e backends/xla -e extensions/ray
	$(PIP) install -c constraints.txt --group test --group lint
	$(PIP) install -c constraints.txt --no-deps --upgrade --target $(VENV)/unpacked transformer-engine
	$(PIP) install -c constraints.txt --no-deps --upgrade --target $(VENV)/guides lightning-fabric lightning-utilities peft
	@touch $@

quickstart: $(VENV)/run.stamp
	$(BIN)/accelerate-core launch --cpu --num_processes 2 examples/quickstart.py

# Folders with their own targets; .ci/run runs all of them. The slowest come first.
CONFORMANCE := tests/conformance/test_third_party.py tests/testing tests/devices/test_vendor.py tests/conformance
EXAMPLE_TESTS := tests/examples
# tests/engines/test_local_ways.py is also part of `make engines`, but needs neither root nor a scheduler.
FAULTS := tests/faults tests/machines tests/engines/test_local_ways.py tests/backends/torchft tests/watch/test_hang_reports.py \
          $(addprefix tests/launch/,test_elastic.py test_failures.py test_late_ranks.py test_machine_0.py)
ENGINES := tests/engines
CLIENTS := tests/clients
MEGATRON_EXAMPLE := tests/examples/test_megatron_gpt.py
MEGATRON := tests/backends/megatron $(MEGATRON_EXAMPLE)
FP8 := tests/backends/fp8
XLA := tests/backends/xla
SITE_TESTS := tests/site
# `make dist` runs these, on the wheels that it has built. `make test` would build each of them twice more.
WHEELS := tests/packaging/test_wheels.py tests/packaging/test_release.py
# `make lint` runs this right after mypy, which then has read torch.
TYPING := tests/core/test_typing.py
test: $(VENV)/dev.stamp
	$(PYTEST) -m "not soak" $(addprefix --ignore=,$(CONFORMANCE) $(EXAMPLE_TESTS) $(FAULTS) $(ENGINES) $(CLIENTS) $(MEGATRON) $(FP8) $(SITE_TESTS) $(WHEELS) $(TYPING)) $(ARGS)

examples: $(VENV)/dev.stamp
	$(PYTEST) -m "not soak" $(EXAMPLE_TESTS) --ignore=$(MEGATRON_EXAMPLE) $(ARGS)

conformance: $(VENV)/dev.stamp
	$(PYTEST) --dist loadscope -m "not soak" $(CONFORMANCE) $(ARGS)

megatron: $(VENV)/dev.stamp
	$(PYTEST) -m "not soak" $(MEGATRON) $(ARGS)

fp8: $(VENV)/dev.stamp
	$(PYTEST) -m "not soak" $(FP8) $(ARGS)

# torch_xla is built for one version of torch, so it has a separate environment, where our own packages
# are installed in editable mode.
XLA_MADE := build/xla
XLA_NEEDS := core extensions/compile extensions/dispatch backends/ddp backends/xla extensions/launch extensions/checkpoint extensions/tracking extensions/testing extensions/big_model
$(XLA_MADE).stamp: $(VENV)/base.stamp $(XLA)/environment.py $(XLA_NEEDS:%=%/pyproject.toml)
	$(BIN)/python $(XLA)/environment.py $(XLA_MADE) $(XLA_NEEDS)
	@touch $@

test-xla: $(XLA_MADE).stamp
	$(XLA_MADE)/bin/python -m pytest -m "not soak" $(XLA) --ignore $(XLA)/test_tpu_launch.py $(ARGS)

# One at a time, because these tests measure how quickly ranks exit.
faults: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not soak" $(FAULTS) $(ARGS)

# Each process of pytest has its own simulated machines with SLURM, so that waiting time overlaps. Writes
# the table of docs/clusters.md.
engines: $(VENV)/dev.stamp
	$(PIP) install -c constraints.txt --group ray
	$(BIN)/python tests/engines/needed.py --install
	$(BIN)/python -m pytest -n $(ENGINE_JOBS) --dist loadfile -m "not soak" $(ENGINES) --engines-report docs/clusters.md $(ARGS)

# SkyPilot needs an older click than the command line.
SKYPILOT_PIP := PIP_NO_COMPILE=1 $(VENV)/skypilot/bin/python -m pip --disable-pip-version-check -q
skypilot: $(VENV)/dev.stamp
	$(PYTHON) -m venv $(VENV)/skypilot
	$(SKYPILOT_PIP) install -U "pip>=25.1"
	$(SKYPILOT_PIP) install --group skypilot
	$(BIN)/python -m pytest tests/launch/test_skypilot.py $(ARGS)

# Separate environments on top of the main one. `ours` has the drop-in's wheel, named accelerate. `theirs`
# has Hugging Face Accelerate, to record its results, and to run what differs because the CPU is another one.
# `-4.57` has an older transformers.
CLIENTS_MADE := build/clients
$(CLIENTS_MADE)/%.stamp: $(VENV)/dev.stamp $(wildcard $(CLIENTS)/requirements*.txt) $(CLIENTS)/environment.py
	$(BIN)/python $(CLIENTS)/environment.py $(CLIENTS_MADE)/$* $(FROM)
	@touch $@
CLIENTS_OURS := $(CLIENTS_MADE)/ours.stamp $(CLIENTS_MADE)/ours-4.57.stamp
CLIENTS_THEIRS := $(CLIENTS_MADE)/theirs.stamp $(CLIENTS_MADE)/theirs-4.57.stamp
$(CLIENTS_OURS): FROM = extensions/drop_in/accelerate
$(CLIENTS_OURS): $(shell find extensions/drop_in/accelerate extensions/drop_in/src/*/served -type f -not -name '*.pyc')
$(CLIENTS_THEIRS): FROM = accelerate==1.15.0

# One at a time, because a client on two processes uses both cores.
clients: $(CLIENTS_OURS) $(CLIENTS_THEIRS)
	$(BIN)/python -m pytest -m "not soak" $(CLIENTS) $(ARGS)

clients-recorded: $(CLIENTS_THEIRS)
	$(BIN)/python $(CLIENTS)/record.py $(ARGS)

soak: $(VENV)/dev.stamp $(CLIENTS_OURS) $(CLIENTS_THEIRS)
	$(BIN)/python -m pytest $(ARGS)
	$(BIN)/python tests/drop_in/original_tests.py --python $(CLIENTS_MADE)/ours/bin/python

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(TYPING)
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/prose.py
	$(BIN)/zizmor --offline --no-progress --quiet .github/
	$(BIN)/python tools/workspace.py --check
	$(BIN)/python docs/generate.py --check

format: $(VENV)/dev.stamp
	$(BIN)/python tools/workspace.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp
	$(BIN)/python docs/generate.py

# The site has a separate environment without torch, because the sources are parsed, not imported.
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

# Select some of it with, for example, ARGS="--only lowest tests/core".
matrix: $(VENV)/dev.stamp
	$(BIN)/python tools/matrix.py $(ARGS)

drop-in: $(VENV)/run.stamp
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist extensions/drop_in/accelerate

# The prefix of benchmarks that run on two processes.
PAIR = OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node 2
bench: $(VENV)/dev.stamp $(CLIENTS_MADE)/ours.stamp $(CLIENTS_MADE)/theirs.stamp
	$(PIP) install -c constraints.txt accelerate==1.15.0 lightning-fabric==2.6.6
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/step_counts.py
	$(PAIR) benchmarks/collectives.py
	$(PAIR) benchmarks/loaders.py
	$(BIN)/python benchmarks/sampler_scale.py
	$(BIN)/python benchmarks/scale.py
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

# Tests the plugins of the last release (or of REF, with ARGS="--ref REF") with the core of this tree.
downstream: $(VENV)/dev.stamp
	$(BIN)/python tests/packaging/downstream.py $(ARGS)

# Installs nothing, and uses the Python, torch and libraries of the machine with the accelerator.
GPU_PYTHON ?= python3
GPU_REPORT ?= build/gpu.md
gpu:
	PYTHONPATH="$$($(GPU_PYTHON) tests/gpu/paths.py build/gpu)$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(GPU_PYTHON) -m pytest tests/gpu -m "not anywhere" --gpu-report $(GPU_REPORT) $(ARGS)

clean:
	rm -rf $(VENV) dist build *_output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
