# Pellucid's everyday commands. Each of them sets up .venv first when it is missing.
#
#   make demo     compile and run MobileBERT with eager, Inductor and Pellucid, side by side
#   make test     everything that CI runs; CASES=all adds those of the longest tests that run at other commits
#   make check    the quick part, under a minute: style, types, layers, unit and golden tests
#   make test-ops every sample of PyTorch's operator and module databases, static and dynamic, and large ones: hours on
#                 two cores
#   make test-models
#                 the models of the suite at full size, long training runs, more operators: minutes each
#   make test-kit every planted fault through the commands of the debugging kit: minutes
#   make bench    pellucid bench; choose with ARGS="bert --batch 8"
#   make format   rewrite the sources in the project's style
#   make clean    remove .venv and everything that the commands above made
#
# PYTHON       the interpreter that makes .venv (3.10 or later, and one that your torch wheel was built for)
# JOBS         how many processes share the tests (2)
# CASES        which of the longest tests run: a third, another one for each commit (third), or all of them (all)
# TORCH_INDEX  a package index to take torch from, for example https://download.pytorch.org/whl/cpu

PYTHON ?= python3
CXX ?= g++
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2
CASES ?= third

BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
SOURCES := $(wildcard pellucid tests examples benchmarks setup.py)
QUICK_TESTS := $(wildcard tests/unit tests/golden)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-ops test-models test-kit check quick lint bench format clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

# torch goes in first and alone, so that a CPU build that pip is pointed at is taken as it is; resolved together
# with the rest, pip may prefer a build that brings several gigabytes of CUDA along.
$(READY): pyproject.toml
	@command -v $(CXX) >/dev/null || { \
	  echo "error: no C++ compiler ($(CXX)): Pellucid builds its kernels with it." >&2; \
	  echo "hint:  apt-get install g++" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) not found." >&2; \
	  echo "hint:  apt-get install python3 python3-venv, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), Pellucid needs Python 3.10 or later." >&2; \
	  echo "hint:  name another one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments." >&2; \
	  echo "hint:  apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/pip install --quiet -e '.[dev,bench]'
	@touch $@

demo: $(READY)
	$(BIN)/pellucid demo $(ARGS)

bench: $(READY)
	$(BIN)/pellucid bench $(ARGS)

# pytest exits with 5 when it ran no test, which fails these targets, as it should. What needs the memory of the whole
# machine, the models at full size, runs alone.
test: lint
	$(PYTEST) --cases $(CASES) --durations=40 tests $(ARGS)

# -O1 saves time here, and the vector code is written out either way.
test-ops: $(READY)
	PELLUCID_CXXFLAGS=-O1 $(BIN)/python -m tests.operators.sweep --all $(ARGS)

test-models: $(READY)
	$(BIN)/python -m pytest -m slow tests/integration $(ARGS)

test-kit: $(READY)
	$(PYTEST) -m "slow or not slow" tests/kit $(ARGS)

# Types are checked on one core while tests wait for their processes on the other.
check: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint quick

quick: $(READY)
	$(PYTEST) $(QUICK_TESTS) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv build dist pellucid.egg-info pellucid_runs
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
