"""A server-less app on a database of its own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import accuracy_job, cli
from db.engine import open_database
from planner.accuracy import AccuracyReport

ROOT = Path(__file__).resolve().parents[2]
TINY_CONFIG = (
    '{"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, '
    '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}'
)
DECODING_CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def predicted_rows(recorded_reports: Callable[[], Mapping[str, AccuracyReport]]) -> Iterator[None]:
    """Predict for each recorded row once, though every test has a database of its own.

    A row's id is a hash of what it holds.
    """
    report_of = accuracy_job._report_of

    def remembered(row: Mapping[str, Any]) -> AccuracyReport:
        return recorded_reports().get(row["id"]) or report_of(row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy_job, "_report_of", remembered)
        yield


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database as a first start makes it, with all recorded rows: two seconds, once."""
    path = tmp_path_factory.mktemp("database") / "new.db"
    open_database(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def database_url(tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = shutil.copy(new_database, tmp_path / "app.db")
    url = f"sqlite:///{path}"
    monkeypatch.setenv("PEAKMARK_DATABASE_URL", url)
    return url


@pytest.fixture
def opened(database_url: str) -> Callable[..., AppTest]:
    """Open the app as a browser would, with the given URL parameters."""

    def run(**query: str) -> AppTest:
        app = AppTest.from_file(str(ROOT / "app" / "streamlit_app.py"), default_timeout=300)
        for key, value in query.items():
            app.query_params[key] = value
        return app.run()

    return run


@pytest.fixture
def tiny_config() -> str:
    return TINY_CONFIG


@pytest.fixture
def run(
    tmp_path: Path,
    new_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line on a database of its own; gives exit code, stdout and stderr."""
    path = shutil.copy(new_database, tmp_path / "peakmark.db")
    monkeypatch.setenv("PEAKMARK_DATABASE_URL", str(path))
    # Wide enough that no sentence is wrapped.
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["peakmark", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that a command starts compute with one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def decoding_config(tmp_path: Path) -> str:
    """A file of a model of 64 positions, quick to decode on a CPU."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(DECODING_CONFIG))
    return str(path)
