from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from db.database import Database
from db.engine import open_database
from db.measurements import measurements
from db.recorded import RECORDED_DIRECTORY, load_files, load_recorded
from db.types import Origin, Role, RunState
from planner.records import row_id


def row(allocated_bytes: int, **changes: Any) -> str:
    spec = {"schema": 1, "kind": "train_step", "world": "solo", "plan": {"schema": 1}}
    spec |= changes.pop("spec", {})
    measured = {"allocated_bytes": allocated_bytes}
    environment = {"gpu": {"name": "NVIDIA H200"}}
    fields = {
        "schema": 1,
        "id": row_id(spec, measured, environment),
        "kind": "train_step",
        "recorded_at": "2026-11-29T12:00:00Z",
        "role": "evidence",
        "spec": spec,
        "outcome": "done",
        "measured": measured,
        "environment": environment,
    }
    return json.dumps({**fields, **changes})


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_new_database_is_filled_at_its_first_opening_only(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    write(recorded, "a.jsonl", row(1), row(2, role="calibration"), row(4, role="holdout"))
    file = str(tmp_path / "x.db")
    seen = measurements(open_database(file, recorded=recorded))
    assert [(m.measured["allocated_bytes"], m.role, m.origin) for m in seen] == [
        (1, Role.EVIDENCE, Origin.RECORDED),
        (2, Role.CALIBRATION, Origin.RECORDED),
        (4, Role.HOLDOUT, Origin.RECORDED),
    ]
    write(recorded, "b.jsonl", row(3))
    assert len(measurements(open_database(file, recorded=recorded))) == 3


def test_loading_again_adds_only_what_is_new(database: Database, tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", row(1), row(2))
    first = load_recorded(database, tmp_path)
    write(tmp_path, "a.jsonl", row(1), "", row(2), row(3), row(3))
    second = load_recorded(database, tmp_path)
    assert (first.loaded, first.known, first.problems) == (2, 0, ())
    assert (second.loaded, second.known) == (1, 3)
    assert len(measurements(database)) == 3


def test_a_bad_line_is_named_and_the_others_are_kept(database: Database, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "bad.jsonl",
        row(1),
        "{cut",
        row(2, id="0" * 16),
        row(3, outcome="splendid"),
        row(4, spec={"world": "moon"}),
        "[" * 100_000,
        row(5, outcome="oom_device"),
    )
    report = load_files(database, [file, tmp_path / "missing.jsonl"])
    assert report.loaded == 2
    places = [problem.split(":")[0] for problem in report.problems]
    assert places == [
        *(f"bad.jsonl, line {n}" for n in (2, 3, 4, 5, 6)),
        "missing.jsonl cannot be read",
    ]
    assert [m.outcome for m in measurements(database)] == [RunState.DONE, RunState.OOM_DEVICE]


def test_a_file_without_an_end_is_read_to_its_first_long_line(
    database: Database, tmp_path: Path
) -> None:
    long = write(tmp_path, "long.jsonl", row(1), "1" * 5_000, "x" * 1_000_001, row(2))
    report = load_files(database, [long, Path("/dev/zero")])
    assert report.loaded == 1
    too_long = "the line is longer than 1,000,000 characters. No more of that file was read."
    assert report.problems == (
        "long.jsonl, line 2: the line is not JSON.",
        f"long.jsonl, line 3: {too_long}",
        f"zero, line 1: {too_long}",
    )


def test_a_stored_row_comes_back_as_it_was(database: Database, tmp_path: Path) -> None:
    file = write(tmp_path, "a.jsonl", row(1))
    load_files(database, [file])
    [seen] = measurements(database)
    assert seen.to_row() == json.loads(row(1))


def test_every_row_that_we_ship_loads(database: Database) -> None:
    report = load_recorded(database, RECORDED_DIRECTORY)
    assert report.problems == ()
    lines = [
        line
        for file in RECORDED_DIRECTORY.glob("*.jsonl")
        for line in file.read_text().splitlines()
        if line.strip()
    ]
    assert report.loaded == len(lines)


def test_withdrawn_rows_leave_a_database_that_has_them(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'a.sqlite'}", recorded=None)
    kept, old = row(100), row(200)
    write(tmp_path, "a.jsonl", kept, old)
    load_recorded(database, tmp_path)
    assert len(measurements(database)) == 2
    write(tmp_path, "a.jsonl", kept)
    withdrawn = {"withdrawals": [{"why": "an older engine", "ids": [json.loads(old)["id"]]}]}
    write(tmp_path, "withdrawn.json", json.dumps(withdrawn))
    load_recorded(database, tmp_path)
    assert [found.id for found in measurements(database)] == [json.loads(kept)["id"]]


def test_no_recorded_row_is_withdrawn() -> None:
    withdrawals = json.loads((RECORDED_DIRECTORY / "withdrawn.json").read_text())["withdrawals"]
    shipped = {
        json.loads(line)["id"]
        for file in RECORDED_DIRECTORY.glob("*.jsonl")
        for line in file.read_text().splitlines()
    }
    assert all(withdrawal["why"] for withdrawal in withdrawals)
    assert [len(set(withdrawal["ids"])) for withdrawal in withdrawals] == [147, 140, 9, 9, 16]
    assert shipped.isdisjoint(row_id for w in withdrawals for row_id in w["ids"])
