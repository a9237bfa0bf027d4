# `make` alone lists the targets. A fresh machine needs Python 3.11, pip and make, nothing else.
# PIP_ARGS go to every `pip install`: make demo PIP_ARGS="--extra-index-url URL"

PYTHON   ?= $(shell command -v python3.11 || command -v python3)
VENV     ?= .venv
PIP_ARGS ?=
JOBS     ?= 2

BIN      := $(VENV)/bin
INSTALL   = $(BIN)/python -m pip install -q -c constraints.txt $(PIP_ARGS)
PYTEST    = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
SOURCES   = src tests scripts benchmarks examples
ANGR      = TOKMILL_ANGR_PYTHON=$(abspath $(VENV)-angr)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-long lint check format bench pairs profiles signatures similarity soak clean system-packages

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo  ## real text and programs to trained models and a report, in demo/ (minutes)
	$(BIN)/tokmill demo

test: $(VENV)/.installed-dev system-packages  ## every test but the long ones
	$(PYTEST) -m "not long"

test-long: $(VENV)/.installed-dev $(VENV)-angr/.installed system-packages  ## the slow proofs
	$(ANGR) $(PYTEST) -m long

lint: $(VENV)/.installed-dev  ## format, lint, types, imports
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --config .importlinter

check: lint  ## the quick loop: the same, and unit tests
	$(PYTEST) -m "not long" tests/unit

format: $(VENV)/.installed-dev  ## rewrite the sources as `make check` wants them
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(VENV)/.installed-dev $(VENV)-peers/.installed $(VENV)-angr/.installed  ## measure against peers: benchmarks/RESULTS.md
	@sh scripts/install-system-packages.sh bench
	mkdir -p bench-cache
	$(ANGR) $(BIN)/python benchmarks/run.py bench-cache $(abspath $(VENV)-peers)/bin/python $(SECTIONS)

pairs:  ## programs in pairs, for diffing, in bench-cache/pairs (PAIRS=--small: a few, in seconds)
	@sh scripts/install-system-packages.sh pairs
	mkdir -p bench-cache
	$(PYTHON) benchmarks/program_pairs.py bench-cache $(PAIRS)

similarity: $(VENV)/.installed-dev  ## programs of 51 projects, ten builds each, split and frozen, and vectors learned of them (hours; SIMILARITY=--small: a minute)
	@sh scripts/install-system-packages.sh similarity
	mkdir -p bench-cache
	$(BIN)/python benchmarks/similarity_programs.py bench-cache $(SIMILARITY)
	$(BIN)/python benchmarks/similarity_stores.py bench-cache $(filter --small,$(SIMILARITY))
	$(if $(SIMILARITY),,$(BIN)/python benchmarks/similarity_learned.py bench-cache)

profiles: $(VENV)/.installed-dev  ## execution profiles of 20 programs in bench-cache/profiles (PROFILES="--scale 0.1")
	@sh scripts/install-system-packages.sh profiles
	mkdir -p bench-cache
	$(BIN)/python benchmarks/profiles.py bench-cache $(PROFILES)

signatures: $(VENV)/.installed-dev  ## points that three programs share, by learned signatures (SIGNATURES=--small)
	@sh scripts/install-system-packages.sh profiles
	mkdir -p bench-cache
	$(BIN)/python benchmarks/signatures.py bench-cache $(SIGNATURES)

soak: $(VENV)/.installed-dev  ## commands at random, killed and continued, in bench-cache/soak-… (MINUTES=60)
	mkdir -p bench-cache
	$(BIN)/python benchmarks/soak.py bench-cache/soak-$$(date +%s) --minutes $(or $(MINUTES),60)

docs: $(VENV)/.installed-dev  ## the site, in site/
	$(BIN)/python scripts/reference.py build-cache/reference
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . site

clean:  ## remove the demo and caches
	rm -rf demo dist site build-cache bench-cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian packages that some tests use; without root or apt those tests are skipped.
system-packages:
	@sh scripts/install-system-packages.sh

# Each stamp says that its packages are installed as pyproject.toml and constraints.txt have it.
# The build backends come from constraints.txt too, hence no isolated build; DeepSpeed, which there is
# as sources only, is built by setuptools.
$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokmill needs Python 3.11: make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed-demo: $(VENV)/.made pyproject.toml constraints.txt Makefile
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e '.[text,train,x86,plot]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml constraints.txt tests/parity/readers.txt
	$(INSTALL) hatchling editables setuptools
	$(INSTALL) --no-build-isolation -e '.[dev]'
	$(INSTALL) --no-deps -r tests/parity/readers.txt
	touch $@

# What tokmill is measured against lives apart: its packages are not ours.
$(VENV)-peers/.installed: benchmarks/requirements.txt benchmarks/streaming.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install -q $(PIP_ARGS) -r benchmarks/requirements.txt
	$(VENV)-peers/bin/python -m pip install -q $(PIP_ARGS) --no-deps -r benchmarks/streaming.txt
	touch $@

# angr, which tests and benchmarks compare with, wants versions that are too old for the others.
$(VENV)-angr/.installed: benchmarks/angr.txt
	$(PYTHON) -m venv $(VENV)-angr
	$(VENV)-angr/bin/python -m pip install -q $(PIP_ARGS) -r benchmarks/angr.txt
	touch $@
