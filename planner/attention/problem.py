"""One attention call and its variants: what a person chooses, and which pairs a query sees.

Shape letters: B batch, H query heads, K key/value heads, S sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.checks import check_boolean, check_integer, check_mapping
from planner.errors import PlanError

Numbers = float | NDArray[np.float64]

MAX_DIMENSION = 2**24
MAX_HEAD_DIM = 256
MAX_LINEAR_HEAD_DIM = 128
SMALL_BLOCK, LARGE_BLOCK = 64, 128
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


class Variant(StrEnum):
    """What can compute an attention layer; the first three give softmax attention itself."""

    EAGER = "eager"
    SDPA = "sdpa"
    TRITON = "triton"
    WINDOW = "window"
    GLOBAL_LOCAL = "global_local"
    BLOCK_SPARSE = "block_sparse"
    LINEAR = "linear"


# Kernels: system variables. The others are algorithms: they change what the model computes.
EXACT_VARIANTS = (Variant.EAGER, Variant.SDPA, Variant.TRITON)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """One attention problem: Q [B, H, S, D], K and V [B, K, S, D], and the patterns of the variants.

    `window` keys up to a query's own are seen by window and global_local, the first `global_tokens`
    by global_local too. Blocks are `block` tokens; block_sparse sees the blocks at a distance of 0,
    `block_stride`, 2 `block_stride`, ... from a query's own (Sparse Transformers, arXiv 1904.10509,
    the strided pattern, by blocks). Where it is not causal, patterns reach to both sides.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    sequence_length: int
    causal: bool
    dtype: str = "bf16"
    window: int = 4096
    global_tokens: int = 128
    block: int = 128
    block_stride: int = 4

    @property
    def scale(self) -> float:
        """The factor on the scores, D^-1/2."""
        return float(self.head_dim**-0.5)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K and V."""
        return DTYPE_BYTES[self.dtype]

    def forward_flops(self) -> float:
        """Return the FLOPs of Q K^T and P V, 4 B H S^2 D, halved when causal."""
        scores = self.batch * self.heads * self.sequence_length**2
        return 4.0 * scores * self.head_dim / (2 if self.causal else 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as a job's spec holds it."""
        return asdict(self)


_FIELDS = tuple(field.name for field in fields(AttentionProblem))
_NEEDED = ("batch", "heads", "kv_heads", "head_dim", "sequence_length", "causal")


def parse_problem(given: object) -> AttentionProblem:
    """Check a mapping of the problem's fields; raises PlanError naming the one at fault."""
    values = check_mapping("attention", given, frozenset(_FIELDS))
    for name in _NEEDED:
        if name not in values:
            sentence = f"attention.{name} is missing: every attention problem needs it."
            raise PlanError(f"attention.{name}", None, "present", sentence=sentence)
    for name in (name for name in values if name not in ("causal", "dtype")):
        check_integer(f"attention.{name}", values[name], 1, MAX_DIMENSION)
    check_boolean("attention.causal", values["causal"])
    problem = AttentionProblem(**values)
    _check_together(problem)
    return problem


def _check_together(problem: AttentionProblem) -> None:
    if not isinstance(problem.dtype, str) or problem.dtype not in DTYPE_BYTES:
        raise PlanError("attention.dtype", problem.dtype, f"one of {', '.join(DTYPE_BYTES)}")
    if problem.heads % problem.kv_heads:
        raise PlanError("attention.kv_heads", problem.kv_heads, "a divisor of attention.heads")
    if problem.head_dim > MAX_HEAD_DIM:
        allowed = f"an integer from 1 to {MAX_HEAD_DIM}"
        raise PlanError("attention.head_dim", problem.head_dim, allowed)
    if problem.block != SMALL_BLOCK and problem.block % LARGE_BLOCK:
        allowed = f"{SMALL_BLOCK} or a multiple of {LARGE_BLOCK}"
        raise PlanError("attention.block", problem.block, allowed)


def parse_variants(given: object) -> tuple[Variant, ...]:
    """Check a list of variants' names; raises PlanError naming what is allowed."""
    names = list(given) if isinstance(given, list | tuple) else []
    if not names or not all(isinstance(name, str) and name in set(Variant) for name in names):
        raise PlanError("attention.kernels", given, f"some of {', '.join(Variant)}")
    return tuple(dict.fromkeys(Variant(name) for name in names))


def parse_job(given: Mapping[str, Any] | None) -> tuple[AttentionProblem, tuple[Variant, ...]]:
    """Read a job spec's `attention`: the problem's fields, and `kernels` (all if left out)."""
    values = dict(given or {})
    variants = parse_variants(values.pop("kernels", list(Variant)))
    return parse_problem(values), variants


def obstacle(problem: AttentionProblem, variant: Variant) -> str | None:
    """Return why a variant cannot compute a problem, as a sentence; None where it can."""
    if variant is not Variant.LINEAR:
        return None
    if not problem.causal:
        return "Linear attention is causal here: choose a causal mask."
    if problem.head_dim > MAX_LINEAR_HEAD_DIM:
        return f"Linear attention has a head size of at most {MAX_LINEAR_HEAD_DIM}."
    return None


def is_exact(problem: AttentionProblem, variant: Variant) -> bool:
    """Whether a variant gives what softmax attention gives: a kernel, or a pattern that hides nothing."""
    if variant in EXACT_VARIANTS:
        return True
    if variant is Variant.LINEAR:
        return False
    length = float(problem.sequence_length)
    seen = visible_pairs(problem, variant, length)
    return bool(seen == visible_pairs(problem, Variant.TRITON, length))


def _triangle(length: Numbers, reach: Numbers) -> Numbers:
    """Return the sum over i = 1..length of min(i, reach)."""
    low: Numbers = np.minimum(length, reach)
    return low * (low + 1) / 2 + (length - low) * low


def visible_pairs(problem: AttentionProblem, variant: Variant, s: Numbers) -> Numbers:
    """Return the query-key pairs that one head of one row sees, at sequence lengths `s`.

    Linear attention weighs every causal pair, though it computes none of them.
    """
    if variant is Variant.WINDOW:
        return _window_pairs(problem, s)
    if variant is Variant.GLOBAL_LOCAL:
        return _window_pairs(problem, s) + _global_pairs(problem, s)
    if variant is Variant.BLOCK_SPARSE:
        return _block_pairs(problem, s)
    return s * (s + 1) / 2 if problem.causal else s * s


def _window_pairs(problem: AttentionProblem, s: Numbers) -> Numbers:
    one_side = _triangle(s, float(problem.window))
    return one_side if problem.causal else 2 * one_side - s


def _global_pairs(problem: AttentionProblem, s: Numbers) -> Numbers:
    """Pairs of global keys that no window holds: before it and, where not causal, after it."""
    first = float(problem.global_tokens)
    before = _triangle(np.maximum(s - problem.window, 0.0), first)
    if problem.causal:
        return before
    after: Numbers = np.maximum(np.minimum(first, s) - problem.window, 0.0)
    return before + after * (after + 1) / 2


def _block_pairs(problem: AttentionProblem, s: Numbers) -> Numbers:
    size, stride = float(problem.block), float(problem.block_stride)
    whole: Numbers = np.ceil(s / size) - 1
    last = s - whole * size
    # Blocks before each of the first `whole` ones: the sum of floor(i / stride).
    rounds: Numbers = np.floor(whole / stride)
    before = stride * rounds * (rounds - 1) / 2 + rounds * (whole - rounds * stride)
    away = size * size * before + last * size * rounds
    if problem.causal:
        return away + whole * size * (size + 1) / 2 + last * (last + 1) / 2
    return 2 * away + whole * size * size + last * last
