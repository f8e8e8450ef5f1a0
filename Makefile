# One command after cloning: `make check` makes the environment, installs the package and runs every check.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: venv install demo docs format lint types test check
# One after the other, also under `make -j`: pytest's closing line is then the last one.
.NOTPARALLEL:

venv: $(BIN)/python

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

install: $(INSTALLED)

# Only a change of pyproject.toml installs again: the package itself is installed in place.
$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/vicinal demo

docs: $(INSTALLED)
	$(BIN)/python -m vicinal.report.methods docs/methods

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

# One thread a worker: more threads than cores make small tensors slower, not faster.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

check: lint types test
