# `make study` trains the first study and prints its tables; `make test` checks everything.
# Both set themselves up: a virtual environment in .venv with the versions that setup.py pins.
#
# Without a GPU, PyTorch's CPU wheels save gigabytes:  make setup PIP_ARGS="--extra-index-url URL"

PYTHON ?= python3
PIP_ARGS ?=
PY := .venv/bin/python
STUDY ?= parity

.PHONY: help setup study render report test check format clean
.DEFAULT_GOAL := help

help:
	@echo "make study    train every engine and split on this machine, print the tables (7 minutes)"
	@echo "make test     run the tests (12 minutes)"
	@echo "make setup    only build .venv"
	@echo "make check    only what is fast: format, lint, and that no table in Markdown is stale"
	@echo "make report   write the tables and pictures of README.md and logs/README.md again"
	@echo "make render   write slurm/<study>/*.slurm of every study again"
	@echo "make format   let ruff format the code"
	@echo "make clean    remove .venv (logs stay)"

setup: .venv/installed

.venv/installed: setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); try: make setup PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[test]'
	@touch $@

study: setup
	$(PY) -m parallel.data --if-missing
	$(PY) -m parallel.sweep slurm/$(STUDY).toml
	$(PY) -m analysis.tflops logs/$(STUDY)
	$(PY) -m analysis.parity --check logs/$(STUDY)

render: setup
	$(PY) -m slurm.render slurm/*.toml

report: setup
	$(PY) -m analysis.report README.md logs/README.md
	$(PY) -m analysis.plots

test: setup check
	$(PY) -m pytest

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m analysis.report --check README.md logs/README.md

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf .venv
