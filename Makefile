# Two commands for a fresh machine with python3 >= 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PROMPT ?= Write a Python function that checks whether a number is prime.

.PHONY: demo test lint
demo: $(VENV)/base.stamp
	$(BIN)/dspark generate --compare --max-tokens 128 --prompt "$(PROMPT)"

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"python >= 3.11 is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/base.stamp: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/dev.stamp: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@
