#!/usr/bin/env bash
# Builds .venv and installs Peakmark in it (editable). `setup.sh dev` adds what the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

find_python() {
  local candidate
  for candidate in "${PEAKMARK_PYTHON:-}" python3 python3.11 python3.12 python3.13; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

require_python() {
  python=$(find_python) || install_packages python3 python3-venv || return 1
  if ! python=$(find_python); then
    echo "peakmark: Python 3.11 or newer is needed and python3 is" \
      "$(python3 -V 2>&1); install a newer one or set PEAKMARK_PYTHON to its path" >&2
    return 1
  fi
  "$python" -c 'import venv, ensurepip' 2>/dev/null || install_packages python3-venv
}

# Triton compiles a small C launcher at run time: with a GPU, a compiler and Python.h are needed.
require_compiler() {
  command -v nvidia-smi >/dev/null || return 0
  local header
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  if ! command -v gcc >/dev/null || [ ! -e "$header" ]; then
    install_packages gcc libc6-dev python3-dev ||
      echo "peakmark: going on; the Triton kernels will not run until they are installed" >&2
  fi
}

require_python
require_compiler
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --clear .venv
fi
target=.
if [ "${1:-}" = dev ]; then
  target='.[dev]'
fi
echo "peakmark: installing into .venv (the first time takes a few minutes: torch is large)"
.venv/bin/python -m pip install -q --no-compile -e "$target"
# By all cores, where pip would take one; what is no Python of today is left as pip leaves it.
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
touch .venv/.installed
if [ "${1:-}" = dev ]; then
  touch .venv/.installed-dev
fi
