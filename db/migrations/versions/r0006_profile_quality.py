"""Two more kinds of run: where the time goes, and what a change does to a model's answers."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    for table in ("run", "measurement"):
        with op.batch_alter_table(table) as batch:
            batch.drop_constraint(op.f(f"ck_{table}_kind"), type_="check")
            batch.create_check_constraint(
                op.f(f"ck_{table}_kind"),
                "kind IN ('train_step', 'attention', 'calibrate', 'decode', 'serve', 'profile', "
                "'quality')",
            )
