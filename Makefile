# make quickstart: set up and train the packaged model.   make test: set up and check everything.
# Both work from a fresh clone; all they need is GNU make and Python 3.11 or newer.

VENV := .venv
BIN := $(VENV)/bin
# Newer than both files it depends on: what they ask for is installed.
STAMP := $(VENV)/.set-up
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint unit test-slow test-peers test-hosts study study-small clean

help:
	@echo "make quickstart  train the packaged model (about three minutes on two cores)"
	@echo "make test        lint, types, import contracts and tests (under ten minutes)"
	@echo "make setup       only create $(VENV) and install everything"
	@echo "make lint        only lint, types and import contracts"
	@echo "make unit        only the tests"
	@echo "make test-slow   the tests that take minutes"
	@echo "make test-peers  our losses against those of verl and TRL (3.4 GB, five minutes)"
	@echo "make test-hosts  adapters against the real verl, TorchTitan and DeepSpeed (some GB each)"
	@echo "make study-small the small grid of the study (about ten minutes)"
	@echo "make study       the whole grid (hours; goes on where it was stopped)"
	@echo "make clean       remove $(VENV) and caches"

# Tests start processes of their own. Two that keep both cores busy while they wait are 30 times
# slower than two that sleep. A run sets this itself.
lint unit test-slow: export OMP_NUM_THREADS ?= 1
lint unit test-slow: export OMP_WAIT_POLICY ?= passive

setup: $(STAMP)

# pip keeps what is installed already, so this is quick in a venv that somebody made by hand.
# The constraint selects the CPU build of torch; with a GPU, install without it (see README).
$(STAMP): pyproject.toml constraints-cpu.txt
	@for python in python3.11 python3.12 python3.13 python3.14 python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			test -x $(BIN)/python || $$python -m venv $(VENV); \
			exit $$?; \
		fi; \
	done; \
	echo "make setup: Python 3.11 or newer is needed, as python3.11 (or newer) or python3" >&2; \
	exit 1
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
		-c constraints-cpu.txt -e '.[dev]'
	@touch $@

quickstart: setup
	$(BIN)/sidestep train

test: lint unit

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two at a time, each file's tests together: they share what is costly to set up.
unit: setup
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: setup
	$(BIN)/pytest -m slow

# Sidestep's losses against verl's and TRL's, each in an environment of its own: their pins fight.
PEERS := verl trl

test-peers: $(PEERS:%=test-peers-%)

test-peers-%: export OMP_NUM_THREADS ?= 1
test-peers-%: export OMP_WAIT_POLICY ?= passive
test-peers-%: .venv-peers/%/.set-up
	.venv-peers/$*/bin/python -m pytest -m peers tests/peers

.PRECIOUS: .venv-peers/%/.set-up
.venv-peers/%/.set-up: tests/peers/requirements-%.txt constraints-cpu.txt pyproject.toml $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet \
		-c constraints-cpu.txt -r $<
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -e .
	@touch $@

# Adapters against their hosts, each in an environment of its own.
HOSTS := verl torchtitan deepspeed

test-hosts: $(HOSTS:%=test-hosts-%)

test-hosts-%: export OMP_NUM_THREADS ?= 1
test-hosts-%: export OMP_WAIT_POLICY ?= passive
test-hosts-%: .venv-hosts/%/.set-up
	.venv-hosts/$*/bin/python -m pytest -m hosts tests/integrations/test_integrations_$*.py

# DeepSpeed imports torch while it is built, and compiles nothing with DS_BUILD_OPS=0.
.PRECIOUS: .venv-hosts/%/.set-up
.venv-hosts/%/.set-up: tests/integrations/requirements-%.txt constraints-cpu.txt pyproject.toml $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet \
		-c constraints-cpu.txt torch setuptools wheel ninja
	DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --disable-pip-version-check --quiet \
		--no-build-isolation -c constraints-cpu.txt -r $<
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -e .
	@touch $@

study: setup
	$(BIN)/sidestep study studies/full.toml

study-small: setup
	$(BIN)/sidestep study studies/small.toml

clean:
	rm -rf $(VENV) .venv-peers .venv-hosts build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
