"""What tests of several folders share."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from planner.accuracy import AccuracyReport, accuracy_report
from planner.records import RecordedRow, read_file

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
Reports = dict[str, AccuracyReport]
# Rooms whose files take long come first, so that two workers end at about the same time.
LONG_FIRST = ("browser", "house", "runners", "kernels", "app")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of rooms in `LONG_FIRST` before all others; each room keeps its order."""
    rooms = {room: place for place, room in enumerate(LONG_FIRST)}
    tests = RECORDED.parent / "tests"
    items.sort(key=lambda item: rooms.get(item.path.relative_to(tests).parts[0], len(rooms)))


@pytest.fixture(scope="session")
def recorded_rows() -> list[RecordedRow]:
    """The rows of every recorded file, in the order of the files' names."""
    rows = [row for path in sorted(RECORDED.glob("*.jsonl")) for row in read_file(path)]
    assert rows, "recorded/ holds no rows"
    return rows


@pytest.fixture(scope="session")
def recorded_reports(
    recorded_rows: list[RecordedRow], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Reports]:
    """Return today's report over each recorded row by its id, predicted once for all tests.

    At the first call, in whichever process of this session comes first: the others read its file.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / "recorded_reports.pickle"

    @cache
    def reports() -> Reports:
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                found = {row.id: accuracy_report([row]) for row in recorded_rows}
                kept.write_bytes(pickle.dumps(found))
            loaded: Reports = pickle.loads(kept.read_bytes())
            return loaded

    return reports
