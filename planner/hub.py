"""The configuration of a model on the Hugging Face hub: config.json only, never any code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.config_input import read_config_file
from planner.errors import PlanError, describe_value

TIMEOUT_S = 10.0


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if "GatedRepo" in name:
        return "access to it must be granted on the hub first"
    if "RepositoryNotFound" in name or "HFValidation" in name:
        return "the hub has no such public model"
    if "EntryNotFound" in name and "Local" not in name:
        return "it has no config.json"
    if "RevisionNotFound" in name:
        return "it has no main revision"
    return "the hub cannot be reached from here; paste or upload its config.json instead"


def fetch_hub_config(hub_id: str) -> dict[str, Any]:
    """Download and parse the config.json of `hub_id`; raises PlanError with the reason.

    Nothing else is downloaded and no code of the repository is ever run.
    """
    # Imported here: the client costs tens of milliseconds that offline use never needs.
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(hub_id, "config.json", etag_timeout=TIMEOUT_S)
    except Exception as error:
        # The client raises its own, httpx's, OS and value errors: a person needs one sentence.
        sentence = f"model {describe_value(hub_id)} was not loaded: {_reason(error)}."
        raise PlanError("model.hub", hub_id, "a public model", sentence=sentence) from error
    return read_config_file(Path(path))
