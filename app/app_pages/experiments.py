"""Experiments: which variable changed, algorithm or system, and is the difference real?"""

from app.components.experiments_view import show_experiments_page

show_experiments_page()
