"""Calibrations in the database, made here or imported, as the Hardware page shows them."""

from __future__ import annotations

from typing import Any

from app import services
from db.measurements import measurements
from db.types import RunKind
from planner.comparison import gpu_name


def stored_calibrations() -> list[dict[str, Any]]:
    """Return the newest calibration of each GPU, number of them and world, newest first.

    A dictionary each: `name` in words, `measured`, `environment` and, where one was made here, `run`.
    """
    newest: dict[tuple[str, int, str], dict[str, Any]] = {}
    for seen in measurements(services.database(), kinds=[RunKind.CALIBRATE]):
        if not seen.measured.get("curves"):
            continue
        asked = seen.spec.get("calibration") or {}
        place = (gpu_name(seen.environment), int(asked.get("world_size", 1)), seen.spec["world"])
        newest.pop(place, None)
        newest[place] = {
            "name": _words(*place, seen.recorded_at, seen.environment),
            "measured": seen.measured,
            "environment": seen.environment,
            "run": seen.run_id,
        }
    return list(newest.values())[::-1]


def _words(gpu: str, number: int, world: str, recorded_at: str, environment: dict[str, Any]) -> str:
    what = f"{number} CPU {'process' if number == 1 else 'processes'}"
    if gpu != "none":
        what = f"{number} x {gpu}"
    torch = (environment.get("versions") or {}).get("torch")
    software = f", torch {torch}" if torch else ""
    return f"{what}, world {world}, {recorded_at[:10]}{software}"
