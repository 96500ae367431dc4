"""Recorded rows: measurements made on real devices, as JSON lines with their environment.

The format is described in recorded/README.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    StringConstraints,
    ValidationError,
)

from planner.checks import canonical_json
from planner.errors import PlanError, describe_value

SCHEMA = 1
MAX_LINE_CHARACTERS = 1_000_000


class Kind(StrEnum):
    """The jobs whose results are recorded."""

    TRAIN_STEP = "train_step"
    ATTENTION = "attention"
    CALIBRATE = "calibrate"
    DECODE = "decode"
    SERVE = "serve"
    PROFILE = "profile"
    QUALITY = "quality"
    LIMIT = "limit"


# What the spec of each kind must hold one of.
_SPEC_PARTS = {
    Kind.TRAIN_STEP: ("plan",),
    Kind.ATTENTION: ("attention",),
    Kind.CALIBRATE: ("calibration",),
    Kind.DECODE: ("decode",),
    Kind.SERVE: ("serve",),
    Kind.PROFILE: ("plan", "decode"),
    Kind.QUALITY: ("quality",),
    Kind.LIMIT: ("limit",),
}


class Role(StrEnum):
    """Whether a row counts in accuracy.

    `holdout` is evidence chosen before the formulas were tuned and never used for tuning: it counts
    with the rest and is reported apart too. Calibration rows fitted a constant and never count.
    """

    EVIDENCE = "evidence"
    HOLDOUT = "holdout"
    CALIBRATION = "calibration"


class RecordError(ValueError):
    """A recorded row that cannot be used; `field` names the part at fault, `str()` the reason."""

    def __init__(self, field: str, sentence: str) -> None:
        self.field = field
        super().__init__(sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """One measurement: what was run, how it ended, what was seen and where."""

    id: str
    kind: Kind
    recorded_at: datetime
    role: Role
    spec: Mapping[str, Any] = field(hash=False)
    outcome: str
    measured: Mapping[str, Any] = field(hash=False)
    environment: Mapping[str, Any] = field(hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema version."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "kind": self.kind.value,
            "recorded_at": self.recorded_at.isoformat().replace("+00:00", "Z"),
            "role": self.role.value,
            "spec": dict(self.spec),
            "outcome": self.outcome,
            "measured": dict(self.measured),
            "environment": dict(self.environment),
        }


def _require_utc(moment: datetime) -> datetime:
    if moment.utcoffset() != timedelta(0):
        raise ValueError("must be in UTC")
    return moment


class _Row(BaseModel):
    """The shape of one line; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    schema_: Literal[1]
    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    kind: Kind
    recorded_at: Annotated[AwareDatetime, AfterValidator(_require_utc)]
    role: Role
    spec: dict[str, Any]
    outcome: Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,32}$")]
    measured: dict[str, Any]
    environment: dict[str, Any]


def row_id(
    spec: Mapping[str, Any], measured: Mapping[str, Any], environment: Mapping[str, Any]
) -> str:
    """Return the first 16 hex digits of the SHA-256 of the canonical JSON of the three parts.

    Raises PlanError where a part holds what JSON cannot, such as NaN.
    """
    parts = {"spec": spec, "measured": measured, "environment": environment}
    return hashlib.sha256(canonical_json("row", parts).encode("ascii")).hexdigest()[:16]


def parse_row(data: object) -> RecordedRow:
    """Check one row and its id; raises RecordError naming the field at fault."""
    if not isinstance(data, Mapping):
        raise RecordError("row", f"A recorded row is {describe_value(data)}: it must be an object.")
    renamed = {("schema_" if key == "schema" else key): value for key, value in data.items()}
    try:
        row = _Row.model_validate(renamed)
    except ValidationError as error:
        raise _describe(error) from None
    _check_spec(row.kind, row.spec)
    _check_id(row)
    return RecordedRow(**row.model_dump(exclude={"schema_"}))


def _check_spec(kind: Kind, spec: Mapping[str, Any]) -> None:
    if spec.get("kind") != kind.value:
        found = describe_value(spec.get("kind"))
        raise RecordError("spec.kind", f"spec.kind is {found}: it must be the row's kind, {kind}.")
    needed = _SPEC_PARTS[kind]
    if not any(isinstance(spec.get(name), Mapping) for name in needed):
        names = " or ".join(f"spec.{name}" for name in needed)
        raise RecordError(f"spec.{needed[0]}", f"{names} is missing: a {kind} row needs it.")


def _check_id(row: _Row) -> None:
    try:
        expected = row_id(row.spec, row.measured, row.environment)
    except PlanError as error:
        raise RecordError(error.field, str(error)) from None
    if row.id != expected:
        raise RecordError(
            "id",
            f"id is {row.id!r}, but the row's content gives {expected!r}: the row was changed.",
        )


def _describe(error: ValidationError) -> RecordError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]).replace("schema_", "schema")
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return RecordError(name, f"{name} is missing.")
    if first["type"] == "extra_forbidden":
        return RecordError(name, f"{name} is not a field of a recorded row.")
    return RecordError(name, f"{name} is {describe_value(first['input'])}: {reason}.")


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; of one that is too long, only as much as shows that."""
    return iter(lambda: file.readline(MAX_LINE_CHARACTERS + 1), "")


def check_length(line: str, place: str) -> None:
    """Raise RecordError for a line that is too long to be a row."""
    if len(line) > MAX_LINE_CHARACTERS:
        raise RecordError(
            "row", f"{place}: the line is longer than {MAX_LINE_CHARACTERS:,} characters."
        )


def read_rows(lines: Iterable[str], source: str) -> Iterator[RecordedRow]:
    """Parse JSON lines; raises RecordError that names `source` and the line. Blank lines pass."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        check_length(line, place)
        try:
            yield parse_row(json.loads(line))
        except RecordError as error:
            raise RecordError(error.field, f"{place}: {error}") from None
        except (ValueError, RecursionError):
            raise RecordError("row", f"{place}: the line is not JSON.") from None


def read_file(path: Path) -> list[RecordedRow]:
    """Read one file of recorded rows; raises RecordError, also when it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return list(read_rows(bounded_lines(file), path.name))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecordError("file", f"{path} cannot be read: {reason}.") from None
