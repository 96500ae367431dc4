"""Widgets and views that the pages are made of."""
