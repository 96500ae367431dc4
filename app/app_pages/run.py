"""Run: one execution, named by ?run=ID."""

from app.components.run_view import show_run_page

show_run_page()
