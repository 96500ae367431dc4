"""Sweep: of everything I left open, what should I run?"""

from app.components.sweep_view import show_sweep_page

show_sweep_page()
