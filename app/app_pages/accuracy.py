"""Accuracy: how far predictions have been from what was measured."""

from app.components.accuracy_view import show_accuracy_page

show_accuracy_page()
