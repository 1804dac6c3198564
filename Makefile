# The two commands of a clean clone: `make quickstart` and `make test`. Both need only Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests run beside one another in so many processes; 0 is all in one, for a debugger (ARGS=--pdb).
WORKERS ?= 2
# One thread a process: the runs start several processes, and threads beyond the cores make everything many times slower.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install install-dev quickstart test lint types docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

quickstart: install  ## train the quickstart recipe and show what was learned (ARGS="key=value ..." overrides)
	$(BIN)/drumroll train recipes/quickstart.yaml $(ARGS)

test: install-dev  ## the whole test suite (ARGS="-k name" selects, WORKERS=0 runs it in one process)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: install-dev  ## ruff
	$(BIN)/ruff check .

types: install-dev  ## mypy, strict on the package
	$(BIN)/mypy

docs: install-dev  ## build the documentation into site/
	$(BIN)/python -m pip install --quiet -c constraints.txt mkdocs
	$(BIN)/mkdocs build --strict --quiet

install: $(VENV)/.installed  ## the package and what it needs, into $(VENV)

install-dev: $(VENV)/.installed-dev  ## the same and the tools for development

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $@

clean:  ## remove what was built, keep runs and environments
	rm -rf site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
