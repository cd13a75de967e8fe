# `make demo` and `make test` set up everything they need by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check dashboard bench clean

demo: $(STAMP)
	$(BIN)/ppo-tuner demo

dashboard: $(STAMP)
	$(BIN)/ppo-tuner dashboard

test: check
	$(BIN)/python -m tests.dashboard.browser
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamp is touched last, so an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PPO Tuner needs Python 3.11 or later; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,postgres]'
	@touch $@

# Beside TRL 1.12, the last release with a PPO trainer; not part of the tests.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/ppo_iteration.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
