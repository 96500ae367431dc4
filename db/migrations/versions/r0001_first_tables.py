"""The first tables: plans, predictions, runs with their history, measurements, workers, GPUs."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Written out, not imported: a revision must stay what it was when the models move on.
_KINDS = ("train_step", "attention")
_WORLDS = ("nccl", "shared", "solo", "cpu")
_STATES = (
    "queued",
    "running",
    "done",
    "oom_device",
    "oom_host",
    "failed",
    "crashed",
    "timed_out",
    "cancelled",
    "lost",
)


def _integer() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _choice(name: str, *values: str) -> sa.Enum:
    return sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=24)


def _needed(name: str, kind: Any = None) -> sa.Column[Any]:
    return sa.Column(name, kind if kind is not None else _integer(), nullable=False)


def _optional(name: str, kind: Any = None) -> sa.Column[Any]:
    return sa.Column(name, kind if kind is not None else _integer(), nullable=True)


def _key(table: str, column: str = "id") -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(column, name=f"pk_{table}")


def _reference(table: str, column: str, other: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=f"fk_{table}_{column}_{other}")


def _unique(table: str, column: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(column, name=f"uq_{table}_{column}")


def _json() -> sa.JSON:
    return sa.JSON(none_as_null=True)


def upgrade() -> None:
    """Go to this revision."""
    _create_plan_and_environment()
    _create_prediction()
    _create_run()
    _create_run_event()
    _create_measurement()
    _create_worker_and_gpu_reservation()


def _create_plan_and_environment() -> None:
    op.create_table(
        "plan",
        _needed("id"),
        _needed("hash", sa.String(64)),
        _needed("document", _json()),
        _needed("job", sa.Text()),
        _needed("model_name", sa.Text()),
        _needed("hardware_name", sa.Text()),
        _needed("created_at_ms"),
        _key("plan"),
        _unique("plan", "hash"),
    )
    op.create_table(
        "environment",
        _needed("id"),
        _needed("hash", sa.String(64)),
        _needed("document", _json()),
        _optional("gpu_name", sa.Text()),
        _needed("created_at_ms"),
        _key("environment"),
        _unique("environment", "hash"),
    )


def _create_prediction() -> None:
    op.create_table(
        "prediction",
        _needed("id"),
        _optional("plan_id"),
        _needed("hash", sa.String(64)),
        _needed("document", _json()),
        _optional("planner_version", sa.Text()),
        _optional("allocated_bytes"),
        _optional("reserved_bytes"),
        _optional("device_bytes"),
        _optional("step_time_s", sa.Double()),
        _optional("tokens_per_s", sa.Double()),
        _optional("verdict", _choice("verdict", "fits", "tight", "does_not_fit")),
        _needed("created_at_ms"),
        _key("prediction"),
        _unique("prediction", "hash"),
        _reference("prediction", "plan_id", "plan"),
    )


def _create_run() -> None:
    op.create_table(
        "run",
        _needed("id", sa.String(32)),
        _needed("idempotency_key", sa.String(128)),
        _needed("kind", _choice("kind", *_KINDS)),
        _needed("world", _choice("world", *_WORLDS)),
        _needed("spec", _json()),
        _optional("plan_id"),
        _optional("prediction_id"),
        _optional("rerun_of_id", sa.String(32)),
        _needed("state", _choice("state", *_STATES)),
        _needed("priority"),
        _needed("attempt"),
        _optional("lease_owner", sa.Text()),
        _needed("lease_token"),
        _optional("lease_expires_at_ms"),
        _optional("heartbeat_at_ms"),
        _optional("cancel_requested_at_ms"),
        _optional("host", sa.Text()),
        _optional("pid"),
        _optional("pid_start_ticks"),
        _optional("run_directory", sa.Text()),
        _optional("exit_code"),
        _optional("why", sa.Text()),
        _needed("created_at_ms"),
        _optional("started_at_ms"),
        _optional("finished_at_ms"),
        _key("run"),
        _unique("run", "idempotency_key"),
        _reference("run", "plan_id", "plan"),
        _reference("run", "prediction_id", "prediction"),
        _reference("run", "rerun_of_id", "run"),
    )
    columns = ["state", "priority", "created_at_ms"]
    op.create_index("ix_run_state_priority_created_at_ms", "run", columns)


def _create_run_event() -> None:
    op.create_table(
        "run_event",
        _needed("id"),
        _needed("run_id", sa.String(32)),
        _needed("at_ms"),
        _needed("who", sa.Text()),
        _optional("from_state", sa.Text()),
        _needed("to_state", sa.Text()),
        _optional("why", sa.Text()),
        _key("run_event"),
        _reference("run_event", "run_id", "run"),
    )
    op.create_index("ix_run_event_run_id", "run_event", ["run_id"])


def _create_measurement() -> None:
    op.create_table(
        "measurement",
        _needed("id"),
        _needed("row_id", sa.String(64)),
        _optional("run_id", sa.String(32)),
        _needed("environment_id"),
        _needed("origin", _choice("origin", "here", "recorded")),
        _needed("role", _choice("role", "evidence", "calibration")),
        _needed("kind", _choice("kind", *_KINDS)),
        _needed("world", _choice("world", *_WORLDS)),
        _needed("outcome", _choice("state", *_STATES)),
        _needed("spec", _json()),
        _needed("measured", _json()),
        _optional("error", _json()),
        _needed("recorded_at", sa.Text()),
        _optional("allocated_bytes"),
        _optional("reserved_bytes"),
        _optional("device_bytes"),
        _optional("step_time_s", sa.Double()),
        _optional("tokens_per_s", sa.Double()),
        _key("measurement"),
        _unique("measurement", "run_id"),
        _reference("measurement", "run_id", "run"),
        _reference("measurement", "environment_id", "environment"),
    )
    op.create_index("ix_measurement_row_id", "measurement", ["row_id"])


def _create_worker_and_gpu_reservation() -> None:
    op.create_table(
        "worker",
        _needed("id", sa.Text()),
        _needed("host", sa.Text()),
        _needed("pid"),
        _needed("pid_start_ticks"),
        _needed("started_at_ms"),
        _needed("heartbeat_at_ms"),
        _optional("stopped_at_ms"),
        _key("worker"),
    )
    op.create_table(
        "gpu_reservation",
        _needed("device_uuid", sa.String(80)),
        _needed("run_id", sa.String(32)),
        _needed("lease_token"),
        _needed("reserved_at_ms"),
        _key("gpu_reservation", "device_uuid"),
        _reference("gpu_reservation", "run_id", "run"),
    )
    op.create_index("ix_gpu_reservation_run_id", "gpu_reservation", ["run_id"])
