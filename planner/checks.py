"""Checks of single values that people enter; each raises PlanError with one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

from planner.errors import PlanError, describe_key, describe_value

Choice = TypeVar("Choice", bound=StrEnum)


def check_integer(field: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an integer (no boolean, no text) from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise PlanError(field, value, f"an integer from {low} to {high}")
    return value


def check_number(field: str, value: object, low: float, high: float) -> float:
    """Return `value` as a float if it is a finite number from `low` to `high`."""
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise PlanError(field, value, f"a number from {low:g} to {high:g}")
    return float(value)  # type: ignore[arg-type]


def check_boolean(field: str, value: object) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise PlanError(field, value, "true or false")
    return value


def check_text(field: str, value: object, max_characters: int = 200) -> str:
    """Return `value` if it is a non-empty text of at most `max_characters`."""
    if not isinstance(value, str) or not value.strip() or len(value) > max_characters:
        raise PlanError(field, value, f"a text of 1 to {max_characters} characters")
    return value


def check_choice(field: str, value: object, choices: type[Choice]) -> Choice:
    """Return the member of `choices` that `value` names."""
    if isinstance(value, str):
        with suppress(ValueError):
            return choices(value)
    raise PlanError(field, value, "one of " + ", ".join(choices))


def check_mapping(field: str, value: object, known: frozenset[str] | None = None) -> dict[str, Any]:
    """Return `value` if it is an object with text keys, all of them in `known` where given."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise PlanError(field, value, "an object with named fields")
    unknown = sorted(set(value) - known) if known is not None else []
    if unknown:
        allowed = ", ".join(sorted(known or ()))
        sentence = f"{field} has no field {describe_value(unknown[0])}: its fields are {allowed}."
        raise PlanError(
            f"{field}.{describe_key(unknown[0])}", value[unknown[0]], allowed, sentence=sentence
        )
    return dict(value)


def _bad_number(value: object, path: str) -> tuple[str, float] | None:
    """Return where in a value a NaN or an infinity is, and which; None without."""
    if isinstance(value, float) and not math.isfinite(value):
        return path, value
    if isinstance(value, Mapping):
        pairs = [(f"{path}.{describe_key(str(key))}", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(f"{path}[{i}]", child) for i, child in enumerate(value)]
    else:
        return None
    return next((bad for name, child in pairs if (bad := _bad_number(child, name))), None)


def canonical_json(field: str, value: object) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, ASCII, no NaN."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise PlanError(field, value, "nested less deeply") from None
    except (TypeError, ValueError):
        bad = _bad_number(value, field)
    if bad:
        raise PlanError(*bad, "a finite number, not NaN or infinity")
    raise PlanError(field, value, "JSON: text, numbers, true, false, null, lists and objects")
