"""Experiments in the database: named sets of runs and of measurements recorded elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session, joinedload

from db.database import Database
from db.measurements import to_measurement
from db.models import ExperimentMemberRow, ExperimentRow, MeasurementRow, RunRow
from db.types import Origin, now_ms
from db.views import Measurement
from planner.checks import check_text
from planner.errors import PlanError

MAX_NAME_CHARACTERS = 80
MAX_MEMBERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A named set and how many runs are in it."""

    id: int
    name: str
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run of an experiment; `state` and `spec` are None where a recorded row was withdrawn.

    `measurement` is None until a run has ended. Exactly one of `run_id` and `row_id` is given.
    """

    id: int
    run_id: str | None
    row_id: str | None
    state: str | None
    spec: dict[str, object] | None
    measurement: Measurement | None


def list_experiments(database: Database) -> list[Experiment]:
    """List all experiments by name."""
    query = (
        select(ExperimentRow, func.count(ExperimentMemberRow.id))
        .outerjoin(ExperimentMemberRow, ExperimentMemberRow.experiment_id == ExperimentRow.id)
        .group_by(ExperimentRow.id)
        .order_by(func.lower(ExperimentRow.name))
    )
    with database.read() as session:
        return [
            Experiment(id=row.id, name=row.name, members=count)
            for row, count in session.execute(query)
        ]


def create_experiment(database: Database, name: object) -> int:
    """Make an empty experiment and return its id; raises PlanError for a name that cannot be."""
    checked = _checked_name(name)
    with database.write() as session:
        _require_free(session, checked, None)
        row = ExperimentRow(name=checked, created_at_ms=now_ms())
        session.add(row)
        session.flush()
        return row.id


def rename_experiment(database: Database, experiment_id: int, name: object) -> None:
    """Give an experiment another name; raises PlanError and leaves it as it was where that cannot be."""
    checked = _checked_name(name)
    with database.write() as session:
        row = _required(session, experiment_id)
        _require_free(session, checked, experiment_id)
        row.name = checked


def delete_experiment(database: Database, experiment_id: int) -> None:
    """Forget an experiment; its runs and measurements stay. Raises PlanError where there is none."""
    with database.write() as session:
        row = _required(session, experiment_id)
        own = ExperimentMemberRow.experiment_id == experiment_id
        session.execute(delete(ExperimentMemberRow).where(own))
        session.delete(row)


def add_members(
    database: Database,
    experiment_id: int,
    run_ids: Sequence[str] = (),
    row_ids: Sequence[str] = (),
) -> int:
    """Add runs and recorded measurements, all or none; return how many were not in it before.

    Raises PlanError for an experiment, a run or a measurement that does not exist.
    """
    with database.write() as session:
        _required(session, experiment_id)
        for run_id in run_ids:
            if session.get(RunRow, run_id) is None:
                raise _missing("run", run_id)
        for row_id in row_ids:
            known = select(MeasurementRow.id).where(MeasurementRow.row_id == row_id)
            if session.scalars(known).first() is None:
                raise _missing("measurement", row_id)
        held = _members(session, experiment_id)
        runs, rows = {one.run_id for one in held}, {one.row_id for one in held}
        new = [{"run_id": one} for one in dict.fromkeys(run_ids) if one not in runs]
        new += [{"row_id": one} for one in dict.fromkeys(row_ids) if one not in rows]
        if len(held) + len(new) > MAX_MEMBERS:
            sentence = f"An experiment holds {MAX_MEMBERS:,} runs at most: begin another one."
            raise PlanError("experiment", len(held) + len(new), "fewer", sentence=sentence)
        at_ms = now_ms()
        session.add_all(
            ExperimentMemberRow(experiment_id=experiment_id, added_at_ms=at_ms, **one)
            for one in new
        )
        return len(new)


def remove_members(database: Database, experiment_id: int, member_ids: Sequence[int]) -> int:
    """Take runs out of an experiment, by their members' ids; return how many were in it."""
    with database.write() as session:
        _required(session, experiment_id)
        held = [one for one in _members(session, experiment_id) if one.id in set(member_ids)]
        for one in held:
            session.delete(one)
        return len(held)


def experiment_members(database: Database, experiment_id: int) -> list[Member]:
    """Return the runs of an experiment with what they measured, in the order they were added.

    Raises PlanError where there is no such experiment.
    """
    with database.read() as session:
        _required(session, experiment_id)
        return [_member(session, row) for row in _members(session, experiment_id)]


def _member(session: Session, row: ExperimentMemberRow) -> Member:
    query = select(MeasurementRow).options(joinedload(MeasurementRow.environment))
    # A run here may have seen the very figures of a recorded row: that one is meant by its id.
    query = query.order_by(MeasurementRow.origin == Origin.HERE)
    is_run = row.run_id is not None
    own = MeasurementRow.run_id == row.run_id if is_run else MeasurementRow.row_id == row.row_id
    seen = session.scalars(query.where(own)).first()
    known = session.get(RunRow, row.run_id) if is_run else seen
    state = known.state if isinstance(known, RunRow) else known and known.outcome
    return Member(
        id=row.id,
        run_id=row.run_id,
        row_id=row.row_id,
        state=None if state is None else str(state),
        spec=None if known is None else known.spec,
        measurement=None if seen is None else to_measurement(seen),
    )


def _members(session: Session, experiment_id: int) -> list[ExperimentMemberRow]:
    own = ExperimentMemberRow.experiment_id == experiment_id
    query = select(ExperimentMemberRow).where(own).order_by(ExperimentMemberRow.id)
    return list(session.scalars(query))


def _checked_name(name: object) -> str:
    return check_text("experiment.name", name, MAX_NAME_CHARACTERS).strip()


def _require_free(session: Session, name: str, but: int | None) -> None:
    for row in session.scalars(select(ExperimentRow)):
        if row.name.casefold() == name.casefold() and row.id != but:
            sentence = f"An experiment is called {row.name!r} already: choose another name."
            raise PlanError("experiment.name", name, "a new name", sentence=sentence)


def _required(session: Session, experiment_id: int) -> ExperimentRow:
    row = session.get(ExperimentRow, experiment_id)
    if row is None:
        raise _missing("experiment", experiment_id)
    return row


def _missing(what: str, value: object) -> PlanError:
    sentence = f"There is no {what} {value} in this database."
    return PlanError(what, value, f"the id of one {what} here", sentence=sentence)
