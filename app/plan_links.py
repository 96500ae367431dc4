"""Plans as links: the address of a page read strictly, and a set of plans in one address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from app import state
from planner.config_input import parse_config_text
from planner.errors import PlanError
from planner.hub import fetch_hub_config

MAX_LINK_CHARACTERS = 20_000
# One parameter of the address per plan of a set: plan_1, plan_2, ...
SET_PREFIX = "plan_"
BASELINE_KEY, CHOSEN_KEY = "baseline", "against"
LETTERS = "ABCD"
# What a link of a run, or of a measurement recorded elsewhere, names.
RUN_KEYS = ("run", "row")
_READABLE: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}
Query = Mapping[str, str]


def known_parameters() -> dict[str, Any]:
    """Return the default of every parameter that describes a plan, by its name in a link."""
    dimensions = dict.fromkeys(state.DIMENSIONS)
    return {**state.DEFAULTS, **dimensions, state.TIE_KEY: state.TIE_CHOICES[0]}


def read_link(text: str) -> dict[str, str]:
    """Return the parameters of a pasted link or of its part after the question mark.

    Raises PlanError for a text that is no link, or one that says nothing of a plan or a run.
    """
    stripped = text.strip()
    if not stripped or len(stripped) > MAX_LINK_CHARACTERS:
        raise _refused(text, f"it has {len(stripped):,} of 1 to {MAX_LINK_CHARACTERS:,} characters")
    is_address = "://" in stripped or stripped.startswith(("/", "?"))
    try:
        query = urlsplit(stripped).query if is_address else stripped
        found = dict(parse_qsl(query, keep_blank_values=True))
    except ValueError:
        raise _refused(text, "it is no address") from None
    if is_address and not query:
        # The address of a page whose plan is all defaults.
        return {}
    kept = {key: found[key] for key in found if _says_something(key)}
    if not kept:
        raise _refused(text, "it says nothing of a plan")
    return kept


def _says_something(key: str) -> bool:
    own = (*known_parameters(), state.CONFIG_KEY, *RUN_KEYS, BASELINE_KEY, CHOSEN_KEY)
    return key in own or (key.startswith(SET_PREFIX) and key[len(SET_PREFIX) :].isdecimal())


def _refused(text: str, why: str) -> PlanError:
    allowed = "the address of a page that shows a plan, a comparison or a run"
    sentence = f"The link cannot be used: {why}; paste {allowed}."
    return PlanError("link", text, allowed, sentence=sentence)


def set_of(query: Query) -> list[str]:
    """Return the plans of a set in an address, in their order, each as its own query."""
    numbered = [
        key for key in query if key.startswith(SET_PREFIX) and key[len(SET_PREFIX) :].isdecimal()
    ]
    return [query[key] for key in sorted(numbered, key=lambda key: int(key[len(SET_PREFIX) :]))]


def set_query(plans: Sequence[str]) -> dict[str, str]:
    """Return the parameters that carry a set of plans in an address."""
    return {f"{SET_PREFIX}{number}": plan for number, plan in enumerate(plans, start=1)}


def packed(query: Query) -> str:
    """Return a plan's parameters as one text, in the order of their names."""
    return urlencode(sorted(query.items()))


def unpacked(plan: str) -> dict[str, str]:
    """Return the parameters of a plan packed by `packed`; what says nothing of a plan is dropped."""
    return {
        key: value
        for key, value in parse_qsl(plan, keep_blank_values=True)
        if key in known_parameters() or key == state.CONFIG_KEY
    }


def query_of_document(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of the plan on the page: `document` as entered, else its widgets' `values`.

    A plan that the first cannot say, such as a custom GPU without its memory, is said by the second.
    Raises PlanError for a configuration that is too long for a link.
    """
    try:
        query = state.query_of_plan(document)
    except (KeyError, TypeError, AttributeError):
        query = state.query_of_values(values)
    if "config" in document["model"] and state.CONFIG_KEY not in query:
        allowed = f"at most {state.MAX_CONFIG_URL_CHARACTERS:,} characters when packed"
        sentence = f"The model's configuration is too long for a link: it may have {allowed}."
        raise PlanError("model.config", None, allowed, sentence=sentence)
    return {key: value for key, value in query.items() if key != "unit"}


def document_of(
    query: Query, fetch: Callable[[str], dict[str, Any]] = fetch_hub_config
) -> dict[str, Any]:
    """Return the plan that parameters describe, unchecked as a plan; absent ones take the defaults.

    Raises PlanError for a value that cannot be read and for a model that cannot be had.
    """
    values = known_parameters()
    values |= {name: _read(name, query[name]) for name in query if name in values}
    hardware = (
        state.custom_hardware(values)
        if values["gpu"] == state.CUSTOM_GPU
        else {"preset": values["gpu"]}
    )
    return state.plan_mapping(values, _model(values, query, fetch), hardware)


def _read(name: str, text: str) -> Any:
    if name == state.TIE_KEY and text not in state.TIE_CHOICES:
        raise PlanError(name, text, "one of " + ", ".join(state.TIE_CHOICES))
    kind = int if name in state.DIMENSIONS else type(known_parameters()[name])
    try:
        value = state.read_flag(text) if kind is bool else kind(text)
    except (ValueError, OverflowError):
        raise PlanError(name, text, _READABLE[kind]) from None
    if kind is float and not isfinite(value):
        raise PlanError(name, text, "a finite number")
    return value


def _model(
    values: Mapping[str, Any], query: Query, fetch: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    if values["source"] == "preset":
        return {"preset": values["model"]}
    if values["source"] == "hub":
        return {"config": fetch(values["hub"]), "name": values["hub"]}
    if values["source"] != "config":
        raise PlanError("source", values["source"], "preset, config or hub")
    text = state.unpack_config(query.get(state.CONFIG_KEY, ""))
    if not text:
        sentence = "config is missing from the link or damaged: the model it names cannot be had."
        raise PlanError("config", None, "a packed config.json", sentence=sentence)
    return {"config": parse_config_text(text), "name": "config.json"}
