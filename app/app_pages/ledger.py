"""Ledger: which tensor is that, why is this the peak, when in the step?"""

from app.components.ledger_view import show_ledger_page

show_ledger_page()
