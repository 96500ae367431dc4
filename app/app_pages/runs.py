"""Runs: what ran, what was predicted, what was measured."""

from app.components.run_table import show_runs

show_runs()
