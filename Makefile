# Two commands matter: `make plan` (the main job) and `make test` (everything that CI runs).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: plan test lint docs wheel validation bench clean

plan: $(VENV)/core
	$(BIN)/trainwright plan llama-3.1-70b --on 64xH100 -o plan.toml

test: $(VENV)/dev
	$(MAKE) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m 'not slow and not ranks'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'ranks and not slow' tests/train  # one process: its ranks fill the machine
	$(MAKE) wheel

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/dev
	$(BIN)/python docs/generate.py

# What people install: built, installed alone into an empty environment and asked; on the oldest Python with the oldest libraries that it says are enough.
OLDEST = import sys, tomllib; names = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
  print(*(name.replace(">=", "==") for name in names if sys.version_info < (3, 12)), sep="\n")

wheel: $(VENV)/dev
	rm -rf build/wheel && $(BIN)/python -m build --wheel --outdir build/wheel . > build.log 2>&1 || { cat build.log; exit 1; }
	rm -f build.log && $(PYTHON) -m venv --clear build/wheel/venv
	$(BIN)/python -c '$(OLDEST)' > build/wheel/oldest.txt
	build/wheel/venv/bin/python -m pip --disable-pip-version-check install -q -c build/wheel/oldest.txt build/wheel/*.whl
	cd build/wheel && venv/bin/trainwright plan llama-3.1-8b --on 8xH100 --json > plan.json && venv/bin/python -c "import json; assert json.load(open('plan.json'))['plans']"
	cd build/wheel && venv/bin/trainwright gpus > gpus.txt && venv/bin/trainwright plan --help > help.txt

# Scores the published runs and writes docs/validation.md with its pictures.
validation: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/validation.py

bench: $(VENV)/dev
	for f in benchmarks/bench_*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$f || exit 1; done

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed (PYTHON=python3.11 make ...)')"
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/core

# The second engine, whose tests (`-m deepspeed`) run where it is installed.
$(VENV)/deepspeed: $(VENV)/dev
	$(PIP) install -q -c constraints.txt -e '.[dev,deepspeed]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
