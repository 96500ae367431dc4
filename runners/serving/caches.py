"""Key-value caches on a device: one room per row, or pages; plain or in one byte with scales.

A cache has a fixed number of rows. The host says how many tokens each row is about to get (`grow`),
then `lengths` on the device are raised, then every layer writes its new keys and values and attends.
Nothing of a step but `grow` touches the host, so steps can be replayed as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from planner.decode_run import CacheDtype
from planner.errors import PlanError
from runners.serving.pages import CacheFullError, PageBook, PageCopy
from runners.serving.shapes import ONE_BYTE, CacheShape

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's cache for some rows, as the decode kernel takes it."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor | None
    window: int | None


class Layers(Protocol):
    """What attention needs of a cache."""

    def layer(self, index: int, rows: slice) -> LayerView:
        """Return a layer's view of some rows."""


class Cache(Layers, Protocol):
    """What decoding needs of a cache; `lengths` (rows,) int32 counts the tokens of each row."""

    lengths: Tensor
    capacity: int

    @property
    def rows(self) -> int:
        """How many sequences it holds at once."""

    def grow(self, row: int, tokens: int) -> None:
        """Make room for `tokens` more of a row; raises CacheFullError, and takes nothing then."""

    def publish(self) -> None:
        """Tell the device of what `grow` and `finish` changed."""

    def finish(self, row: int) -> None:
        """Forget a row's tokens; its room is free again."""

    def bytes(self) -> int:
        """Return the bytes of all its tensors that hold keys, values and scales."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The tensors of one layer: (pages or rows, Hkv, tokens, D), scales without D."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def bytes(self) -> int:
        """Bytes of the four."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _store(
    blocks: int, tokens: int, shape: CacheShape, dtype: torch.dtype, device: torch.device
) -> _Stored:
    """Allocate one layer; a token's heads lie side by side, but a head's scales: they are read together."""

    def values() -> Tensor:
        size = (blocks, tokens, shape.kv_heads, shape.head_dim)
        return torch.empty(size, dtype=dtype, device=device).transpose(1, 2)

    def scales() -> Tensor | None:
        if dtype not in ONE_BYTE.values():
            return None
        size = (blocks, shape.kv_heads, tokens)
        return torch.empty(size, dtype=torch.float32, device=device)

    return _Stored(values(), values(), scales(), scales())


def stored_dtype(dtype: CacheDtype, model_dtype: torch.dtype) -> torch.dtype:
    """Return the element type of a cache beside a model of `model_dtype`.

    Raises PlanError for one byte beside fp32, which the decode kernel cannot multiply.
    """
    if dtype is CacheDtype.MODEL:
        return model_dtype
    if model_dtype == torch.float32:
        raise PlanError("decode.cache_dtype", str(dtype), "model where the weights are fp32")
    return ONE_BYTE[dtype]


class ContiguousCache:
    """Room for `capacity` tokens of every row, whether or not they come."""

    def __init__(
        self,
        shape: CacheShape,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._windows = shape.windows
        self._tokens = [0] * rows
        self._layers = [_store(rows, capacity, shape, dtype, device) for _ in shape.windows]

    @property
    def rows(self) -> int:
        """How many sequences it holds at once."""
        return len(self._tokens)

    def layer(self, index: int, rows: slice) -> LayerView:
        """Return a layer's view of some rows."""
        stored = self._layers[index]
        k_scale = None if stored.k_scale is None else stored.k_scale[rows]
        v_scale = None if stored.v_scale is None else stored.v_scale[rows]
        window = self._windows[index]
        return LayerView(stored.k[rows], stored.v[rows], k_scale, v_scale, None, window)

    def grow(self, row: int, tokens: int) -> None:
        """Count `tokens` more of a row; raises CacheFullError where they do not fit."""
        _check_room(self._tokens[row] + tokens, self.capacity)
        self._tokens[row] += tokens

    def publish(self) -> None:
        """Nothing is kept on the host that the device must know."""

    def finish(self, row: int) -> None:
        """Forget a row's tokens."""
        self._tokens[row] = 0
        self.lengths[row] = 0

    def bytes(self) -> int:
        """Return the bytes of all layers."""
        return sum(stored.bytes() for stored in self._layers)


def _check_room(tokens: int, capacity: int) -> None:
    if tokens > capacity:
        raise CacheFullError(
            f"a sequence of {tokens} tokens does not fit a cache of {capacity} tokens per sequence; "
            "shorten it or give the cache more"
        )


class _Group:
    """The layers that see alike: one book of pages, one block table on the device."""

    def __init__(
        self,
        window: int | None,
        pages: int,
        page_size: int,
        size: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.window = window
        self.book = PageBook(pages, page_size, window)
        # Zero where a row has no page: a number that may be read, of a page that is not.
        self.table = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._changed = False
        self.layers: dict[int, _Stored] = {}

    def grow(self, row: int, tokens: int) -> list[PageCopy]:
        """Take the pages of `tokens` more of a row; return what must be copied first."""
        before = self.book.num_pages(row)
        copies = self.book.grow(row, tokens)
        for index in range(max(0, before - len(copies)), self.book.num_pages(row)):
            self._host[row, index] = self.book.page(row, index) or 0
            self._changed = True
        return copies

    def publish(self) -> None:
        """Write the table to the device, where it has changed."""
        if self._changed:
            # The host may write on while this is under way: a row only ever gains pages, and what is
            # read too early is behind the row's length.
            self.table.copy_(self._host, non_blocking=True)
            self._changed = False

    def rewrite(self, row: int) -> None:
        """Write a row's whole table, after it was forked."""
        pages = [page or 0 for page in self.book.pages(row)]
        self._host[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._changed = True


class PagedCache:
    """Pages of `page_size` tokens that rows take as they grow, of a pool for each kind of layer.

    `num_pages` is the pool of the layers that see everything; those with a window have one as large
    unless `window_pages` says otherwise.
    """

    def __init__(
        self,
        shape: CacheShape,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        page_size: int,
        num_pages: int,
    ) -> None:
        if num_pages * page_size < capacity and None in shape.windows:
            raise PlanError(
                "pages", num_pages, f"at least {-(-capacity // page_size)}, for one sequence"
            )
        self.capacity, self.page_size = capacity, page_size
        # Behind all pages, of no row: what is written behind a row's own pages goes there.
        self.spare_page = num_pages
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        size = (rows, -(-capacity // page_size))
        self._groups: dict[int | None, _Group] = {}
        for index, window in enumerate(shape.windows):
            if window not in self._groups:
                self._groups[window] = _Group(window, num_pages, page_size, size, device)
            layers = self._groups[window].layers
            layers[index] = _store(num_pages + 1, page_size, shape, dtype, device)
        self._group_of = [self._groups[window] for window in shape.windows]
        for group in self._groups.values():
            for row in range(rows):
                group.book.begin(row)

    @property
    def rows(self) -> int:
        """How many sequences it holds at once."""
        return len(self.lengths)

    def tables(self) -> dict[int | None, Tensor]:
        """Return the block table (rows, pages) of each kind of layer, by its window."""
        return {window: group.table for window, group in self._groups.items()}

    def num_free(self) -> int:
        """Return the pages that the fullest pool has left."""
        return min(group.book.num_free for group in self._groups.values())

    def tokens(self, row: int) -> int:
        """Return how many tokens a row has room for."""
        return self._group_of[0].book.tokens(row)

    def layer(self, index: int, rows: slice) -> LayerView:
        """Return a layer's view of some rows."""
        group = self._group_of[index]
        stored = group.layers[index]
        table = group.table[rows]
        return LayerView(stored.k, stored.v, stored.k_scale, stored.v_scale, table, group.window)

    def fits(self, growth: Sequence[tuple[int, int]]) -> bool:
        """Say whether (row, tokens) of different rows can all grow now.

        Pages that their windows have passed are given back first.
        """
        for row, _ in growth:
            for group in self._groups.values():
                group.book.slide(row)
        return all(
            sum(group.book.missing(row, tokens) for row, tokens in growth) <= group.book.num_free
            for group in self._groups.values()
        )

    def grow(self, row: int, tokens: int) -> None:
        """Take the pages of `tokens` more of a row; raises CacheFullError, and takes nothing then."""
        _check_room(self.tokens(row) + tokens, self.capacity)
        if not self.fits([(row, tokens)]):
            # Raises for the pool that is too full, before any other one has grown.
            for group in self._groups.values():
                if group.book.missing(row, tokens) > group.book.num_free:
                    group.book.grow(row, tokens)
        for group in self._groups.values():
            for copy in group.grow(row, tokens):
                for stored in group.layers.values():
                    _copy_page(stored, copy)

    def fork(self, row: int, child: int, tokens: int) -> None:
        """Let an empty row share the first `tokens` of another one's pages."""
        for group in self._groups.values():
            group.book.finish(child)
            group.book.fork(row, child, tokens)
            group.rewrite(child)
        self.lengths[child] = tokens

    def publish(self) -> None:
        """Write the block tables to the device."""
        for group in self._groups.values():
            group.publish()

    def finish(self, row: int) -> None:
        """Give back a row's pages."""
        for group in self._groups.values():
            group.book.finish(row)
            group.book.begin(row)
        self.lengths[row] = 0

    def bytes(self) -> int:
        """Return the bytes of all layers, without the spare page."""
        groups = self._groups.values()
        held = sum(stored.bytes() for group in groups for stored in group.layers.values())
        return held // (self.spare_page + 1) * self.spare_page


class StagedRows:
    """Some rows of a paged cache under block tables of their own: a graph of them can serve any rows."""

    def __init__(self, cache: PagedCache, rows: int, tokens: int) -> None:
        self._cache = cache
        size = (rows, -(-tokens // cache.page_size))
        self._tables = {
            window: torch.full(size, cache.spare_page, dtype=torch.int32, device=table.device)
            for window, table in cache.tables().items()
        }

    def hold(self, rows: slice, tokens: int) -> None:
        """Take on rows of the cache that hold so many tokens; behind their pages comes the spare one."""
        own = -(-tokens // self._cache.page_size)
        for window, table in self._cache.tables().items():
            staged = self._tables[window]
            staged[:, :own] = table[rows, :own]
            staged[:, own:] = self._cache.spare_page

    def layer(self, index: int, rows: slice) -> LayerView:
        """Return a layer's view of some of the staged rows."""
        view = self._cache.layer(index, rows)
        return replace(view, block_table=self._tables[view.window][rows])


def _copy_page(stored: _Stored, copy: PageCopy) -> None:
    for tensor in (stored.k, stored.v, stored.k_scale, stored.v_scale):
        if tensor is not None:
            tensor[copy.target].copy_(tensor[copy.source])
