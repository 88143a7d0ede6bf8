# Two commands do all the set-up: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test test-gpu test-kill test-deployment fuzz corrupt audit resolve docs dist lint clean

run: $(READY)
	$(BIN)/fedala run

# Stealing keeps the tests of a file in one process, so that what they share is made once.
test: $(READY) lint
	$(BIN)/pytest -n 2 --dist worksteal -q

# On a machine with a GPU: the fast path against the plain one. PYTEST may name another interpreter's.
PYTEST ?= $(BIN)/pytest
test-gpu:
	$(PYTEST) -q -m gpu tests/cuda
	$(PYTEST) -q tests/cuda/test_kernels.py

# The long form of the kill tests: a hundred kills in configurations drawn at random (KILLS=…), and
# a disk that fails at every flush, too.
KILLS ?= 100
test-kill: $(READY)
	FEDALA_KILLS=$(KILLS) $(BIN)/pytest -q tests/runs/test_kill.py \
		tests/runs/test_resume.py::test_a_disk_that_fails_anywhere_loses_nothing

# The long form of tests/fuzz: damaged input for so many minutes.
MINUTES ?= 30
fuzz: $(READY)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz.campaign $(MINUTES)

# Every file of finished, stopped and cells' folders × mutations × the commands that read them: a table, and exit code 1
# for any traceback, hang or silent difference. About twenty minutes; a fifth of the cases: CORRUPT='--share 5'.
corrupt: $(READY)
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m corrupt $(CORRUPT)

# Known vulnerabilities in the pinned versions, by pip-audit in an environment of its own that is thrown away. It asks a
# database on the internet (AUDIT='-s osv' for another one); where it cannot, that is a failure and not a pass.
audit:
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv $$folder && \
	$$folder/bin/pip install --quiet pip-audit && \
	if $$folder/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off $(AUDIT) -r constraints.txt > $$folder/log 2>&1; \
	then cat $$folder/log; \
	elif grep -q '^Found ' $$folder/log; then cat $$folder/log; exit 1; \
	else tail -n 1 $$folder/log; \
	echo "The audit could not be done: no vulnerability database was reached, so nothing is known about these versions."; exit 2; fi

# Resolves the constraints for each Python and each build of torch, with uv and from metadata alone.
# It asks a package registry; if that cannot be reached, it fails.
resolve: $(READY)
	FEDALA_REGISTRY=1 $(BIN)/pytest -q -m 'registry or not registry' \
		-k can_be_installed tests/test_supply_chain.py

# Real federations on this machine: killed nodes, a killed server, poisoned updates, and more. About a quarter of an hour.
test-deployment: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[flower-simulation]'
	$(BIN)/pytest -q -m deployment tests/flower tests/ranks

# The site, in build/site. A broken link or a page that the menu lacks is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html, or look at it while you write: $(BIN)/mkdocs serve"

# Wheel and sdist, checked and installed into an environment of their own, which runs the first experiment.
dist:
	rm -rf dist
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv $$folder && \
	$$folder/bin/pip install --quiet build twine && \
	$$folder/bin/python -m build --outdir dist . > $$folder/log && \
	$$folder/bin/python -m twine check --strict dist/* && \
	$(PYTHON) -m venv $$folder/clean && \
	$$folder/clean/bin/pip install --quiet --constraint constraints.txt torch && \
	$$folder/clean/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[all]" && \
	cd $$folder && clean/bin/fedala run --rounds 2 --clients 5 --out first && clean/bin/fedala report first

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
