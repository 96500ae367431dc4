from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db.database import Database
from db.engine import open_database


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "peakmark.db"


@pytest.fixture
def database(file: Path) -> Iterator[Database]:
    database = open_database(str(file), recorded=None)
    yield database
    database.close()
