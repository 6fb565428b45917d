# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ORACLES := .venv-oracles
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "k3rl needs Python 3.11 or newer: make PYTHON=python3.12 ...")'

.PHONY: demo test test-long check oracles bench install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/k3rl train configs/demo.yaml $(if $(wildcard runs/demo/config.json),--resume)

test: $(STAMP)
	$(BIN)/pytest -q -m 'not long' tests

test-long: $(STAMP)
	$(BIN)/pytest -q -m long --timeout=5400 tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

# Against code of others, whose pins would clash with ours. One thread: on tiny tensors a second one only waits.
oracles: $(ORACLES)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ORACLES)/bin/pytest -q tests/oracles

$(ORACLES)/.installed: constraints-oracles.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/pip install --quiet --disable-pip-version-check --requirement constraints-oracles.txt
	touch $@

bench: $(STAMP)
	$(BIN)/k3rl bench
