"""The Alembic environment; `db.upgrade` runs it."""
