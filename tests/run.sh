#!/usr/bin/env bash
# Set up a virtual environment and run the tests: bash tests/run.sh [pytest arguments]
#   VENV=dir          where the environment goes (default .venv)
#   PYTHON=python3    the interpreter to make it with
#   TRANSFORMERS=...  a requirement for transformers, such as transformers==5.17.0 (default: the newest)
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${VENV:-.venv}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]' \
    ${TRANSFORMERS:+"$TRANSFORMERS"}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
exec "$venv/bin/python" -m pytest -q "$@"
