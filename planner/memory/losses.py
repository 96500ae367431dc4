"""How many tokens a chunked loss takes at once: the one number its memory depends on."""

from __future__ import annotations

from typing import Any

import numpy as np

# Logits of one chunk: 256 MiB in fp32, and some hundreds of tokens for the largest vocabularies,
# enough to keep the matrix product busy.
MAX_CHUNK_LOGITS = 1 << 26
_TOKEN_STEP = 64


def chunk_tokens(num_tokens: Any, vocab_size: int) -> Any:
    """Tokens per chunk: a multiple of 64 with at most 2^26 logits, never more than there are.

    `num_tokens` may be an array.
    """
    fitting = max(MAX_CHUNK_LOGITS // vocab_size // _TOKEN_STEP, 1) * _TOKEN_STEP
    if np.ndim(num_tokens) == 0:
        return min(num_tokens, fitting)
    return np.minimum(num_tokens, fitting)
