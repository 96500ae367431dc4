"""What a job tells while it runs: JSON lines that pages and the command line follow."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class EventLog:
    """JSON lines of one rank: {"t", "rank", "event", ...}, readable while the job runs."""

    def __init__(self, out_dir: Path, rank: int) -> None:
        self._rank = rank
        self._file = (out_dir / f"events-rank{rank}.jsonl").open("a", buffering=1)

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"t": moment, "rank": self._rank, "event": event, **fields}
        self._file.write(json.dumps(line) + "\n")

    def phase(self, name: str, **fields: Any) -> None:
        """Append a phase mark."""
        self.emit("phase", name=name, **fields)
