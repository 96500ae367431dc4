"""Every problem on a page is one sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from app.services import PROBLEMS

log = logging.getLogger("peakmark.app")
OUR_FAULT = "This part of the page could not be drawn; the server's log says why."


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Show what is wrong as a sentence in place of the block's rest.

    A wrong plan or an unusable database has its own; a fault of ours goes to the log in full.
    """
    try:
        yield
    except PROBLEMS as problem:
        st.error(str(problem), icon=":material/error:")
    except Exception:
        # The last resort at the edge of the page: a person sees a sentence, never a traceback.
        log.exception("a page failed")
        st.error(OUR_FAULT, icon=":material/error:")
