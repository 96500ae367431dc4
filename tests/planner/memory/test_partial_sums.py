"""Buffers of partial sums: sizes followed by hand through the launch of torch's reduction."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.memory.partial_sums import (
    embedding_buffers,
    is_partial_sums,
    partial_sums,
    partial_sums_name,
    partial_sums_value,
)
from planner.presets import resolve_model
from planner.workload import TrainingWorkload

MIB = 2**20


@pytest.mark.parametrize(
    ("rows", "columns", "element_bytes", "expected_mib"),
    [
        # 4 columns a thread, 32 x 4 threads a block: 32 blocks beside each other, room for
        # 132 x 16 / 32 = 66 behind each; 2,048 / 4 = 512 values a thread are shared by 512 / 16.
        (2048, 4096, 2, 4096 * 32 * 128 * 4 / MIB),
        # Room for 17 blocks only: 132 x 16 / 128, rounded up.
        (2048, 16384, 2, 16384 * 17 * 128 * 4 / MIB),
        # 600 / 4 values a thread are fewer than 256: one block adds up a column.
        (600, 4096, 2, 0),
        # One column a thread: 32 x 16 threads a block, 32 values a thread.
        (512, 4095, 2, 0),
        # 128 columns are one block wide; 65,536 / 4 values a thread, 1,024 blocks of 16 each.
        (65536, 128, 2, 128 * 1024 * 128 * 4 / MIB),
        # 2 GiB are two launches of half the rows each.
        (2**18, 4096, 4, 4096 * 128 * 128 * 4 / MIB),
    ],
)
def test_a_buffer_has_a_place_for_every_block_and_thread(
    rows: int, columns: int, element_bytes: int, expected_mib: float
) -> None:
    assert 4 * int(partial_sums(rows, columns, element_bytes)) / MIB == expected_mib
    name = partial_sums_name(str(rows), str(columns), element_bytes)
    assert 4 * partial_sums_value(name, {}) / MIB == expected_mib


def test_one_matrix_is_evaluated_as_many_are() -> None:
    source = random.Random(1)
    for _ in range(2000):
        rows, columns = (int(2 ** source.uniform(0, most)) for most in (21, 18))
        # Most real matrices have a multiple of eight columns.
        columns = columns // 8 * 8 or columns
        element_bytes = source.choice((2, 4, 8))
        name = partial_sums_name(str(rows), str(columns), element_bytes)
        assert partial_sums_value(name, {}) == partial_sums(rows, columns, element_bytes)


def test_a_grid_of_batches_and_lengths_is_evaluated_at_once() -> None:
    name = partial_sums_name("batch*seq", "2*half_head_dim", 2)
    assert is_partial_sums(name) and not is_partial_sums("batch*seq*hidden")
    lengths = np.array([600.0, 2048.0, 65536.0])
    values = partial_sums_value(name, {"batch": 1.0, "seq": lengths, "half_head_dim": 64.0})
    assert values.tolist() == [int(partial_sums(n, 128, 2)) for n in (600, 2048, 65536)]


def test_an_embedding_s_backward_sorts_its_tokens_and_sums_pieces_of_ten() -> None:
    spec = resolve_model("meta-llama/Llama-3.2-1B")
    found = embedding_buffers(spec, TrainingWorkload(micro_batch=2, sequence_length=2048))
    tokens = 8 * 4096
    # At the most every token is another row, and 4096 / 10 rows have a piece more.
    assert found == (tokens, tokens, tokens, 8, tokens, tokens, 8, 8 * 4505, 4 * 4505 * 2048)
    many = embedding_buffers(spec, TrainingWorkload(micro_batch=100, sequence_length=2048))
    assert many[-1] == 4 * (20480 + 128_256) * 2048
    assert embedding_buffers(spec, TrainingWorkload(sequence_length=3072)) == ()
