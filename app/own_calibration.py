"""The calibrations made on this machine, at whose rates a plan of that GPU is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from db.database import Database, resolve_url
from db.measurements import measurements
from db.types import Origin, RunKind
from planner.hardware import Gpu
from planner.plan import Plan
from planner.speed.own import OwnCalibration, calibrated, own_calibrations


def calibrations_made_here(database: Database) -> dict[str, OwnCalibration]:
    """Return what `peakmark calibrate` measured here, by the id of the GPU's preset."""
    seen = measurements(database, kinds=[RunKind.CALIBRATE])
    return own_calibrations(one.to_row() for one in seen if one.origin is Origin.HERE)


def timed_here(plan: Plan) -> Plan:
    """Return a plan whose GPU has what was measured on its kind on this machine, if anything was."""
    return replace(plan, hardware=calibrated(plan.hardware, calibration_of(plan.hardware)))


def calibration_of(gpu: Gpu) -> OwnCalibration | None:
    """Return the calibration of a GPU from this machine's database, None without one or without it.

    A command that only predicts makes no database.
    """
    from db.engine import open_database

    place = resolve_url(None)
    if place.database is None or not Path(place.database).exists():
        return None
    database = open_database()
    try:
        return calibrations_made_here(database).get(gpu.id)
    finally:
        database.close()
