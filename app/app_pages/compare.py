"""Compare: what is the difference between these plans, and what causes it?"""

from app.components.compare_view import show_compare_page

show_compare_page()
