"""Claims: is what people say about FlashAttention and ZeRO true here?"""

from app.components.claims_view import show_claims_page

show_claims_page()
