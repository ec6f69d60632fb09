# Every recipe sets up what it needs. PYTHON chooses the interpreter that makes the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-slow check format bench clean help

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: $(STAMP)  ## the main job: digits on 2 ranks in bf16, to over 97 % test accuracy
	$(BIN)/samestep train digits --nproc 2 --precision bf16 --run-dir runs/digits --resume never

test: check      ## lint, types and the default test suite
	$(BIN)/python -m pytest

test-slow: $(STAMP)  ## the long campaigns
	$(BIN)/python -m pytest -m slow

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## ratios against a hand-written loop, interleaved in one run
	$(BIN)/python benchmarks/window_overhead.py

clean:           ## remove what the recipes made
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
