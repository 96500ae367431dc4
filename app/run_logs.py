"""What a run printed and told, where its files are on this host."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

LOG_TAIL_BYTES = 20_000
OWN_LOGS = ("stdout.log", "stderr.log", "supervisor.log")
RANK_LOGS = "ranks/**/std*.log"
EVENTS = "events-rank0.jsonl"


def log_tail(run_directory: str | None) -> str:
    """Return the end of a run's output; empty when its files are not on this host."""
    if run_directory is None:
        return ""
    directory = Path(run_directory)
    parts = []
    for path in (*(directory / name for name in OWN_LOGS), *sorted(directory.rglob(RANK_LOGS))):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace").strip()
            parts += [f"{path.relative_to(directory)}\n{text}"] if text else []
    return "\n\n".join(parts)


def trials_so_far(run_directory: str | None) -> list[dict[str, Any]]:
    """Return the runs that a search for a limit has ended; none where its files are not on this host."""
    if run_directory is None:
        return []
    found = []
    with suppress(OSError), (Path(run_directory) / EVENTS).open() as lines:
        for line in lines:
            # The last line may still be being written.
            with suppress(ValueError):
                event = json.loads(line)
                found += [event] if event["event"] == "trial" else []
    return found
