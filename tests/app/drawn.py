"""What a test reads from a page that AppTest drew."""

from __future__ import annotations

import json

from streamlit.testing.v1 import AppTest

from app.components.problems import OUR_FAULT


def texts(app: AppTest) -> str:
    """All visible prose of a page."""
    shown = [*app.markdown, *app.caption, *app.error, *app.info, *app.warning]
    return "\n".join(str(element.value) for element in shown)


def broken(app: AppTest) -> bool:
    """Whether a page failed by a fault of ours instead of telling what is wrong."""
    return bool(app.exception) or any(error.value == OUR_FAULT for error in app.error)


def charts(app: AppTest) -> list[dict[str, object]]:
    """The figures of a page, as plotly writes them."""
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
