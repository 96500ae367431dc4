"""Plain data that leaves the database: no page or command ever holds a live row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from db.types import FINAL_STATES, Origin, Role, RunKind, RunState, RunWorld, VerdictState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of the run table: predicted and measured figures, no documents."""

    id: str
    kind: RunKind
    world: RunWorld
    state: RunState
    cancelling: bool
    priority: int
    attempt: int
    model_name: str | None
    hardware_name: str | None
    verdict: VerdictState | None
    predicted_allocated_bytes: int | None
    predicted_device_bytes: int | None
    predicted_step_time_s: float | None
    predicted_tokens_per_s: float | None
    measured_allocated_bytes: int | None
    measured_device_bytes: int | None
    measured_step_time_s: float | None
    measured_tokens_per_s: float | None
    why: str | None
    created_at_ms: int
    started_at_ms: int | None
    finished_at_ms: int | None

    @property
    def finished(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.state in FINAL_STATES

    @property
    def outcome(self) -> RunState | None:
        """How the run ended; None while it is queued or running."""
        return self.state if self.finished else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """Everything known of one run. `run_directory` holds its log files on the worker's host."""

    summary: RunSummary
    spec: dict[str, Any]
    plan: dict[str, Any] | None
    prediction: dict[str, Any] | None
    measured: dict[str, Any] | None
    error: dict[str, Any] | None
    environment: dict[str, Any] | None
    rerun_of_id: str | None
    host: str | None
    pid: int | None
    exit_code: int | None
    run_directory: str | None
    lease_token: int
    heartbeat_at_ms: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One change of a run's state: when, who, from, to, why."""

    at_ms: int
    who: str
    from_state: str | None
    to_state: str
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A stored measurement in the fields of the `recorded/` format, with where it was made."""

    id: str
    kind: RunKind
    recorded_at: str
    role: Role
    spec: dict[str, Any]
    outcome: RunState
    measured: dict[str, Any]
    environment: dict[str, Any]
    origin: Origin
    run_id: str | None

    def to_row(self) -> dict[str, Any]:
        """Return the row of the `recorded/` format."""
        names = ("id", "kind", "recorded_at", "role", "spec", "outcome", "measured", "environment")
        return {"schema": 1, **{name: getattr(self, name) for name in names}}
