"""The kinds of operations bound by memory: their numbers, and what stands in for one not measured."""

from __future__ import annotations

from collections.abc import Iterator

_NAMES = (
    *("cast_up", "cast_down", "copy", "strided_copy", "repeat", "fill", "unary", "half_negated"),
    *("power", "tanh", "silu", "silu_backward", "gelu", "gelu_backward", "binary", "mixed_binary"),
    *("add_in_place", "row_factor", "weight", "angles", "row_mean", "row_sum", "column_sum"),
    *("concatenate", "layer_norm", "layer_norm_backward", "softmax", "softmax_backward"),
    *("log_softmax", "log_softmax_backward", "loss_backward", "chosen_logits", "embedding"),
    *("embedding_backward", "row_gather", "row_scatter", "sort"),
    *("foreach_copy", "foreach_add", "adamw_fused", "adamw_foreach", "adamw"),
    *("foreach_cast", "chunk_cat", "split_copy", "expanded_copy"),
)
STREAM_KINDS = tuple((name, dtype) for name in _NAMES for dtype in ("bf16", "fp32"))
_NUMBERS = {kind: number for number, kind in enumerate(STREAM_KINDS)}
_LIKE = {
    "chosen_logits": "row_gather",
    "sort": "row_gather",
    "foreach_cast": "cast_up",
    "chunk_cat": "cast_up",
    "split_copy": "foreach_copy",
    "expanded_copy": "strided_copy",
    "adamw_fused": "adamw",
    "adamw_foreach": "adamw",
    "layer_norm_backward": "layer_norm",
    "softmax": "layer_norm",
    "log_softmax": "layer_norm",
    "log_softmax_backward": "layer_norm",
    "softmax_backward": "layer_norm",
    "row_mean": "row_sum",
    "row_sum": "column_sum",
    "binary": "add",
    "mixed_binary": "add",
    "add_in_place": "add",
    "copy": "unary",
}


def stream_number(name: str, dtype: str) -> int:
    """Return the number of a kind; one that is not known counts as an operation on two tensors."""
    return _NUMBERS.get((name, dtype), _NUMBERS["binary", dtype])


def stand_ins(name: str, dtype: str) -> Iterator[tuple[str, str]]:
    """Yield what is looked for among measured points, best first: same kind, same bytes, like it."""
    other = "fp32" if dtype == "bf16" else "bf16"
    seen = name
    while True:
        yield from ((seen, dtype), (seen, other))
        if seen not in _LIKE:
            break
        seen = _LIKE[seen]
    yield from (("copy", "bf16"), ("copy", "fp32"))
