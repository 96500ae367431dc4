"""Choosing, making, renaming and filling experiments; what goes wrong is told and loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from app import experiment_candidates, services
from db import experiments

CHOSEN, PROBLEM = "experiment_chosen", "experiment_problem"
NEW_NAME, NAME = "experiment_new_name", "experiment_name"
URL_KEY = "experiment"


def choose_experiment() -> int | None:
    """Draw the choice of an experiment and the ways to make or change one; None without any."""
    found = {one.id: one for one in experiments.list_experiments(services.database())}
    if st.session_state.get(CHOSEN) not in found:
        st.session_state.pop(CHOSEN, None)
        wanted = str(st.query_params.get(URL_KEY, ""))
        if wanted.isdecimal() and int(wanted) in found:
            st.session_state[CHOSEN] = int(wanted)
        elif wanted:
            st.warning(f"The link names experiment {wanted!r}, which is not in this database.")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox(
            "Experiment",
            list(found),
            key=CHOSEN,
            format_func=lambda one: f"{found[one].name} · {found[one].members} runs",
            placeholder="None is there yet",
            disabled=not found,
        )
        _new()
        if chosen is not None:
            _change(chosen, found[chosen].name)
    if st.session_state.get(PROBLEM):
        st.error(st.session_state[PROBLEM], icon=":material/error:")
    if chosen is not None:
        st.query_params[URL_KEY] = str(chosen)
    return chosen


def _new() -> None:
    with st.popover("New", icon=":material/add:"), st.form("experiment_new"):
        st.text_input("Name", key=NEW_NAME, max_chars=experiments.MAX_NAME_CHARACTERS)
        st.form_submit_button("Make it", on_click=_create, key="experiment_create")


def _change(chosen: int, name: str) -> None:
    with st.popover("Change", icon=":material/edit:"):
        with st.form("experiment_change"):
            st.text_input(
                "Name",
                value=name,
                key=f"{NAME}_{chosen}",
                max_chars=experiments.MAX_NAME_CHARACTERS,
            )
            st.form_submit_button(
                "Rename", on_click=_rename, args=(chosen,), key="experiment_rename"
            )
        st.caption("Forgetting an experiment leaves its runs and measurements where they are.")
        st.button(
            "Forget this experiment",
            icon=":material/delete:",
            key="experiment_delete",
            on_click=_delete,
            args=(chosen,),
        )


def offer_example() -> None:
    """Draw the button that makes an experiment of recorded measurements, to see what one says."""
    st.button(
        "Make an example of measurements that came with Peakmark",
        icon=":material/science:",
        key="experiment_example",
        on_click=_make_example,
    )


def _make_example() -> None:
    def act() -> None:
        database = services.database()
        made = experiments.create_experiment(database, experiment_candidates.EXAMPLE)
        experiments.add_members(database, made, (), experiment_candidates.example_rows())
        st.session_state[CHOSEN] = made

    _told(act)


def _told(act: Callable[[], Any]) -> bool:
    """Do something; keep what is wrong with it for the page to tell. Says whether it was done."""
    st.session_state.pop(PROBLEM, None)
    try:
        act()
    except services.PROBLEMS as problem:
        st.session_state[PROBLEM] = str(problem)
        return False
    return True


def _create() -> None:
    def act() -> None:
        name = st.session_state.get(NEW_NAME)
        st.session_state[CHOSEN] = experiments.create_experiment(services.database(), name)

    if _told(act):
        st.session_state[NEW_NAME] = ""


def _delete(chosen: int) -> None:
    if _told(lambda: experiments.delete_experiment(services.database(), chosen)):
        st.query_params.pop(URL_KEY, None)


def _rename(chosen: int) -> None:
    name = st.session_state.get(f"{NAME}_{chosen}")
    _told(lambda: experiments.rename_experiment(services.database(), chosen, name))


def add_runs(chosen: int, *, is_empty: bool) -> None:
    """Draw the runs and recorded measurements that can be added, and the button that does it."""
    # Its list is made only while it is open.
    box = st.expander(
        "Add runs",
        icon=":material/playlist_add:",
        expanded=is_empty,
        key=f"experiment_add_box_{chosen}",
        on_change="rerun",
    )
    if box.open:
        with box:
            _candidates(chosen)


def _candidates(chosen: int) -> None:
    search = st.text_input(
        "Search runs here and measurements that came with Peakmark",
        key="experiment_search",
        placeholder="words such as: qwen2.5-0.5b fsdp2 nccl",
        live="300ms",
    )
    found = experiment_candidates.candidates(search)
    if not found:
        st.caption("Nothing matches.")
        return
    names = ("what", "world", "outcome", "made", "id")
    chosen_rows = st.dataframe(
        [{name: line[name] for name in names} for line in found],
        key="experiment_candidates",
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
        height=min(320, 3 + 35 * (1 + len(found))),
        alt="Runs and measurements that can be added",
    )
    selected = [found[i] for i in chosen_rows["selection"]["rows"] if i < len(found)]
    full = len(found) == experiment_candidates.CANDIDATES_SHOWN
    shown = f"The newest {len(found)} are shown. " if full else ""
    st.caption(f"{shown}Select rows and add them; a run that is in it already stays once.")
    st.button(
        f"Add {len(selected)} selected",
        icon=":material/add:",
        key="experiment_add",
        disabled=not selected,
        on_click=_add,
        args=(chosen, selected),
    )


def _add(chosen: int, selected: Sequence[dict[str, Any]]) -> None:
    runs = [line["run_id"] for line in selected if line["run_id"]]
    rows = [line["row_id"] for line in selected if line["row_id"]]
    _told(lambda: experiments.add_members(services.database(), chosen, runs, rows))


def remove_runs(chosen: int, member_ids: Sequence[int]) -> None:
    """Take runs out of an experiment, from a callback."""
    _told(lambda: experiments.remove_members(services.database(), chosen, member_ids))
