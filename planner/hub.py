"""The configuration of a model on the Hugging Face hub: config.json only, never any code."""

from __future__ import annotations

from typing import Any

from planner.config_input import MAX_CONFIG_BYTES, parse_config_text
from planner.errors import PlanError, describe_value

TIMEOUT_S = 10.0


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if "GatedRepo" in name:
        return "access to it must be granted on the hub first"
    if "RepositoryNotFound" in name or "HFValidation" in name:
        return "the hub has no such public model"
    if "EntryNotFound" in name:
        return "it has no config.json"
    if "RevisionNotFound" in name:
        return "it has no main revision"
    return "the hub cannot be reached from here; paste or upload its config.json instead"


def _download(hub_id: str) -> bytes:
    """Return the first megabyte of the config.json of a model.

    One request without the retries of `hf_hub_download`, which keep a page waiting for half a
    minute where there is no network.
    """
    # Imported here: the client costs tens of milliseconds that offline use never needs.
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, lazily exported
        build_hf_headers,
        hf_raise_for_status,
    )

    url = hf_hub_url(hub_id, "config.json")
    request = get_session().stream(
        "GET", url, headers=build_hf_headers(), timeout=TIMEOUT_S, follow_redirects=True
    )
    content = b""
    with request as response:
        hf_raise_for_status(response)
        for piece in response.iter_bytes():
            content += piece
            if len(content) > MAX_CONFIG_BYTES:
                break
    return content


def fetch_hub_config(hub_id: str) -> dict[str, Any]:
    """Download and parse the config.json of `hub_id`; raises PlanError with the reason.

    Nothing else is downloaded and no code of the repository is ever run.
    """
    try:
        content = _download(hub_id)
    except Exception as error:
        # The client raises its own, httpx's, OS and value errors: a person needs one sentence.
        sentence = f"model {describe_value(hub_id)} was not loaded: {_reason(error)}."
        raise PlanError("model.hub", hub_id, "a public model", sentence=sentence) from error
    return parse_config_text(content)
