"""Which pages of a key-value cache belong to which sequence: counts on the host, no tensors.

A page holds a fixed number of tokens. Sequences share the pages of a common prefix; the first that
writes into a shared page gets a copy of it. With a sliding window, pages that no later query sees are
given back while the sequence lives.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


class CacheFullError(ValueError):
    """There are fewer free pages than a sequence needs; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page whose content must be copied before the next token is written."""

    source: int
    target: int


@dataclass(slots=True)
class _Sequence:
    """Its pages in order, None where the window has passed, and its tokens."""

    pages: list[int | None] = field(default_factory=list)
    tokens: int = 0


class PageBook:
    """The pages of all sequences of one kind of layer; `window` as the layers see it, None for all."""

    def __init__(self, num_pages: int, page_size: int, window: int | None = None) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.page_size = page_size
        self._window = window
        self._free = list(range(num_pages - 1, -1, -1))
        self._uses = [0] * num_pages
        self._sequences: dict[Hashable, _Sequence] = {}

    @property
    def num_free(self) -> int:
        """Pages that belong to nobody."""
        return len(self._free)

    def begin(self, name: Hashable) -> None:
        """Add a sequence without tokens; raises ValueError for a name that is in use."""
        if name in self._sequences:
            raise ValueError(f"sequence {name!r} is in the cache already; finish it first")
        self._sequences[name] = _Sequence()

    def tokens(self, name: Hashable) -> int:
        """Return how many tokens a sequence has."""
        return self._known(name).tokens

    def pages(self, name: Hashable) -> list[int | None]:
        """Return a sequence's pages in order; None where its window has passed."""
        return list(self._known(name).pages)

    def page(self, name: Hashable, index: int) -> int | None:
        """Return one page of a sequence; None where its window has passed."""
        return self._known(name).pages[index]

    def num_pages(self, name: Hashable) -> int:
        """Return how many pages a sequence has, those given back among them."""
        return len(self._known(name).pages)

    def missing(self, name: Hashable, tokens: int) -> int:
        """Return how many free pages `grow` would take."""
        sequence = self._known(name)
        wanted = -(-(sequence.tokens + tokens) // self.page_size)
        return wanted - len(sequence.pages) + int(tokens > 0 and self._shares_its_end(sequence))

    def grow(self, name: Hashable, tokens: int) -> list[PageCopy]:
        """Make room for `tokens` more, and return what must be copied before they are written.

        Raises CacheFullError, before anything is taken, where there are too few free pages.
        """
        sequence = self._known(name)
        needed = self.missing(name, tokens)
        if needed > self.num_free:
            raise CacheFullError(
                f"sequence {name!r} needs {needed} more pages of {self.page_size} tokens and "
                f"{self.num_free} are free; finish another sequence or give the cache more pages"
            )
        copies = []
        if tokens > 0 and self._shares_its_end(sequence):
            shared, own = sequence.pages[-1], self._take()
            assert shared is not None
            copies.append(PageCopy(shared, own))
            self._release(shared)
            sequence.pages[-1] = own
        sequence.tokens += tokens
        while len(sequence.pages) * self.page_size < sequence.tokens:
            sequence.pages.append(self._take())
        return copies

    def slide(self, name: Hashable) -> bool:
        """Give back the pages that the next query will not see; say whether there were any."""
        sequence = self._known(name)
        if self._window is None:
            return False
        passed = max(0, sequence.tokens + 1 - self._window) // self.page_size
        gone = [page for page in sequence.pages[:passed] if page is not None]
        for page in gone:
            self._release(page)
        sequence.pages[:passed] = [None] * passed
        return bool(gone)

    def fork(self, parent: Hashable, child: Hashable, tokens: int | None = None) -> None:
        """Add `child`, which shares the first `tokens` of `parent` (all if None) without a copy.

        Raises ValueError for more tokens than there are, or for what the window has passed.
        """
        source = self._known(parent)
        tokens = source.tokens if tokens is None else tokens
        if not 0 <= tokens <= source.tokens:
            raise ValueError(f"tokens is {tokens}; {parent!r} has {source.tokens} to share")
        pages = source.pages[: -(-tokens // self.page_size)]
        oldest = 0 if self._window is None else max(0, tokens + 1 - self._window)
        if None in pages[oldest // self.page_size :]:
            raise ValueError(f"{parent!r} has given back pages that {child!r} would see")
        self.begin(child)
        for page in pages:
            if page is not None:
                self._uses[page] += 1
        self._sequences[child] = _Sequence(pages, tokens)

    def finish(self, name: Hashable) -> None:
        """Forget a sequence and give back the pages that no other one shares."""
        for page in self._known(name).pages:
            if page is not None:
                self._release(page)
        del self._sequences[name]

    def _known(self, name: Hashable) -> _Sequence:
        if name not in self._sequences:
            raise ValueError(f"sequence {name!r} is not in the cache; begin it first")
        return self._sequences[name]

    def _shares_its_end(self, sequence: _Sequence) -> bool:
        """Say whether the next token goes into a page that another sequence has too."""
        if sequence.tokens % self.page_size == 0:
            return False
        page = sequence.pages[-1]
        return page is not None and self._uses[page] > 1

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._uses[page] -= 1
        if self._uses[page] == 0:
            self._free.append(page)
