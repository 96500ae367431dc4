#!/usr/bin/env bash
# Every check of a change: lint, format, types, tests. GPU tests run where there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

PEAKMARK_CHROMIUM=$(scripts/chromium.sh)
export PEAKMARK_CHROMIUM
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
marks=()
if ! nvidia-smi -L >/dev/null 2>&1; then
  marks=(-m 'not gpu')
fi
# Gloo tests start several processes; one thread each keeps two cores from thrashing.
OMP_NUM_THREADS=1 .venv/bin/python -m pytest "${marks[@]}"
