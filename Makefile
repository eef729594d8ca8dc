# Everything runs in a virtual environment of the project's own, made when it is first needed.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
DATA ?=

.PHONY: help demo test test-all check lint bench peers docs clean

help:
	@echo "make demo      train a head twice, plainly and near the data (DATA=folder uses your class folders)"
	@echo "make test      the tests (under 10 minutes on two cores)"
	@echo "make test-all  the tests and the slow sweeps"
	@echo "make check     ruff, mypy, tests: what CI runs"
	@echo "make bench     list the benchmarks; python -m bench NAME runs one"
	@echo "make peers     install what bench offload compares with"
	@echo "make docs      build the site of the documents into site/"

# torch first and from its pin: a range would pull the newest build with all its accelerator packages.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/test: $(VENV)/demo pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: $(VENV)/demo
	$(BIN)/python examples/demo.py $(if $(DATA),--data '$(DATA)')

test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

$(VENV)/test-all: $(VENV)/test pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test-all]'
	@touch $@

test-all: $(VENV)/test-all
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -m ''

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

bench: $(VENV)/test
	$(BIN)/python -m bench --list

# mosaicml-streaming asks for older numpy and transformers than ours, and works with these.
$(VENV)/peers: $(VENV)/test pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps mosaicml-streaming
	@touch $@

peers: $(VENV)/peers

# Without torch: nothing of ours is imported for it.
$(VENV)/docs: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/docs
	$(BIN)/python -m website

clean:
	rm -rf $(VENV) build dist site demo-out examples-out .mypy_cache .pytest_cache .ruff_cache .hypothesis
