"""Plan: does it fit, how close, how fast."""

from app.components.plan_view import show_plan_page

show_plan_page()
