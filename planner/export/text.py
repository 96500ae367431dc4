"""JSON, TOML and YAML of plain values, without a library: scalars are written as JSON writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isinf
from typing import Any


def json_text(values: Mapping[str, Any]) -> str:
    """Return an object as indented JSON with a last line break; no NaN or infinity."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def toml_text(sections: Mapping[str, Mapping[str, Any]], head: str) -> str:
    """Return sections of scalars as TOML 1.0, below comment lines."""
    lines = [f"# {line}" for line in head.splitlines()]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_scalar(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def yaml_text(values: Mapping[str, Any], head: str) -> str:
    """Return a mapping of scalars and of mappings of scalars as YAML, below comment lines."""
    lines = [f"# {line}" for line in head.splitlines()]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{key}:", *(f"  {name}: {_scalar(one)}" for name, one in value.items())]
        else:
            lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    # Both languages read JSON's strings, numbers and booleans; infinity is TOML's word.
    if isinstance(value, float) and isinf(value):
        return "inf"
    return json.dumps(value, ensure_ascii=True)
