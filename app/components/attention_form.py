"""The Attention page's choices: the plan's shape, changes to it, and the variants to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from planner.attention.answer import WORDS
from planner.attention.of_plan import problem_of_plan
from planner.attention.problem import (
    DTYPE_BYTES,
    EXACT_VARIANTS,
    MAX_DIMENSION,
    AttentionProblem,
    Variant,
)
from planner.errors import describe_value
from planner.plan import Plan

WIDTH_PX = 130
PREFIX = "at_"
MASKS = ("causal", "full")
SHAPE: Mapping[str, str] = {
    "batch": "Batch",
    "heads": "Query heads",
    "kv_heads": "Key-value heads",
    "head_dim": "Head size",
    "sequence_length": "Tokens",
}
PATTERN: Mapping[str, str] = {
    "window": "Window, tokens",
    "global_tokens": "Global tokens",
    "block": "Block, tokens",
    "block_stride": "One block in",
}
HELP: Mapping[str, str] = {
    "window": "Of window and global + local: a query sees keys less than this many tokens away.",
    "global_tokens": "Of global + local: the first tokens, which every later query sees.",
    "block": "Of block-sparse: 64 or a multiple of 128.",
    "block_stride": "Of block-sparse: its own block and every so-many-th from it.",
}
ALGORITHMS = tuple(variant for variant in Variant if variant not in EXACT_VARIANTS)


def choose_problem(plan: Plan) -> AttentionProblem:
    """Draw the shape, the plan's where it is not changed; return the problem they make.

    Raises PlanError naming a field that cannot be.
    """
    own = problem_of_plan(plan)
    with st.expander("Change shape and patterns", icon=":material/tune:"):
        with st.grid(5, min_column_width=WIDTH_PX):
            changes: dict[str, Any] = {
                name: _number(name, label, own) for name, label in SHAPE.items()
            }
        with st.container(horizontal=True):
            changes["causal"] = _choice("causal", "Mask", MASKS, MASKS[not own.causal]) == MASKS[0]
            changes["dtype"] = _choice("dtype", "Type", tuple(DTYPE_BYTES), own.dtype)
        # The window follows the length that was chosen, until it is chosen itself.
        at_length = problem_of_plan(plan, changes)
        with st.grid(4, min_column_width=WIDTH_PX):
            pattern = {name: _number(name, label, at_length) for name, label in PATTERN.items()}
    problem = problem_of_plan(plan, {**changes, **pattern})
    st.markdown(problem_line(problem))
    return problem


def problem_line(problem: AttentionProblem) -> str:
    """Return a problem in one line."""
    heads = f"{problem.heads} query and {problem.kv_heads} key-value heads of {problem.head_dim}"
    mask = "causal" if problem.causal else "full"
    return (
        f"**{problem.batch:,} × {problem.sequence_length:,} tokens** · {heads} · {mask} · "
        f"{problem.dtype} · window {problem.window:,} · {problem.global_tokens:,} global · one in "
        f"{problem.block_stride} blocks of {problem.block:,}"
    )


def _number(name: str, label: str, own: AttentionProblem) -> int:
    value = getattr(own, name)
    return st.number_input(
        label,
        min_value=1,
        max_value=MAX_DIMENSION,
        value=_from_link(name, value),
        step=1,
        key=f"attention_{name}_{value}",
        help=HELP.get(name),
    )


def _from_link(name: str, own: int) -> int:
    text = st.query_params.get(PREFIX + name)
    if text is None:
        return own
    if text.isdigit() and 0 < int(text) <= MAX_DIMENSION:
        return int(text)
    _tell_refused(name, text, own)
    return own


def _choice(name: str, label: str, options: Sequence[str], own: str) -> str:
    asked = st.query_params.get(PREFIX + name, own)
    if asked not in options:
        _tell_refused(name, asked, own)
    chosen = st.segmented_control(
        label,
        options,
        default=asked if asked in options else own,
        required=True,
        key=f"attention_{name}_{own}",
    )
    return str(chosen)


def _tell_refused(name: str, text: str, own: object) -> None:
    given = describe_value(text).replace("`", "'")
    st.warning(
        f"The link says `{PREFIX}{name}` is `{given}`, which cannot be used: {own} is shown.",
        icon=":material/link_off:",
    )


def choose_variants() -> list[Variant]:
    """Draw kernels and algorithms apart, each with what it is; return the chosen ones."""
    left, right = st.columns(2)
    with left:
        kernels = _pills("Kernels: the same result, another way", EXACT_VARIANTS)
    with right:
        algorithms = _pills("Algorithms: another result", ALGORITHMS)
    chosen = {*kernels, *algorithms}
    return [variant for variant in Variant if variant in chosen]


def _pills(label: str, variants: Sequence[Variant]) -> list[Variant]:
    names = [variant.value for variant in variants]
    asked = st.query_params.get(PREFIX + "variants")
    wanted = names if asked is None else [name for name in names if name in asked.split(",")]
    picked = st.pills(
        label,
        names,
        default=wanted,
        selection_mode="multi",
        format_func=lambda name: WORDS[Variant(name)],
        key=f"attention_variants_{names[0]}",
    )
    return [Variant(name) for name in picked]


def link_of(plan: Plan, problem: AttentionProblem, variants: Sequence[Variant]) -> dict[str, str]:
    """Return the parameters of the page's address for what differs from the plan."""
    changed: dict[str, Any] = {
        name: getattr(problem, name)
        for name, own in problem_of_plan(plan).to_dict().items()
        if getattr(problem, name) != own
    }
    if "causal" in changed:
        changed["causal"] = MASKS[not problem.causal]
    at_length = problem_of_plan(plan, {"sequence_length": problem.sequence_length})
    if changed.get("window") == at_length.window:
        del changed["window"]
    if len(variants) < len(Variant):
        changed["variants"] = ",".join(variants)
    return {PREFIX + name: str(value) for name, value in changed.items()}
