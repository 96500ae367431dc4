"""Buffers in which CUDA kernels gather partial sums over tokens.

Gradients of biases and of norm weights are sums over tokens. Where there are many tokens, torch splits
a column's sum over several blocks of threads, and these meet in a buffer that lives as long as the
kernel. It depends on rows and columns by steps, so it is no product of dimensions: templates name it
by "sum:ROWS:COLUMNS:BYTES", where ROWS and COLUMNS are products and BYTES is an element's size.

The gradient of an embedding's row is a sum over the tokens that looked it up: of many tokens the kernel
sorts them, and sums pieces of ten first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.model import ModelSpec
from planner.workload import TrainingWorkload

PREFIX = "sum"
# Multiprocessors and the threads each runs at once: an H200's (NVIDIA H100 architecture paper).
_MULTIPROCESSORS, _THREADS_EACH = 132, 2048
_WARP, _MOST_THREADS, _MOST_VECTOR = 32, 512, 4
_MOST_ADDRESSED_BYTES = 2**31
# Values that a thread adds up: it is given no fewer, and no more where blocks can share them.
_FEWEST_VALUES, _MOST_VALUES = 16, 256
# Tokens up to which an embedding's backward adds without sorting, and those of a piece beyond that.
_MOST_UNSORTED_TOKENS, _PIECE_TOKENS = 3072, 10
_NUMBER_BYTES, _SUM_BYTES = 8, 4


def partial_sums_name(rows: str, columns: str, element_bytes: int) -> str:
    """Name the buffer of a sum over `rows` rows, a product such as "batch*seq"."""
    return ":".join((PREFIX, rows, columns, str(element_bytes)))


def is_partial_sums(name: str) -> bool:
    """Whether a template's size is such a buffer's."""
    return name.startswith(PREFIX + ":")


def partial_sums_value(name: str, sizes: Mapping[str, Any]) -> Any:
    """Evaluate a buffer by name: fp32 values, as an array over the shape of `sizes`."""
    _, rows, columns, element_bytes = name.split(":")
    matrix = _product(rows, sizes), _product(columns, sizes)
    is_one = all(isinstance(side, int | float) for side in matrix)
    return (_one_of if is_one else partial_sums)(*matrix, int(element_bytes))


@lru_cache(maxsize=4096)
def _one_of(rows: float, columns: float, element_bytes: int) -> float:
    """`partial_sums` of one matrix, in Python's integers: arrays of one number take ten times as long."""
    height, width = round(rows), round(columns)
    while height * width * element_bytes > _MOST_ADDRESSED_BYTES:
        height = -(-height // 2)
    vector = _MOST_VECTOR if width % 4 == 0 else 2 if width % 2 == 0 else 1
    most = _MOST_THREADS // vector
    across = min(_power_of_2(width // vector), most)
    down = min(_power_of_2(height), most, most // min(across, _WARP))
    across = min(across, most // down)
    values = -(-height // down)
    grid = -(-(width // vector) // across)
    grids = _MULTIPROCESSORS * (_THREADS_EACH // (across * down))
    blocks = min(-(-grids // grid), -(-values // _FEWEST_VALUES))
    blocks = max(blocks, -(-values // _MOST_VALUES))
    is_split = values >= _MOST_VALUES and grid <= grids and blocks > 1
    return float(width * blocks * across * vector if is_split else 0)


def _power_of_2(number: int) -> int:
    """The largest power of two that is at most a number, and at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _product(text: str, sizes: Mapping[str, Any]) -> Any:
    value: Any = 1
    for name in text.split("*"):
        value = value * (int(name) if name.isdigit() else sizes[name])
    return value


def partial_sums(rows: Any, columns: Any, element_bytes: int) -> npt.NDArray[np.int64]:
    """Values in the buffer of a sum over the rows of a [rows, columns] matrix; 0 where it has none.

    Source: torch 2.11, aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig` and
    `global_memory_size`, for a reduction that is not along the fastest dimension.
    """
    rows, columns = np.broadcast_arrays(
        *(np.asarray(np.rint(n), np.int64) for n in (rows, columns))
    )
    rows = _addressable_rows(rows, columns, element_bytes)
    vector = np.where(columns % 4 == 0, _MOST_VECTOR, np.where(columns % 2 == 0, 2, 1))
    most = _MOST_THREADS // vector
    across = np.minimum(_last_power_of_2(columns // vector), most)
    down = np.minimum(_last_power_of_2(rows), most)
    height = np.minimum(down, most // np.minimum(across, _WARP))
    width = np.minimum(across, most // height)
    values = -(-rows // height)
    grid = -(-(columns // vector) // width)
    grids = _MULTIPROCESSORS * (_THREADS_EACH // (width * height))
    blocks = np.minimum(-(-grids // grid), -(-values // _FEWEST_VALUES))
    blocks = np.maximum(blocks, -(-values // _MOST_VALUES))
    is_split = (values >= _MOST_VALUES) & (grid <= grids) & (blocks > 1)
    return np.where(is_split, columns * blocks * width * vector, 0)


def _addressable_rows(
    rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], element_bytes: int
) -> npt.NDArray[np.int64]:
    """Halve the rows until 32 bits address the matrix: the kernel runs once for each part."""
    halved = rows.copy()
    while np.any(too_many := halved * columns * element_bytes > _MOST_ADDRESSED_BYTES):
        halved = np.where(too_many, -(-halved // 2), halved)
    return halved


def _last_power_of_2(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The largest power of two that is at most each number, and at least 1."""
    exponents = np.floor(np.log2(np.maximum(numbers, 1)))
    powers: npt.NDArray[np.int64] = 2 ** exponents.astype(np.int64)
    return powers


def embedding_buffers(spec: ModelSpec, workload: TrainingWorkload) -> tuple[int, ...]:
    """Bytes of what the backward of the embedding takes beside its gradient, in order; often nothing.

    Sorted tokens and their places; where rows begin, how many pieces each has and which is its first;
    two counts; where pieces begin, and their sums in fp32, as many as there can be. What CUB takes to
    sort (some tens of KiB) is left out. Source: torch 2.11, aten/src/ATen/native/cuda/Embedding.cu
    (embedding_dense_backward_cuda) and EmbeddingBackwardKernel.cu; peaks recorded on an H200 agree.
    """
    tokens = workload.micro_batch * workload.sequence_length
    if tokens <= _MOST_UNSORTED_TOKENS:
        return ()
    rows = min(tokens, spec.vocab_size)
    pieces = tokens // _PIECE_TOKENS + rows
    numbers = (tokens, tokens, tokens, 1, rows, rows, 1, pieces)
    sums_bytes = pieces * spec.hidden_size * _SUM_BYTES
    return (*(count * _NUMBER_BYTES for count in numbers), sums_bytes)
