"""Measured times that serving alone needs: products of few tokens, and decode attention over a cache.

planner/serving/h200.json holds the points. Between them time goes by a straight line.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.workload import KvDtype

_PATH = Path(__file__).with_name("h200.json")
# Products of up to so many tokens were measured.
MOST_FEW_TOKENS = 256
# Less than the smallest product and attention measured no kernel in a graph takes.
_LEAST_S = 3e-6


@lru_cache
def _points() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_PATH.read_text())
    return found


def few_tokens_s(weight_bytes: float, tokens: float) -> float:
    """Return the seconds of a product of `tokens` with a weight of so many bytes, on the measured GPU.

    Beyond MOST_FEW_TOKENS it is as for these.
    """
    found = _points()["few_tokens"]
    sizes = np.array(found["weight_bytes"], float)
    each = [np.interp(tokens, found["tokens"], times_s) for times_s in found["time_s"]]
    return _along(sizes, np.array(each), weight_bytes)


def decode_attention_s(
    kv_dtype: KvDtype, token_scales: bool, head_dim: int, batch: int, token_heads: float
) -> float:
    """Return the seconds of one decode attention over so many cached tokens x key-value heads of a layer.

    `token_scales`: a one-byte cache has a scale for each token and head and lies in pages; else it has one for
    each head, in one piece. Heads of
    another width than those measured take the nearest one's time by their bytes. One sequence alone is cut
    into more parts than several are.
    """
    kind, sequences = _kind(kv_dtype, token_scales), "one" if batch == 1 else "many"
    curves = [
        one
        for one in _points()["decode_attention"]
        if (one["kind"], one["sequences"]) == (kind, sequences)
    ]
    nearest = min(curves, key=lambda one: abs(one["head_dim"] - head_dim))
    sizes = np.array(nearest["token_heads"], float) * nearest["head_dim"]
    return _along(sizes, np.array(nearest["time_s"]), token_heads * head_dim)


def _kind(kv_dtype: KvDtype, token_scales: bool) -> str:
    if kv_dtype is KvDtype.INT8:
        return "int8_token"
    if kv_dtype is KvDtype.FP8:
        return "fp8_token" if token_scales else "fp8_head"
    return "bf16"


def _along(sizes: NDArray[np.float64], times_s: NDArray[np.float64], size: float) -> float:
    """Interpolate; beyond the ends the line of the last two points goes on."""
    place = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    (first, second), (start_s, end_s) = sizes[place - 1 : place + 1], times_s[place - 1 : place + 1]
    found = start_s + (size - first) * (end_s - start_s) / (second - first)
    return max(_LEAST_S, float(found))
