#!/usr/bin/env bash
# Makes a virtual environment with d5suite and the frameworks EXTRAS, unless ENVIRONMENT names one.
set -euo pipefail
d5suite=$(cd "$GITHUB_ACTION_PATH/../../.." && pwd)

if [[ -n $ENVIRONMENT ]]; then
    [[ -x $ENVIRONMENT/bin/d5suite ]] || {
        echo "::error::environment $ENVIRONMENT has no bin/d5suite: install d5suite there, or leave the input empty"
        exit 2
    }
    exit 0
fi
"$PYTHON" -m venv "$RUNNER_TEMP/d5suite"
"$RUNNER_TEMP/d5suite/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$d5suite/constraints.txt" "$d5suite[$EXTRAS]"
