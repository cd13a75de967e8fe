# `make demo` and `make test` set up everything they need by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all browser coverage check docs dashboard bench gpu clean

demo: $(STAMP)
	$(BIN)/ppo-tuner demo

dashboard: $(STAMP)
	$(BIN)/ppo-tuner dashboard

# Two test processes suit two cores; more cores take more (`auto`).
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal
REST := slow or browser or postgres or chaos or ray

# What guards the product, in a few minutes. Without a browser its tests are skipped, which fails only where CI is set.
test: check
	$(BIN)/python -m tests.chromium || true
	$(PYTEST) -m "not ($(REST))"

# All other tests (every page in the browser, PostgreSQL, kills at random moments), the site of the docs, and the
# trainer's tests on the arithmetic of a processor without vector instructions: nothing may depend on how one rounds.
test-all: test docs
	$(PYTEST) -m "$(REST)"
	ATEN_CPU_CAPABILITY=default $(PYTEST) tests/ppo_core

# Chromium for the tests, by any way this machine has, apt-get among them.
browser: $(STAMP)
	$(BIN)/python -m tests.chromium --system

# Branch coverage of all tests, worker processes and servers included.
coverage: $(STAMP)
	rm -rf .coverage
	mkdir .coverage
	$(BIN)/coverage run -m pytest -n auto --maxprocesses 8 --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=cover

# The pages of docs/ as a site in build/docs; a warning is an error.
docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamp is touched last, so an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PPO Tuner needs Python 3.11 or later; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs,postgres,ray]'
	@touch $@

# Beside TRL 1.12, the last release with a PPO trainer; not part of the tests.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/ppo_iteration.py

# What needs a GPU, under a plain python3 with torch, transformers, peft and pytest: no virtual environment, no registry.
# PART is check, speed, trl or study; WHEELS names a folder with the packages that are missing, RESULTS one to write to.
PART ?= check
RESULTS ?= benchmarks/results
gpu:
	$(if $(WHEELS),$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu $(WHEELS)/*.whl)
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu $(PYTHON) benchmarks/gpu.py $(PART) --results $(RESULTS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage
