"""What a run printed, where its files are on this host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LOG_TAIL_BYTES = 20_000
OWN_LOGS = ("stdout.log", "stderr.log", "supervisor.log")
RANK_LOGS = "ranks/**/std*.log"


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
