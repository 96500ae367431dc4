#!/usr/bin/env bash
# Prints the path of a Chromium that starts; installs Debian's package when it may.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/packages.sh

find_chromium() {
  local candidate
  for candidate in "${PEAKMARK_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
    # Ubuntu's package can be a stub that only points to a snap, so ask it for its version.
    if "$candidate" --version >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

if ! find_chromium; then
  install_packages chromium || true
  if ! find_chromium; then
    echo "peakmark: the browser tests need Chromium or Chrome; install one" \
      "or set PEAKMARK_CHROMIUM to its path" >&2
    exit 1
  fi
fi
