"""A third role of measurements: held out, evidence that nothing was tuned on."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    with op.batch_alter_table("measurement") as batch:
        batch.drop_constraint(op.f("ck_measurement_role"), type_="check")
        batch.create_check_constraint(
            op.f("ck_measurement_role"), "role IN ('evidence', 'holdout', 'calibration')"
        )
