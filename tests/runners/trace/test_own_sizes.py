"""Sizes read in rows and tokens, all else as numbers of the model's own."""

from __future__ import annotations

from runners.trace.own_sizes import OwnSizes, two_sizes

SIZES = OwnSizes(batch=101, seq=8221, vocab=1000)


def test_a_tensor_is_rows_tokens_and_a_number() -> None:
    assert SIZES.factor(101 * 8221 * 4096, (101, 8221, 4096)) == ("batch*seq*width", 4096)
    assert SIZES.factor(101 * 32 * 8221**2, (101, 32, 8221, 8221)) == (
        "batch*seq*seq*width",
        32,
    )
    assert SIZES.factor(101 * 8221, (101, 8221)) == ("batch*seq", 1)
    assert SIZES.factor(1, ()) == ("", 1)


def test_logits_and_vocabulary_sized_weights_are_told_by_their_shape() -> None:
    assert SIZES.factor(101 * 8221 * 1000, (101, 8221, 1000)) == ("batch*seq*vocab", 1)
    assert SIZES.factor(1000 * 4096, (1000, 4096)) == ("vocab*width", 4096)
    assert SIZES.factor(2000 * 4096, (2000, 4096)) == ("width*width", 2000 * 4096)


def test_labels_padded_by_one_position_are_a_sequence_and_one() -> None:
    assert SIZES.factor(101 * 8222, (101, 8222)) == ("batch*half_seq_and_one", 2)


def test_dimensions_are_named_or_numbers() -> None:
    assert SIZES.dims((101, 8221, 4096, 1)) == ["batch", "seq", "4096", "1"]
    assert SIZES.dims((101 * 8221, 3 * 101)) == ["batch*seq", "3*batch"]


def test_primes_divide_none_of_the_models_dimensions() -> None:
    found = two_sizes(2, 2048, {101, 2039 * 2, 4096}, 1000)
    assert found is not None
    first, second = found
    assert (first.batch, second.batch) == (103, 107)
    assert (first.seq, second.seq) == (2029, 2027)


def test_a_size_that_is_one_more_than_the_tokens_is_no_label() -> None:
    sizes = OwnSizes(batch=101, seq=8191, vocab=256000)
    assert sizes.factor(256000 * 4096, (256000, 4096)) == ("vocab*width", 4096)
    found = two_sizes(2, 8192, {8192}, 256000)
    assert found is not None
    assert found[0].seq == 8179


def test_a_range_without_two_primes_is_too_short() -> None:
    assert two_sizes(2, 40, set(), 1000) is None
    assert two_sizes(62, 66, set(), 1000) is None
