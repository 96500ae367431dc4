"""The plan that the form describes, on pages where the form itself is not drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import services, state
from app.components.header import current_values
from app.components.model_form import CONFIG_TEXT, FETCHED


def current_document() -> dict[str, Any] | None:
    """Return the plan as entered, unchecked; None while its model is not given."""
    values = current_values()
    model = _model_part(values)
    return None if model is None else state.plan_mapping(values, model, _hardware_part(values))


def keep_plan_in_url(own: Mapping[str, str] | None = None) -> None:
    """Carry the plan in this page's address, so that a reload or a shared link opens it again.

    `own` are parameters of the page itself.
    """
    wanted = {**state.query_of_values(current_values()), **(own or {})}
    packed = _packed_config()
    if packed:
        wanted[state.CONFIG_KEY] = packed
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


def _model_part(values: Mapping[str, Any]) -> dict[str, Any] | None:
    if values["source"] == "preset":
        return {"preset": values["model"]}
    if values["source"] == "hub":
        fetched = st.session_state.get(FETCHED, {})
        config = fetched.get(str(values["hub"]).strip())
        return None if config is None else {"config": config, "name": values["hub"]}
    text = _config_text()
    return {"config": services.read_config(text), "name": "config.json"} if text else None


def _config_text() -> str:
    typed = str(st.session_state.get(CONFIG_TEXT) or "").strip()
    packed = st.query_params.get(state.CONFIG_KEY)
    return typed or (state.unpack_config(packed) or "" if packed else "")


def _packed_config() -> str | None:
    if current_values()["source"] != "config":
        return None
    text = _config_text()
    return state.pack_config(services.read_config(text)) if text else None


def _hardware_part(values: Mapping[str, Any]) -> dict[str, Any]:
    gpu = str(values["gpu"])
    if gpu == state.CUSTOM_GPU:
        return state.custom_hardware(values)
    for attached in services.attached():
        if gpu == f"{state.ATTACHED_PREFIX}{attached['index']}" and attached["hardware"]:
            return dict(attached["hardware"])
    return {"preset": gpu}
