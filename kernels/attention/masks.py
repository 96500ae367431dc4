"""Masks by kind: which keys a query sees, said in a few numbers or a small table, never as scores.

Query i of Sq and key j of Sk are aligned at their last positions: with shift = Sk - Sq, query i
stands at key i + shift. Every kind but a block table lets a query see one run of keys, whose two
ends never move left from one query to the next; a prefix adds the keys before it. That is why a
kernel finds the tiles to visit from the first and the last query of its own tile alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

# Stands for "no bound"; added to a position it stays far inside an int32.
UNBOUNDED = 2**30
MIN_BLOCK = 64
LARGE_BLOCK = 128


class MaskKind(StrEnum):
    """What decides which keys a query sees."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"
    PREFIX = "prefix"
    GLOBAL = "global"
    DOCUMENTS = "documents"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mask:
    """One mask; make it with the functions of this module, which check what they are given.

    A query sees `left` keys before and `right` keys after its own (UNBOUNDED for all), and with a
    prefix the first `prefix` keys (of kind `global` only those up to its own). `keys_of_query` and `queries_of_key` are int32 tables: of kind
    `documents` the first key seen and the end, (1 or B, 2, S); of kind `blocks` the numbers of whole
    and of partial blocks and then both lists, (1 or B, 1 or Hq, blocks, 2 + blocks).
    """

    kind: MaskKind
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    prefix: int = 0
    block: int = 0
    lengths: tuple[int, int] | None = None
    keys_of_query: Tensor | None = None
    queries_of_key: Tensor | None = None

    def simplified(self, seq_q: int, seq_k: int) -> Mask:
        """Return full or causal where no key falls out of this window, else this mask."""
        if self.kind is not MaskKind.WINDOW or self.left < seq_k - 1:
            return self
        if self.right == 0:
            return CAUSAL
        # The first query stands at key seq_k - seq_q, which may be far before the first key.
        return FULL if self.right >= seq_q - 1 else self


FULL = Mask(kind=MaskKind.FULL)
CAUSAL = Mask(kind=MaskKind.CAUSAL, right=0)


def _bound(name: str, value: int | None) -> int:
    """Return a number of keys, UNBOUNDED for None; raises ValueError for what is no such number."""
    if value is None:
        return UNBOUNDED
    if not _is_count(value):
        raise ValueError(f"{name} is {value!r}; it must be 0 or more keys, or None for all")
    return min(value, UNBOUNDED)


def _is_count(value: object) -> bool:
    # A size that torch.compile left open is a SymInt.
    return isinstance(value, int | torch.SymInt) and bool(value >= 0)


def _count(name: str, value: int, what: str = "keys") -> int:
    """Return a whole number from 0 on; raises ValueError for another."""
    if not _is_count(value):
        raise ValueError(f"{name} is {value!r}; it must be 0 or more {what}")
    return value


def window(left: int | None, right: int | None = 0) -> Mask:
    """Return the mask of a query that sees `left` keys before its own and `right` after it.

    A sliding window of W tokens, counted as transformers does with the query's own, is window(W-1);
    window(w, w) is symmetric. Raises ValueError for a negative number.
    """
    left, right = _bound("left", left), _bound("right", right)
    if left == UNBOUNDED and right in (0, UNBOUNDED):
        return CAUSAL if right == 0 else FULL
    return Mask(kind=MaskKind.WINDOW, left=left, right=right)


def prefix(length: int, left: int | None = None, right: int | None = 0) -> Mask:
    """Return the mask of a window beside whose keys every query sees the first `length`.

    prefix(n) is a prefix language model: the first n tokens see each other in both directions, the
    rest is causal. prefix(n, w, w) is n global keys with a symmetric window. For global keys that
    only later queries see, use `global_local`. Raises ValueError for a negative number.
    """
    left, right = _bound("left", left), _bound("right", right)
    return Mask(kind=MaskKind.PREFIX, left=left, right=right, prefix=_count("length", length))


def global_local(length: int, left: int) -> Mask:
    """Return the causal mask of a query that sees `left` keys before its own and the first `length`.

    Raises ValueError for a negative number.
    """
    prefix = _count("length", length)
    return Mask(kind=MaskKind.GLOBAL, left=_bound("left", left), right=0, prefix=prefix)


def _cumulative(name: str, lengths: Sequence[int] | Tensor) -> Tensor:
    """Return cumulative lengths as int64, checked where their values can be read."""
    # Without a dtype: a list with a fraction becomes a float tensor, which is refused below.
    found = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
    if found.dim() != 1 or found.shape[0] < 1 or found.is_floating_point():
        shape = tuple(found.shape)
        raise ValueError(
            f"{name} is {found.dtype} of shape {shape}; it must be whole numbers (N + 1)"
        )
    if _readable() and (int(found[0]) != 0 or bool((found.diff() < 0).any())):
        raise ValueError(f"{name} is {found.tolist()}; it must start at 0 and never fall")
    return found.long()


def _readable() -> bool:
    """Say whether values can be read: not while compiling or tracing with FakeTensors."""
    return not torch.compiler.is_compiling() and detect_fake_mode() is None


def _check_fits(name: str, cumulative: Tensor, length: int) -> None:
    if _readable() and int(cumulative[-1]) > length:
        raise ValueError(f"{name} ends at {int(cumulative[-1])}; it must end at {length} or before")


def _runs(rows: Tensor, columns: Tensor, length: int, before: int, after: int) -> Tensor:
    """Return (1, 2, length): the first column that each row sees and the end of what it sees.

    `rows` and `columns` are the cumulative lengths of the same documents. A row past the last
    document sees nothing.
    """
    index = torch.arange(length, device=rows.device)
    # The number of documents that end at or before a row is its document, empty ones stepped over.
    document = torch.searchsorted(rows[1:].contiguous(), index, right=True)
    outside = document >= rows.shape[0] - 1
    document = document.clamp(max=max(rows.shape[0] - 2, 0))
    following = (document + 1).clamp(max=rows.shape[0] - 1)
    start, end = columns[document], columns[following]
    found = _clipped(index + end - rows[following], start, end, before, after)
    found = torch.where(outside, columns[-1], found)
    return found[None].to(torch.int32).contiguous()


def _clipped(own: Tensor, start: Tensor, end: Tensor, before: int, after: int) -> Tensor:
    """Return (2, ...): the window around `own`, cut at its document's [start, end)."""
    low = torch.clamp(own - before, min=start, max=end)
    return torch.stack([low, torch.clamp(own + after + 1, min=start, max=end)])


def documents(
    cumulative_q: Sequence[int] | Tensor,
    length_q: int,
    cumulative_k: Sequence[int] | Tensor | None = None,
    length_k: int | None = None,
    *,
    left: int | None = None,
    right: int | None = 0,
) -> Mask:
    """Return the mask of documents packed into one row: no token sees another document.

    `cumulative_q` (N + 1,) starts at 0 and holds where each document ends; the row has `length_q`
    tokens, those past the last document see nothing and give 0. Keys have documents of their own
    lengths where `cumulative_k` and `length_k` are given. `left` and `right` are a window inside
    each document, aligned at its last token; the default is causal. Lengths may be 0. The same
    documents hold for every row of the batch. Raises ValueError naming what is wrong.
    """
    before, after = _bound("left", left), _bound("right", right)
    rows = _cumulative("cumulative_q", cumulative_q)
    columns = rows if cumulative_k is None else _cumulative("cumulative_k", cumulative_k)
    columns = columns.to(rows.device)
    if rows.shape != columns.shape:
        counts = columns.shape[0] - 1, rows.shape[0] - 1
        raise ValueError("cumulative_k has {} documents; it must have {}".format(*counts))
    length_q = _count("length_q", length_q, "tokens")
    length_k = length_q if length_k is None else _count("length_k", length_k, "tokens")
    _check_fits("cumulative_q", rows, length_q)
    _check_fits("cumulative_k", columns, length_k)
    return Mask(
        kind=MaskKind.DOCUMENTS,
        left=before,
        right=after,
        lengths=(length_q, length_k),
        keys_of_query=_runs(rows, columns, length_q, before, after),
        queries_of_key=_runs(columns, rows, length_k, after, before),
    )


def packed(position_ids: Tensor, *, left: int | None = None, right: int | None = 0) -> Mask:
    """Return the mask of documents told by their positions (B, S), each row packed by itself.

    A document starts where a position is not the one before it plus 1, as transformers reads
    them. `left` and `right` are a window inside each document; the default is causal. Raises
    ValueError for another shape.
    """
    if position_ids.dim() != 2:
        shape = tuple(position_ids.shape)
        raise ValueError(f"position_ids has shape {shape}; it must be (B, S)")
    first = position_ids[:, :1] - 1
    return labelled((position_ids.diff(prepend=first) != 1).cumsum(1), left=left, right=right)


def labelled(document_ids: Tensor, *, left: int | None = None, right: int | None = 0) -> Mask:
    """Return the mask of documents told by a number for each token (B, S), each row by itself.

    A document is a run of equal numbers. `left` and `right` are a window inside each document; the
    default is causal. Raises ValueError for another shape.
    """
    if document_ids.dim() != 2:
        shape = tuple(document_ids.shape)
        raise ValueError(f"document_ids has shape {shape}; it must be (B, S)")
    before, after = _bound("left", left), _bound("right", right)
    batch, seq = document_ids.shape
    index = torch.arange(seq, device=document_ids.device).expand(batch, seq)
    changes = document_ids.diff(dim=1) != 0
    edge = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    starts, stops = torch.cat([edge, changes], 1), torch.cat([changes, edge], 1)
    first = torch.where(starts, index, 0).cummax(1).values
    end = torch.where(stops, index + 1, seq).flip(1).cummin(1).values.flip(1)

    def runs(before: int, after: int) -> Tensor:
        return (
            _clipped(index, first, end, before, after).transpose(0, 1).to(torch.int32).contiguous()
        )

    return Mask(
        kind=MaskKind.DOCUMENTS,
        left=before,
        right=after,
        lengths=(seq, seq),
        keys_of_query=runs(before, after),
        queries_of_key=runs(after, before),
    )


def block_sparse(
    table: Tensor, block: int, lengths: tuple[int, int], *, causal: bool = False
) -> Mask:
    """Return the mask of a query that sees the keys of the blocks its own block's row marks.

    `table` is boolean, (nq, nk) or (1 or B, 1 or Hq, nq, nk) with nq = ceil(Sq / block) and
    nk = ceil(Sk / block) for `lengths` (Sq, Sk); `block` is 64 or a multiple of 128. `causal` also
    hides the keys after the query, inside blocks too. Raises ValueError naming what is wrong.
    """
    if block != MIN_BLOCK and (block <= 0 or block % LARGE_BLOCK):
        raise ValueError(f"block is {block}; allowed are 64 and the multiples of 128")
    counts = tuple(-(-length // block) for length in lengths)
    if table.dtype != torch.bool or table.dim() not in (2, 4) or table.shape[-2:] != counts:
        found = f"{table.dtype} of shape {tuple(table.shape)}"
        raise ValueError(f"table is {found}; it must be bool, its last sizes {counts}")
    table = table if table.dim() == 4 else table[None, None]
    hidden, whole = _block_classes(block, lengths, causal, table.device)
    seen = table & ~hidden
    return Mask(
        kind=MaskKind.BLOCKS,
        right=0 if causal else UNBOUNDED,
        block=block,
        lengths=lengths,
        keys_of_query=_block_lists(seen, whole),
        queries_of_key=_block_lists(seen.mT, whole.mT),
    )


def _block_classes(
    block: int, lengths: tuple[int, int], causal: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (hidden, whole), (nq, nk): blocks of which causality hides all or in which nothing is.

    A block that reaches past the last query or key is not whole: it must be masked.
    """
    seq_q, seq_k = lengths
    first_q = torch.arange(0, seq_q, block, device=device)[:, None]
    first_k = torch.arange(0, seq_k, block, device=device)[None, :]
    whole = (first_q + block <= seq_q) & (first_k + block <= seq_k)
    hidden = torch.zeros_like(whole)
    if causal:
        last_q = (first_q + block).clamp(max=seq_q) - 1
        hidden = first_k > last_q + (seq_k - seq_q)
        whole = whole & (first_k + block - 1 <= first_q + (seq_k - seq_q))
    return hidden, whole


def _block_lists(seen: Tensor, whole: Tensor) -> Tensor:
    """Return (.., rows, 2 + columns) int32: how many whole and partial blocks, and which, sorted."""
    # Stable sorting puts the whole blocks first, then the partial ones, each in rising order.
    rank = torch.where(seen & whole, 0, torch.where(seen, 1, 2))
    order = rank.argsort(dim=-1, stable=True)
    counts = torch.stack([(rank == 0).sum(-1), (rank == 1).sum(-1)], dim=-1)
    return torch.cat([counts, order], dim=-1).to(torch.int32).contiguous()
