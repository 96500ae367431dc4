"""The one error a person sees for a wrong input."""

from __future__ import annotations

_MAX_SHOWN_CHARACTERS = 60


def describe_value(value: object) -> str:
    """Return a short, safe text for any value: never long, never raising."""
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} values"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[: _MAX_SHOWN_CHARACTERS - 3] + "..."


def describe_key(key: str) -> str:
    """Return the name of a field as it can stand in a sentence: ASCII, one line, not long."""
    return ascii(key)[1:-1][:_MAX_SHOWN_CHARACTERS]


class PlanError(ValueError):
    """A field that cannot be used: `field` (dotted), `value`, `allowed`; `str()` is one sentence.

    `sentence` replaces the standard wording where the fault is not a range or a choice.
    """

    def __init__(
        self, field: str, value: object, allowed: str, *, sentence: str | None = None
    ) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(sentence or f"{field} is {describe_value(value)}: it must be {allowed}.")
