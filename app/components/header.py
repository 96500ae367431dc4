"""The line above every page: model, workload, parallelism, hardware, and the unit of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import streamlit as st

from app import state
from app.plan_words import checkpointing_words, split_words, variant_words

# These pages begin with a headline of their own.
UNTITLED_PAGES = ("Plan", "Run")
# These have a line of their own for the workload, which is not the plan's where that trains.
MODEL_PAGES = ("Serving",)
# These are about something else: the plan stands beside it, as what other pages go on with.
OTHER_PAGES = ("Compare", "Claims", "Runs", "Experiments", "Accuracy", "Hardware")
# These carry the plan in their own address.
PLAN_PAGES = ("Ledger", "Sweep", "Compare", "ZeRO", "Attention", "Claims")


def current_values() -> dict[str, Any]:
    """Return what the plan's widgets hold, on whichever page they are."""
    # A mapping in all but its type: its keys may also be numbers.
    widgets = cast("Mapping[str, Any]", st.session_state)
    return state.values_from(widgets, st.query_params)


def unit() -> str:
    """Return the unit that the person reads sizes in, "GiB" or "GB"."""
    return "GB" if current_values()["unit"] == "GB" else "GiB"


def header_line(values: Mapping[str, Any], page_title: str = "") -> str:
    """Return the plan in one line; its model and GPU alone on pages that say the rest themselves."""
    if page_title in MODEL_PAGES:
        return " · ".join([model_name(values), _hardware(values)])
    rare = []
    if values["job"] == "train" and values["checkpointing"] != "none":
        rare.append(f"checkpointing {checkpointing_words(values)}")
    return " · ".join([model_name(values), *_workload(values), *rare, _hardware(values)])


def headline(values: Mapping[str, Any], page_title: str) -> str:
    """Return a page's first line in Markdown: the plan it is about, or quietly the plan beside it."""
    if page_title == "Run":
        return ""  # A run's page is about the run's plan, which it names itself.
    line = header_line(values, page_title)
    return f":gray[Your plan: {line}]" if page_title in OTHER_PAGES else f"**{line}**"


def model_name(values: Mapping[str, Any]) -> str:
    """Return the model's name without its owner."""
    if values["source"] == "config":
        return "config.json"
    name = values["hub"] if values["source"] == "hub" else values["model"]
    return str(name or "no model").rsplit("/", 1)[-1]


def _workload(values: Mapping[str, Any]) -> list[str]:
    if values["job"] == "serve":
        shape = f"{values['sequences']:,} × {values['context']:,} tokens"
        precision = f"{values['weights_dtype']} weights, {values['kv_dtype']} KV"
        return [f"serve {shape}", precision, f"{values['gpus']} replicas"]
    shape = f"{values['micro_batch']:,} × {values['seq']:,} tokens"
    return [
        f"train {shape}",
        f"{values['precision']}, {values['attention']}",
        f"{values['engine']} ZeRO-{values['zero']} × {values['gpus']:,}{split_words(values)}",
        *variant_words(values),
    ]


def plan_line(plan: Mapping[str, Any]) -> str:
    """Return a stored training plan in one line, in the words of the header."""
    hardware = plan["hardware"]
    return " · ".join(
        [
            *_workload(
                {
                    "job": plan["job"],
                    **plan["workload"],
                    **plan["parallelism"],
                    "seq": plan["workload"]["sequence_length"],
                    "zero": plan["parallelism"]["zero_stage"],
                    "gpus": plan["parallelism"]["world_size"],
                }
            ),
            f"checkpointing {checkpointing_words(plan['workload'])}",
            str(hardware.get("preset") or hardware["custom"]["name"]),
        ]
    )


def _hardware(values: Mapping[str, Any]) -> str:
    gpu = str(values["gpu"])
    return "custom GPU" if gpu == state.CUSTOM_GPU else gpu


def show_header(page_title: str, show_beside: Callable[[str], None]) -> None:
    """Draw the header of a page: its title, the plan and the way to its form, the unit switch.

    `show_beside` draws what else belongs beside the plan, given the title.
    """
    if page_title not in UNTITLED_PAGES:
        st.markdown(f"## {page_title}")
    with st.container(horizontal=True, vertical_alignment="center", key="header"):
        st.markdown(headline(current_values(), page_title), width="stretch")
        if page_title != "Plan":
            st.page_link(
                "app_pages/plan.py",
                label="Edit plan",
                icon=":material/edit:",
                # A page that was opened by a link has the plan in its own address only.
                query_params=st.query_params.to_dict() if page_title in PLAN_PAGES else None,
            )
        show_beside(page_title)
        st.segmented_control(
            "Unit of sizes",
            ("GiB", "GB"),
            default="GiB",
            required=True,
            key="unit",
            bind="query-params",
            label_visibility="collapsed",
            width="content",
        )
