#!/usr/bin/env bash
# Every check of a change: lint, format, types, tests. GPU tests run where there is a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

PEAKMARK_CHROMIUM=$(scripts/chromium.sh)
export PEAKMARK_CHROMIUM
.venv/bin/ruff check .
.venv/bin/ruff format --check .
MYPY_NUM_WORKERS=2 .venv/bin/mypy
# The allocator's replay is compiled once here, not by every process of the tests that comes first.
.venv/bin/python -c 'from planner.memory.recorder import load_compiled; load_compiled()' || true
# Two files of tests at a time, each in one process, in the order of tests/conftest.py; a GPU's memory is
# not shared between two.
chosen=()
if ! nvidia-smi -L >/dev/null 2>&1; then
  chosen=(-m 'not gpu' -n 2 --dist loadfile --no-loadscope-reorder)
fi
# Gloo tests start several processes; one thread each keeps two cores from thrashing.
OMP_NUM_THREADS=1 .venv/bin/python -m pytest "${chosen[@]}"
