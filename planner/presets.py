"""The models we know by name: a fact table with its sources (data/models.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from planner.config_input import spec_from_config
from planner.errors import PlanError, describe_value
from planner.families import SUPPORTED_FAMILIES
from planner.model import ModelSpec

_MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """A published model: `hf_fields` are the fields of its Hugging Face configuration.

    `checked_params` is the exact count by transformers on the meta device, tied weights once.
    """

    id: str
    model_type: str
    hf_fields: Mapping[str, Any]
    checked_params: int
    source: tuple[str, ...]
    note: str | None

    @property
    def supported(self) -> bool:
        """Whether the planner models this family."""
        return self.model_type in SUPPORTED_FAMILIES


@cache
def all_presets() -> tuple[ModelPreset, ...]:
    """Return every model of the fact table, also those of families not modelled yet."""
    rows = json.loads(files("planner").joinpath("data/models.json").read_text())
    return tuple(
        ModelPreset(
            id=row["id"],
            model_type=row["hf_model_type"],
            hf_fields=row["hf_fields"],
            checked_params=row["checked_params"],
            source=tuple(row["source"]),
            note=row["note"],
        )
        for row in rows
    )


def model_presets() -> tuple[ModelPreset, ...]:
    """Return the models of supported families, in the order of the fact table."""
    return tuple(preset for preset in all_presets() if preset.supported)


_NEAR, _LISTED = 3, 8
# All but letters, digits and the point within a number: "opt-1.3b" is not "opt-13b".
_PUNCTUATION = re.compile(r"(?<!\d)\.|\.(?!\d)|[^\w.]|_")


def _plain(name: str) -> str:
    return _PUNCTUATION.sub("", name.lower())


def find_by_name(field: str, name: object, ids: Sequence[str]) -> str:
    """Return the id that `name` means: exact, then the last path part, then a unique part of it.

    Case and punctuation do not matter, but for a point within a number. Raises PlanError naming the candidates, or the nearest.
    """
    if not isinstance(name, str) or len(name) > _MAX_NAME_CHARACTERS or not _plain(name):
        raise PlanError(field, name, "the name of a preset")
    wanted = _plain(name)
    shorts = {full: _plain(full.rsplit("/", 1)[-1]) for full in ids}
    for matches in (
        [full for full in ids if _plain(full) == wanted],
        [full for full in ids if shorts[full] == wanted],
        [full for full in ids if shorts[full].startswith(wanted)],
        [full for full in ids if wanted in _plain(full)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = ", ".join(matches[:_LISTED])
            if len(matches) > _LISTED:
                listed += f" and {len(matches) - _LISTED} more (`peakmark presets` lists all)"
            sentence = f"{field} {describe_value(name)} could be any of {listed}: write one fully."
            raise PlanError(field, name, listed, sentence=sentence)
    close = get_close_matches(wanted, list(shorts.values()), n=_NEAR, cutoff=0.0)
    near = ", ".join(full for full in ids if shorts[full] in close)
    sentence = (
        f"{field} {describe_value(name)} is not a known preset: the nearest are {near}; "
        "`peakmark presets` lists all."
    )
    raise PlanError(field, name, ", ".join(ids), sentence=sentence)


@lru_cache(maxsize=1024)
def _preset(name: str) -> ModelPreset:
    presets = {preset.id: preset for preset in all_presets()}
    preset = presets[find_by_name("model.preset", name, list(presets))]
    if not preset.supported:
        supported = ", ".join(SUPPORTED_FAMILIES)
        sentence = (
            f"model.preset {preset.id} is of the family {preset.model_type}, which is not "
            f"modelled: supported families are {supported}."
        )
        raise PlanError("model.preset", preset.id, supported, sentence=sentence)
    return preset


def resolve_preset(name: object) -> ModelPreset:
    """Return the preset of a hub id or an unambiguous short name ("llama-3.1-8b")."""
    if not isinstance(name, str):
        raise PlanError("model.preset", name, "the name of a preset")
    return _preset(name)


def resolve_model(name: object, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the model of a hub id or short name, with edited configuration keys laid over it."""
    preset = resolve_preset(name)
    config = {"model_type": preset.model_type, **preset.hf_fields}
    return spec_from_config(config, name=preset.id, overrides=overrides)
