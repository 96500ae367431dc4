"""Reading dimensions out of element counts."""

from __future__ import annotations

import pytest

from runners.trace.symbols import HEAD_DIM, HIDDEN, KV_RANK, NOPE_DIM, PRIMES, dims, factor

BATCH, SEQ, VOCAB = PRIMES["batch"], PRIMES["seq"], PRIMES["vocab"]


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        (BATCH * SEQ * VOCAB, ("batch*seq*vocab", 1)),
        (3 * HIDDEN, ("hidden", 3)),
        (BATCH * SEQ * PRIMES["kv_heads"] * HEAD_DIM, ("batch*seq*kv_heads*half_head_dim", 2)),
        (BATCH * SEQ * SEQ, ("batch*seq*seq", 1)),
        (BATCH * (SEQ + 1), ("batch*half_seq_and_one", 2)),
        (BATCH * SEQ * (SEQ + 1), ("batch*seq*half_seq_and_one", 2)),
        (PRIMES["expert_groups"] * PRIMES["group_experts"], ("expert_groups*group_experts", 1)),
        (HIDDEN * HIDDEN, ("hidden*hidden", 1)),
        (7, ("", 7)),
    ],
)
def test_an_element_count_factors_into_its_dimensions(
    numel: int, expected: tuple[str, int]
) -> None:
    monomial, coefficient = factor(numel)
    assert (sorted(monomial.split("*")), coefficient) == (
        sorted(expected[0].split("*")),
        expected[1],
    )


def test_a_shape_is_named_dimension_by_dimension() -> None:
    assert dims((BATCH, SEQ, HIDDEN, 5)) == ["batch", "seq", "hidden", "5"]


def test_a_count_that_is_no_product_of_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="does not factor"):
        factor(PRIMES["hidden_per_head"])


def test_sums_of_widths_are_sizes_of_their_own() -> None:
    rotated = 2 * PRIMES["half_rotary"]
    assert 4 * PRIMES["quarter_qk_dim"] == NOPE_DIM + rotated
    assert 4 * PRIMES["quarter_kv_rank_and_rotary"] == KV_RANK + rotated
    assert PRIMES["nope_and_value"] == NOPE_DIM + PRIMES["value_dim"]
    assert 2 * PRIMES["half_seq_and_one"] == SEQ + 1


def test_every_symbol_is_a_prime_of_its_own() -> None:
    values = list(PRIMES.values())
    assert len(set(values)) == len(values)
    assert all(value % n for value in values for n in range(2, min(value, 200)))
