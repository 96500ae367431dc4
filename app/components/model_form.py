"""The form's model part: preset, config.json, hub id, and every derived number to edit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import services, state
from planner.errors import PlanError
from planner.units import format_count

CONFIG_TEXT = "config_text"
FETCHED = "fetched_configs"
CONFIG_PLACEHOLDER = '{"model_type": "llama", "hidden_size": 4096, ...}'


def model_form() -> dict[str, Any] | None:
    """Draw the model's widgets; return the plan's "model" part, None while nothing is given."""
    st.segmented_control(
        "Model",
        ("preset", "config", "hub"),
        default=state.DEFAULTS["source"],
        required=True,
        key="source",
        bind="query-params",
        on_change=_forget_dimensions,
        help="preset: from our table. config: a Hugging Face config.json. hub: fetch one by id.",
    )
    source = st.session_state["source"]
    model = {"preset": _preset, "config": _pasted, "hub": _from_hub}[source]()
    _keep_config_in_url(model if source == "config" else None)
    if model is not None:
        _dimensions(model)
    return model


def _forget_dimensions() -> None:
    """Another model: the edited numbers of the old one do not carry over."""
    for key in state.DIMENSIONS:
        st.session_state[key] = None
    st.session_state[state.TIE_KEY] = state.TIE_CHOICES[0]


def _preset() -> dict[str, Any]:
    ids = services.model_ids()
    chosen = st.selectbox(
        "Preset",
        ids,
        index=ids.index(state.DEFAULTS["model"]),
        key="model",
        bind="query-params",
        on_change=_forget_dimensions,
        label_visibility="collapsed",
    )
    return {"preset": chosen}


def _pasted() -> dict[str, Any] | None:
    packed = st.query_params.get(state.CONFIG_KEY)
    if packed and not st.session_state.get(CONFIG_TEXT):
        st.session_state[CONFIG_TEXT] = state.unpack_config(packed) or ""
        if not st.session_state[CONFIG_TEXT]:
            st.error("The link's config is damaged: paste or upload the config.json instead.")
    st.file_uploader("Upload config.json", type="json", key="config_upload", on_change=_take_upload)
    text = st.text_area(
        "or paste config.json",
        key=CONFIG_TEXT,
        persist_state="session",
        height=140,
        placeholder=CONFIG_PLACEHOLDER,
    )
    if not text.strip():
        st.caption("Paste or upload a Hugging Face config.json to plan that model.")
        return None
    return {"config": services.read_config(text), "name": "config.json"}


def _take_upload() -> None:
    """Put an uploaded file into the text box, where it can be read and changed."""
    file = st.session_state["config_upload"]
    if file is not None:
        st.session_state[CONFIG_TEXT] = file.getvalue().decode(errors="replace")
        _forget_dimensions()


def _from_hub() -> dict[str, Any] | None:
    hub_id = st.text_input(
        "Hub id", key="hub", bind="query-params", placeholder="owner/name"
    ).strip()
    fetched = st.session_state.setdefault(FETCHED, {})
    if st.button("Fetch config.json", icon=":material/cloud_download:", disabled=not hub_id):
        fetched[hub_id] = services.hub_config(hub_id)
        _forget_dimensions()
    if hub_id not in fetched:
        st.caption("The configuration is fetched from huggingface.co; no weights are loaded.")
        return None
    return {"config": fetched[hub_id], "name": hub_id}


def _keep_config_in_url(model: Mapping[str, Any] | None) -> None:
    """Carry a pasted configuration in the URL, where it is short enough."""
    if model is None:
        if state.CONFIG_KEY in st.query_params:
            del st.query_params[state.CONFIG_KEY]
        return
    packed = state.pack_config(model["config"])
    if packed is None:
        st.caption("This config.json is too long for the URL: a shared link opens without it.")
    elif st.query_params.get(state.CONFIG_KEY) != packed:
        st.query_params[state.CONFIG_KEY] = packed


def _dimensions(model: Mapping[str, Any]) -> None:
    """Show every derived number and let each be edited; a change is an override of the plan."""
    try:
        derived = services.model_summary(model)
    except PlanError as problem:
        st.error(str(problem))
        return
    heads = f"{derived['num_attention_heads']} heads / {derived['num_key_value_heads']} KV"
    st.caption(
        f"{derived['family']} · {format_count(derived['parameters'])} parameters as published · "
        f"{derived['num_hidden_layers']} layers · {heads}"
    )
    if derived["is_traced"]:
        st.caption(
            "traced: planned as it is; to change a dimension, trace the changed config.json."
        )
        return
    with st.expander("Edit dimensions", icon=":material/edit:"):
        columns = st.columns(2)
        for index, (key, label) in enumerate(state.DIMENSIONS.items()):
            with columns[index % 2]:
                _dimension(key, label, derived[key])
        st.segmented_control(
            "Input and output embeddings",
            state.TIE_CHOICES,
            default=state.TIE_CHOICES[0],
            required=True,
            key=state.TIE_KEY,
            bind="query-params",
        )
        st.button("Back to the configuration", on_click=_forget_dimensions, icon=":material/undo:")


def _dimension(key: str, label: str, derived: int | None) -> None:
    st.number_input(
        label,
        min_value=1,
        max_value=2**30,
        value=None,
        step=1,
        key=key,
        bind="query-params",
        placeholder="none" if derived is None else str(derived),
        help=f"{key} of config.json",
    )
