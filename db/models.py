"""The tables. Times are epoch milliseconds, bytes are integers; whole documents are JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    Enum,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from db.types import Origin, Role, RunKind, RunState, RunWorld, VerdictState


def _choice(choices: type[StrEnum], name: str) -> Enum:
    """A string column that a CHECK limits to the values of `choices`."""
    return Enum(
        choices,
        name=name,
        native_enum=False,
        create_constraint=True,
        validate_strings=True,
        length=24,
        values_callable=lambda members: [member.value for member in members],
    )


class Base(DeclarativeBase):
    """Naming convention and column types of every table."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        # SQLite numbers rows only in a column of type INTEGER, which holds 64 bits there.
        int: BigInteger().with_variant(Integer(), "sqlite"),
        float: Double(),
        str: Text(),
        dict[str, Any]: JSON(none_as_null=True),
        RunState: _choice(RunState, "state"),
        RunKind: _choice(RunKind, "kind"),
        RunWorld: _choice(RunWorld, "world"),
        Role: _choice(Role, "role"),
        Origin: _choice(Origin, "origin"),
        VerdictState: _choice(VerdictState, "verdict"),
    }


class PlanRow(Base):
    """A plan, kept once however often it is run."""

    __tablename__ = "plan"

    id: Mapped[int] = mapped_column(primary_key=True)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    document: Mapped[dict[str, Any]]
    job: Mapped[str]
    model_name: Mapped[str]
    hardware_name: Mapped[str]
    created_at_ms: Mapped[int]


class PredictionRow(Base):
    """What the planner said of a plan when a run was asked for."""

    __tablename__ = "prediction"

    id: Mapped[int] = mapped_column(primary_key=True)
    plan_id: Mapped[int | None] = mapped_column(ForeignKey("plan.id"))
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    document: Mapped[dict[str, Any]]
    planner_version: Mapped[str | None]
    allocated_bytes: Mapped[int | None]
    reserved_bytes: Mapped[int | None]
    device_bytes: Mapped[int | None]
    step_time_s: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    verdict: Mapped[VerdictState | None]
    created_at_ms: Mapped[int]


class RunRow(Base):
    """One execution: what was asked, who holds it, and how it ended.

    `lease_token` grows by one with each claim; a write that names an old token changes nothing.
    """

    __tablename__ = "run"
    __table_args__ = (Index(None, "state", "priority", "created_at_ms"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(String(128), unique=True)
    kind: Mapped[RunKind]
    world: Mapped[RunWorld]
    spec: Mapped[dict[str, Any]]
    plan_id: Mapped[int | None] = mapped_column(ForeignKey("plan.id"))
    prediction_id: Mapped[int | None] = mapped_column(ForeignKey("prediction.id"))
    rerun_of_id: Mapped[str | None] = mapped_column(ForeignKey("run.id"))
    state: Mapped[RunState]
    priority: Mapped[int]
    attempt: Mapped[int]
    lease_owner: Mapped[str | None]
    lease_token: Mapped[int]
    lease_expires_at_ms: Mapped[int | None]
    heartbeat_at_ms: Mapped[int | None]
    cancel_requested_at_ms: Mapped[int | None]
    host: Mapped[str | None]
    pid: Mapped[int | None]
    pid_start_ticks: Mapped[int | None]
    run_directory: Mapped[str | None]
    exit_code: Mapped[int | None]
    why: Mapped[str | None]
    created_at_ms: Mapped[int]
    started_at_ms: Mapped[int | None]
    finished_at_ms: Mapped[int | None]

    plan: Mapped[PlanRow | None] = relationship()
    prediction: Mapped[PredictionRow | None] = relationship()
    measurement: Mapped[MeasurementRow | None] = relationship(viewonly=True)


class RunEventRow(Base):
    """One change of a run's state; rows are added, never changed."""

    __tablename__ = "run_event"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"), index=True)
    at_ms: Mapped[int]
    who: Mapped[str]
    from_state: Mapped[str | None]
    to_state: Mapped[str]
    why: Mapped[str | None]


class EnvironmentRow(Base):
    """The machine and software that a measurement was made with, kept once."""

    __tablename__ = "environment"

    id: Mapped[int] = mapped_column(primary_key=True)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    document: Mapped[dict[str, Any]]
    gpu_name: Mapped[str | None]
    created_at_ms: Mapped[int]


class MeasurementRow(Base):
    """What a run saw.

    `row_id` is the id of the recorded format: a hash of the content, so two runs that saw the very
    same figures share it.
    """

    __tablename__ = "measurement"
    __table_args__ = (UniqueConstraint("run_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    row_id: Mapped[str] = mapped_column(String(64), index=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("run.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    origin: Mapped[Origin]
    role: Mapped[Role]
    kind: Mapped[RunKind]
    world: Mapped[RunWorld]
    outcome: Mapped[RunState]
    spec: Mapped[dict[str, Any]]
    measured: Mapped[dict[str, Any]]
    error: Mapped[dict[str, Any] | None]
    recorded_at: Mapped[str]
    allocated_bytes: Mapped[int | None]
    reserved_bytes: Mapped[int | None]
    device_bytes: Mapped[int | None]
    step_time_s: Mapped[float | None]
    tokens_per_s: Mapped[float | None]

    environment: Mapped[EnvironmentRow] = relationship()


class WorkerRow(Base):
    """A worker process and its last sign of life."""

    __tablename__ = "worker"

    id: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str]
    pid: Mapped[int]
    pid_start_ticks: Mapped[int]
    started_at_ms: Mapped[int]
    heartbeat_at_ms: Mapped[int]
    stopped_at_ms: Mapped[int | None]


class GpuReservationRow(Base):
    """A GPU that a run holds; the primary key lets no two runs hold one device."""

    __tablename__ = "gpu_reservation"

    device_uuid: Mapped[str] = mapped_column(String(80), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"), index=True)
    lease_token: Mapped[int]
    reserved_at_ms: Mapped[int]


class ExperimentRow(Base):
    """A named set of runs that are set against one another."""

    __tablename__ = "experiment"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at_ms: Mapped[int]


class ExperimentMemberRow(Base):
    """One run of an experiment: of this database, or a measurement recorded elsewhere.

    The latter is named by its `row_id`, which stays if the measurement is withdrawn.
    """

    __tablename__ = "experiment_member"
    __table_args__ = (
        UniqueConstraint("experiment_id", "run_id"),
        UniqueConstraint("experiment_id", "row_id"),
        CheckConstraint("(run_id IS NULL) <> (row_id IS NULL)", name="one"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    experiment_id: Mapped[int] = mapped_column(ForeignKey("experiment.id"), index=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("run.id"))
    row_id: Mapped[str | None] = mapped_column(String(64))
    added_at_ms: Mapped[int]
