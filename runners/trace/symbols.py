"""Read a tensor's size as a product of model dimensions.

The traced model is built with a different prime for every dimension, so the prime factors of a
tensor's element count say which dimensions it is the product of. Fake tensors own no memory, so
the primes may be as large as needed to stay clear of ordinary integer factors.
"""

from __future__ import annotations

from collections.abc import Mapping

# `hidden` is a multiple of the heads in several families, so it is its own prime times the heads.
PRIMES: Mapping[str, int] = {
    "batch": 13,
    "seq": 8221,
    # Labels are padded by one position, and attention sinks add a column to the scores: half of the
    # sequence and one, a prime as well.
    "half_seq_and_one": 4111,
    "kv_heads": 11,
    "group": 17,
    "group_plus_2": 19,  # phi3 fuses Q, K and V into one projection of (group + 2) * kv_heads heads
    "hidden_per_head": 23,
    "half_head_dim": 61,
    "half_rotary": 29,  # half of the elements of a head that are rotated, where not all are
    "ffn": 31,
    "vocab": 37,
    "top_k": 43,
    "experts": 47,
    "positions": 10007,
    "moe_ffn": 53,
    "shared_experts": 59,
    # DeepSeek-V3 chooses groups of experts first: experts = expert_groups * group_experts.
    "expert_groups": 71,
    "group_experts": 83,
    "chosen_groups": 41,
    # Latent attention; sums of two widths are sizes of their own.
    # Complex numbers are viewed in rows of these widths, so the widths are even.
    "half_nope_dim": 149,
    "quarter_qk_dim": 89,  # (nope_dim + rotary_dim) / 4
    "value_dim": 103,
    "nope_and_value": 401,
    "half_kv_rank": 173,
    "quarter_kv_rank_and_rotary": 101,
    "q_rank": 113,
    "lora_rank": 131,
    "chunk": 127,  # tokens that a chunked loss takes at once
}
HIDDEN = PRIMES["hidden_per_head"] * PRIMES["kv_heads"] * PRIMES["group"]
HEAD_DIM = 2 * PRIMES["half_head_dim"]
HEADS = PRIMES["kv_heads"] * PRIMES["group"]
ROTARY_DIM = 2 * PRIMES["half_rotary"]
NOPE_DIM, KV_RANK = 2 * PRIMES["half_nope_dim"], 2 * PRIMES["half_kv_rank"]
KNOWN_DIMS: Mapping[int, str] = {
    HIDDEN: "hidden",
    HEAD_DIM: "head_dim",
    HEADS: "heads",
    HEADS * HEAD_DIM: "heads*head_dim",
    3 * HEADS * HEAD_DIM: "3*heads*head_dim",
    PRIMES["group"] * HEAD_DIM: "group*head_dim",
    ROTARY_DIM: "rotary_dim",
    2 * PRIMES["moe_ffn"]: "2*moe_ffn",
    PRIMES["expert_groups"] * PRIMES["group_experts"]: "experts",
    PRIMES["moe_ffn"] * PRIMES["shared_experts"]: "shared_ffn",
    NOPE_DIM: "nope_dim",
    4 * PRIMES["quarter_qk_dim"]: "qk_dim",
    HEADS * 4 * PRIMES["quarter_qk_dim"]: "heads*qk_dim",
    KV_RANK: "kv_rank",
    4 * PRIMES["quarter_kv_rank_and_rotary"]: "kv_rank+rotary_dim",
    HEADS * PRIMES["value_dim"]: "heads*value_dim",
    PRIMES["nope_and_value"]: "nope_dim+value_dim",
    PRIMES["kv_heads"] * HEAD_DIM: "kv_heads*head_dim",
    PRIMES["batch"] * PRIMES["seq"]: "batch*seq",
    PRIMES["batch"] * PRIMES["seq"] * PRIMES["top_k"]: "batch*seq*top_k",
    **{prime: name for name, prime in PRIMES.items()},
}


def factor(numel: int) -> tuple[str, int]:
    """Split an element count into (monomial of dimension names, integer coefficient).

    The monomial is `*`-joined names in a fixed order ("batch*seq*hidden"); "" is a constant.
    """
    powers = dict.fromkeys(PRIMES, 0)
    for name, prime in PRIMES.items():
        while numel % prime == 0:
            numel //= prime
            powers[name] += 1
    powers["hidden"] = powers.pop("hidden_per_head")
    powers["kv_heads"] -= powers["hidden"]
    powers["group"] -= powers["hidden"]
    if min(powers.values()) < 0:
        raise ValueError(f"element count does not factor into model dimensions: {powers}")
    names = [name for name, power in powers.items() for _ in range(power)]
    return "*".join(names), numel


def dims(shape: tuple[int, ...]) -> list[str]:
    """Name each dimension of a shape; a size that is no known product is kept as a number."""
    return [KNOWN_DIMS.get(size, str(size)) for size in shape]
