"""The choice of tiles."""

from __future__ import annotations

import pytest

from kernels.attention.blocks import MAX_SHARED_BYTES, Blocks, Pass, choose_blocks, padded_head_dim

CONSUMER_BYTES = 99 * 1024


def least_shared_bytes(blocks: Blocks, columns: int, element_bytes: int, kernel: Pass) -> int:
    """Shared memory that the pipelined operand tiles alone need (the rest can sit in registers)."""
    streamed = blocks.queries if kernel is Pass.KEY_GRADIENT else blocks.keys
    buffers = max(1, blocks.stages - 1)
    return 2 * buffers * streamed * columns * element_bytes


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [(1, 64), (16, 64), (64, 64), (65, 128), (80, 128), (96, 128), (128, 128), (129, 256), (256, 256)],
)  # fmt: skip
def test_head_sizes_are_padded_to_a_power_of_two(head_dim: int, columns: int) -> None:
    assert padded_head_dim(head_dim) == columns


@pytest.mark.parametrize("head_dim", [0, -1, 257])
def test_other_head_sizes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}; allowed are 1 to 256"):
        padded_head_dim(head_dim)


@pytest.mark.parametrize("kernel", list(Pass))
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("shared_bytes", [CONSUMER_BYTES, 163 * 1024, MAX_SHARED_BYTES])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_tiles_are_powers_of_two_that_fit(
    kernel: Pass, element_bytes: int, shared_bytes: int, head_dim: int
) -> None:
    blocks = choose_blocks(head_dim, element_bytes, kernel, shared_bytes)
    assert all(n & (n - 1) == 0 and n >= 16 for n in (blocks.queries, blocks.keys))
    columns = padded_head_dim(head_dim)
    assert least_shared_bytes(blocks, columns, element_bytes, kernel) <= shared_bytes


def test_a_full_mask_takes_larger_tiles_where_it_fills_them() -> None:
    def tile(kernel: Pass, length: int | None) -> Blocks:
        return choose_blocks(128, 2, kernel, MAX_SHARED_BYTES, length)

    assert [tile(Pass.FORWARD, n).keys for n in (4096, 4160, None)] == [128, 64, 64]
    # dK and dV walk over queries, 64 at a time.
    assert [tile(Pass.KEY_GRADIENT, n).stages for n in (4096, 4160, 4100, None)] == [3, 3, 2, 2]
    for kernel in Pass:
        found = tile(kernel, 4096)
        assert least_shared_bytes(found, 128, 2, kernel) <= MAX_SHARED_BYTES
        assert choose_blocks(128, 2, kernel, CONSUMER_BYTES, 4096) == choose_blocks(
            128, 2, kernel, CONSUMER_BYTES
        )


@pytest.mark.parametrize("kernel", list(Pass))
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_hopper_tiles_are_never_narrower_than_64(kernel: Pass, head_dim: int) -> None:
    blocks = choose_blocks(head_dim, 2, kernel, MAX_SHARED_BYTES)
    assert min(blocks.queries, blocks.keys, padded_head_dim(head_dim)) >= 64


def test_an_a100_and_a_consumer_card_get_the_same_portable_tiles() -> None:
    choices = {choose_blocks(128, 2, Pass.FORWARD, n * 1024) for n in (99, 163)}
    assert choices == {Blocks(64, 64, 4, 2)}
