"""Hardware: the attached GPUs and the presets with their sources."""

from app.components.hardware_view import show_hardware_page

show_hardware_page()
