"""Experiments: named sets of runs and of measurements recorded elsewhere."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def _integer() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Go to this revision."""
    op.create_table(
        "experiment",
        sa.Column("id", _integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at_ms", _integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_experiment"),
        sa.UniqueConstraint("name", name="uq_experiment_name"),
    )
    op.create_table(
        "experiment_member",
        sa.Column("id", _integer(), nullable=False),
        sa.Column("experiment_id", _integer(), nullable=False),
        sa.Column("run_id", sa.String(32), nullable=True),
        sa.Column("row_id", sa.String(64), nullable=True),
        sa.Column("added_at_ms", _integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_experiment_member"),
        sa.ForeignKeyConstraint(
            ["experiment_id"],
            ["experiment.id"],
            name="fk_experiment_member_experiment_id_experiment",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_experiment_member_run_id_run"),
        sa.UniqueConstraint(
            "experiment_id", "run_id", name="uq_experiment_member_experiment_id_run_id"
        ),
        sa.UniqueConstraint(
            "experiment_id", "row_id", name="uq_experiment_member_experiment_id_row_id"
        ),
        sa.CheckConstraint("(run_id IS NULL) <> (row_id IS NULL)", name="ck_experiment_member_one"),
    )
    op.create_index("ix_experiment_member_experiment_id", "experiment_member", ["experiment_id"])
