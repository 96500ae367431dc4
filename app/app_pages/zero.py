"""ZeRO: what does each stage and engine hold, send and cost, and when is ZeRO not the answer?"""

from app.components.zero_view import show_zero_page

show_zero_page()
