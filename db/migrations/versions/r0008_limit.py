"""One more kind of run: the largest that fits, proven by short runs."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
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
                "'quality', 'limit')",
            )
