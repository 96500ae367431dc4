"""Every problem on a page is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from app.services import PROBLEMS


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Show a wrong plan or an unusable database as a sentence in place of the block's rest."""
    try:
        yield
    except PROBLEMS as problem:
        st.error(str(problem), icon=":material/error:")
