"""Runs the migrations on the connection that `db.upgrade` hands over."""

from __future__ import annotations

from alembic import context

from db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
    # The caller owns the transaction: DDL, row counts and the foreign-key check stand or fall as one.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
