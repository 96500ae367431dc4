"""Read a tensor's size in rows and tokens, where a model is traced at its own dimensions.

Only rows and tokens per row are given sizes of their own: primes that divide none of the model's
dimensions. What else a tensor's element count holds is a number of that very model, and stays one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.memory.templates import WIDTH

# Counts of elements per token up to this are small beside a hidden size: norms, router choices.
_FEW = 16
_LARGEST_SEQ, _SMALLEST_SEQ = 8221, 50
_BATCHES = (101, 103, 107, 109, 113, 127, 131, 137)


@dataclass(frozen=True, slots=True)
class OwnSizes:
    """Rows and tokens per row of a trace, and the rows of the model's output embedding."""

    batch: int
    seq: int
    vocab: int

    def powers(self, count: int) -> tuple[int, int, int]:
        """Split a count into the powers of rows and tokens in it and the number that is left."""
        rows, count = _divide(count, self.batch)
        tokens, count = _divide(count, self.seq)
        return rows, tokens, count

    def factor(self, numel: int, shape: tuple[int, ...]) -> tuple[str, int]:
        """Split an element count into (monomial, coefficient); `shape` tells the vocabulary."""
        padded = self.seq + 1  # labels are padded by one position
        is_padded = padded in shape and numel % padded == 0
        rows, tokens, rest = self.powers(numel // padded * 2 if is_padded else numel)
        names = ["batch"] * rows + ["seq"] * tokens + ["half_seq_and_one"] * is_padded
        if self.vocab in shape and rest % self.vocab == 0:
            names.append("vocab")
            rest //= self.vocab
        is_matrix = not rows and not tokens and len(shape) > 1
        if rest > _FEW and (names or is_matrix):
            names.append(WIDTH)
        if names == [WIDTH] or names == ["vocab"]:
            names.append(WIDTH)
        return "*".join(names), rest

    def dims(self, shape: tuple[int, ...]) -> list[str]:
        """Name each dimension of a shape: rows and tokens by their names, all else by its number."""
        return [self._dim(size) for size in shape]

    def _dim(self, size: int) -> str:
        rows, tokens, rest = self.powers(size)
        names = ["batch"] * rows + ["seq"] * tokens
        return "*".join([*([str(rest)] if rest > 1 or not names else []), *names])


def _divide(count: int, prime: int) -> tuple[int, int]:
    power = 0
    while prime > 1 and count and count % prime == 0:
        count //= prime
        power += 1
    return power, count


def two_sizes(
    low: int, high: int, dimensions: Iterable[int], vocab: int
) -> tuple[OwnSizes, OwnSizes] | None:
    """Two pairs of primes to trace sequences from `low` to `high` tokens with, None if too short.

    None of them divides any of the model's `dimensions`.
    """
    taken = set(dimensions)

    def is_free(prime: int) -> bool:
        return not any(size % prime == 0 for size in taken if size)

    first = max(low, _SMALLEST_SEQ)
    lengths = range(min(high, max(_LARGEST_SEQ, low + 1000)), first - 1, -1)
    # One more than the tokens is a size as well: that of padded labels.
    seqs = [s for s in lengths if _is_prime(s) and is_free(s) and s + 1 not in taken][:2]
    batches = [batch for batch in _BATCHES if is_free(batch) and batch not in seqs][:2]
    if len(seqs) < 2 or len(batches) < 2:
        return None
    return OwnSizes(batches[0], seqs[0], vocab), OwnSizes(batches[1], seqs[1], vocab)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
