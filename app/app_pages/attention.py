"""Attention: what do kernels and algorithms cost at this shape, and which are exact?"""

from app.components.attention_view import show_attention_page

show_attention_page()
