"""The book of pages: whatever the order of events, every page is free or counted as often as used."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runners.serving.pages import CacheFullError, PageBook, PageCopy

PAGES, PAGE = 13, 3
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("begin", "grow", "slide", "fork", "finish")),
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 9),
    ),
    max_size=60,
)


class Tokens:
    """What pages hold, written and copied as a cache would: to see that nothing is lost."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], Any] = {}
        self.expected: dict[int, list[Any]] = {}

    def write(self, book: PageBook, name: int, tokens: int, copies: list[PageCopy]) -> None:
        for copy in copies:
            for place in range(PAGE):
                self.stored[copy.target, place] = self.stored.get((copy.source, place))
        rows = self.expected[name]
        for _ in range(tokens):
            page = book.pages(name)[len(rows) // PAGE]
            assert page is not None
            value = object()
            self.stored[page, len(rows) % PAGE] = value
            rows.append(value)

    def assert_intact(self, book: PageBook, name: int, window: int | None) -> None:
        rows = self.expected[name]
        first = 0 if window is None else max(0, len(rows) + 1 - window)
        for position in range(first, len(rows)):
            page = book.pages(name)[position // PAGE]
            assert page is not None
            assert self.stored[page, position % PAGE] is rows[position]


def apply(book: PageBook, tokens: Tokens, event: tuple[str, int, int, int]) -> None:
    kind, name, other, number = event
    if kind == "begin":
        book.begin(name)
        tokens.expected[name] = []
    elif kind == "grow":
        tokens.write(book, name, number, book.grow(name, number))
    elif kind == "slide":
        book.slide(name)
    elif kind == "fork":
        book.fork(name, other, number)
        tokens.expected[other] = tokens.expected[name][:number]
    else:
        book.finish(name)
        del tokens.expected[name]


@pytest.mark.parametrize("window", [None, 1, 5])
@given(events=EVENTS)
@settings(max_examples=80, deadline=None)
def test_no_page_is_lost_or_given_twice(
    window: int | None, events: list[tuple[str, int, int, int]]
) -> None:
    book, tokens = PageBook(PAGES, PAGE, window), Tokens()
    for event in events:
        free = book.num_free
        try:
            apply(book, tokens, event)
        except ValueError:
            assert book.num_free == free  # what is refused takes nothing
        pages = [page for name in tokens.expected for page in book.pages(name)]
        uses = Counter(page for page in pages if page is not None)
        assert book.num_free == PAGES - len(uses)
        for name in tokens.expected:
            assert book.tokens(name) == len(tokens.expected[name])
            tokens.assert_intact(book, name, window)
    for name in list(tokens.expected):
        book.finish(name)
    assert book.num_free == PAGES


def test_a_shared_page_is_copied_by_the_first_that_writes_into_it() -> None:
    book = PageBook(4, 4)
    book.begin("a")
    book.grow("a", 6)
    book.fork("a", "b")
    first, last = book.pages("a")
    (copy,) = book.grow("b", 1)
    assert (copy.source, book.pages("b")) == (last, [first, copy.target])
    assert book.grow("a", 1) == []  # now its own alone


def test_what_cannot_be_done_is_refused() -> None:
    book = PageBook(2, 4, window=3)
    book.begin("a")
    with pytest.raises(CacheFullError, match="'a' needs 3 more pages of 4 tokens and 2 are free"):
        book.grow("a", 9)
    with pytest.raises(ValueError, match="'a' is in the cache already"):
        book.begin("a")
    with pytest.raises(ValueError, match="'b' is not in the cache; begin it first"):
        book.grow("b", 1)
    book.grow("a", 8)
    assert book.slide("a")
    with pytest.raises(ValueError, match="'a' has given back pages that 'b' would see"):
        book.fork("a", "b", 5)
    with pytest.raises(ValueError, match="tokens is 9; 'a' has 8 to share"):
        book.fork("a", "b", 9)
    with pytest.raises(ValueError, match="page_size is 0; it must be at least 1"):
        PageBook(2, 0)
