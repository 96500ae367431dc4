"""Recorded rows: every fault is named, and an id vouches for the content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.records import RecordError, Role, parse_row, read_file, read_rows, row_id

SPEC = {"kind": "train_step", "plan": {"job": "train"}}
MEASURED = {"allocated_bytes": 5}
ENVIRONMENT = {"gpu": "A"}
# Worked out by hand from the definition: sorted keys, no spaces.
CANONICAL = (
    '{"environment":{"gpu":"A"},"measured":{"allocated_bytes":5},'
    '"spec":{"kind":"train_step","plan":{"job":"train"}}}'
)
ID = hashlib.sha256(CANONICAL.encode()).hexdigest()[:16]


def row(**changes: Any) -> dict[str, Any]:
    base = {
        "schema": 1,
        "id": ID,
        "kind": "train_step",
        "recorded_at": "2026-11-29T12:00:00Z",
        "role": "evidence",
        "spec": SPEC,
        "outcome": "done",
        "measured": MEASURED,
        "environment": ENVIRONMENT,
    }
    return base | changes


def test_the_id_is_the_hash_of_spec_measured_and_environment() -> None:
    assert row_id(SPEC, MEASURED, ENVIRONMENT) == ID
    shuffled = {"plan": {"job": "train"}, "kind": "train_step"}
    assert row_id(shuffled, MEASURED, ENVIRONMENT) == ID


def test_a_row_survives_reading_and_writing() -> None:
    parsed = parse_row(row())
    assert parsed.role is Role.EVIDENCE
    assert parsed.to_dict() == row()


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"schema": 2}, "schema", "schema is 2"),
        ({"id": "xyz"}, "id", "id is 'xyz'"),
        ({"id": "0" * 16}, "id", "the row was changed"),
        ({"kind": "generate"}, "kind", "kind is 'generate'"),
        ({"kind": "attention"}, "spec.kind", "spec.kind is 'train_step'"),
        ({"recorded_at": "yesterday"}, "recorded_at", "recorded_at is 'yesterday'"),
        ({"recorded_at": "2026-11-29T12:00:00"}, "recorded_at", "timezone"),
        ({"recorded_at": "2026-11-29T12:00:00+02:00"}, "recorded_at", "UTC"),
        ({"role": "proof"}, "role", "role is 'proof'"),
        ({"spec": {"kind": "train_step"}}, "spec.plan", "spec.plan is missing"),
        ({"spec": []}, "spec", "spec is a list"),
        ({"outcome": "Out of memory!"}, "outcome", "outcome is 'Out of memory!'"),
        ({"measured": {"time_s": float("nan")}}, "row.measured.time_s", "NaN"),
        ({"note": 1}, "note", "note is not a field"),
    ],
)
def test_a_fault_names_its_field(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_row(row(**change))
    assert caught.value.field == field
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(row()))
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(RecordError, match=f"{name} is missing"):
        parse_row({key: value for key, value in row().items() if key != name})


@pytest.mark.parametrize("data", [None, 3, "text", [], [row()]])
def test_a_row_that_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(RecordError, match="must be an object"):
        parse_row(data)


def test_a_faulty_line_is_named_with_its_file() -> None:
    lines = [json.dumps(row()), "", json.dumps(row(role="proof"))]
    with pytest.raises(RecordError, match=r"^h200\.jsonl, line 3: role is"):
        list(read_rows(lines, "h200.jsonl"))


@pytest.mark.parametrize("line", ["{", "NaN,", "[" * 100_000])
def test_a_line_that_is_not_json_is_named(line: str) -> None:
    with pytest.raises(RecordError, match="line 1"):
        list(read_rows([line], "x.jsonl"))


def write_nothing(path: Path) -> None:
    pass


def write_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def write_binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (write_nothing, "No such file"),
        (write_binary, "not UTF-8"),
        (write_endless, "longer than 1,000,000 characters"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, write: Callable[[Path], None], words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    write(path)
    with pytest.raises(RecordError, match=words):
        read_file(path)
