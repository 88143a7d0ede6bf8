# Two commands do all the set-up: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test test-gpu test-deployment lint clean

run: $(READY)
	$(BIN)/fedala run

test: $(READY) lint
	$(BIN)/pytest -n 2 -q

# On a machine with a GPU: the fast path against the plain one. PYTEST may name another interpreter's.
PYTEST ?= $(BIN)/pytest
test-gpu:
	$(PYTEST) -q -m gpu tests/cuda
	$(PYTEST) -q tests/cuda/test_kernels.py

# Real federations on this machine: killed nodes, a killed server, poisoned updates, and more. About a quarter of an hour.
test-deployment: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[flower-simulation]'
	$(BIN)/pytest -q -m deployment tests/flower

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first: the constraints pin it, and what comes after is then satisfied by it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
