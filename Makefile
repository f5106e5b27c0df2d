# `make demo` and `make test` set up everything they need in .venv; nothing else to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-all lint bench docs clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

demo: $(VENV)/.demo  ## train a small net dense and 95-98% sparse, five ways; a table and a report (under 4 minutes)
	@$(BIN)/spartan sweep digits --set method=dense,imp,topkast,spartan,paced --set sparsity=0.95,0.98 --seeds 3 --jobs 2 --out runs/demo

test: $(VENV)/.dev lint  ## lint, type-check and test (what CI runs)
	@$(BIN)/python -m pytest

test-all: $(VENV)/.dev lint  ## the same with the slow tests
	@$(BIN)/python -m pytest -m "not gpu"

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.dev  ## the operator benchmark of docs/numerics.md
	@$(BIN)/python benchmarks/bench_soft_topk.py

docs: $(VENV)/.docs  ## build the documentation site into site/, strictly; list the links that lead out of it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python docs/site_links.py site
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

clean:  ## remove the environment and the caches
	rm -rf site $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info src/*.egg-info

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Spartan needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "Setting up .venv (a minute or two the first time) ..."
	@$(PIP) -c constraints.txt -e '.[app]'
	@touch $@

$(VENV)/.dev: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "Setting up .venv (a minute or two the first time) ..."
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "Setting up .venv (a minute or two the first time) ..."
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@
