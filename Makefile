# Every target sets itself up from a bare clone. PYTHON picks the interpreter, ARGS goes to the command, PIP_ARGS to pip:
#   make quickstart ARGS="--seed 3"      make test ARGS="tests/config"      make test PYTHON=python3.12

PYTHON   ?= python3
VENV     ?= .venv
ARGS     ?=
PIP_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV   := $(VENV)/.installed-dev

.PHONY: help quickstart test soak lint clean setup
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train a tiny model to use a calculator, on the CPU"
	@echo "make test         the tests (all but the soak tests)"
	@echo "make soak         the long tests: many seeds, many kills"
	@echo "make lint         ruff and mypy"
	@echo "make clean        remove the environment, builds and caches; runs/ stays"

quickstart: $(STAMP)
	$(BIN)/etude quickstart $(ARGS)

test: $(DEV)
	$(BIN)/python -m pytest -m "not soak" $(ARGS)

soak: $(DEV)
	$(BIN)/python -m pytest -m soak $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

setup: $(DEV)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' here; install Python 3.10 or newer, or say  make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $$($(PYTHON) --version) is too old; Étude needs 3.10 or newer: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "[1/2] environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/2] installing Étude and what it needs (the first time takes minutes: PyTorch is large)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

# What only the tests need (Ray, MCP, peers' clients, linters) stays out of the way of a first run.
$(DEV): $(STAMP)
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find etude tests -name __pycache__ -type d -prune -exec rm -rf {} +
