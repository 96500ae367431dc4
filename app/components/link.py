"""What a link said and the form could not take: one sentence instead of a silent default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import streamlit as st

from app import state
from planner.errors import describe_value

READ_KEY = "link_read"


def link_once() -> dict[str, str]:
    """Return the parameters of the URL that opened this session, the first time only."""
    if READ_KEY in st.session_state:
        return {}
    st.session_state[READ_KEY] = True
    return st.query_params.to_dict()


def tell_refused(query: Mapping[str, str]) -> None:
    """Name the parameters whose widget holds another value than the link asked for."""
    # A page without the plan's form has no widgets of it: there the parameter itself is read.
    widgets = {**state.values_from({}, query), **cast("Mapping[str, Any]", st.session_state)}
    for key, text, value in refused(query, widgets):
        given = describe_value(text).replace("`", "'")
        st.warning(
            f"The link says `{key}` is `{given}`, which cannot be used: {value} is shown.",
            icon=":material/link_off:",
        )


def refused(query: Mapping[str, str], widgets: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return key, text and the value shown instead of each parameter that was not taken."""
    known = {*state.DEFAULTS, *state.DIMENSIONS, state.TIE_KEY}
    return [
        (key, text, widgets[key])
        for key, text in query.items()
        if key in known and key in widgets and not _same(text, widgets[key])
    ]


def _same(text: str, value: Any) -> bool:
    if value is None:
        return not text
    if isinstance(value, str):
        return text == value
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    try:
        return float(text) == float(value)
    except ValueError:
        return False
