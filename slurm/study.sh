#!/bin/bash
# Submits the runs of studies. Each slurm/<study>.slurm calls it:
#   bash slurm/study.sh STUDY.toml [OTHER.slurm ...] [OPTIONS of python -m slurm.submit]
set -uo pipefail

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import tomllib' 2>/dev/null || {
  echo "slurm/study.sh: $python is no Python 3.11 or newer: run make setup, or set PYTHON" >&2
  exit 2
}
exec "$python" -m slurm.submit "$@"
