"""Serving: how many requests, how soon the first token, how fast the rest, which lever helps?"""

from app.components.serving_view import show_serving_page

show_serving_page()
