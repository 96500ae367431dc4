#!/usr/bin/env bash
# The product on this machine: database upgraded and filled, worker and dashboard started.
# Ctrl-C (or the end of either this script or its terminal) stops both.
set -euo pipefail
cd "$(dirname "$0")/.."

address=127.0.0.1
port=8501
python=.venv/bin/python

if ! "$python" - "$address" "$port" <<'PY'
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sys.exit(probe.connect_ex((sys.argv[1], int(sys.argv[2]))) == 0)
PY
then
  echo "peakmark: port $port is taken (perhaps by another \`make run\`): stop that program first" >&2
  exit 1
fi

shopt -s nullglob
recorded=(recorded/*.jsonl)
if [ "${#recorded[@]}" -gt 0 ]; then
  # Into a database of an earlier start: a new one begins with them. Only what is wrong is told.
  .venv/bin/peakmark import --json "${recorded[@]}" >/dev/null
fi

pids=()
stop() {
  trap - EXIT INT TERM HUP
  if [ "${#pids[@]}" -gt 0 ]; then
    kill "${pids[@]}" 2>/dev/null || true
    wait "${pids[@]}" 2>/dev/null || true
  fi
}
trap stop EXIT
trap 'stop; exit 0' INT TERM HUP

"$python" -m runners.worker &
pids+=("$!")
"$python" -m streamlit run app/streamlit_app.py \
  --server.address "$address" --server.port "$port" --server.headless true &
pids+=("$!")
echo "peakmark: http://$address:$port (Ctrl-C stops it)"
# The dashboard can do without a worker and says so; the worker alone is not the product.
wait "${pids[1]}"
