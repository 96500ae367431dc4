#!/bin/sh
# The container's command: `web`, `worker`, or any `peakmark` command with its options.
set -eu
case "${1:-web}" in
  web)
    python -m db.upgrade
    exec python -m streamlit run app/streamlit_app.py \
      --server.address 0.0.0.0 --server.port 8501 --server.headless true
    ;;
  worker) exec python -m runners.worker ;;
  *) exec peakmark "$@" ;;
esac
