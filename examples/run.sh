#!/usr/bin/env bash
# Set up a virtual environment and run the quickstart: bash examples/run.sh [arguments of examples/quickstart.py]
#   VENV=dir          where the environment goes (default .venv-examples)
#   PYTHON=python3    the interpreter to make it with
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${VENV:-.venv-examples}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[examples]'
exec "$venv/bin/python" examples/quickstart.py "$@"
