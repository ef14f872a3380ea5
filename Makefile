# `make help` lists the targets. Each one makes the environment it needs first.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
# The interpreter of the environment; by default the first of python3.11 and python3 that is 3.10 or newer.
PYTHON ?=
# An index with torch's CPU build, where the default index has only the CUDA one.
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
FUZZ_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the fixedstate command and everything the other targets need
	@:

demo: setup ## export a shipped model, read a log longer than it was trained on, answer questions about it
	@$(BIN)/fixedstate demo

test: lint types imports ## everything CI runs: lint, types, import contracts, tests
	@$(BIN)/pytest -m "not slow" $(PYTEST_ARGS)

lint: setup ## style of every file
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup ## mypy, strict, on the package
	@$(BIN)/mypy

imports: setup ## which module may import which
	@$(BIN)/lint-imports

format: setup ## put every file into the style that `make lint` wants
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

check: test ## `make test`, then build the wheel and the source archive
	@$(BIN)/python -m build --no-isolation --outdir dist .

bench: setup ## the measurements behind the numbers in README.md and docs/
	@shopt -s nullglob; for script in benchmarks/bench_*.py; do \
	    echo "== $$script"; PYTHONPATH=benchmarks $(BIN)/python "$$script" || exit 1; done

ptx: setup ## compile the kernels anew into plugins/ptx, and assemble every text for seven GPU generations
	@$(BIN)/python -m fixedstate.plugins.compile

fuzz: setup ## laws 1 to 5 on 250 drawn models, 40 draws each; goes on where it was stopped
	@PYTHONPATH=tests $(BIN)/python tests/fuzz.py $(FUZZ_ARGS)

nightly: setup ## the tests that take minutes
	@$(BIN)/pytest -m slow $(PYTEST_ARGS) || { code=$$?; [ $$code -eq 5 ] && echo "no slow tests" || exit $$code; }

clean: ## remove what was built and cached; environments stay
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage htmlcov
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# folder=packages,...; the older ones need a numpy below 2.4 beside them.
PLUGIN_PACKAGES := 10.9=tensorrt-cu12-bindings==10.9.0.34,numpy==2.2.6 \
    10.13=tensorrt-cu12-bindings==10.13.3.9,numpy==2.2.6 11.4=tensorrt-cu13-bindings==11.4.0.106

CANDIDATES := $(or $(PYTHON),python3.11 python3)
find_python = $(shell for python in $(CANDIDATES); do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; done)

# Made again when what it is made from changes. The first two lines stop with one line of text.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(eval BASE := $(find_python))$(if $(BASE),,$(error no Python 3.10 or newer ($(CANDIDATES)): install the package python3))
	$(if $(shell $(BASE) -c 'import ensurepip, venv' 2>&1 || echo missing),$(error $(BASE) cannot make environments: install the package python3-venv))
	@echo "make setup: installing into $(VENV), some minutes the first time"
	@$(PIP) --version >/dev/null 2>&1 || $(BASE) -m venv --clear $(VENV)
	@if [ -n "$(TORCH_INDEX_URL)" ]; then \
	    $(PIP) install -qq --no-deps --constraint constraints.txt --index-url "$(TORCH_INDEX_URL)" torch; fi
	@# The build tool comes from constraints.txt as well, so the build is not isolated.
	@$(PIP) install -qq --constraint constraints.txt setuptools
	@$(PIP) install -qq --constraint constraints.txt --no-build-isolation --editable '.[export,dev,rtx,kernels,triton]'
	@# TensorRT's own plugin package, three versions side by side; no test needs the library itself.
	@for pair in $(PLUGIN_PACKAGES); do target=$(VENV)/plugin-packages/$${pair%%=*}; \
	    [ -f $$target/.installed ] || { rm -rf $$target && $(PIP) install -qq --no-deps --target $$target \
	        $$(echo $${pair#*=} | tr , ' ') && touch $$target/.installed; } || \
	    echo "make setup: no TensorRT $${pair%%=*} plugin package for this Python; its tests will fail" >&2; done
	@touch $@

.PHONY: help setup demo test lint types imports format check bench ptx fuzz nightly clean
