PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/first

.PHONY: setup run test check slow bench docs clean

setup: $(VENV)/.ready

# torch goes first and pinned, so that no other requirement chooses it.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

# The main job: fine-tune, score before and after, export, check the export in stock PEFT, report.
run: setup
	$(BIN)/mezzo model get
	$(BIN)/mezzo nlora train --out $(OUT) --export $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: setup
	$(BIN)/ruff format --check src tests docs benchmarks recipes
	$(BIN)/ruff check src tests docs benchmarks recipes
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

slow: setup
	$(BIN)/mezzo model get
	$(BIN)/python -m pytest -m slow

bench: setup
	for script in $(wildcard benchmarks/*.py); do $(BIN)/python $$script || exit 1; done

docs: setup
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_measured.py

clean:
	rm -rf $(VENV) build dist *.egg-info
