"""Runs set against one another: which variable changed, and whether the difference is real."""
