# make demo   train a small language model through a pipeline of 8 virtual devices
# make test   lint, type check, and the quick tests
# make test-all   every test, the whole grids included (hours on 2 cores)
# make bench  compile pipejax and its peers for GPUs, and write benchmarks/RESULTS.md
#
# Each makes its own virtual environment. PYTHON picks the interpreter (3.11 or newer), VENV the folder, JAX a
# requirement such as "jax==0.10.2".

PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
VENV ?= .venv
JAX ?= jax
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all bench lint clean

demo: $(VENV)/.run
	@rm -rf runs/demo
	@$(BIN)/python -m experiments.gpt_tiny --out runs/demo

test: lint
	@$(BIN)/python -m pytest -n 2 --dist loadfile -q

test-all: lint
	@$(BIN)/python -m pytest -n 2 --dist loadfile -q -m "full or not full"

bench: $(VENV)/.test
	@$(BIN)/python -m benchmarks

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "pipejax needs Python 3.11 or newer; set PYTHON to one, as in: make demo PYTHON=/opt/python3.12/bin/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed; your system may keep it in a package of its own (python3-venv)."; exit 1; }

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	@echo "Installing pipejax and JAX into $(VENV); this takes about a minute, once."
	@$(PIP) "$(JAX)" -e .
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	@echo "Installing pipejax, JAX and the test tools into $(VENV); this takes about a minute, once."
	@$(PIP) "$(JAX)" -e ".[test,aot]"
	@touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
