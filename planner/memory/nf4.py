"""Bytes of a weight in bitsandbytes' 4-bit NormalFloat with doubly quantised scales, as in QLoRA.

bitsandbytes 0.50, functional.py, quantize_4bit with compress_statistics: two weights to a byte, the
largest of every 64 weights in one byte, of every 256 such bytes one fp32 scale, and for each weight
matrix the offset and the two code books that decode them. QLoRA (arXiv 2305.14314), section 3:
8/64 + 32/(64 * 256) = 0.127 bits of scales per weight.
"""

from __future__ import annotations

_BLOCK_NUMEL, _NESTED_BLOCK_NUMEL = 64, 256
_FP32_BYTES = 4
_CODE_NUMEL, _NESTED_CODE_NUMEL = 16, 256


def nf4_tensors(numel: int) -> dict[str, int]:
    """Bytes of each tensor that stands for a weight of `numel` elements, in order of allocation."""
    blocks = -(-numel // _BLOCK_NUMEL)
    return {
        "weight": -(-numel // 2),
        "code": _CODE_NUMEL * _FP32_BYTES,
        "offset": _FP32_BYTES,
        "absmax": blocks,
        "nested absmax": -(-blocks // _NESTED_BLOCK_NUMEL) * _FP32_BYTES,
        "nested code": _NESTED_CODE_NUMEL * _FP32_BYTES,
    }


def nf4_bytes(numel: int) -> int:
    """Bytes of all of them."""
    return sum(nf4_tensors(numel).values())
