# `make study` trains the first study and prints its table; `make test` checks everything.
# Both set themselves up: a virtual environment in .venv with the versions of constraints.txt.
#
# Without a GPU, PyTorch's CPU wheels save gigabytes:  make setup PIP_ARGS="--extra-index-url URL"
# Optional packages of setup.py:  make setup EXTRAS=test,nvml,gpu

PYTHON ?= python3
EXTRAS ?= test
PROCESSES ?= 2
PIP_ARGS ?=
PY := .venv/bin/python
PYTEST = $(PY) -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
# What another Python, PyTorch or megatron-core can break: engines and one study, checkpoints and their
# doors, readers of what libraries write. The other tests are of our own words and numbers.
LIBRARIES = parity steps train_loop training_rules models experts routing documents middle_stages \
  transformer_engine rehearsal hugging_face folders_of_weights checkpoints_resume checkpoints_on_disk \
  checkpoints_read_ranges doors doors_deepspeed nothing_is_unpickled data breakdowns_add_up \
  profiles_tell_where_time_goes curves pictures page failures launch gpus_are_set_up gpu_check layouts_to_paste
PAGES = $(shell grep -rl --include=*.md '<!-- report:' README.md docs logs)

.PHONY: help setup study study-all measure render report picture test test-all test-libraries test-newest check format clean
.DEFAULT_GOAL := help

help:
	@echo "make study    train every engine and every split once on this machine, and print one table"
	@echo "make study-all   train every run of that study, a Llama, and experts, as CI does"
	@echo "make test     make check, then the tests without the slow ones, in two processes"
	@echo "make test-all make check, then every test, as CI does"
	@echo "make test-libraries   of make test what another version of a library can break"
	@echo "make test-newest   make test-libraries on Debian 13, with the newest libraries; needs root and 7 GB for a while"
	@echo "make setup    only build .venv"
	@echo "make check    check the format, the lint rules and that every table in Markdown is current"
	@echo "make report   write the tables, pictures and offline pages again"
	@echo "make measure  train the runs of logs/2-core-cpu again; from a clean tree, then make report picture"
	@echo "make picture  take README's picture of the offline page; needs chromium"
	@echo "make render   write slurm/<study>.slurm of every study in slurm/ again"
	@echo "make format   let ruff format the code"
	@echo "make clean    remove .venv (logs stay)"

setup: .venv/installed

.venv/installed: setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); try: make setup PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

study: setup
	$(PY) -m parallel.data --if-missing
	$(PY) -m parallel.sweep slurm/parity.toml slurm/parity-moe.toml --quick
	@parity="$(PY) -m analysis.parity --check logs/parity logs/parity-moe"; $$parity > /dev/null \
	  && echo "Losses and gradient norms are equal in all runs; by how much: $$parity" || $$parity

study-all: setup
	$(PY) -m parallel.data --if-missing
	$(PY) -m parallel.sweep slurm/parity.toml
	$(PY) -m parallel.sweep slurm/parity-llama.toml slurm/parity-moe.toml --quick
	$(PY) -m analysis.parity --check logs/parity logs/parity-llama logs/parity-moe

# .gitignore says which files of a run are committed; of the last two studies, their tables are.
measure: setup
	@test -z "$$(git status --porcelain)" || { echo "the tree is not clean: commit first" >&2; exit 2; }
	$(PY) -m parallel.data --if-missing
	rm -rf logs/2-core-cpu/parity logs/2-core-cpu/2-core_bucket_ab
	$(PY) -m parallel.sweep slurm/parity.toml --logs logs/2-core-cpu
	$(PY) -m parallel.sweep slurm/2-core_bucket_ab.toml --logs logs/2-core-cpu
	for model in llama qwen3 moe mla-moe; do \
	  $(PY) -m parallel.sweep slurm/parity-$$model.toml && \
	  $(PY) -m analysis.parity --format markdown logs/parity-$$model > logs/2-core-cpu/parity-$$model.md && \
	  echo "- code: $$(git rev-parse --short HEAD)" >> logs/2-core-cpu/parity-$$model.md || exit 1; done

render: setup
	$(PY) -m slurm.render slurm/*.toml

report: setup
	$(PY) -m benchmarks.published_tables $(PAGES)
	$(PY) -m analysis.page logs/2-core-cpu/parity --out logs/2-core-cpu/parity.html
	$(PY) -m analysis.proposal logs/2-core-cpu/parity --tokens 1e9 --plot docs/proposal.svg > /dev/null

picture: setup
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,850 --virtual-time-budget=5000 \
	  --screenshot=logs/plots/page.png file://$(CURDIR)/logs/2-core-cpu/parity.html
	$(PY) -c "from PIL import Image as I; p = 'logs/plots/page.png'; I.open(p).convert('RGB').quantize(256).save(p)"

test: setup check
	$(PYTEST) -m "not slow"

test-all: setup check
	$(PYTEST)

test-libraries: setup
	$(PYTEST) -m "not slow" $(LIBRARIES:%=tests/test_%.py)

test-newest:
	.ci/newest

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m benchmarks.published_tables --check $(PAGES)

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf .venv
